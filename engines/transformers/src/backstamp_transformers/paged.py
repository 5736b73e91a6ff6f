"""Continuous batching: our own update of Transformers' paged cache, and the step it leads to.

In: the paged cache's storage and its read and write slots. Out: K and V written, and attention that reads them where
they lie. Transformers' update gathers every row's keys into a copy before it calls attention; this one hands over slots
instead, but where a chunk would overwrite keys of a sliding ring that it still has to read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators.sliding_attention import (
    SlidingAttentionCacheAllocator,
)

from backstamp.attention import AttentionBackend, PagedKV
from backstamp.declarations import Phase
from backstamp_transformers.batches import index_of_slots, make_batch, phase_of
from backstamp_transformers.kernels import Bounds
from backstamp_transformers.served import Served

__all__ = ["KV", "PagedKeys", "PagedStep", "paged_step", "update"]

#: Where `update` leaves what attention reads, among the keywords that the model hands on.
KV = "backstamp_kv"


class PagedKeys(NamedTuple):
    """One layer's keys and values `[P, Hk, D]`, and the slot of each key a row reads, row after row.

    `where` says what they are: the "cache" itself, this step's own "new" ones, or "gathered" copies.
    """

    k: Tensor
    v: Tensor
    slots: Tensor
    where: str


def update(cache: PagedAttentionCache, key: Tensor, value: Tensor, layer: int, kwargs: dict[str, Any]) -> None:
    """Write `key, value [1, Hk, T, D]` and leave in `kwargs` where each row's keys lie."""
    allocator = cache.layer_to_allocator[layer]
    kwargs["cu_seq_lens_k"] = kwargs["cu_seq_lens_k"][allocator.layer_type]
    read, write = kwargs["read_index"][allocator.index], kwargs["write_index"][allocator.index]
    new_k, new_v = (states.squeeze(0).transpose(0, 1) for states in (key, value))
    ring = isinstance(allocator, SlidingAttentionCacheAllocator)
    if read.numel() and ring and kwargs["max_length_q"] > 1:
        k, v = allocator.update(new_k, new_v, layer, read, write)
        kwargs[KV] = PagedKeys(k, v, torch.arange(len(k), device=k.device), "gathered")
        return
    k, v = allocator._kv_token_views[layer]
    k.index_copy_(0, write, new_k)
    v.index_copy_(0, write, new_v)
    if not read.numel():
        kwargs[KV] = PagedKeys(new_k, new_v, torch.arange(len(new_k), device=k.device), "new")
        return
    if ring:
        # this step's token took the slot of the one that left the window
        read = read.masked_scatter(read == allocator.sentinel_index, write)
    # both start at a page of this layer and run to the end of the storage, where keys have a page more
    kwargs[KV] = PagedKeys(k[: len(v)], v, read, "cache")


class _Group(NamedTuple):
    """The key lengths of one group of layers, and the longest of them."""

    kv_lens: list[int]
    longest: int


@dataclass(slots=True)
class PagedStep:
    """One forward of a paged batch.

    Attributes:
        groups: what each group of layers reads, by `LayerSpec.group`.
        states: each kernel and what it planned, by kernel, group and where its keys lie.
    """

    served: Served
    q_lens: list[int]
    groups: dict[int, _Group] = field(default_factory=dict)
    states: dict[tuple[int, int, str], tuple[AttentionBackend[object], object]] = field(default_factory=dict)
    phase: Phase = field(init=False)
    num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.phase, self.num_tokens = phase_of(self.q_lens), sum(self.q_lens)

    def attend(self, q: Tensor, keys: PagedKeys, cu_seq_lens_k: Tensor, layer: int) -> Tensor:
        """Attend one layer: `q [1, Hq, T, Dk]` to `[1, T, Hq, Dv]`; tokens past the rows answer zeros."""
        served = self.served
        queries = q[0].transpose(0, 1)[: self.num_tokens]
        spec = served.spec(layer)
        group = self.groups.get(spec.group)
        if group is None:
            kv_lens = _lengths(cu_seq_lens_k)
            group = self.groups[spec.group] = _Group(kv_lens, max(kv_lens))
        step = Bounds(len(self.q_lens), self.num_tokens, len(keys.k), group.longest)
        backend, form, _ = served.fit(step, q.dtype, q.device).places[self.phase, layer]
        at = (id(backend), spec.group, keys.where)
        if at not in self.states:
            index = index_of_slots(keys.slots, group.kv_lens, form)
            batch = make_batch(self.q_lens, group.kv_lens, True, index, q.device)
            self.states[at] = backend, backend.plan(batch)
        out = q.new_zeros(q.shape[2], spec.num_qo_heads, spec.v_head_dim)
        kv = PagedKV(k=keys.k[:, None], v=keys.v[:, None])
        backend.forward(queries, kv, spec, self.states[at][1], out=out[: self.num_tokens])
        return out[None]


_steps: WeakIdKeyDictionary = WeakIdKeyDictionary()


def paged_step(served: Served, cu_seq_lens_q: Tensor) -> PagedStep:
    """The step of a forward, which is known by the tensor of query offsets that all its layers get."""
    step = _steps.get(cu_seq_lens_q)
    if step is None:
        step = _steps[cu_seq_lens_q] = PagedStep(served, _lengths(cu_seq_lens_q))
    return step


def _lengths(offsets: Tensor) -> list[int]:
    return offsets.diff().tolist()
