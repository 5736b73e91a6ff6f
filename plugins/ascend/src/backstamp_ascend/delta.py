"""Gated delta nets through torch-npu's recurrent and chunked delta rules, over a pool of bf16 states.

In: the linear call contract with exact host offsets; states `vk`. Out: outputs and states in place. The library knows
no pads, so the states of a step are copied out of the pool and back; a row without a slot is computed from zeros and
written nowhere. Never holds the current batch, and never reads a device value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Final

import torch
from torch import Tensor

from backstamp.attention import ComputedGates, LayerSpec, LinearBatch, RawGates, StatePool
from backstamp.factories import BuildRequest
from backstamp.linear_checks import LinearForm, check_linear_batch, check_linear_call, linear_refusal
from backstamp.linear_gates import computed_gates
from backstamp.linear_math import first_slots, unit_heads

__all__ = ["MOST_TOKENS", "DeltaPrefill", "DeltaRows", "DeltaStep"]

#: Tokens of one row in a recurrent call. Source: torch-npu 2.14.0 _op_plugin_docs.py:6726. The chunked function's page
#: (:12085) repeats the bound beside an example of 100 tokens, and is not held to it.
MOST_TOKENS: Final = 8


@dataclass(slots=True)
class DeltaStep:
    """One planned step of R rows that have tokens, T tokens in all.

    Attributes:
        form: where its states go.
        rows: i64 `[R]`, the rows' places in the batch.
        lens: i32 `[R]`. first, last: i64 `[R]`, each row's first and last token.
        token_rows, token_at: i64 `[T]`, which of the R rows a token belongs to, and where in it.
    """

    batch: LinearBatch
    form: LinearForm
    rows: Tensor
    lens: Tensor
    first: Tensor
    last: Tensor
    token_rows: Tensor
    token_at: Tensor


class _Delta:
    """What both have in common: the rows of a step, and the checks of a call."""

    def __init__(self, request: BuildRequest, run: Callable[..., object]) -> None:
        self._request = request
        self._run = run

    def plan(self, batch: LinearBatch, *, state: DeltaStep | None = None, capture: bool = False) -> DeltaStep:
        """Find the rows that have tokens, from the host offsets.

        Raises:
            UnsupportedBatch: what the row does not declare, or more tokens a row than the library takes.
        """
        step = _step_of(batch, check_linear_batch(self._request, batch, capture=capture))
        if batch.phase != "prefill" and bool((step.lens > MOST_TOKENS).any()):
            needed, found = f"at most {MOST_TOKENS} tokens a row", str(int(step.lens.max()))
            raise linear_refusal(self._request, "qo_indptr_host", needed, found, batch.phase)
        step = _on(step, batch.slots.device)
        if state is None:
            return step
        for field in fields(DeltaStep):
            setattr(state, field.name, getattr(step, field.name))
        return state

    def _open(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: RawGates | ComputedGates,
        layer: LayerSpec,
        step: DeltaStep,
        pool: StatePool,
        slots: Tensor,
        out: Tensor | None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The output, its tokens of no row zeroed, and the library's tokens and gates."""
        batch, total = step.batch, step.token_rows.shape[0]
        check_linear_call(self._request, q, k, v, gates, layer, batch, pool=pool, slots=slots, out=out)
        if pool.ssm.dtype is not torch.bfloat16:
            raise linear_refusal(self._request, "pool.ssm", "torch.bfloat16", str(pool.ssm.dtype), batch.phase)
        if out is None:
            out = torch.empty_like(v, memory_format=torch.contiguous_format)
        out[total:].zero_()
        ready = computed_gates(gates)
        return out, {
            # the norms of heads are left to the caller
            "query": unit_heads(q[:total]).to(q.dtype),
            "key": unit_heads(k[:total]).to(k.dtype),
            "value": v[:total].contiguous(),
            "g": ready.g[:total].contiguous(),
            "beta": ready.beta[:total].to(torch.bfloat16),
        }


class DeltaRows(_Delta):
    """Decode and verify of a chain; `run` is `npu_recurrent_gated_delta_rule`."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: RawGates | ComputedGates,
        layer: LayerSpec,
        state: DeltaStep,
        *,
        pool: StatePool,
        slots: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """Run one layer; shapes as in `LinearBackend.forward`.

        Raises:
            UnsupportedBatch: what the row does not declare, or states in another dtype than bf16.
        """
        batch, total = state.batch, state.token_rows.shape[0]
        out, tokens = self._open(q, k, v, gates, layer, state, pool, slots, out)
        if total == 0:
            return out
        read = (slots if batch.slot_table is None else first_slots(batch))[state.rows]
        # a state a token: the library reads a row's from its first token's place and leaves one at each
        states = pool.ssm.new_zeros(total, *pool.ssm.shape[1:])
        states[state.first] = _load(pool.ssm, read, read >= 0)
        query, key, value = (tokens.pop(name) for name in ("query", "key", "value"))
        answer = self._run(
            query,
            key,
            value,
            states,
            **tokens,
            scale=layer.scale,
            actual_seq_lengths=state.lens,
            ssm_state_indices=torch.arange(total, dtype=torch.int32, device=q.device),
        )
        assert isinstance(answer, Tensor)
        out[:total] = answer
        self._keep(states, read, state, pool, slots)
        return out

    def _keep(self, states: Tensor, read: Tensor, step: DeltaStep, pool: StatePool, slots: Tensor) -> None:
        """Put the states where the form of the step says."""
        batch, there = step.batch, (read >= 0)[step.token_rows]
        if step.form == "slots":
            _store(states[step.last], pool.ssm, slots[step.rows])
            return
        rows = step.rows[step.token_rows]
        if step.form == "slot_table":
            assert batch.slot_table is not None
            _store(states, pool.ssm, torch.where(there, batch.slot_table[rows, step.token_at], -1))
            return
        kept = batch.intermediate
        assert kept is not None
        before = kept[rows, step.token_at]
        kept[rows, step.token_at] = torch.where(_for_states(there), states.to(kept.dtype), before)


class DeltaPrefill(_Delta):
    """Prefill in chunks; `run` is `npu_chunk_gated_delta_rule`."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: RawGates | ComputedGates,
        layer: LayerSpec,
        state: DeltaStep,
        *,
        pool: StatePool,
        slots: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """Run one layer; shapes as in `LinearBackend.forward`.

        Raises:
            UnsupportedBatch: what the row does not declare, or states in another dtype than bf16.
        """
        total, own = state.token_rows.shape[0], slots[state.rows]
        out, tokens = self._open(q, k, v, gates, layer, state, pool, slots, out)
        if total == 0:
            return out
        query, key, value = (tokens.pop(name) for name in ("query", "key", "value"))
        answer = self._run(
            query,
            key,
            value,
            **tokens,
            initial_state=_load(pool.ssm, own, (own >= 0) & state.batch.has_state[state.rows]),
            actual_seq_lengths=state.lens,
            scale=layer.scale,
        )
        assert isinstance(answer, tuple)
        out[:total] = answer[0]
        _store(answer[1], pool.ssm, own)
        return out


def _step_of(batch: LinearBatch, form: LinearForm) -> DeltaStep:
    """The rows that have tokens; empty rows take none, so theirs are the step's first T, in order."""
    assert batch.qo_indptr_host is not None, "declared as an input"
    offsets = batch.qo_indptr_host[: batch.num_rows + 1].long()
    lens = offsets.diff()
    rows = lens.nonzero()[:, 0]
    first, lens = offsets[:-1][rows], lens[rows]
    token_rows = torch.repeat_interleave(torch.arange(len(rows)), lens)
    return DeltaStep(
        batch=batch,
        form=form,
        rows=rows,
        lens=lens.int(),
        first=first,
        last=first + lens - 1,
        token_rows=token_rows,
        token_at=torch.arange(len(token_rows)) - first[token_rows],
    )


def _on(step: DeltaStep, device: torch.device) -> DeltaStep:
    return replace(
        step,
        rows=step.rows.to(device),
        lens=step.lens.to(device),
        first=step.first.to(device),
        last=step.last.to(device),
        token_rows=step.token_rows.to(device),
        token_at=step.token_at.to(device),
    )


def _load(pool: Tensor, slots: Tensor, there: Tensor) -> Tensor:
    """`[R, HV, V, K]`: the states of slots, zero where there is none; never what a slot of none holds."""
    return torch.where(_for_states(there), pool[slots.clamp(min=0).long()], 0.0)


def _store(states: Tensor, pool: Tensor, slots: Tensor) -> None:
    """Write states to their slots, those without one nowhere, without asking the device which they are.

    A state without a slot writes what another state writes, to that one's slot: the same numbers twice are no race.
    Where none has a slot, the pool's own numbers are written back.
    """
    there = slots >= 0
    source = torch.where(there, torch.arange(len(slots), device=slots.device), there.int().argmax())
    at = slots[source].clamp(min=0).long()
    pool[at] = torch.where(there.any(), states[source].to(pool.dtype), pool[at])


def _for_states(there: Tensor) -> Tensor:
    return there[:, None, None, None]
