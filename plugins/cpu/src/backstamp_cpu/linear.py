"""`torch_native` of the linear slot: delta rules through PyTorch alone, on any device, in every phase; a reference.

In: the linear call contract, gated delta net or Kimi delta attention. Out: outputs and states in place. A step runs
token by token, all rows at once, in fp32. `plan` reads offsets, slots and trees on the host, `forward` slots alone, and
only of a layer that has others than its batch. Never holds the current batch: that is the state's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backstamp.attention import ComputedGates, LayerSpec, LinearBatch, RawGates, StatePool
from backstamp.factories import BuildRequest
from backstamp.linear_checks import LinearForm, check_linear_batch, check_linear_build, check_linear_call
from backstamp.linear_gates import computed_gates
from backstamp.linear_math import first_slots, unit_heads

__all__ = ["LinearState", "TorchNativeLinear"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearState:
    """One planned step: rows with tokens, the longest first, so that those still running lead at every token.

    Attributes:
        first_slots: state slot each row of the batch starts from, -1 pad.
        table, parents: `slot_table` and `parents` on the host, None where the batch has none.
    """

    batch: LinearBatch
    form: LinearForm
    offsets: list[int]
    rows: list[int]
    first_slots: list[int]
    table: list[list[int]] | None
    parents: list[list[int]] | None


class TorchNativeLinear:
    """The backend of one group of linear layers."""

    def __init__(self, request: BuildRequest) -> None:
        check_linear_build(request)
        self._request = request

    def plan(self, batch: LinearBatch, *, state: LinearState | None = None, capture: bool = False) -> LinearState:
        """Check the step and read its row numbers; a refused batch raises an `UnsupportedBatch`."""
        form = check_linear_batch(self._request, batch, capture=capture)
        offsets = (batch.qo_indptr if batch.qo_indptr_host is None else batch.qo_indptr_host).tolist()
        table = None if batch.slot_table is None else batch.slot_table.tolist()
        lens = [offsets[row + 1] - offsets[row] for row in range(batch.num_rows)]
        return LinearState(
            batch=batch,
            form=form,
            offsets=offsets,
            rows=sorted((row for row, length in enumerate(lens) if length), key=lambda row: -lens[row]),
            first_slots=first_slots(batch).tolist(),
            table=table,
            parents=None if batch.parents is None else batch.parents.tolist(),
        )

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: RawGates | ComputedGates,
        layer: LayerSpec,
        state: LinearState,
        *,
        pool: StatePool,
        slots: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """Run one layer; shapes as in `LinearBackend.forward`. Pads and tokens of no row come out as zero."""
        batch = state.batch
        check_linear_call(self._request, q, k, v, gates, layer, batch, pool=pool, slots=slots, out=out)
        out = torch.zeros_like(v, memory_format=torch.contiguous_format) if out is None else out.zero_()
        own = state.first_slots
        if state.table is None and slots is not batch.slots:
            own = slots.tolist()
        rows = [row for row in state.rows if own[row] >= 0]
        if rows:
            self._run(rows, [own[row] for row in rows], q, k, v, gates, layer, state, pool, out)
        return out

    def _run(
        self,
        rows: list[int],
        own_slots: list[int],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: RawGates | ComputedGates,
        layer: LayerSpec,
        state: LinearState,
        pool: StatePool,
        out: Tensor,
    ) -> None:
        batch, offsets = state.batch, state.offsets
        ready = computed_gates(gates)
        decay = ready.g.exp()
        shared = layer.num_kv_heads // layer.num_qo_heads
        at_slots = torch.tensor(own_slots, device=q.device)
        own = _values_first(pool.ssm[at_slots].float(), pool)
        if batch.phase == "prefill":
            fresh = ~batch.has_state[torch.tensor(rows, device=q.device)]
            # whatever the slot holds, NaN too
            own = own.masked_fill(fresh[:, None, None, None], 0.0)
        lens = [offsets[row + 1] - offsets[row] for row in rows]
        states, after = own, [own]
        for at in range(lens[0]):
            running = sum(length > at for length in lens)
            tokens = torch.tensor([offsets[row] + at for row in rows[:running]], device=q.device)
            before = states[:running]
            if state.parents is not None:
                parents = [state.parents[row][at] for row in rows[:running]]
                before = torch.stack([after[parent + 1][i] for i, parent in enumerate(parents)])
            queries = (unit_heads(q[tokens]) * layer.scale).repeat_interleave(shared, 1)
            keys = unit_heads(k[tokens]).repeat_interleave(shared, 1)
            answer, now = _advance(before, queries, keys, v[tokens].float(), decay[tokens], ready.beta[tokens])
            out[tokens] = answer.to(out.dtype)
            states = torch.cat([now, states[running:]])
            if batch.phase == "verify":
                after.append(now)
                _keep(now, rows[:running], at, state, pool)
        if batch.phase != "verify":
            pool.ssm[at_slots] = _values_first(states, pool).to(pool.ssm.dtype)


def _advance(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """One token of R rows: `state [R, HV, V, K]`, `q`, `k [R, HV, K]`, `v [R, HV, V]`; outputs, and states after."""
    state = state * (decay[..., None, None] if decay.dim() == 2 else decay[..., None, :])
    change = beta[..., None] * (v - (state * k[..., None, :]).sum(-1))
    state = state + change[..., None] * k[..., None, :]
    return (state * q[..., None, :]).sum(-1), state


def _keep(now: Tensor, rows: list[int], at: int, state: LinearState, pool: StatePool) -> None:
    """Leave the states after one verify token where the batch says."""
    stored = _values_first(now, pool)
    if state.batch.intermediate is not None:
        where = torch.tensor(rows, device=now.device)
        state.batch.intermediate[where, at] = stored.to(state.batch.intermediate.dtype)
        return
    assert state.table is not None, "verify has one of two forms"
    kept = [(i, state.table[row][at]) for i, row in enumerate(rows) if state.table[row][at] >= 0]
    if kept:
        which, slots = (torch.tensor(part, device=now.device) for part in zip(*kept, strict=True))
        pool.ssm[slots] = stored[which].to(pool.ssm.dtype)


def _values_first(states: Tensor, pool: StatePool) -> Tensor:
    """`[..., V, K]` from the pool's order, and back: the same turn."""
    return states if pool.order == "vk" else states.mT
