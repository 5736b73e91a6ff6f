"""Backstamp's kernels in Transformers: `use` for a loaded model, `implementation` for `attn_implementation=`.

In: what an operator asks for. Out: a model whose attention runs on the resolved, stamped kernels. Importing this module
touches nothing of Transformers: names are registered when somebody first asks for one.

.. versionadded:: 0.1
"""

from __future__ import annotations

from backstamp_transformers.entry import implementation, use
from backstamp_transformers.handle import Handle

__all__ = ["Handle", "implementation", "use"]
