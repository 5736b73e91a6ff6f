"""One planned step: what `forward` needs of a batch, and how a recorded step takes another one.

In: a `Batch` that the shared checks have let through. Out: a `Step`, or an `UnsupportedBatch` for what only this kernel
cannot read, and where a recorded step cannot take it. It must never read a device value, and launches nothing but the
copies `refresh` needs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from backstamp.attention import Batch, KVIndex
from backstamp.factories import BuildRequest
from backstamp.relaunch import Codes
from backstamp.step_checks import IndexForm, refusal

if TYPE_CHECKING:
    from torch import Tensor

    from backstamp_triton.configs import TileConfig

__all__ = ["Kind", "Launch", "Step", "new_step", "refresh"]

#: The kernels a step may run: one for every chip, and Hopper's own for long queries and for a latent cache.
Kind: TypeAlias = Literal["tile", "prefill", "latent"]


@dataclass(frozen=True, slots=True)
class Launch:
    """How one launch shape runs in one step: blocks, heads of a tile, programs sharing a tile's keys, tile slots.

    `merged_at_once` counts the shares that the merge loads together, a power of two; `overlap` launches the merge ahead
    of the last program's end, where the kernel allows it. `what` says which kernel that is, for the announcement of its
    compile; `codes` keeps what it was compiled to, for the layers of the step that follow.
    """

    config: TileConfig
    pack: int
    splits: int
    merged_at_once: int
    overlap: bool
    slots: int
    what: str
    codes: Codes = field(default_factory=dict, compare=False)


@dataclass(slots=True)
class Step:
    """A planned step of one KV group.

    Attributes:
        batch: the batch the step was planned with; its tensors are read at every forward and graph replay.
        form: the form of index the batch carries.
        page_ids, page_rows: the index's id tensor, and its per-row tensor (offsets or table rows) or None.
        causal: "no", "yes" or "rows". tree: "no" or the tree's kind.
        one_token: no row holds more than one token. what: the step's part of a kernel's name.
        launches: launch by kernel and layer shape; filled when one is first met.
    """

    batch: Batch
    form: IndexForm
    page_ids: Tensor | None
    page_rows: Tensor | None
    causal: str
    tree: str
    one_token: bool
    what: str
    launches: dict[tuple[Kind, tuple[int, int, int, int]], Launch] = field(default_factory=dict)


def new_step(request: BuildRequest, batch: Batch, form: IndexForm) -> Step:
    """Read a batch that the shared checks have let through into a new step; `form` is what they answered.

    Raises:
        UnsupportedBatch: half an index, which is no step of ragged keys, or a tree whose rows have gaps.
    """
    halves = [name for name, tensor in _index_fields(batch.index) if tensor is not None] if form == "none" else []
    if halves:
        needed = "page_table, kv_indptr with kv_indices, or table with row_ids"
        raise refusal(request, "index", needed, f"only {', '.join(halves)}", phase=batch.phase)
    if batch.tree is not None and batch.tree.buffer.stride(-1) != 1:
        raise refusal(
            request, "tree.buffer", "a last stride of 1", str(batch.tree.buffer.stride(-1)), phase=batch.phase
        )
    tree = "no" if batch.tree is None else batch.tree.kind
    causal = "rows"
    if isinstance(batch.causal, bool):
        causal = "yes" if batch.causal else "no"
    # a single token sees every key up to itself: neither a tree of one nor the causal rule changes that
    one_token = batch.max_q_len <= 1 and tree == "no"
    if one_token:
        causal = "no"
    rule = "one token a row" if one_token else f"tree {tree}" if tree != "no" else f"causal {causal}"
    what = rule if batch.kv_starts is None else f"{rule}, left padding"
    page_ids, page_rows = _index_tensors(batch.index, form)
    return Step(batch, form, page_ids, page_rows, causal, tree, one_token, what)


def refresh(request: BuildRequest, state: Step, fresh: Step) -> Step:
    """Give a step that graphs may have recorded a new batch's values, at the addresses it was planned with.

    Tensors the engine keeps at a fixed address are up to date already; any other is copied. Raises an
    `UnsupportedBatch` where the batch needs another launch than the recorded one.
    """
    old, new = state.batch, fresh.batch
    for name, needed, found in (
        ("num_rows", old.num_rows, new.num_rows),
        ("num_tokens", old.num_tokens, new.num_tokens),
        ("index", state.form, fresh.form),
        ("causal", state.causal, fresh.causal),
        ("tree", state.tree, fresh.tree),
        ("kv_starts", old.kv_starts is None, new.kv_starts is None),
    ):
        if needed != found:
            wanted = f"{needed}, as the recorded step has it"
            raise refusal(request, name, wanted, str(found), phase=new.phase, fix="Plan a new state")
    if new.max_q_len > old.max_q_len:
        wanted = f"at most {old.max_q_len}, as the recorded step has it"
        raise refusal(request, "max_q_len", wanted, str(new.max_q_len), phase=new.phase)
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
    given = [(target, source) for target, source in pairs if target is not None and source is not None]
    # all of them are looked at before the first one is written
    for target, source in [pair for pair in given if _lies_elsewhere(request, *pair, phase=new.phase)]:
        _copy_into(request, target, source)
    return state


def _lies_elsewhere(request: BuildRequest, target: Tensor, source: Tensor, *, phase: str) -> bool:
    """Whether new values must be copied: what the engine keeps at a fixed address is up to date already.

    Raises an `UnsupportedBatch` where the address is the planned one and the strides are not: the two share memory.
    """
    if target.data_ptr() != source.data_ptr() or not source.numel():
        return True
    strides = zip(source.shape, target.stride(), source.stride(), strict=True)
    if any(size > 1 and planned != found for size, planned, found in strides):
        needed = f"strides {target.stride()} at the recorded address, or another address"
        raise refusal(request, "batch", needed, f"strides {source.stride()}", phase=phase, fix="Plan a new state")
    return False


def _index_fields(index: KVIndex) -> tuple[tuple[str, Tensor | None], ...]:
    return (
        ("page_table", index.page_table),
        ("kv_indptr", index.kv_indptr),
        ("kv_indices", index.kv_indices),
        ("table", index.table),
        ("row_ids", index.row_ids),
    )


def _index_tensors(index: KVIndex, form: IndexForm) -> tuple[Tensor | None, Tensor | None]:
    """The tensor of page ids, and the per-row tensor beside it."""
    if form == "csr":
        return index.kv_indices, index.kv_indptr
    if form == "indirect":
        return index.table, index.row_ids
    return (index.page_table, None) if form == "page_table" else (None, None)


def _copy_into(request: BuildRequest, target: Tensor, source: Tensor) -> None:
    if target.dim() != source.dim() or any(have < want for have, want in zip(target.shape, source.shape, strict=True)):
        needed, found = f"room for a tensor {list(source.shape)}", f"a recorded tensor {list(target.shape)}"
        raise refusal(request, "state", needed, found)
    target[tuple(slice(0, size) for size in source.shape)].copy_(source)
