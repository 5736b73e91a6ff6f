"""Is the answer at a shape's full size right? Held against float64 on sampled queries, or rows of a recurrence.

In: what a kernel wrote and the step it was given. Out: the worst relative error of a sampled token, over all its heads;
infinite where a number is not finite. A quantised cache is read as what its bytes mean. Samples lie all over a row:
tokens that see few keys have large outputs, and an error over all of them at once would be theirs alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from backstamp.attention import ComputedGates, RawGates
from backstamp.testing.packed_latent import FORMATS, unpack
from backstamp.testing.reference import tree_rows
from steps import AttentionStep, LinearStep

__all__ = ["Truth", "error_of", "sampled", "truth_of", "worst_of"]

#: Rows and queries of a row that are sampled, its first and its last among them.
_ROWS: Final = 6
#: Rows of a decode step of a recurrence, where each is one token.
_STATES: Final = 512
_QUERIES: Final = 64
#: Numbers of logits held at a time: one GiB of float64.
_MOST: Final = 1 << 27
#: Tokens of a recurrence whose error is taken together.
_BLOCK: Final = 64
_EPS: Final = 1e-6


class Truth(NamedTuple):
    """Tokens and their outputs, slots and their states: a member of a tensor's first dim is one sample."""

    outputs: Sequence[tuple[Tensor, Tensor]]
    states: Sequence[tuple[Tensor, Tensor]]


def sampled(count: int, most: int) -> list[int]:
    """At most `most` of `count` things, spread evenly, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return [round(at * (count - 1) / (most - 1)) for at in range(most)]


def truth_of(step: AttentionStep | LinearStep) -> Truth:
    """What a step comes to on its sampled tokens, in float64; made once, and held against every kernel's answer."""
    return _linear_truth(step) if isinstance(step, LinearStep) else _attention_truth(step)


def error_of(out: Tensor, step: AttentionStep | LinearStep, truth: Truth) -> float:
    """The worst relative error of a sampled token of `out`; in a recurrence of a block of tokens, or a final state."""
    if not bool(torch.isfinite(out).all()):
        return math.inf
    worst = max(worst_of(out[tokens], wanted) for tokens, wanted in truth.outputs)
    if isinstance(step, LinearStep):
        worst = max(worst, *(worst_of(step.pool.ssm[slots], states) for slots, states in truth.states))
    return worst


def _attention_truth(step: AttentionStep) -> Truth:
    offsets, outputs = step.batch.qo_indptr.tolist(), []
    for row in sampled(len(step.shape.rows), _ROWS):
        keys, values = _row(step, row)
        queries = sampled(step.shape.rows[row][0], _QUERIES)
        together = max(1, _MOST // (keys.shape[0] * step.layer.num_qo_heads))
        for first in range(0, len(queries), together):
            some = queries[first : first + together]
            tokens = [offsets[row] + at for at in some]
            answer = _attend(step, row, some, tokens, keys, values)
            outputs.append((torch.tensor(tokens, device=step.q.device), answer))
    return Truth(outputs, [])


def _linear_truth(step: LinearStep) -> Truth:
    shape, offsets = step.shape, step.batch.qo_indptr.tolist()
    outputs, states = [], []
    # rows of one length run side by side
    by_length: dict[int, list[int]] = {}
    for row in sampled(len(shape.rows), _STATES if shape.phase == "decode" else _ROWS):
        by_length.setdefault(shape.rows[row][0], []).append(row)
    for length, alike in by_length.items():
        every = torch.tensor([[offsets[row] + at for at in range(length)] for row in alike], device=step.q.device)
        slots = step.batch.slots[alike].long()
        answer, left = _recur(step, every, slots)
        states.append((slots, left))
        for first in range(0, length, _BLOCK):
            outputs.append((every[:, first : first + _BLOCK], answer[:, first : first + _BLOCK]))
    return Truth(outputs, states)


def worst_of(got: Tensor, truth: Tensor) -> float:
    """The greatest relative error of the first dim's members, each taken as a whole; infinite where one is NaN."""
    got, truth = got.double().flatten(1), truth.double().flatten(1)
    errors = (got - truth).norm(dim=1) / truth.norm(dim=1).clamp_min(1e-12)
    # Python's max would pass over a NaN
    return float(errors.nan_to_num(nan=math.inf, posinf=math.inf).max())


def _row(step: AttentionStep, row: int) -> tuple[Tensor, Tensor]:
    """A row's keys `[n, Hk, Dk]` and values in float64, as the cache's bytes mean them."""
    length, layer = step.shape.rows[row][1], step.layer
    if step.new is not None:
        begin = int(step.new.kv_indptr[row])
        return step.new.k[begin : begin + length].double(), step.new.v[begin : begin + length].double()
    kv, index = step.kv, step.batch.index
    assert kv is not None, "a step has a cache or keys in none"
    assert index.page_table is not None, "every paged step has it"
    pages = index.page_table[row, : -(-length // index.page_size)].long()
    if kv.layout in FORMATS:
        rows = unpack(kv.k[pages], kv.layout).double().flatten(0, 1)[:length]
        return rows, rows[..., : layer.v_head_dim]
    keys = kv.k[pages].double().flatten(0, 1)[:length] * (kv.k_scale or 1.0)
    if kv.v is None:
        return keys, keys[..., : layer.v_head_dim]
    return keys, kv.v[pages].double().flatten(0, 1)[:length] * (kv.v_scale or 1.0)


def _attend(step: AttentionStep, row: int, some: list[int], tokens: list[int], keys: Tensor, values: Tensor) -> Tensor:
    """`[n, Hq, Dv]`: some queries of a row over all keys each of them sees."""
    layer, share = step.layer, step.layer.num_qo_heads // step.layer.num_kv_heads
    q = step.q[tokens].double().unflatten(1, (layer.num_kv_heads, share))
    logits = torch.einsum("qhgd,khd->qhgk", q, keys) * layer.scale
    seen = _seen(step, row, some, tokens)
    weights = logits.masked_fill(~seen[:, None, None], -math.inf).softmax(-1)
    return torch.einsum("qhgk,khd->qhgd", weights, values).flatten(1, 2)


def _seen(step: AttentionStep, row: int, some: list[int], tokens: list[int]) -> Tensor:
    """Bool `[n, kv_len]`: the causal rule, the tree, or the choice of keys."""
    q_len, kv_len = step.shape.rows[row]
    device = step.q.device
    if step.indices is not None:
        seen = torch.zeros(len(some), kv_len, dtype=torch.bool, device=device)
        return seen.scatter_(1, step.indices[tokens].long(), True)
    positions = torch.tensor(some, device=device) + kv_len - q_len
    seen = torch.arange(kv_len, device=device)[None] <= positions[:, None]
    if step.batch.tree is not None:
        seen[:, kv_len - q_len :] = tree_rows(step.batch.tree, row, q_len, kv_len)[some].to(device)
    return seen


def _recur(step: LinearStep, tokens: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of one length, a token at a time: outputs `[rows, tokens, HV, V]` and states `[rows, HV, V, K]`."""
    share = step.layer.num_kv_heads // step.layer.num_qo_heads
    decay, beta = _gates(step.gates, tokens)
    q = _unit(step.q[tokens]).repeat_interleave(share, 2) * step.layer.scale
    k, v = _unit(step.k[tokens]).repeat_interleave(share, 2), step.v[tokens].double()
    state = step.before[slots].double() * bool(step.batch.has_state.any())
    out = torch.empty_like(v)
    for at in range(tokens.shape[1]):
        state *= decay[:, at]
        change = beta[:, at, :, None] * (v[:, at] - (state @ k[:, at, :, :, None])[..., 0])
        state.addcmul_(change[..., None], k[:, at, :, None])
        out[:, at] = (state @ q[:, at, :, :, None])[..., 0]
    return out, state


def _gates(gates: RawGates | ComputedGates, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of a state `[rows, tokens, HV, 1, K or 1]`, and beta `[rows, tokens, HV]`."""
    if isinstance(gates, ComputedGates):
        decay, beta = gates.g[tokens].double(), gates.beta[tokens].double()
    else:
        raw = gates.a[tokens].double() + gates.dt_bias.double()
        rate = gates.A_log.double().exp().reshape(-1, *[1] * (raw.dim() - 3))
        decay, beta = -rate * torch.nn.functional.softplus(raw), gates.b[tokens].double().sigmoid()
        if gates.lower_bound is not None:
            decay = gates.lower_bound * (rate * raw).sigmoid()
    return decay.exp()[..., None, :] if decay.dim() == 4 else decay.exp()[..., None, None], beta


def _unit(x: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().sum(-1, keepdim=True) + _EPS).sqrt()
