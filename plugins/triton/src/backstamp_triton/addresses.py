"""Memory as a TMA descriptor knows it: an address, not the tensor that lies there.

In: a cache's address and dtype. Out: what Triton asks of a descriptor's `base`. It keeps no memory alive, so that a
descriptor may be kept for every later call over the same cache, and frees nothing: a call's own tensors hold its cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

__all__ = ["KEPT_VIEWS", "MemoryAt"]

#: Descriptors kept of each kernel: keys and values of some hundred layers, and what ragged keys leave behind.
KEPT_VIEWS: Final = 1024


@dataclass(frozen=True, slots=True)
class MemoryAt:
    """The base of a descriptor. Source: triton 3.6 and 3.9, specialize.cc and backends/nvidia/driver.py, read no more
    of it than these two.
    """

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        """The first byte."""
        return self.address
