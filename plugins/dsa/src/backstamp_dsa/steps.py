"""One planned step of a sparse kernel, and its renewal for a graph replay.

In: a batch that was checked. Out: a `SparseStep`, whose tensors keep their addresses when it is planned again. It reads
no device value and launches nothing but the copies a renewal needs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from backstamp.attention import Batch
from backstamp.factories import BuildRequest
from backstamp.relaunch import Codes
from backstamp.step_checks import IndexForm, refusal
from backstamp_dsa.configs import SparseConfig

__all__ = ["Slots", "SparseLaunch", "SparseStep", "kept_of", "recording", "renew"]


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Slots(NamedTuple):
    """What each token reads.

    Attributes:
        slots: `[T, W]` i32, -1 where there is nothing or a token may not look.
        ends: `[T]` i32, from which column on all are -1; 1 where all are.
        seen: `[T]` bool, whether there is any.
    """

    slots: Tensor
    ends: Tensor
    seen: Tensor


class SparseLaunch(NamedTuple):
    """How calls that are alike run: on the SM90 kernel or the one for all chips, its grid, and shares of a token."""

    hopper: bool
    config: SparseConfig
    grid: tuple[int, int, int]
    splits: int


@dataclass(slots=True)
class SparseStep:
    """A planned step of one KV group.

    Attributes:
        batch: the batch it was planned with; kernels read its tensors at every forward and replay.
        form: which form of index the batch carries.
        seed: `[B, K]` i32 choice of keys carried over from draft extend, or None; see `DsaAttention.use_seed`.
        schedules: the library's split-KV schedules by launch shape, kept as long as the step; see `kept_of`.
        slots: lists of slots, which every layer writes anew for itself, by what they are made of.
        launches: how our own kernel runs calls that are alike.
        codes: what the kernels of the first layer were compiled to, for those that follow.
    """

    batch: Batch
    form: IndexForm
    seed: Tensor | None = None
    schedules: dict[tuple[int, ...], object] = field(default_factory=dict)
    slots: dict[tuple[object, ...], Slots] = field(default_factory=dict)
    launches: dict[Hashable, SparseLaunch] = field(default_factory=dict)
    codes: Codes = field(default_factory=dict)


def recording() -> bool:
    """Whether a graph is recorded on the current stream."""
    # a torch without CUDA cannot be asked
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def kept_of(kept: dict[K, V], key: K, make: Callable[[], V]) -> V:
    """What a step keeps of its own by `key`, made at its first use: a schedule the library fills, or a list of slots.

    A graph that recorded a launch reads its memory at each replay: a plan must not let go of it. A schedule depends on
    the launch shape alone, as no lengths are handed over beside `indices`, and is good for every plan of the step.
    """
    # Source: FlashMLA, get_decoding_sched_meta.cu: of a sparse call without topk_length it reads topk and extra_topk
    known = kept.get(key)
    if known is None:
        known = make()
        # made inside a graph it holds nothing before a replay: such a one is the graph's own, and not handed on
        if not recording():
            kept[key] = known
    return known


def renew(request: BuildRequest, batch: Batch, form: IndexForm, fresh: Batch, fresh_form: IndexForm) -> None:
    """Give a planned batch another's values at its own addresses.

    Raises:
        UnsupportedBatch: a batch that needs another launch than the planned one, or an index of another shape.
    """
    for name, needed, found in (
        ("phase", batch.phase, fresh.phase),
        ("index", form, fresh_form),
        ("num_rows", str(batch.num_rows), str(fresh.num_rows)),
        ("num_tokens", str(batch.num_tokens), str(fresh.num_tokens)),
    ):
        if needed != found:
            raise refusal(request, name, f"{needed}, as planned before", found, fix="Plan a new state")
    if fresh.max_q_len > batch.max_q_len or fresh.max_kv_len > batch.max_kv_len:
        needed = f"rows of at most {batch.max_q_len} and {batch.max_kv_len} tokens, as planned before"
        raise refusal(request, "max_q_len and max_kv_len", needed, f"{fresh.max_q_len} and {fresh.max_kv_len}")
    # a row of one query sees every key up to itself either way
    if fresh.max_q_len > 1 and fresh.causal is not batch.causal:
        raise refusal(
            request, "causal", f"{batch.causal}, as planned before", str(fresh.causal), fix="Plan a new state"
        )
    for (name, target), (_, source) in zip(_read(batch, form), _read(fresh, form), strict=True):
        _copy(request, name, target, source)


def _read(batch: Batch, form: IndexForm) -> list[tuple[str, Tensor]]:
    """What kernels read of a batch's tensors: the rows it has, of the index form they walk."""
    rows, index = batch.num_rows, batch.index
    tensors: list[tuple[str, Tensor | None]] = [
        ("qo_indptr", batch.qo_indptr[: rows + 1]),
        ("kv_lens", batch.kv_lens[:rows]),
    ]
    if form == "page_table" and index.page_table is not None:
        tensors += [("index.page_table", index.page_table[:rows])]
    elif form == "indirect" and index.row_ids is not None:
        tensors += [("index.table", index.table), ("index.row_ids", index.row_ids[:rows])]
    elif form == "csr" and index.kv_indptr is not None:
        tensors += [("index.kv_indptr", index.kv_indptr[: rows + 1]), ("index.kv_indices", index.kv_indices)]
    return [(name, tensor) for name, tensor in tensors if tensor is not None]


def _copy(request: BuildRequest, name: str, target: Tensor, source: Tensor) -> None:
    """Write `source` at the planned address, unless it is what lies there."""
    if source.data_ptr() == target.data_ptr() and source.stride() == target.stride() and source.dtype is target.dtype:
        return
    if any(have < want for have, want in zip(target.shape, source.shape, strict=True)):
        found = str(list(source.shape))
        raise refusal(request, name, f"at most {list(target.shape)}, as planned before", found)
    if source.untyped_storage().data_ptr() == target.untyped_storage().data_ptr():
        # another view of the same memory: read whole before any of it is written
        source = source.clone()
    target[tuple(slice(0, size) for size in source.shape)].copy_(source)
