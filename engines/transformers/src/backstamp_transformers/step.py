"""One forward's share of the call contract: rows become a `Batch`, planned once for each kernel that serves them.

In: `Rows`, and in each layer the keys and values of a dense cache. Out: attention outputs. Keys are read where they
lie: `[B, Hk, S, D]` is a paged cache whose pages hold one token and overlap nothing, given the right strides.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from backstamp.attention import AttentionBackend, Batch, LayerSpec, PagedKV, TreeMask
from backstamp.declarations import Phase
from backstamp.stamp import read_stamp
from backstamp_transformers.batches import index_of_runs, make_batch, phase_of
from backstamp_transformers.errors import NotServed
from backstamp_transformers.kernels import Bounds, Kernels
from backstamp_transformers.rows import Rows
from backstamp_transformers.served import Served

__all__ = ["Rule", "Slots", "Step", "dense_slots"]


class Slots(NamedTuple):
    """Keys and values as slots of one token, `[P, 1, Hk, D]`, and how many slots apart two rows of the batch start."""

    k: Tensor
    v: Tensor
    row_stride: int


class Rule(NamedTuple):
    """Who sees whom, as far as a kernel knows it; `window_left` as in `LayerSpec`, -1 none."""

    causal: bool
    window_left: int


@dataclass(slots=True)
class Step:
    """The rows of one forward under one kind of mask, and what was planned of them.

    Attributes:
        rule: what the mask of this forward says.
        tree: bool `[B, Q, Q]`, which of this forward's tokens each token sees in place of the causal rule, or None.
        phase, longest, last_key: read of the rows once: which kernel serves them, their most keys, and how many keys a
            cache has to hand over.
        fitted: the kernels of the last layer, and the size, dtype and device they were found to fit.
        states: each kernel and what it planned, by kernel and row stride; a kernel is kept, and so its id its own.
    """

    served: Served
    rows: Rows
    rule: Rule
    device: torch.device
    tree: Tensor | None = None
    states: dict[tuple[int, int], tuple[AttentionBackend[object], object]] = field(default_factory=dict)
    fitted: tuple[tuple[object, ...], Kernels] | None = None
    phase: Phase = field(init=False)
    longest: int = field(init=False)
    last_key: int = field(init=False)

    def __post_init__(self) -> None:
        rows = self.rows
        self.phase, self.longest = phase_of(rows.q_lens), max(rows.kv_lens)
        self.last_key = max(map(sum, zip(rows.kv_first, rows.kv_lens, strict=True)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """Attend one layer: `q [B, Hq, Q, Dk]`, `k, v [B, Hk, S, D]` to `[B, Q, Hq, Dv]`; pads answer zeros."""
        num_rows, heads, q_len, _ = q.shape
        self._check(num_rows, k, layer)
        # one view in place of two where there is one token a row
        queries = q.squeeze(2) if q_len == 1 else q.transpose(1, 2).flatten(0, 1)
        if self.rows.tokens is not None:
            queries = queries[self.rows.tokens]
        spec, out = self._call(queries, dense_slots(k, v), layer)
        if self.rows.tokens is not None:
            padded = out.new_zeros(num_rows * q_len, heads, spec.v_head_dim)
            padded[self.rows.tokens] = out
            out = padded
        return out.view(num_rows, q_len, heads, spec.v_head_dim)

    def _check(self, num_rows: int, k: Tensor, layer: int) -> None:
        """A cache that hands over fewer keys than its mask counts would have others' memory read."""
        rows, last = len(self.rows.q_lens), self.last_key
        if num_rows != rows or k.shape[0] != num_rows or k.shape[2] < last:
            raise NotServed(
                f"layer {layer}, keys of its cache",
                needed=f"{rows} rows of at least {last} keys, as its mask counts them",
                found=f"{k.shape[0]} rows of {k.shape[2]}",
            )

    def _call(self, q: Tensor, slots: Slots, layer: int) -> tuple[LayerSpec, Tensor]:
        spec = self.served.spec(layer)
        # the layers of a forward are alike, and what fits one need not be asked of the next
        like = (len(slots.k), q.dtype, q.device)
        if self.fitted is None or self.fitted[0] != like:
            size = Bounds(len(self.rows.q_lens), len(q), len(slots.k), self.longest)
            self.fitted = like, self.served.fit(size, q.dtype, q.device)
        backend, form, features = self.fitted[1].places[self.phase, layer]
        if self.tree is not None and "tree_mask" not in features:
            stamp = read_stamp(backend)
            raise NotServed(
                f"{self.phase} attention backend {stamp.kernel!r} (plugin {stamp.plugin.name}), layer {layer}",
                needed="the causal rule among a step's tokens: it declares no tree_mask",
                found="a mask of the caller's own",
                fix="Ask for a kernel that declares tree_mask (docs/backends.md), or for sdpa or eager",
            )
        key = (id(backend), slots.row_stride)
        if key not in self.states:
            self.states[key] = backend, backend.plan(self._batch(slots.row_stride, form))
        out = q.new_empty(len(q), spec.num_qo_heads, spec.v_head_dim)
        backend.forward(q, PagedKV(k=slots.k, v=slots.v), spec, self.states[key][1], out=out)
        return spec, out

    def _batch(self, row_stride: int, index_form: str) -> Batch:
        rows = self.rows
        firsts = [row * row_stride + first for row, first in enumerate(rows.kv_first)]
        index = index_of_runs(firsts, rows.kv_lens, index_form, self.device)
        tree = None if self.tree is None else TreeMask(kind="qlen", buffer=self.tree)
        return make_batch(rows.q_lens, rows.kv_lens, self.rule.causal, index, self.device, tree)


def dense_slots(k: Tensor, v: Tensor) -> Slots:
    """A dense cache as slots: token s of row b is slot `b * row_stride + s`. Copies only what strides cannot say."""
    of_k, of_v = _slotted(k), _slotted(v)
    if of_k is None or of_k != of_v:
        # contiguous() answers a tensor of one token as it is, whatever its token's stride
        k, v = (part.clone(memory_format=torch.contiguous_format) for part in (k, v))
        of_k = k.shape[1] * k.shape[2] if k.shape[0] > 1 else 0
    return Slots(_as_slots(k, of_k), _as_slots(v, of_k), of_k)


def _slotted(tensor: Tensor) -> int | None:
    """How many slots apart two rows start, 0 where there is one; None where that is no whole number."""
    row, _, token, last = tensor.stride()
    if last != 1 or token <= 0:
        return None
    if tensor.shape[0] == 1:
        return 0
    return row // token if row % token == 0 else None


def _as_slots(tensor: Tensor, row_stride: int) -> Tensor:
    num_rows, heads, length, dim = tensor.shape
    _, head, token, _ = tensor.stride()
    count = (num_rows - 1) * row_stride + length
    return tensor.as_strided((count, 1, heads, dim), (token, token, head, 1))
