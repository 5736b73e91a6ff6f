"""`flex_attention`: a target's prefill, decode and verify through PyTorch's compiled attention over gathered keys.

In: the call contract. Out: outputs in place. Keys are gathered into one of two layouts: flat, all rows end to end,
each token with the bounds of its own row's keys; or padded, one row a batch entry, for steps of short queries. Trees
use the padded layout with a ready mask. Never holds the current batch: that is the state's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from backstamp.attention import Batch, LayerSpec, PagedKV, RaggedKV
from backstamp.factories import BuildRequest
from backstamp_cpu.checks import cached_lens
from backstamp_cpu.flexmods import Blocks, Call, blocks_of_bounds, blocks_of_mask, compiled_call
from backstamp_cpu.gather import KeySource, count_up, locate_keys, read_keys, repeated
from backstamp_cpu.masks import visible
from backstamp_cpu.rows import Span, StepRows
from backstamp_cpu.steps import StepState, open_output, plan_step

__all__ = ["FlexAttention", "FlexState"]

#: Longest row in query tokens of a padded step; longer ones fill blocks of the flat layout well.
MAX_PADDED_QUERIES = 16
#: Padded keys may be this many times the real ones before the flat layout is taken.
MAX_PADDING = 4
#: Fewest query and key slots of a view: dynamo compiles a size of one apart from the others.
MIN_SIZE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The step laid out for one kind of layer: B batch entries of Q query and K key slots.

    Attributes:
        tokens: i64 `[N]` query tokens that see something; slots: i64 `[N]` where they stand in `[B * Q]`.
        unseen: bool `[B * K]` keys of a tree step that no token sees, or None.
    """

    shape: tuple[int, int, int]
    tokens: Tensor
    slots: Tensor
    source: KeySource
    blocks: Blocks
    unseen: Tensor | None


#: One planned step; a view of each kind of layer, None where nothing is seen.
FlexState = StepState["View | None"]


class FlexAttention:
    """The backend: one compiled call a layer shape and kind of view, kept for the life of the object."""

    def __init__(self, request: BuildRequest) -> None:
        self._request = request
        self._calls: dict[tuple[int, int, int, int, bool, bool, bool], Call] = {}

    def plan(self, batch: Batch, *, state: FlexState | None = None, capture: bool = False) -> FlexState:
        """Read the step's row numbers, as `backstamp_cpu.steps.plan_step`."""
        return plan_step(self._request, batch, state, capture)

    def forward(
        self,
        q: Tensor,
        kv: PagedKV | None,
        layer: LayerSpec,
        state: FlexState,
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
        view = self._view(state, kv, layer, new, q.device)
        if view is None:
            return out
        k, v = read_keys(view.source, kv, new, layer, q.dtype)
        if view.unseen is not None:
            k, v = (part.masked_fill(view.unseen[:, None, None], 0.0) for part in (k, v))
        queries = q if q_rope is None else torch.cat([q, q_rope], dim=-1)
        answer, logs = self._attend(queries, k, v, view, layer)
        if layer.sinks is not None:
            # e^lse / (e^lse + e^sink): the share of the softmax that is not the sink's
            answer = answer * torch.sigmoid(logs - layer.sinks.float())[..., None]
        out[view.tokens] = answer.to(out.dtype)
        if lse is not None:
            lse[view.tokens] = logs
        return out

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, view: View, layer: LayerSpec) -> tuple[Tensor, Tensor]:
        """Outputs `[N, Hq, Dv]` and natural-log LSE `[N, Hq]` of the view's tokens."""
        entries, num_queries, num_keys = view.shape
        slots = q.new_zeros(entries * num_queries, layer.num_qo_heads, layer.head_dim)
        slots[view.slots] = q[view.tokens]
        kind = (
            layer.num_qo_heads,
            layer.num_kv_heads,
            layer.head_dim,
            layer.v_head_dim,
            bool(layer.softcap),
            view.blocks.mask is None,
            entries == 1,
        )
        call = self._calls.get(kind)
        if call is None:
            call = self._calls[kind] = compiled_call(q.device)
        softcap = torch.tensor(layer.softcap, device=q.device) if layer.softcap else None
        q, k, v = (
            part.view(entries, length, *part.shape[1:]).transpose(1, 2)
            for part, length in ((slots, num_queries), (k, num_keys), (v, num_keys))
        )
        answer, logs = call(q, k, v, view.blocks, layer.scale, softcap)
        return answer.transpose(1, 2).flatten(0, 1)[view.slots], logs.transpose(1, 2).flatten(0, 1)[view.slots]

    def _view(
        self, state: FlexState, kv: PagedKV | None, layer: LayerSpec, new: RaggedKV | None, device: torch.device
    ) -> View | None:
        """The step's view for this kind of layer: its window, and where its keys lie."""
        new_starts = None if new is None else state.offsets.read(new)
        kind = (layer.window_left, kv is not None, new_starts)
        if kind not in state.views:
            cached = cached_lens(self._request, state.batch, state.rows, kv is not None, new_starts)
            spans = state.rows.spans(layer.window_left)
            make = _padded_view if state.rows.tree or _pads_well(spans, state.rows) else _flat_view
            view = make(spans, state, layer.window_left, cached, new_starts, device) if spans else None
            state.views[kind] = view
        return state.views[kind]


def _pads_well(spans: Sequence[Span], rows: StepRows) -> bool:
    """Whether a step of several short queries wastes little when every row is padded to the longest."""
    lens = [span.stop - span.start for span in spans]
    short = all(rows.q_len(span.row) <= MAX_PADDED_QUERIES for span in spans)
    return len(spans) > 1 and short and len(spans) * max(lens) <= MAX_PADDING * sum(lens)


def _padded_view(
    spans: Sequence[Span],
    state: FlexState,
    window_left: int,
    cached_lens: Sequence[int],
    new_starts: Sequence[int] | None,
    device: torch.device,
) -> View:
    rows, tree = state.rows, state.batch.tree
    num_queries = max(MIN_SIZE, *(rows.q_len(span.row) for span in spans))
    num_keys = max(MIN_SIZE, *(span.stop - span.start for span in spans))
    shape = (len(spans), num_queries, num_keys)
    first_slots = [number * num_keys for number in range(len(spans))]
    first_queries = [number * num_queries for number in range(len(spans))]
    tokens, slots = _token_slots(spans, first_queries, rows, device)
    source = locate_keys(spans, first_slots, len(spans) * num_keys, state.batch.index, cached_lens, new_starts, device)
    if tree is None:
        first, last = _bounds(spans, [0] * len(spans), slots, shape, rows, window_left, device)
        blocks = blocks_of_bounds(first, last, num_keys)
        return View(shape=shape, tokens=tokens, slots=slots, source=source, blocks=blocks, unseen=None)
    mask = visible(rows, spans, window_left, tree, num_queries, num_keys, device)
    blocks, unseen = blocks_of_mask(mask), ~mask.any(1).flatten()
    return View(shape=shape, tokens=tokens, slots=slots, source=source, blocks=blocks, unseen=unseen)


def _flat_view(
    spans: Sequence[Span],
    state: FlexState,
    window_left: int,
    cached_lens: Sequence[int],
    new_starts: Sequence[int] | None,
    device: torch.device,
) -> View:
    rows = state.rows
    first_slots, first_queries, num_keys, num_queries = [], [], 0, 0
    for span in spans:
        first_slots.append(num_keys)
        first_queries.append(num_queries)
        num_keys += span.stop - span.start
        num_queries += rows.q_len(span.row)
    shape = (1, max(MIN_SIZE, num_queries), max(MIN_SIZE, num_keys))
    tokens, slots = _token_slots(spans, first_queries, rows, device)
    first, last = _bounds(spans, first_slots, slots, shape, rows, window_left, device)
    return View(
        shape=shape,
        tokens=tokens,
        slots=slots,
        source=locate_keys(spans, first_slots, shape[2], state.batch.index, cached_lens, new_starts, device),
        blocks=blocks_of_bounds(first, last, shape[2]),
        unseen=None,
    )


def _token_slots(
    spans: Sequence[Span], first_queries: Sequence[int], rows: StepRows, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The query tokens of the spans in order, and the query slot of each: i64 `[N]` both."""
    lens = [rows.q_len(span.row) for span in spans]
    tokens = count_up([rows.q_starts[span.row] for span in spans], lens, device)
    return tokens, count_up(first_queries, lens, device)


def _bounds(
    spans: Sequence[Span],
    first_slots: Sequence[int],
    slots: Tensor,
    shape: tuple[int, int, int],
    rows: StepRows,
    window_left: int,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """First and one past the last key slot each query slot sees: i32 `[B, Q]` both, 0 and 0 in padding.

    A token that sees nothing has a last that is not past its first.
    """
    lens = [rows.q_len(span.row) for span in spans]
    positions = count_up([rows.kv_lens[s.row] - rows.q_len(s.row) for s in spans], lens, device)
    start = repeated([span.start for span in spans], lens, device)
    stop = repeated([span.stop for span in spans], lens, device)
    causal = repeated([int(rows.causal[span.row]) for span in spans], lens, device).bool()
    to_slot = repeated(first_slots, lens, device) - start
    last = torch.where(causal, torch.minimum(positions + 1, stop), stop)
    first = torch.maximum(start, positions - window_left) if window_left >= 0 else start
    bounds = torch.zeros(2, shape[0] * shape[1], dtype=torch.int32, device=device)
    bounds[0, slots], bounds[1, slots] = (first + to_slot).int(), (last + to_slot).int()
    return bounds[0].view(shape[:2]), bounds[1].view(shape[:2])
