"""What the recorded functions of fla-core, flashinfer and FlashKDA compute, in torch, from their own documentation.

Each refuses what the library itself asserts, so a binding that hands over another dtype, shape or order fails here.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from tests.libraries.fake import FakeLibrary

CHUNK_GDN = "fla.ops.gated_delta_rule.chunk:chunk_gated_delta_rule"
CHUNK_KDA = "fla.ops.kda.chunk:chunk_kda"
PREFILL = "flashinfer.gdn_prefill:chunk_gated_delta_rule"
DECODE = "flashinfer.gdn_decode:gated_delta_rule_decode_pretranspose"
MTP = "flashinfer.gdn_decode:gated_delta_rule_mtp"
FLASH_KDA = "flash_kda:fwd"
HALF = (torch.float16, torch.bfloat16)


def fresh(monkeypatch: Any) -> None:
    """Let this plugin's modules import the stand-ins, and later tests the library again."""
    for name in ("fla_prefill", "flashinfer_prefill", "flashinfer_rows", "flashkda_prefill"):
        monkeypatch.delitem(sys.modules, f"backstamp_linear_attn.{name}", raising=False)


def fla_core(monkeypatch: Any) -> FakeLibrary:
    """fla-core 0.6.0, with the names its packages re-export."""
    library = FakeLibrary("fla-core", monkeypatch)
    for path in (CHUNK_GDN, CHUNK_KDA):
        module, _, name = path.partition(":")
        monkeypatch.setattr(
            sys.modules[module.rpartition(".")[0]], name, vars(sys.modules[module])[name], raising=False
        )
        library.on(path, fla_chunk)
    fresh(monkeypatch)
    return library


def flashinfer(monkeypatch: Any) -> FakeLibrary:
    """flashinfer-python 0.7.4's gated delta net."""
    library = FakeLibrary("flashinfer-python-gdn", monkeypatch)
    library.on(PREFILL, gdn_prefill)
    library.on(DECODE, gdn_decode)
    library.on(MTP, gdn_mtp)
    fresh(monkeypatch)
    return library


def flashkda(monkeypatch: Any) -> FakeLibrary:
    """tokenspeed-flashkda 0.0.1.post20260901."""
    library = FakeLibrary("tokenspeed-flashkda", monkeypatch)
    library.on(FLASH_KDA, flash_kda)
    fresh(monkeypatch)
    return library


def unit(x: Tensor, on: bool) -> Tensor:
    """Heads of length one."""
    x = x.float()
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() if on else x


def advance(state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """One token: `state [HV, K, V]`, `q`, `k [H, K]`, `v [HV, V]`, `log_decay [HV]` or `[HV, K]`."""
    shared = v.shape[0] // q.shape[0]
    q, k = q.repeat_interleave(shared, 0), k.repeat_interleave(shared, 0)
    state = state * log_decay.exp().reshape(v.shape[0], -1, 1)
    change = beta[:, None] * (v.float() - torch.einsum("hk,hkv->hv", k, state))
    state = state + torch.einsum("hk,hv->hkv", k, change)
    return torch.einsum("hk,hkv->hv", q, state), state


def fla_chunk(
    q, k, v, g, beta, cu_seqlens, cu_seqlens_cpu, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, state_v_first=False, use_gate_in_kernel=False, safe_gate=False, lower_bound=None,
    kwargs=None,
):  # fmt: skip
    """Chunked prefill over packed rows and packed states; `g` in log space, or raw where the kernel computes it.

    One of the functions names what the other takes beside its parameters.
    """
    more = kwargs or {}
    if more.get("use_gate_in_kernel", use_gate_in_kernel):
        A_log, dt_bias = more["A_log"], more["dt_bias"]
        assert A_log.dtype == dt_bias.dtype == torch.float32
        assert A_log.is_contiguous()
        assert dt_bias.is_contiguous()
        assert dt_bias.dim() == 1
        assert not safe_gate or -5 <= lower_bound < 0
        g = log_decay(g[0], A_log, dt_bias, lower_bound)[None]
    else:
        assert not safe_gate
    assert q.dtype == k.dtype == v.dtype
    assert q.shape[0] == 1
    assert v.shape[2] % q.shape[2] == 0
    assert cu_seqlens.dtype == cu_seqlens_cpu.dtype == torch.int64
    assert torch.equal(cu_seqlens, cu_seqlens_cpu)
    assert initial_state.shape[0] == len(cu_seqlens) - 1
    assert initial_state.dtype == torch.float32
    assert initial_state.is_contiguous()
    assert int(cu_seqlens[-1]) == q.shape[1]
    out, final = torch.empty_like(v), torch.empty_like(initial_state)
    queries, keys = unit(q[0], use_qk_l2norm_in_kernel), unit(k[0], use_qk_l2norm_in_kernel)
    for row, (start, stop) in enumerate(zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:], strict=False)):
        state = initial_state[row].mT if state_v_first else initial_state[row]
        for token in range(start, stop):
            of = (queries[token] * (scale or q.shape[-1] ** -0.5), keys[token], v[0, token])
            answer, state = advance(state, *of, g[0, token].float(), beta[0, token].float())
            out[0, token] = answer.to(v.dtype)
        final[row] = state.mT if state_v_first else state
    return out, final if output_final_state else None


def gdn_prefill(
    q, k, v, g, beta, cu_seqlens, output, output_state, initial_state, state_indices=None, output_state_indices=None,
    scale=None, output_final_state=False, use_qk_l2norm_in_kernel=False, backend="auto", gate_domain="linear",
    max_seqlen=None,
):  # fmt: skip
    """Chunked prefill over a pool: -1 reads a zero state, or writes none; a sequence without tokens writes nothing.

    Without indices the states are packed, and none is written by a sequence without tokens here, which is the worst
    a caller may meet.
    """
    assert backend in ("auto", "flashinfer")
    assert output_final_state
    assert q.dtype in HALF
    assert all(x.is_contiguous() for x in (q, k, v, g, beta, output, cu_seqlens))
    assert g.dtype == beta.dtype == torch.float32
    assert g.shape == beta.shape == v.shape[:2]
    rows = cu_seqlens.shape[0] - 1
    if state_indices is None:
        assert output_state_indices is None
        assert initial_state.is_contiguous()
        assert output_state.is_contiguous()
        assert initial_state.shape[0] == output_state.shape[0] == rows
        assert max_seqlen is None or -(-q.shape[0] // rows) <= max_seqlen <= q.shape[0]
        state_indices = output_state_indices = torch.arange(rows, dtype=torch.int32)
    assert state_indices.is_contiguous()
    assert output_state_indices.is_contiguous()
    assert state_indices.shape == output_state_indices.shape == (rows,)
    assert output.shape == v.shape
    decay = g if gate_domain == "log" else g.log()
    queries, keys = unit(q, use_qk_l2norm_in_kernel), unit(k, use_qk_l2norm_in_kernel)
    after = {}
    for row, (start, stop) in enumerate(zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:], strict=False)):
        read, write = int(state_indices[row]), int(output_state_indices[row])
        state = initial_state[read].float().mT if read >= 0 else torch.zeros_like(initial_state[0]).float().mT
        for token in range(start, stop):
            of = (queries[token] * (scale or q.shape[-1] ** -0.5), keys[token], v[token])
            answer, state = advance(state, *of, decay[token], beta[token])
            output[token] = answer.to(output.dtype)
        if write >= 0 and stop > start:
            after[write] = state.mT
    for write, state in after.items():
        output_state[write] = state.to(output_state.dtype)
    return output, output_state


def flash_kda(
    q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state=None, final_state=None, cu_seqlens=None
):
    """Fused prefill over packed rows and packed states, the norms and the bounded gates its own; what it checks."""
    everything = (q, k, v, g, beta, out, A_log, dt_bias, initial_state, final_state, cu_seqlens)
    assert all(x.is_contiguous() for x in everything)
    assert all(x.dtype == torch.bfloat16 for x in (q, k, v, g, beta, out))
    assert q.shape == k.shape == v.shape == g.shape == out.shape
    assert q.shape[0] == 1
    assert beta.shape == q.shape[:3]
    assert A_log.dtype == dt_bias.dtype == torch.float32
    assert dt_bias.shape == (*A_log.shape, q.shape[3])
    assert cu_seqlens.dtype == torch.int64
    assert initial_state.dtype == final_state.dtype
    assert initial_state.shape == final_state.shape == (len(cu_seqlens) - 1, v.shape[2], v.shape[3], q.shape[3])
    assert -5 <= lower_bound <= 0
    decay, rate = log_decay(g[0], A_log, dt_bias, lower_bound), beta[0].float().sigmoid()
    queries, keys = unit(q[0], True) * scale, unit(k[0], True)
    for row, (start, stop) in enumerate(zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:], strict=False)):
        state = initial_state[row].mT
        for token in range(start, stop):
            answer, state = advance(state, queries[token], keys[token], v[0, token], decay[token], rate[token])
            out[0, token] = answer.to(out.dtype)
        final_state[row] = state.mT


def log_decay(a: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None = None) -> Tensor:
    """The log decay of packed raw gates, of either family and form."""
    raw = a.float() + dt_bias.float().reshape(a.shape[1:])
    rate = A_log.exp().reshape(-1, *[1] * (raw.dim() - 2))
    return -rate * torch.nn.functional.softplus(raw) if lower_bound is None else lower_bound * (rate * raw).sigmoid()


def gates_of(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """The log decay and beta of a gated delta net's raw gates."""
    return -A_log.exp() * torch.nn.functional.softplus(a.float() + dt_bias.float()), b.float().sigmoid()


def gdn_decode(
    q, k, v, state, A_log, a, dt_bias, b, initial_state, initial_state_indices, scale=None, output=None,
    use_qk_l2norm=True, backend="auto",
):  # fmt: skip
    """One token a row, over an fp32 pool; a row of -1 is left alone and its output is zero."""
    assert state is None
    assert backend == "flashinfer"
    assert q.shape[1] == 1
    assert q.dtype in HALF
    assert initial_state.dtype == A_log.dtype == torch.float32
    assert dt_bias.dtype in (torch.float32, torch.bfloat16)
    assert initial_state.stride(-1) == 1
    assert initial_state_indices.dtype == torch.int32
    assert initial_state_indices.shape == (q.shape[0],)
    output = torch.zeros_like(v) if output is None else output
    decays, beta = gates_of(a[:, 0], b[:, 0], A_log, dt_bias)
    queries, keys = unit(q[:, 0], use_qk_l2norm), unit(k[:, 0], use_qk_l2norm)
    for row, slot in enumerate(initial_state_indices.tolist()):
        if slot < 0:
            output[row] = 0.0
            continue
        of = (queries[row] * (scale or q.shape[-1] ** -0.5), keys[row], v[row, 0])
        answer, after = advance(initial_state[slot].mT, *of, decays[row], beta[row])
        output[row, 0], initial_state[slot] = answer.to(output.dtype), after.mT
    return output, initial_state


def gdn_mtp(
    q, k, v, initial_state, initial_state_indices, A_log, a, dt_bias, b, scale=None, intermediate_states_buffer=None,
    ssm_state_indices=None, disable_state_update=True, use_qk_l2norm=True,
):  # fmt: skip
    """As many tokens in every row: states kept in a buffer, or in a slot a token; none of either leaves the last."""
    rows, width = q.shape[:2]
    assert q.dtype in HALF
    assert initial_state.dtype == A_log.dtype == torch.float32
    assert initial_state_indices.dtype == torch.int32
    assert intermediate_states_buffer is None or ssm_state_indices is None
    if ssm_state_indices is not None:
        assert not disable_state_update
        assert width >= 2
        assert ssm_state_indices.shape == (rows, width)
        assert ssm_state_indices.dtype == torch.int32
    if intermediate_states_buffer is not None:
        assert intermediate_states_buffer.dtype == torch.float32
        assert intermediate_states_buffer.shape[0] >= rows
        assert intermediate_states_buffer.shape[1] >= width
        assert intermediate_states_buffer.is_contiguous()
    output = torch.zeros_like(v)
    decays, beta = gates_of(a, b, A_log, dt_bias)
    queries, keys = unit(q, use_qk_l2norm), unit(k, use_qk_l2norm)
    for row, slot in enumerate(initial_state_indices.tolist()):
        if slot < 0:
            continue
        state = initial_state[slot].mT.clone()
        for token in range(width):
            of = (queries[row, token] * (scale or q.shape[-1] ** -0.5), keys[row, token], v[row, token])
            answer, state = advance(state, *of, decays[row, token], beta[row, token])
            output[row, token] = answer.to(output.dtype)
            if intermediate_states_buffer is not None:
                intermediate_states_buffer[row, token] = state.mT
            if ssm_state_indices is not None:
                assert int(ssm_state_indices[row, token]) >= 0, "it writes outside the pool"
                initial_state[int(ssm_state_indices[row, token])] = state.mT
        if ssm_state_indices is None and not disable_state_update:
            initial_state[slot] = state.mT
    return output, initial_state
