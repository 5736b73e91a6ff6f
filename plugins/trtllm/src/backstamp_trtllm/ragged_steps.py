"""A step over ragged keys, from its exact host lengths: how much of each tensor counts, and which tokens see no key.

In: a checked `Batch`. Out: a `RaggedStep`. Nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backstamp.attention import Batch

__all__ = ["RaggedStep", "plan_ragged"]


@dataclass(frozen=True, slots=True)
class RaggedStep:
    """What `plan` answers.

    Attributes:
        used_tokens, used_keys: tokens and keys that belong to rows; pads follow.
        max_q_len, max_kv_len: exact.
        q_lens_host, kv_lens_host: `[B]` i32 on the CPU.
        dead: `[T, 1, 1]` bool, tokens that see no key; None where there are none.
    """

    batch: Batch
    used_tokens: int
    used_keys: int
    max_q_len: int
    max_kv_len: int
    q_lens_host: Tensor
    kv_lens_host: Tensor
    dead: Tensor | None


def plan_ragged(batch: Batch) -> RaggedStep:
    """Read the host lengths."""
    assert batch.qo_indptr_host is not None, "check_batch found host lengths"
    assert batch.kv_lens_host is not None, "check_batch found host lengths"
    rows = batch.num_rows
    ends, kv_lens = batch.qo_indptr_host[: rows + 1], batch.kv_lens_host[:rows]
    q_lens = ends.diff()
    used = int(ends[rows])
    seeing = (kv_lens > 0).repeat_interleave(q_lens)
    dead = torch.cat([~seeing, torch.ones(batch.num_tokens - used, dtype=torch.bool)])
    return RaggedStep(
        batch,
        used_tokens=used,
        used_keys=int(kv_lens.sum()),
        max_q_len=int(q_lens.max()) if rows else 0,
        max_kv_len=int(kv_lens.max()) if rows else 0,
        q_lens_host=q_lens,
        kv_lens_host=kv_lens,
        dead=dead.view(-1, 1, 1).to(batch.kv_lens.device, non_blocking=True) if bool(dead.any()) else None,
    )
