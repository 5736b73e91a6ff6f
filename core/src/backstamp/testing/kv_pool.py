"""The speculative engine's paged cache: who owns which page, and the engine's own door for writing K and V.

In: page requests, token slots, K and V. Out: page lists, slots, and the `PagedKV` views and `KVIndex` a backend reads.
Pages come in shuffled order, and every slot nobody has written holds NaN: a kernel that reads a wrong page, padding or
a stale slot cannot give a plausible answer. It never knows what a request is.

.. versionadded:: 0.1
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from backstamp.attention import KVIndex, LayerSpec, PagedKV
from backstamp.errors import BadInput

__all__ = ["KVPool"]


class KVPool:
    """`num_pages` pages of `page_size` tokens for every layer; K and V of a token lie side by side in one row."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        layers: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        if num_pages < 1 or page_size < 1:
            raise BadInput("KV pool", needed="at least one page of one token", found=f"{num_pages} of {page_size}")
        self.num_pages, self.page_size, self.device = num_pages, page_size, torch.device(device)
        self._head_dim = head_dim
        shape = (layers, num_pages * page_size, num_kv_heads, head_dim + v_head_dim)
        self._rows = torch.full(shape, float("nan"), dtype=dtype, device=device)
        self._free = list(range(num_pages))
        random.Random(seed).shuffle(self._free)

    @classmethod
    def for_layers(
        cls,
        layers: Sequence[LayerSpec],
        num_pages: int,
        page_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> KVPool:
        """A pool shaped for a decoder's `layer_specs`."""
        first = layers[0]
        dims = (first.num_kv_heads, first.head_dim, first.v_head_dim)
        return cls(num_pages, page_size, len(layers), *dims, dtype=dtype, device=device, seed=seed)

    @property
    def num_free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """How many pages hold this many tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, scattered over the pool. Raises `BadInput` when fewer are free."""
        if count > len(self._free):
            raise BadInput("KV pool", needed=f"{count} free pages", found=str(len(self._free)))
        return [self._free.pop() for _ in range(count)]

    def release(self, pages: Sequence[int]) -> None:
        """Give pages back; their slots hold NaN again, so a stale read shows."""
        if pages:
            self._rows[:, self.slots(pages, 0, len(pages) * self.page_size)] = float("nan")
        # to the far end of the free list, so that neighbours in time do not become neighbours in memory
        self._free[:0] = pages

    def slots(self, pages: Sequence[int], start: int, stop: int) -> Tensor:
        """Token slots `[stop - start]` i64 of a row's tokens `start` to `stop`."""
        tokens = torch.arange(start, stop)
        owners = torch.tensor(pages, dtype=torch.long)[tokens // self.page_size]
        return (owners * self.page_size + tokens % self.page_size).to(self.device)

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Store `k [T, Hk, Dk]` and `v [T, Hk, Dv]` of one layer at `slots [T]`."""
        self._rows[layer, slots] = torch.cat([k, v], dim=-1)

    def copy_tokens(self, source: Tensor, destination: Tensor) -> None:
        """Copy tokens between slots in every layer; all are read before any is written, so the two may overlap."""
        self._rows[:, destination] = self._rows[:, source]

    def paged(self, layer: int) -> PagedKV:
        """One layer as `[P, page_size, Hk, D]` views."""
        pages = self._rows[layer].view(self.num_pages, self.page_size, *self._rows.shape[2:])
        return PagedKV(k=pages[..., : self._head_dim], v=pages[..., self._head_dim :])

    def index(self, rows: Sequence[Sequence[int]], kv_lens: Sequence[int]) -> KVIndex:
        """Where each row's tokens lie: a page table whose entries past them are -1, which no kernel may read."""
        used = [list(pages[: self.pages_for(kv_len)]) for pages, kv_len in zip(rows, kv_lens, strict=True)]
        width = max((len(pages) for pages in used), default=0)
        table = torch.tensor([pages + [-1] * (width - len(pages)) for pages in used], dtype=torch.int32)
        return KVIndex(page_size=self.page_size, page_table=table.reshape(len(used), width).to(self.device))
