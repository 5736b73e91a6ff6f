"""What torch-npu's two delta rules compute, from the same arguments, with torch on the CPU.

They hold what the library's own documentation asks of its arguments (torch-npu 2.14.0, _op_plugin_docs.py:6726 and
:12085), and know nothing of `backstamp`.
"""

from __future__ import annotations

import torch

BF16 = torch.bfloat16


def recurrent_delta_rule(
    query, key, value, state, *, beta, scale, actual_seq_lengths, ssm_state_indices, g, num_accepted_tokens=None
):
    """A state is read from the place of the row's last accepted token, and one is left at the place of each token."""
    hold_the_tokens(query, key, value, beta, g, actual_seq_lengths)
    assert int(actual_seq_lengths.max()) <= 8
    assert ssm_state_indices.dtype is torch.int32
    assert ssm_state_indices.shape == (len(query),)
    assert int(ssm_state_indices.min()) >= 0
    assert int(ssm_state_indices.max()) < len(state)
    assert state.dtype is BF16
    assert state.is_contiguous()
    assert state.shape[1:] == (value.shape[1], value.shape[2], key.shape[2])
    out = torch.empty_like(value)
    start = 0
    for row, length in enumerate(actual_seq_lengths.tolist()):
        accepted = 1 if num_accepted_tokens is None else int(num_accepted_tokens[row])
        own = state[int(ssm_state_indices[start + accepted - 1])].double()
        for token in range(start, start + length):
            own = advance(own, key[token], value[token], beta[token], g[token])
            out[token] = read(own, query[token], scale)
            state[int(ssm_state_indices[token])] = own.to(BF16)
        start += length
    return out


def chunk_delta_rule(query, key, value, *, beta, initial_state, actual_seq_lengths, scale, g):
    """Outputs, and each row's last state; `initial_state [B, Nv, Dv, Dk]` is left as it is."""
    hold_the_tokens(query, key, value, beta, g, actual_seq_lengths)
    assert query.shape[2] == value.shape[2] == 128
    assert value.shape[1] <= 64
    assert initial_state.dtype is BF16
    assert initial_state.is_contiguous()
    assert initial_state.shape == (len(actual_seq_lengths), value.shape[1], 128, 128)
    out, final = torch.empty_like(value), torch.empty_like(initial_state)
    start = 0
    for row, length in enumerate(actual_seq_lengths.tolist()):
        own = initial_state[row].double()
        for token in range(start, start + length):
            own = advance(own, key[token], value[token], beta[token], g[token])
            out[token] = read(own, query[token], scale)
        final[row] = own.to(BF16)
        start += length
    return out, final


def hold_the_tokens(query, key, value, beta, g, lengths):
    """Shapes and dtypes of both; queries and keys come normalised."""
    assert query.shape == key.shape
    assert value.shape[1] % key.shape[1] == 0
    assert max(query.shape[2], value.shape[2]) <= 256
    assert all(x.is_contiguous() for x in (query, key, value, beta, g, lengths))
    assert {query.dtype, key.dtype, value.dtype, beta.dtype} == {BF16}
    assert g.dtype is torch.float32
    assert beta.shape == g.shape == value.shape[:2]
    assert lengths.dtype is torch.int32
    assert int(lengths.min()) > 0
    assert int(lengths.sum()) == len(query)
    for x in (query, key):
        assert torch.allclose(x.float().norm(dim=-1), torch.ones(x.shape[:2]), atol=1e-2)


def advance(state, key, value, beta, g):
    """One update of `[Nv, Dv, Dk]`."""
    key = key.double().repeat_interleave(len(value) // len(key), 0)
    state = state * g.double().exp()[:, None, None]
    change = beta.double()[:, None] * (value.double() - torch.einsum("hvk,hk->hv", state, key))
    return state + torch.einsum("hv,hk->hvk", change, key)


def read(state, query, scale):
    """The output of one token, after its own update."""
    query = query.double().repeat_interleave(len(state) // len(query), 0)
    return (torch.einsum("hvk,hk->hv", state, query) * scale).to(BF16)
