"""`torch_native`: paged attention through PyTorch alone, on any device, in every phase; others are compared with it.

In: the call contract. Out: outputs in place. `plan` does the host half; `forward` gathers a group's keys, masks and
attends. Rows with as many queries and about as many keys share a group, unless they run alone so that a row's bits
do not depend on its batch. Never holds the current batch: that is the state's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from backstamp.attention import Batch, LayerSpec, PagedKV, RaggedKV
from backstamp.factories import BuildRequest
from backstamp_cpu.attend import attend_explicitly, attend_with_sdpa, needs_explicit_path
from backstamp_cpu.checks import cached_lens
from backstamp_cpu.gather import KeySource, host_ints, locate_keys, read_keys
from backstamp_cpu.masks import distances, sees_all, visible
from backstamp_cpu.rows import Span, StepRows
from backstamp_cpu.steps import StepState, open_output, plan_step

__all__ = ["Arithmetic", "NativeState", "TorchNative"]

#: Torch dtypes of queries by their canonical name.
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
#: Longest row in query tokens that shares a group: a longer one is work enough by itself.
MAX_GROUPED_QUERIES = 32
#: Most logits of one product, 256 MiB in fp32; longer groups run a slice of their queries at a time.
MAX_LOGITS = 2**26

#: `q [R, S, Hq, Dk]`, `k [R, K, Hk, Dk]`, `v [R, K, Hk, Dv]`, mask `[R, S, K]` or None, distances `[R, S, K]` where the
#: layer has ALiBi, and the layer, to outputs `[R, S, Hq, Dv]` and natural-log LSE `[R, S, Hq]`, or None without one.
Arithmetic: TypeAlias = Callable[
    [Tensor, Tensor, Tensor, Tensor | None, Tensor | None, LayerSpec], tuple[Tensor, Tensor | None]
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rows attended by one call: R spans, S query tokens each, K keys at most.

    Attributes:
        tokens: the group's query tokens in row order, as a slice where they are neighbours, else i64 `[R * S]`.
        mask: bool `[R, S, K]`, None where every token sees every key.
        unseen: bool `[R * K]`, keys of a tree step that no token sees, or None.
    """

    spans: Sequence[Span]
    num_queries: int
    num_keys: int
    tokens: slice | Tensor
    source: KeySource
    mask: Tensor | None
    unseen: Tensor | None


#: One planned step; the groups of rows of each kind of layer.
NativeState = StepState[list[Group]]


class TorchNative:
    """The backend; `rows_alone` gives up grouping for bits that do not depend on what shares the batch."""

    def __init__(self, request: BuildRequest, *, rows_alone: bool) -> None:
        self._request = request
        self._rows_alone = rows_alone

    def plan(self, batch: Batch, *, state: NativeState | None = None, capture: bool = False) -> NativeState:
        """Read the step's row numbers, as `backstamp_cpu.steps.plan_step`."""
        return plan_step(self._request, batch, state, capture)

    def forward(
        self,
        q: Tensor,
        kv: PagedKV | None,
        layer: LayerSpec,
        state: NativeState,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        new: RaggedKV | None = None,
        q_rope: Tensor | None = None,
        indices: Tensor | None = None,
    ) -> Tensor:
        """Attend one layer; shapes as in `AttentionBackend.forward`.

        Raises:
            UnsupportedBatch: a shape, dtype, layout or option this kernel does not serve.
        """
        out = open_output(self._request, q, kv, layer, state, out=out, lse=lse, new=new, q_rope=q_rope, indices=indices)
        arithmetic, key_dtype = self.arithmetic(layer, lse is not None)
        for group in self._groups(state, kv, layer, new, q.device):
            queries = q[group.tokens] if q_rope is None else torch.cat([q[group.tokens], q_rope[group.tokens]], dim=-1)
            k, v = read_keys(group.source, kv, new, layer, key_dtype)
            if group.unseen is not None:
                k = k.masked_fill(group.unseen[:, None, None], 0.0)
                v = v.masked_fill(group.unseen[:, None, None], 0.0)
            answer, logs = _attend(queries, k, v, group, state.rows, layer, arithmetic)
            out[group.tokens] = answer.to(out.dtype)
            if lse is not None:
                assert logs is not None, "the chosen arithmetic answers the LSE"
                lse[group.tokens] = logs
        return out

    def arithmetic(self, layer: LayerSpec, lse_wanted: bool) -> tuple[Arithmetic, torch.dtype]:
        """How this layer's groups are attended, and the dtype their keys are read in."""
        if needs_explicit_path(layer, lse_wanted):
            return attend_explicitly, torch.float32
        return _by_sdpa, _DTYPES[self._request.dtype]

    def _groups(
        self, state: NativeState, kv: PagedKV | None, layer: LayerSpec, new: RaggedKV | None, device: torch.device
    ) -> list[Group]:
        """The step's groups for this kind of layer: its window, and where its keys lie."""
        new_starts = None if new is None else state.offsets.read(new)
        kind = (layer.window_left, kv is not None, new_starts)
        groups = state.views.get(kind)
        if groups is None:
            cached = cached_lens(self._request, state.batch, state.rows, kv is not None, new_starts)
            spans = state.rows.spans(layer.window_left)
            parts = [[span] for span in spans] if self._rows_alone else _parts(spans, state.rows)
            groups = [_group(part, state, layer.window_left, cached, new_starts, device) for part in parts]
            state.views[kind] = groups
        return groups


def _parts(spans: Sequence[Span], rows: StepRows) -> list[list[Span]]:
    """Rows that share a call: as many queries each, the shortest with at least half of the longest's keys."""
    parts: list[list[Span]] = []
    for span in sorted(spans, key=lambda s: (rows.q_len(s.row), s.stop - s.start)):
        q_len, num_keys = rows.q_len(span.row), span.stop - span.start
        first = parts[-1][0] if parts else None
        if (
            first is not None
            and q_len <= MAX_GROUPED_QUERIES
            and q_len == rows.q_len(first.row)
            and num_keys <= 2 * (first.stop - first.start)
        ):
            parts[-1].append(span)
        else:
            parts.append([span])
    return [sorted(part, key=lambda s: s.row) for part in parts]


def _group(
    spans: list[Span],
    state: NativeState,
    window_left: int,
    cached_lens: Sequence[int],
    new_starts: Sequence[int] | None,
    device: torch.device,
) -> Group:
    rows, tree = state.rows, state.batch.tree
    num_queries = rows.q_len(spans[0].row)
    num_keys = max(span.stop - span.start for span in spans)
    first_slots = [number * num_keys for number in range(len(spans))]
    source = locate_keys(spans, first_slots, len(spans) * num_keys, state.batch.index, cached_lens, new_starts, device)
    mask = None
    if not sees_all(rows, spans, window_left, num_keys):
        mask = visible(rows, spans, window_left, tree, num_queries, num_keys, device)
    return Group(
        spans=spans,
        num_queries=num_queries,
        num_keys=num_keys,
        tokens=_tokens(spans, rows, device),
        source=source,
        mask=mask,
        unseen=None if tree is None or mask is None else ~mask.any(1).flatten(),
    )


def _tokens(spans: Sequence[Span], rows: StepRows, device: torch.device) -> slice | Tensor:
    first, last = spans[0].row, spans[-1].row
    num_queries = rows.q_len(first)
    if rows.q_starts[last + 1] - rows.q_starts[first] == num_queries * len(spans):
        return slice(rows.q_starts[first], rows.q_starts[last + 1])
    return host_ints([rows.q_starts[s.row] + i for s in spans for i in range(num_queries)], device)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, group: Group, rows: StepRows, layer: LayerSpec, arithmetic: Arithmetic
) -> tuple[Tensor, Tensor | None]:
    """Attend one group, a slice of its queries at a time: outputs `[R * S, Hq, Dv]`, LSE `[R * S, Hq]` or None."""
    num_rows, num_queries, num_keys = len(group.spans), group.num_queries, group.num_keys
    # a copy: products of the same numbers at another alignment may differ in their last bit
    q = q.clone(memory_format=torch.contiguous_format).view(num_rows, num_queries, *q.shape[1:])
    k, v = k.view(num_rows, num_keys, *k.shape[1:]), v.view(num_rows, num_keys, *v.shape[1:])
    distance = None
    if layer.alibi is not None:
        distance = distances(rows, group.spans, num_queries, num_keys, q.device)
    step = max(1, MAX_LOGITS // (num_rows * layer.num_qo_heads * num_keys))
    outs, logs = [], []
    for start in range(0, num_queries, step):
        part = slice(start, min(start + step, num_queries))
        mask = None if group.mask is None else group.mask[:, part]
        part_distance = None if distance is None else distance[:, part]
        answer, log = arithmetic(q[:, part], k, v, mask, part_distance, layer)
        outs.append(answer)
        if log is not None:
            logs.append(log)
    out = torch.cat(outs, dim=1).flatten(0, 1)
    return out, torch.cat(logs, dim=1).flatten(0, 1) if logs else None


def _by_sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, distance: Tensor | None, layer: LayerSpec
) -> tuple[Tensor, None]:
    """SDPA in the shape of an `Arithmetic`; it answers no LSE."""
    return attend_with_sdpa(q, k, v, mask, layer.scale), None
