"""The truth of delta rules: one token at a time in float64, from the call contract's words alone.

In: what `LinearBackend.forward` is handed. Out: outputs, and the states a kernel should leave behind. Nothing that is
handed over is written. It is slow, reads every number on the host, and shares no code with any kernel.

.. versionadded:: 0.2
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backstamp.attention import ComputedGates, LayerSpec, LinearBatch, RawGates, StatePool

__all__ = ["LinearAnswer", "reference_linear", "relative_error"]

_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAnswer:
    """What a call should come to, in float64: `out [T, HV, V]`, zero where no row has a token; the pool's states; and
    `intermediate` as it should be, None where the batch has none."""

    out: Tensor
    ssm: Tensor
    intermediate: Tensor | None


def reference_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: RawGates | ComputedGates,
    layer: LayerSpec,
    batch: LinearBatch,
    pool: StatePool,
) -> LinearAnswer:
    """Run every row of a step; the gated delta net and Kimi delta attention, told apart by the rank of the gates."""
    decay, beta = _gates(gates)
    shared = v.shape[1] // q.shape[1]
    queries = _unit(q).repeat_interleave(shared, 1) * layer.scale
    keys = _unit(k).repeat_interleave(shared, 1)
    values = v.double()
    out = torch.zeros_like(values)
    ssm = pool.ssm.double().clone()
    left = None if batch.intermediate is None else batch.intermediate.double().clone()
    offsets = batch.qo_indptr.tolist()
    for row in range(batch.num_rows):
        slot = _first_slot(batch, row)
        tokens = range(offsets[row], offsets[row + 1])
        if slot < 0 or not tokens:
            continue
        fresh = batch.phase == "prefill" and not bool(batch.has_state[row])
        # [HV, K, V], whatever the pool's order
        own = torch.zeros_like(_keys_first(ssm[slot], pool)) if fresh else _keys_first(pool.ssm[slot].double(), pool)
        after: list[Tensor] = []
        for at, token in enumerate(tokens):
            state = _before(own, after, batch, row, at)
            state = state * decay[token].exp().reshape(state.shape[0], -1, 1)
            seen = torch.einsum("hk,hkv->hv", keys[token], state)
            change = beta[token][:, None] * (values[token] - seen)
            state = state + torch.einsum("hk,hv->hkv", keys[token], change)
            out[token] = torch.einsum("hk,hkv->hv", queries[token], state)
            after.append(state)
        for at, state in enumerate(after):
            stored = state.mT if pool.order == "vk" else state
            if left is not None:
                left[row, at] = stored
            elif batch.slot_table is not None:
                if int(batch.slot_table[row, at]) >= 0:
                    ssm[int(batch.slot_table[row, at])] = stored
            elif at == len(after) - 1:
                ssm[slot] = stored
    return LinearAnswer(out=out, ssm=ssm, intermediate=left)


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """The norm of the difference over the norm of what was wanted; NaN on both sides at the same place is no error,
    on one side alone it is infinite."""
    got = got.double().cpu()
    wanted = wanted.double().cpu()
    if bool((got.isnan() != wanted.isnan()).any()):
        return float("inf")
    got, wanted = got.nan_to_num(), wanted.nan_to_num()
    size = float(wanted.norm())
    return float((got - wanted).norm()) / size if size else float((got - wanted).norm())


def _gates(gates: RawGates | ComputedGates) -> tuple[Tensor, Tensor]:
    if isinstance(gates, ComputedGates):
        return gates.g.double(), gates.beta.double()
    raw = gates.a.double() + gates.dt_bias.double().reshape(gates.a.shape[1:])
    rate = gates.A_log.double().exp().reshape(-1, *[1] * (raw.dim() - 2))
    decay = -rate * torch.nn.functional.softplus(raw)
    if gates.lower_bound is not None:
        decay = gates.lower_bound * (rate * raw).sigmoid()
    return decay, gates.b.double().sigmoid()


def _unit(x: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().sum(-1, keepdim=True) + _EPS).sqrt()


def _keys_first(state: Tensor, pool: StatePool) -> Tensor:
    return state.mT if pool.order == "vk" else state


def _first_slot(batch: LinearBatch, row: int) -> int:
    if batch.slot_table is None or batch.num_accepted is None:
        return int(batch.slots[row])
    accepted = int(batch.num_accepted[row])
    return int(batch.slot_table[row, accepted - 1]) if 1 <= accepted <= batch.slot_table.shape[1] else -1


def _before(own: Tensor, after: list[Tensor], batch: LinearBatch, row: int, at: int) -> Tensor:
    """The state a token starts from: the row's own, or what an earlier token of the row left."""
    parent = at - 1 if batch.parents is None else int(batch.parents[row, at])
    return own if parent < 0 else after[parent]
