"""`flashinfer` in prefill of a gated delta net: the library's chunked kernel over one state pool.

In: the linear call contract; states `vk`. Out: outputs and states in place, by the library's own slot indices: -1 reads
a zero state or writes none. Its kernels are compiled by the CuTe DSL at the first call. Never holds the current batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from flashinfer.gdn_prefill import chunk_gated_delta_rule
from torch import Tensor

from backstamp.attention import ComputedGates, LayerSpec, LinearBatch, RawGates, StatePool
from backstamp.factories import BuildRequest
from backstamp.jit_notice import compiling
from backstamp.linear_checks import check_linear_batch, check_linear_build, check_linear_call
from backstamp.linear_gates import computed_gates

__all__ = ["GdnPrefill", "run_chunked"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillStep:
    """One planned prefill.

    Attributes:
        read, write: `[B]` i32 slots: -1 where a row starts from zero, or leaves no state.
        num_tokens: tokens of rows; -1 where only the device knows.
    """

    batch: LinearBatch
    cu_seqlens: Tensor
    read: Tensor
    write: Tensor
    num_tokens: int


class GdnPrefill:
    """Prefill of one group of gated delta nets."""

    def __init__(self, request: BuildRequest) -> None:
        check_linear_build(request)
        self._request = request

    def plan(self, batch: LinearBatch, *, state: PrefillStep | None = None, capture: bool = False) -> PrefillStep:
        """Check the step and note which states its rows read and write."""
        check_linear_batch(self._request, batch, capture=capture)
        rows = batch.num_rows
        read, write = _read_and_write(batch, batch.slots)
        host = batch.qo_indptr_host
        return PrefillStep(
            batch=batch,
            cu_seqlens=batch.qo_indptr[: rows + 1].contiguous(),
            read=read,
            write=write,
            num_tokens=-1 if host is None else int(host[rows]),
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
        check_linear_call(self._request, q, k, v, gates, layer, batch, pool=pool, slots=slots, out=out)
        if out is None:
            out = torch.empty_like(v, memory_format=torch.contiguous_format)
        # what the library does not write must not be whatever lay there
        out[max(state.num_tokens, 0) :].zero_()
        if batch.num_tokens == 0 or batch.num_rows == 0 or state.num_tokens == 0:
            return out
        read, write = (state.read, state.write) if slots is batch.slots else _read_and_write(batch, slots)
        with compiling("flashinfer", f"gated delta net prefill {self._request.dtype}"):
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
    """The library's prefill: contiguous tokens, fp32 gates, the decay in log space because it is told so."""
    ready = computed_gates(gates)
    target = out if out.is_contiguous() else torch.zeros_like(out, memory_format=torch.contiguous_format)
    chunk_gated_delta_rule(
        q=q.contiguous(),
        k=k.contiguous(),
        v=v.contiguous(),
        g=ready.g.contiguous(),
        beta=ready.beta.contiguous(),
        scale=layer.scale,
        initial_state=pool.ssm,
        output_final_state=True,
        cu_seqlens=cu_seqlens,
        use_qk_l2norm_in_kernel=True,
        output=target,
        output_state=pool.ssm,
        state_indices=read,
        backend="flashinfer",
        # its own default is a factor
        gate_domain="log",
        output_state_indices=write,
    )
    return out if target is out else out.copy_(target)


def _read_and_write(batch: LinearBatch, slots: Tensor) -> tuple[Tensor, Tensor]:
    write = slots[: batch.num_rows].to(torch.int32, copy=True)
    return torch.where(batch.has_state[: batch.num_rows], write, -1), write
