"""`triton` in prefill: fla-core's chunked kernels over the packed rows of a step.

In: the linear call contract with host offsets. Out: outputs, and each row's final state in its slot. The library takes
packed fp32 states, so states are gathered before and scattered after. Never holds the current batch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

import torch
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.kda import chunk_kda
from torch import Tensor

from backstamp.attention import ComputedGates, LayerSpec, LinearBatch, RawGates, StatePool
from backstamp.factories import BuildRequest
from backstamp.jit_notice import Announcer
from backstamp.linear_checks import check_linear_batch, check_linear_build, linear_refusal
from backstamp.repeated_linear_calls import LinearCallChecks
from backstamp_linear_attn.states import load_states, store_states

__all__ = ["FlaPrefill", "FlaStep"]

#: What the library's chunked functions answer: outputs, and the final states.
_Chunked = Callable[..., "tuple[Tensor, Tensor]"]

#: The package fla-core hands a gated delta net's prefill to where it is installed, and the variable that says
#: otherwise. Its stand-in for Kimi delta attention takes over only where it may compute beta, which it never may here.
#: Source: fla-core 0.6.0 backends.py, ops/gated_delta_rule/backends/flash_qla.py, ops/kda/backends/flash_kda.py
_STAND_IN: Final = ("flash_qla", "FLA_FLASH_QLA")
#: Least bound for which the library may multiply decays of a sub-chunk on tensor cores. Source: ops/kda/chunk.py
_SAFE_BOUND: Final = -5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FlaStep:
    """One planned step: `num_tokens` tokens of rows, and their offsets as the library reads them.

    Attributes:
        cu_seqlens, cu_seqlens_cpu: `[B+1]` i64, new tensors each step: the library remembers what it derived from
            offsets by the identity of their tensors, so one rewritten in place would answer for an earlier step.
            Source: fla-core 0.6.0 utils/decorators.py, tensor_cache.
    """

    batch: LinearBatch
    num_tokens: int
    cu_seqlens: Tensor
    cu_seqlens_cpu: Tensor


class FlaPrefill:
    """The backend of one group of linear layers, of either family."""

    def __init__(self, request: BuildRequest) -> None:
        check_linear_build(request)
        kda = request.family == "kda"
        if not kda:
            _check_no_stand_in(request)
        self._request = request
        self._check_call = LinearCallChecks(request)
        self._chunked: _Chunked = chunk_kda if kda else chunk_gated_delta_rule
        self._compiles = Announcer("triton")

    def plan(self, batch: LinearBatch, *, state: FlaStep | None = None, capture: bool = False) -> FlaStep:
        """Check the step and note its offsets; a refused batch raises an `UnsupportedBatch`."""
        check_linear_batch(self._request, batch, capture=capture)
        assert batch.qo_indptr_host is not None, "the row declares host_lens, and the check holds it"
        cu_seqlens_cpu = batch.qo_indptr_host[: batch.num_rows + 1].to(torch.int64, copy=True)
        return FlaStep(
            batch=batch,
            num_tokens=int(cu_seqlens_cpu[-1]),
            cu_seqlens=batch.qo_indptr[: batch.num_rows + 1].to(torch.int64, copy=True),
            cu_seqlens_cpu=cu_seqlens_cpu,
        )

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: RawGates | ComputedGates,
        layer: LayerSpec,
        state: FlaStep,
        *,
        pool: StatePool,
        slots: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """Run one layer; shapes as in `LinearBackend.forward`. Tokens of no row come out as zero."""
        batch = state.batch
        self._check_call(q, k, v, gates, layer, batch, pool=pool, slots=slots, out=out)
        total = state.num_tokens
        if out is None and total < batch.num_tokens:
            out = torch.empty_like(v, memory_format=torch.contiguous_format)
        if out is not None and total < batch.num_tokens:
            out[total:].zero_()
        if total == 0:
            return torch.empty_like(v) if out is None else out
        dims = f"d{layer.head_dim}/{layer.v_head_dim}"
        with torch.no_grad(), self._compiles.first(self._request.family, "prefill", self._request.dtype, dims):
            initial = load_states(pool.ssm, slots, batch.has_state, batch.num_rows)
            answer, final = self._chunked(
                q=q[None, :total],
                k=k[None, :total],
                v=v[None, :total],
                scale=layer.scale,
                initial_state=initial,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
                state_v_first=pool.order == "vk",
                cu_seqlens=state.cu_seqlens,
                cu_seqlens_cpu=state.cu_seqlens_cpu,
                **_gates(gates, total),
            )
            store_states(final, pool.ssm, slots, batch.qo_indptr)
            if out is None:
                return answer[0]
            out[:total] = answer[0]
        return out


def _gates(gates: RawGates | ComputedGates, total: int) -> dict[str, object]:
    """The gates as the library takes them: the log of the decay, or what its cumulative sum computes it from.

    Raw ones are a 16-bit number a channel; written out as fp32 logarithms they would cost more than the recurrence.
    """
    if isinstance(gates, ComputedGates):
        return {"g": gates.g[None, :total].float(), "beta": gates.beta[None, :total].float()}
    named: dict[str, object] = {
        "g": gates.a[None, :total],
        "beta": gates.b[None, :total].float().sigmoid(),
        "use_gate_in_kernel": True,
        "A_log": gates.A_log.float(),
        "dt_bias": gates.dt_bias.float().reshape(-1),
    }
    if gates.lower_bound is not None:
        named |= {"lower_bound": gates.lower_bound, "safe_gate": gates.lower_bound >= _SAFE_BOUND}
    return named


def _check_no_stand_in(request: BuildRequest) -> None:
    """Refuse where the library would run another package's kernel, because the stamp would not say so.

    It is found by the import name and switched off by the variable, as the library itself does both.
    """
    package, variable = _STAND_IN
    dispatches = os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") != "1" and os.environ.get(variable, "1") != "0"
    if dispatches and find_spec(package) is not None:
        needed = f"fla-core's own kernels: set {variable}=0 before it is imported"
        raise linear_refusal(request, "library", needed, f"{package}, which fla-core would run in their place")
