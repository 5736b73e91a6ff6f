"""`flashkda` in prefill of Kimi delta attention with a bounded decay: FlashKDA's fused kernels over packed rows.

In: the linear call contract with raw, bounded gates; states `vk`. Out: outputs, and each row's final state in its slot.
The library takes packed states, so they are gathered before and scattered after; it divides heads by their norms and
computes the gates itself. Never holds the current batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import flash_kda
import torch
from torch import Tensor

from backstamp.attention import ComputedGates, LayerSpec, LinearBatch, RawGates, StatePool
from backstamp.factories import BuildRequest
from backstamp.jit_notice import Announcer
from backstamp.linear_checks import check_linear_batch, check_linear_build, linear_refusal
from backstamp.repeated_linear_calls import LinearCallChecks
from backstamp_linear_attn.states import load_states, store_states

__all__ = ["KdaPrefill", "KdaStep"]

#: "Gate lower bound, expected in [-5.0, 0]". Source: tokenspeed-flashkda 0.0.1.post20260901 flash_kda/__init__.py
_LEAST_BOUND: Final = -5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaStep:
    """One planned prefill: `[B+1]` i64 offsets, and tokens of rows, None where only the device knows."""

    batch: LinearBatch
    cu_seqlens: Tensor
    num_tokens: int | None


class KdaPrefill:
    """Prefill of one group of Kimi delta attention layers."""

    def __init__(self, request: BuildRequest) -> None:
        check_linear_build(request)
        self._request = request
        self._check_call = LinearCallChecks(request)
        # the library is compiled; the kernels that carry states are not
        self._compiles = Announcer("flashkda")

    def plan(self, batch: LinearBatch, *, state: KdaStep | None = None, capture: bool = False) -> KdaStep:
        """Check the step and note its offsets."""
        check_linear_batch(self._request, batch, capture=capture)
        host = batch.qo_indptr_host
        return KdaStep(
            batch=batch,
            cu_seqlens=batch.qo_indptr[: batch.num_rows + 1].to(torch.int64, copy=True),
            num_tokens=None if host is None else int(host[batch.num_rows]),
        )

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: RawGates | ComputedGates,
        layer: LayerSpec,
        state: KdaStep,
        *,
        pool: StatePool,
        slots: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """Run one layer; shapes as in `LinearBackend.forward`. Tokens of no row come out as zero.

        Raises:
            UnsupportedBatch: gates that are computed already, have no bound or one below -5, or are not bf16.
        """
        batch, total = state.batch, state.num_tokens
        self._check_call(q, k, v, gates, layer, batch, pool=pool, slots=slots, out=out)
        raw = self._bounded(gates)
        if out is None:
            out = torch.empty_like(v, memory_format=torch.contiguous_format)
        # what the library does not write must not be whatever lay there
        out[total or 0 :].zero_()
        if batch.num_tokens == 0 or batch.num_rows == 0 or total == 0:
            return out
        target = out if out.is_contiguous() else torch.zeros_like(out, memory_format=torch.contiguous_format)
        shared = layer.num_kv_heads // layer.num_qo_heads
        if shared > 1:
            q, k = q.repeat_interleave(shared, 1), k.repeat_interleave(shared, 1)
        with torch.no_grad(), self._compiles.first("states of Kimi delta attention"):
            initial = load_states(pool.ssm, slots, batch.has_state, batch.num_rows)
            final = torch.empty_like(initial)
            flash_kda.fwd(
                q[None, :total].contiguous(),
                k[None, :total].contiguous(),
                v[None, :total].contiguous(),
                raw.a[None, :total].contiguous(),
                raw.b[None, :total].contiguous(),
                layer.scale,
                target[None, :total],
                raw.A_log.float().contiguous(),
                raw.dt_bias.float().reshape(layer.num_kv_heads, layer.head_dim).contiguous(),
                raw.lower_bound,
                initial_state=initial,
                final_state=final,
                cu_seqlens=state.cu_seqlens,
            )
            store_states(final, pool.ssm, slots, batch.qo_indptr)
        return out if target is out else out.copy_(target)

    def _bounded(self, gates: RawGates | ComputedGates) -> RawGates:
        """The gates as the library takes them, or a refusal."""
        if not isinstance(gates, RawGates):
            needed, found = "RawGates: the library computes them in its kernel", "ComputedGates"
            raise linear_refusal(self._request, "gates", needed, found, "prefill")
        if gates.lower_bound is None or gates.lower_bound < _LEAST_BOUND:
            needed = f"from {_LEAST_BOUND:g} up to 0: the library has no decay without a bound"
            raise linear_refusal(self._request, "gates.lower_bound", needed, str(gates.lower_bound), "prefill")
        if not gates.a.dtype == gates.b.dtype == torch.bfloat16:
            needed, found = "torch.bfloat16: the library takes no other", f"{gates.a.dtype} and {gates.b.dtype}"
            raise linear_refusal(self._request, "gates.a and gates.b", needed, found, "prefill")
        return gates
