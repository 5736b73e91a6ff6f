"""Backstamp's kernels as attention backends of SGLang; see `names` for where SGLang meets them.

.. versionadded:: 0.1
"""

__version__ = "0.1.0"
__all__ = ["__version__"]
