"""What a call must hold beyond the shared checks: what only these kernels, or only host numbers, know.

In: a built request, and what `forward` got. Out: nothing, or an `UnsupportedBatch` naming needed and found. Never drops
a request in silence, and never reads a tensor's values.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from backstamp.attention import Batch, PagedKV
from backstamp.factories import BuildRequest
from backstamp.step_checks import refusal
from backstamp_cpu.rows import StepRows

__all__ = ["cached_lens", "check_scales"]


def check_scales(request: BuildRequest, kv: PagedKV, batch: Batch) -> None:
    """Refuse scales of more than one number: the gather multiplies a cache by one.

    Raises:
        UnsupportedBatch: a scale a head or a token.
    """
    for field, scale in (("kv.k_scale", kv.k_scale), ("kv.v_scale", kv.v_scale)):
        if isinstance(scale, Tensor) and scale.numel() != 1:
            raise refusal(request, field, "one number", str(list(scale.shape)), phase=batch.phase)


def cached_lens(
    request: BuildRequest, batch: Batch, rows: StepRows, has_cache: bool, new_starts: Sequence[int] | None
) -> list[int]:
    """How many tokens of each row the cache holds; `new_starts` is the host form of `RaggedKV.kv_indptr`.

    Raises:
        UnsupportedBatch: a row with more new tokens than `kv_len`, or with fewer and no cache.
    """
    if new_starts is None:
        return rows.kv_lens
    cached = []
    for row, kv_len in enumerate(rows.kv_lens):
        new_len = new_starts[row + 1] - new_starts[row]
        # a pad row may carry a query and nothing to read
        if kv_len > 0 and (new_len > kv_len or (not has_cache and new_len != kv_len)):
            needed = f"{'at most' if has_cache else 'exactly'} {kv_len} new tokens in row {row}"
            raise refusal(request, "new.kv_indptr", needed, str(new_len), phase=batch.phase)
        cached.append(max(0, kv_len - new_len))
    return cached
