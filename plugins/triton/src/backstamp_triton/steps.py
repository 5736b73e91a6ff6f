"""One planned step: what `plan` checks of a batch and what `forward` needs of it.

In: a `Batch` and the request it must fit. Out: a `Step`, or an `UnsupportedBatch`. Everything here reads shapes, types
and host numbers; it must never read a device value, and launches nothing but the copies `refresh` needs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from backstamp.attention import Batch, KVIndex
from backstamp.errors import UnsupportedBatch
from backstamp.factories import BuildRequest

if TYPE_CHECKING:
    from torch import Tensor

    from backstamp_triton.configs import TileConfig

__all__ = ["Launch", "Step", "check_batch", "refresh", "refuse"]


@dataclass(frozen=True, slots=True)
class Launch:
    """How one launch shape runs in one step: blocks, programs sharing a tile's keys, tile slots."""

    config: TileConfig
    splits: int
    slots: int


@dataclass(slots=True)
class Step:
    """A planned step of one KV group.

    Attributes:
        batch: the batch the step was planned with; its tensors are read at every forward and graph replay.
        index: "page_table", "csr", "indirect", or "ragged" where the batch carries no index.
        page_ids, page_rows: the index's id tensor, and its per-row tensor (offsets or table rows) or None.
        causal: "no", "yes" or "rows". tree: "no" or the tree's kind.
        one_token: no row holds more than one token.
        launches: launch by layer shape, filled when a shape is first met.
    """

    batch: Batch
    index: str
    page_ids: Tensor | None
    page_rows: Tensor | None
    causal: str
    tree: str
    one_token: bool
    launches: dict[tuple[int, int, int, int], Launch] = field(default_factory=dict)


def refuse(who: str, field_name: str, needed: str, found: str, fix: str = "") -> UnsupportedBatch:
    """The refusal of one field."""
    return UnsupportedBatch(who, needed=f"{field_name}: {needed}", found=found, fix=fix)


def check_batch(who: str, request: BuildRequest, batch: Batch) -> Step:
    """Read a batch into a new step.

    Raises an `UnsupportedBatch` for a phase the object was not built for, another page size, a broken index, a tree
    whose kind or companions the kernel cannot read, or a per-row `causal` that is no tensor of B integers.
    """
    if batch.phase not in request.phases:
        raise refuse(who, "phase", f"one of {', '.join(request.phases)}", batch.phase)
    form, page_ids, page_rows = _index_form(who, request, batch.index)
    if isinstance(batch.causal, bool):
        causal = "yes" if batch.causal else "no"
    else:
        if batch.causal.dim() != 1 or batch.causal.shape[0] < batch.num_rows:
            raise refuse(who, "causal", f"bool or [{batch.num_rows}] i32", f"a tensor {list(batch.causal.shape)}")
        causal = "rows"
    tree = "no"
    if batch.tree is not None:
        tree = batch.tree.kind
        if tree not in {"qlen", "full", "packed"}:
            raise refuse(who, "tree.kind", "qlen, full or packed", repr(tree))
        if tree != "qlen" and batch.tree.indptr is None:
            raise refuse(who, "tree.indptr", f"a start per row for kind {tree!r}", "None")
        if batch.tree.buffer.element_size() != 1:
            raise refuse(who, "tree.buffer", "bool or uint8", str(batch.tree.buffer.dtype))
        if tree == "qlen" and (batch.tree.buffer.dim() != 3 or batch.tree.buffer.stride(2) != 1):
            raise refuse(who, "tree.buffer", "[B, S, S] with dense rows", f"shape {list(batch.tree.buffer.shape)}")
    # a single token sees every key up to itself: neither a tree of one nor the causal rule changes that
    one_token = batch.max_q_len <= 1 and tree == "no"
    return Step(batch, form, page_ids, page_rows, "no" if one_token else causal, tree, one_token)


def refresh(who: str, state: Step, fresh: Step) -> Step:
    """Give a step that graphs may have recorded a new batch's values, at the addresses it was planned with.

    Tensors the engine keeps at a fixed address are up to date already; any other is copied. Raises an
    `UnsupportedBatch` where the batch needs another launch than the recorded one.
    """
    old, new = state.batch, fresh.batch
    for name, needed, found in (
        ("num_rows", old.num_rows, new.num_rows),
        ("num_tokens", old.num_tokens, new.num_tokens),
        ("index", state.index, fresh.index),
        ("causal", state.causal, fresh.causal),
        ("tree", state.tree, fresh.tree),
        ("kv_starts", old.kv_starts is None, new.kv_starts is None),
    ):
        if needed != found:
            raise refuse(who, name, f"{needed}, as the recorded step has it", str(found), "Plan a new state")
    if new.max_q_len > old.max_q_len:
        raise refuse(who, "max_q_len", f"at most {old.max_q_len}, as the recorded step has it", str(new.max_q_len))
    pairs = [
        (old.qo_indptr, new.qo_indptr),
        (old.kv_lens, new.kv_lens),
        (state.page_ids, fresh.page_ids),
        (state.page_rows, fresh.page_rows),
        (old.kv_starts, new.kv_starts),
    ]
    if not isinstance(old.causal, bool) and not isinstance(new.causal, bool):
        pairs.append((old.causal, new.causal))
    if old.tree is not None and new.tree is not None:
        pairs += [(old.tree.buffer, new.tree.buffer), (old.tree.indptr, new.tree.indptr)]
    for target, source in pairs:
        if target is None or source is None or target.data_ptr() == source.data_ptr():
            continue
        _copy_into(who, target, source)
    return state


def _index_form(who: str, request: BuildRequest, index: KVIndex) -> tuple[str, Tensor | None, Tensor | None]:
    given = [
        name
        for name in ("page_table", "kv_indptr", "kv_indices", "table", "row_ids")
        if getattr(index, name) is not None
    ]
    if not given:
        return "ragged", None, None
    if index.page_size != request.page_size:
        raise refuse(who, "index.page_size", f"{request.page_size}, as built", str(index.page_size))
    if index.page_table is not None:
        return "page_table", index.page_table, None
    if index.kv_indices is not None and index.kv_indptr is not None:
        return "csr", index.kv_indices, index.kv_indptr
    if index.table is not None and index.row_ids is not None:
        return "indirect", index.table, index.row_ids
    raise refuse(
        who, "index", "page_table, kv_indptr with kv_indices, or table with row_ids", f"only {', '.join(given)}"
    )


def _copy_into(who: str, target: Tensor, source: Tensor) -> None:
    if target.dim() != source.dim() or any(have < want for have, want in zip(target.shape, source.shape, strict=True)):
        raise refuse(who, "state", f"room for a tensor {list(source.shape)}", f"a recorded tensor {list(target.shape)}")
    target[tuple(slice(0, size) for size in source.shape)].copy_(source)
