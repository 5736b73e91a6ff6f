"""Backstamp's own Triton attention: one tile kernel for paged prefill, verify, split decode and absorbed MLA."""
