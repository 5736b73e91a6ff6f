"""`flashinfer` in prefill of a gated delta net: the library's chunked kernels, around one state pool.

In: the linear call contract; states `vk`. Out: outputs and states in place. Where rows are many or short, the library
reads and writes the pool itself, by slots of which -1 reads a zero state or writes none. Where they are few and long,
it can split a row among the chip's processors, but only over packed states: those are gathered and scattered, a few
megabytes. Its kernels are compiled by the CuTe DSL at the first call. Never holds the current batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from flashinfer.gdn_prefill import chunk_gated_delta_rule
from torch import Tensor

from backstamp.attention import ComputedGates, LayerSpec, LinearBatch, RawGates, StatePool
from backstamp.factories import BuildRequest
from backstamp.jit_notice import Announcer
from backstamp.linear_checks import check_linear_batch, check_linear_build
from backstamp.repeated_linear_calls import LinearCallChecks
from backstamp_linear_attn.prepare import prepare_tokens
from backstamp_linear_attn.states import load_states, store_states

__all__ = ["GdnPrefill", "run_chunked"]

#: The most states, rows times value heads, of a call that the library may split. It splits below half the number of
#: processors, which are 132 on an H200 and at most 188 elsewhere; where it does not, packing costs a few microseconds.
#: Source: flashinfer 0.7.4 gdn_kernels/delta_rule_dsl/varlen_helper.py, should_use_cp_host
_FEW_STATES = 94
#: Tokens of a row up to which it is not worth splitting: a block of 64 takes some 3 us on an H200, the four kernels of
#: a split row and the two that carry states some 40.
_SHORT_ROW = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillStep:
    """One planned prefill.

    Attributes:
        read, write: `[B]` i32 slots: -1 where a row starts from zero, or leaves no state.
        num_tokens, max_q_len: tokens of rows, and of the longest; None where only the device knows.
    """

    batch: LinearBatch
    cu_seqlens: Tensor
    read: Tensor
    write: Tensor
    num_tokens: int | None
    max_q_len: int | None


class GdnPrefill:
    """Prefill of one group of gated delta nets."""

    def __init__(self, request: BuildRequest) -> None:
        check_linear_build(request)
        self._request = request
        self._check_call = LinearCallChecks(request)
        self._compiles = Announcer("flashinfer")

    def plan(self, batch: LinearBatch, *, state: PrefillStep | None = None, capture: bool = False) -> PrefillStep:
        """Check the step and note which states its rows read and write."""
        check_linear_batch(self._request, batch, capture=capture)
        rows = batch.num_rows
        read, write = _read_and_write(batch, batch.slots)
        num_tokens = longest = None
        if batch.qo_indptr_host is not None:
            ends: list[int] = batch.qo_indptr_host[: rows + 1].tolist()
            num_tokens = ends[-1]
            longest = max((stop - start for start, stop in pairwise(ends)), default=0)
        return PrefillStep(
            batch=batch,
            cu_seqlens=batch.qo_indptr[: rows + 1].contiguous(),
            read=read,
            write=write,
            num_tokens=num_tokens,
            max_q_len=longest,
        )

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: RawGates | ComputedGates,
        layer: LayerSpec,
        state: PrefillStep,
        *,
        pool: StatePool,
        slots: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """Run one layer; shapes as in `LinearBackend.forward`. Tokens of no row come out as zero."""
        batch = state.batch
        self._check_call(q, k, v, gates, layer, batch, pool=pool, slots=slots, out=out)
        if out is None:
            out = torch.empty_like(v, memory_format=torch.contiguous_format)
        if batch.num_tokens == 0 or batch.num_rows == 0 or state.num_tokens == 0:
            return out.zero_()
        long = state.max_q_len is None or state.max_q_len > _SHORT_ROW
        few = long and batch.num_rows * layer.num_kv_heads <= _FEW_STATES
        with self._compiles.first("gated delta net prefill", self._request.dtype, "few rows" if few else ""):
            if few:
                return _run_packed(q, k, v, gates, layer, state, pool, slots, out)
            read, write = (state.read, state.write) if slots is batch.slots else _read_and_write(batch, slots)
            return run_chunked(q, k, v, gates, layer, state.cu_seqlens, read, write, pool, out)


def run_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: RawGates | ComputedGates,
    layer: LayerSpec,
    cu_seqlens: Tensor,
    read: Tensor,
    write: Tensor,
    pool: StatePool,
    out: Tensor,
) -> Tensor:
    """The library's prefill over the pool, which it never splits a row of."""
    target = _packed(out)
    made = prepare_tokens(q, k, gates, cu_seqlens, target)
    chunk_gated_delta_rule(
        q=made.q,
        k=made.k,
        v=v.contiguous(),
        g=made.decay,
        beta=made.beta,
        scale=layer.scale,
        initial_state=pool.ssm,
        output_final_state=True,
        cu_seqlens=cu_seqlens,
        output=target,
        output_state=pool.ssm,
        state_indices=read,
        backend="flashinfer",
        gate_domain="linear",
        output_state_indices=write,
    )
    return out if target is out else out.copy_(target)


def _run_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: RawGates | ComputedGates,
    layer: LayerSpec,
    state: PrefillStep,
    pool: StatePool,
    slots: Tensor,
    out: Tensor,
) -> Tensor:
    """The library's prefill over packed fp32 states, which it may split."""
    batch, total = state.batch, state.num_tokens
    target = _packed(out)
    made = prepare_tokens(q, k, gates, state.cu_seqlens, target)
    initial = load_states(pool.ssm, slots, batch.has_state, batch.num_rows)
    _, final = chunk_gated_delta_rule(
        q=made.q[:total],
        k=made.k[:total],
        v=v.contiguous()[:total],
        g=made.decay[:total],
        beta=made.beta[:total],
        scale=layer.scale,
        initial_state=initial,
        output_final_state=True,
        cu_seqlens=state.cu_seqlens,
        output=target[:total],
        output_state=torch.empty_like(initial),
        backend="flashinfer",
        max_seqlen=state.max_q_len,
        gate_domain="linear",
    )
    store_states(final, pool.ssm, slots, batch.qo_indptr)
    return out if target is out else out.copy_(target)


def _packed(out: Tensor) -> Tensor:
    return out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)


def _read_and_write(batch: LinearBatch, slots: Tensor) -> tuple[Tensor, Tensor]:
    write = slots[: batch.num_rows].to(torch.int32, copy=True)
    return torch.where(batch.has_state[: batch.num_rows], write, -1), write
