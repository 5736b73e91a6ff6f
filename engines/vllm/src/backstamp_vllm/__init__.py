"""Backstamp's kernels as attention backends of vLLM; see `names` for where vLLM meets them.

.. versionadded:: 0.1
"""

__version__ = "0.1.0"
__all__ = ["__version__"]
