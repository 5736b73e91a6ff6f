"""What every absorbed-MLA binding here shares: the latent cache's widths, head limits, and the query in one piece.

In: requests and queries. Out: refusals, or tensors. Imports no kernel library.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backstamp.factories import BuildRequest
from backstamp.step_checks import refusal

__all__ = ["KV_LORA_RANK", "QK_NOPE_HEAD_DIM", "QK_ROPE_HEAD_DIM", "check_heads", "whole_query"]

KV_LORA_RANK = 512
QK_ROPE_HEAD_DIM = 64
#: Of the projections before absorption; the kernels do not depend on it.
QK_NOPE_HEAD_DIM = 128


def check_heads(request: BuildRequest, *, gap: bool) -> None:
    """Refuse head counts these kernels have no tile for: over 128, and with `gap` between 64 and 128."""
    for spec in request.layers:
        heads = spec.num_qo_heads
        if heads > 128 or (gap and 64 < heads < 128):
            needed = "at most 64 query heads, or 128" if gap else "at most 128 query heads"
            raise refusal(request, f"num_qo_heads of layer {spec.layer_id}", needed, str(heads))


def whole_query(q: Tensor, q_rope: Tensor | None) -> Tensor:
    """`q [T, Hq, 576]` in one piece."""
    return q if q_rope is None else torch.cat([q, q_rope], dim=-1)
