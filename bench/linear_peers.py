"""Libraries called directly on the tensors of a recurrence.

In: a `LinearStep`. Out: `Candidate`s. They take states by row, not by slot: those are laid out beforehand, and put
into the pool's slots once, after the first call, for the check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from backstamp.attention import RawGates
from backstamp.linear_gates import computed_gates
from built import Candidate, Ready
from shapes import Shape, family_of
from steps import LinearStep

__all__ = ["linear_peers"]


def linear_peers(shape: Shape) -> Iterator[Candidate]:
    """The libraries that have a function for this work."""
    gdn, decode = family_of(shape) == "gdn", shape.phase == "decode"
    if decode:
        yield _peer("fla fused recurrent", _fla_recurrent)
    else:
        yield _peer("fla chunk", _fla_chunk)
        if shape.lower_bound is not None:
            yield _peer("flash_kda", _flash_kda)
    if gdn:
        yield _peer("flashinfer decode" if decode else "flashinfer chunk", _gdn_decode if decode else _gdn_chunk)


def _peer(name: str, prepare: Callable[[LinearStep], Ready]) -> Candidate:
    return Candidate(name, True, prepare)


def _fla_chunk(step: LinearStep) -> Ready:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda

    call = chunk_kda if family_of(step.shape) == "kda" else chunk_gated_delta_rule
    ready, host = computed_gates(step.gates), step.batch.qo_indptr_host
    assert host is not None, "every step has them"
    offsets = step.batch.qo_indptr.long()

    @torch.no_grad()
    def run() -> tuple[Tensor, Tensor]:
        out, states = call(
            step.q[None],
            step.k[None],
            step.v[None],
            g=ready.g[None],
            beta=ready.beta[None],
            scale=step.layer.scale,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            state_v_first=True,
            cu_seqlens=offsets,
            cu_seqlens_cpu=host.long(),
        )
        return out[0], states

    return _checked(step, run, "fla-core")


def _fla_recurrent(step: LinearStep) -> Ready:
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
    from fla.ops.kda import fused_recurrent_kda

    call = fused_recurrent_kda if family_of(step.shape) == "kda" else fused_recurrent_gated_delta_rule
    ready = computed_gates(step.gates)
    states = step.before[step.batch.slots.long()]
    q, k, v, g, beta = (x[:, None] for x in (step.q, step.k, step.v, ready.g, ready.beta))

    @torch.no_grad()
    def run() -> tuple[Tensor, Tensor]:
        out, left = call(
            q,
            k,
            v,
            g=g,
            beta=beta,
            scale=step.layer.scale,
            initial_state=states,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            state_v_first=True,
        )
        return out[:, 0], left

    return _checked(step, run, "fla-core")


def _flash_kda(step: LinearStep) -> Ready:
    import flash_kda

    gates, layer = step.gates, step.layer
    assert isinstance(gates, RawGates), "a decay with a bound has them raw"
    offsets, out = step.batch.qo_indptr.long(), torch.empty_like(step.v)
    first = torch.zeros(len(step.shape.rows), *step.pool.ssm.shape[1:], device=out.device)
    final = torch.empty_like(first)

    def run() -> tuple[Tensor, Tensor]:
        flash_kda.fwd(
            step.q[None],
            step.k[None],
            step.v[None],
            gates.a[None],
            gates.b[None],
            layer.scale,
            out[None],
            gates.A_log,
            gates.dt_bias,
            gates.lower_bound,
            initial_state=first,
            final_state=final,
            cu_seqlens=offsets,
        )
        return out, final

    return _checked(step, run, "tokenspeed-flashkda")


def _gdn_chunk(step: LinearStep) -> Ready:
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    ready, offsets = computed_gates(step.gates), step.batch.qo_indptr.long()

    def run() -> tuple[Tensor, Tensor]:
        out, states = chunk_gated_delta_rule(
            q=step.q,
            k=step.k,
            v=step.v,
            g=ready.g,
            beta=ready.beta,
            scale=step.layer.scale,
            output_final_state=True,
            cu_seqlens=offsets,
            use_qk_l2norm_in_kernel=True,
            gate_domain="log",
        )
        return out, states

    return _checked(step, run, "flashinfer-python")


def _gdn_decode(step: LinearStep) -> Ready:
    from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose

    gates = step.gates
    assert isinstance(gates, RawGates), "decode takes them raw"
    states = step.before[step.batch.slots.long()]
    q, k, v, a, b = (x[:, None] for x in (step.q, step.k, step.v, gates.a, gates.b))
    rate, bias = gates.A_log.float(), gates.dt_bias.float()

    def run() -> tuple[Tensor, Tensor]:
        out, left = gated_delta_rule_decode_pretranspose(
            q, k, v, states, rate, a, bias, b, scale=step.layer.scale, use_qk_l2norm=True
        )
        return out[:, 0], left

    return _checked(step, run, "flashinfer-python")


def _checked(step: LinearStep, run: Callable[[], tuple[Tensor, Tensor]], library: str) -> Ready:
    """The call, whose first answer also leaves its states where the check looks for them."""
    first = True

    def once() -> Tensor:
        nonlocal first
        out, states = run()
        if first:
            step.pool.ssm[step.batch.slots.long()] = states.to(step.pool.ssm.dtype)
            first = False
        return out

    return Ready(once, library)
