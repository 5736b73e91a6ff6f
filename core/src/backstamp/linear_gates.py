"""The gates of a delta rule, ready for use: raw inputs → natural-log decay and beta, in fp32.

In: `RawGates` or `ComputedGates`. Out: `ComputedGates` in fp32. It calls methods of the tensors it is given, imports
no torch, and launches a few small kernels; a kernel that fuses the gates has no use for it.

.. versionadded:: 0.2
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from backstamp.linear_contract import ComputedGates, RawGates

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["computed_gates"]


def computed_gates(gates: RawGates | ComputedGates) -> ComputedGates:
    """The gates as `RawGates` defines them, in fp32; computed ones as they are, in fp32."""
    if isinstance(gates, ComputedGates):
        return ComputedGates(g=gates.g.float(), beta=gates.beta.float())
    decay = gates.A_log.float().exp()
    raw, bias = gates.a.float(), gates.dt_bias.float()
    if raw.dim() == 3:
        # Kimi delta attention: a channel of a head has a decay of its own
        decay, bias = decay[:, None], bias.view(raw.shape[1:])
    beta = gates.b.float().sigmoid()
    if gates.lower_bound is not None:
        return ComputedGates(g=gates.lower_bound * (decay * (raw + bias)).sigmoid(), beta=beta)
    return ComputedGates(g=-decay * _softplus(raw + bias), beta=beta)


def _softplus(x: Tensor) -> Tensor:
    # log(1 + exp(x)) without overflow
    return x.clamp(min=0.0) + (-x.abs()).exp().log1p()
