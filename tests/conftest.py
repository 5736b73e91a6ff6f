"""Settings every test process needs before anything imports triton."""

from __future__ import annotations

import os

# Triton reads this when a kernel is decorated: set here, it does not depend on which test is collected first. Children
# that stand for an ordinary machine drop it from their environment.
os.environ["TRITON_INTERPRET"] = "1"
