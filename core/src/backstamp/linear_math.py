"""What every delta rule in PyTorch shares: the slot a row starts from, and the norm of a head.

In: a checked `LinearBatch`, or queries and keys. Out: tensors on the same device, without a look at any of its values.
It calls methods of the tensors it is given and imports no torch.

.. versionadded:: 0.2
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from backstamp.linear_contract import LinearBatch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["first_slots", "unit_heads"]

_EPS: Final = 1e-6


def first_slots(batch: LinearBatch) -> Tensor:
    """`[B]` slots of the states that rows start from, -1 for a pad: `slots`, or of a verify step `slot_table`'s.

    A count of accepted tokens outside the table is a pad's, as `LinearBatch` says; its entry is never looked up.
    """
    rows, table, accepted = batch.num_rows, batch.slot_table, batch.num_accepted
    if table is None or accepted is None:
        return batch.slots[:rows]
    counts = accepted[:rows].long()
    width = table.shape[1]
    read = table[:rows].gather(1, counts.sub(1).clamp(min=0, max=width - 1)[:, None])[:, 0]
    return read.masked_fill((counts < 1) | (counts > width), -1)


def unit_heads(x: Tensor) -> Tensor:
    """Each head of `[T, H, K]` over its L2 norm, in fp32: `x / sqrt(sum(x * x) + 1e-6)`."""
    wide = x.float()
    scale: Tensor = (wide.square().sum(-1, keepdim=True) + _EPS).rsqrt()
    return wide * scale
