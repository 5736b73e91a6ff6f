"""Settings every test process needs before anything imports triton."""

from __future__ import annotations

import os

# Triton reads this when a kernel is decorated: set here, it does not depend on which test is collected first. Children
# that stand for an ordinary machine drop it from their environment.
os.environ["TRITON_INTERPRET"] = "1"

from hypothesis import settings

# The same examples in every run, so that a change is judged by what it changes; HYPOTHESIS_PROFILE=search looks for
# new ones.
settings.register_profile("same", derandomize=True)
settings.register_profile("search", derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
