"""Attention kernels; `plugin.py` says what they can do, `backend.py` builds them."""
