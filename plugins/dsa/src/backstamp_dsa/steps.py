"""One planned step of a sparse kernel, and its renewal for a graph replay.

In: a batch that was checked. Out: a `SparseStep`, whose tensors keep their addresses when it is planned again. It reads
no device value and launches nothing but the copies a renewal needs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from backstamp.attention import Batch
from backstamp.factories import BuildRequest
from backstamp.step_checks import IndexForm, refusal

__all__ = ["SparseStep", "renew"]


@dataclass(slots=True)
class SparseStep:
    """A planned step of one KV group.

    Attributes:
        batch: the batch it was planned with; kernels read its tensors at every forward and replay.
        form: which form of index the batch carries.
        seed: `[B, K]` i32 choice of keys carried over from draft extend, or None; see `DsaAttention.use_seed`.
        schedules: the library's split-KV schedules of this step, by launch shape. They hold for this step alone.
    """

    batch: Batch
    form: IndexForm
    seed: Tensor | None = None
    schedules: dict[tuple[int, ...], object] = field(default_factory=dict)


def renew(request: BuildRequest, batch: Batch, fresh: Batch) -> None:
    """Give a planned batch another's values at its own addresses.

    Raises:
        UnsupportedBatch: another number of rows or tokens, longer rows, or an index of another shape.
    """
    for name, needed, found in (
        ("num_rows", batch.num_rows, fresh.num_rows),
        ("num_tokens", batch.num_tokens, fresh.num_tokens),
    ):
        if needed != found:
            raise refusal(request, name, f"{needed}, as planned before", str(found), fix="Plan a new state")
    if fresh.max_q_len > batch.max_q_len or fresh.max_kv_len > batch.max_kv_len:
        needed = f"rows of at most {batch.max_q_len} and {batch.max_kv_len} tokens, as planned before"
        raise refusal(request, "max_q_len and max_kv_len", needed, f"{fresh.max_q_len} and {fresh.max_kv_len}")
    old, new = batch.index, fresh.index
    for name, target, source in (
        ("qo_indptr", batch.qo_indptr, fresh.qo_indptr),
        ("kv_lens", batch.kv_lens, fresh.kv_lens),
        ("index.page_table", old.page_table, new.page_table),
        ("index.kv_indptr", old.kv_indptr, new.kv_indptr),
        ("index.kv_indices", old.kv_indices, new.kv_indices),
        ("index.table", old.table, new.table),
        ("index.row_ids", old.row_ids, new.row_ids),
    ):
        if target is None or (source is not None and source.data_ptr() == target.data_ptr()):
            continue
        if source is None or any(have < want for have, want in zip(target.shape, source.shape, strict=True)):
            found = "None" if source is None else str(list(source.shape))
            raise refusal(request, name, f"at most {list(target.shape)}, as planned before", found)
        target[tuple(slice(0, size) for size in source.shape)].copy_(source)
