"""One step of the speculative engine: from rows of tokens to a planned batch, written K and V, and logits.

In: rows (tokens, pages, how many tokens are cached), a decoder, its pool and the built backends. Out: logits. A
step is one `Batch` of one phase: `plan` once a KV group, then in each layer write K and V and call `forward`. It never
asks which kernel runs: `serving_attention_backend` answers a phase.

.. versionadded:: 0.1
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from backstamp.attention import AttentionBackend, Batch, LayerSpec, PagedKV, TreeMask
from backstamp.declarations import Phase
from backstamp.testing.decoder import Decoder
from backstamp.testing.kv_pool import KVPool
from backstamp.testing.reference import reference_attention, relative_error

__all__ = ["Observe", "Part", "PhaseErrors", "Row", "Runner", "ServesPhases", "last_of_rows"]

#: `(phase, layer, q [T, Hq, Dk], kv, batch, out [T, Hq, Dv])` after each call of a backend's `forward`.
Observe = Callable[[Phase, LayerSpec, Tensor, PagedKV, Batch, Tensor], None]


class ServesPhases(Protocol):
    """What the engine asks of a built runner."""

    def serving_attention_backend(self, phase: Phase) -> AttentionBackend[object]:
        """The backend that serves a phase."""
        ...


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a step: `tokens` follow `cached` tokens in `pages`; `depths` are their positions past `cached`."""

    tokens: Sequence[int]
    pages: Sequence[int]
    cached: int
    depths: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """A planned step: its backend, its batch and the state of each KV group."""

    backend: AttentionBackend[object]
    batch: Batch
    states: Mapping[int, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """A decoder with its cache and its backends: one for the target, one for a draft.

    `observe` sees every attention call.
    """

    decoder: Decoder
    pool: KVPool
    backends: ServesPhases
    observe: Observe | None = None

    @property
    def groups(self) -> list[int]:
        """KV groups of the decoder's layers; each is planned once a step."""
        return sorted({layer.group for layer in self.decoder.layer_specs})

    def batch(self, phase: Phase, rows: Sequence[Row], *, tree: TreeMask | None = None) -> Batch:
        """Describe rows as the call contract wants them, host mirrors exact."""
        pool = self.pool
        q_lens = [len(row.tokens) for row in rows]
        kv_lens = [row.cached + len(row.tokens) for row in rows]
        qo_indptr_host = torch.tensor([0, *q_lens]).cumsum(0).to(torch.int32)
        kv_lens_host = torch.tensor(kv_lens, dtype=torch.int32)
        return Batch(
            phase=phase,
            num_rows=len(rows),
            num_tokens=sum(q_lens),
            max_q_len=max(q_lens),
            max_kv_len=max(kv_lens),
            decode_q_len=1 if phase == "draft_decode" else None,
            qo_indptr=qo_indptr_host.to(pool.device),
            kv_lens=kv_lens_host.to(pool.device),
            index=pool.index([row.pages for row in rows], kv_lens),
            slot_mapping=torch.cat([pool.slots(row.pages, row.cached, row.cached + len(row.tokens)) for row in rows]),
            qo_indptr_host=qo_indptr_host,
            kv_lens_host=kv_lens_host,
            tree=tree,
        )

    def plan(self, batch: Batch, backend: AttentionBackend[object] | None = None) -> Part:
        """Plan a batch, once a KV group, on the backend that serves its phase, or on the one given."""
        if backend is None:
            backend = self.backends.serving_attention_backend(batch.phase)
        return Part(backend, batch, {group: backend.plan(batch) for group in self.groups})

    def forward(self, rows: Sequence[Row], part: Part) -> Tensor:
        """Run one step, logits `[T, vocab]`.

        Raises `FloatingPointError` when logits are not finite: NaN from a slot nobody wrote has reached an output.
        """
        device = self.pool.device
        tokens = [token for row in rows for token in row.tokens]
        positions = [row.cached + depth for row in rows for depth in row.depths or range(len(row.tokens))]
        slots = torch.cat([self.pool.slots(row.pages, row.cached, row.cached + len(row.tokens)) for row in rows])

        def attend(q: Tensor, k: Tensor, v: Tensor, layer: LayerSpec) -> Tensor:
            self.pool.write(layer.layer_id, k, v, slots)
            kv = self.pool.paged(layer.layer_id)
            # NaN stays wherever a backend does not write
            out = q.new_full((q.shape[0], layer.num_qo_heads, layer.v_head_dim), float("nan"))
            part.backend.forward(q, kv, layer, part.states[layer.group], out=out)
            if self.observe is not None:
                self.observe(part.batch.phase, layer, q, kv, part.batch, out)
            return out

        ids, where = torch.tensor(tokens, device=device), torch.tensor(positions, device=device)
        logits = self.decoder.forward(ids, where, attend)
        if not bool(torch.isfinite(logits).all()):
            raise FloatingPointError(f"speculative engine: logits of a {part.batch.phase} step are not finite")
        return logits


def last_of_rows(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Logits `[T, vocab]` of a step to those of each row's last token, `[B, vocab]`."""
    ends = torch.tensor([len(row.tokens) for row in rows], device=logits.device).cumsum(0)
    return logits[ends - 1]


@dataclass(slots=True)
class PhaseErrors:
    """An `Observe` that compares attention with float64 reference and keeps the worst relative error of each phase.

    Only the first `calls_per_phase` calls of a phase are compared. NaN is worse than any number.
    """

    calls_per_phase: int = 16
    worst: dict[Phase, float] = field(default_factory=dict)
    calls: dict[Phase, int] = field(default_factory=dict)

    def __call__(self, phase: Phase, layer: LayerSpec, q: Tensor, kv: PagedKV, batch: Batch, out: Tensor) -> None:
        self.calls[phase] = self.calls.get(phase, 0) + 1
        if self.calls[phase] > self.calls_per_phase:
            return
        error = relative_error(out, reference_attention(q, kv, layer, batch)[0])
        worst = self.worst.get(phase, 0.0)
        self.worst[phase] = worst if error <= worst or math.isnan(worst) else error
