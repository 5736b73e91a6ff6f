"""The kernels of one model in one dtype on one device: built at a first step, and built anew when a step needs more.

In: a plan and the model's layers. Out: the backend and the index form of each layer and phase. It decides nothing: what
runs is what the plan says.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, cast

import torch

from backstamp.attention import AttentionBackend, LayerSpec
from backstamp.catalogue import Catalogue
from backstamp.construction import RunnerBackends, RunnerShape, build
from backstamp.declarations import Phase
from backstamp.plan import Plan
from backstamp.telling import tell_stamps

__all__ = ["PHASES", "Bounds", "Kernels", "Place"]

LOG: Final = logging.getLogger(__name__)

#: The phases a Transformers model runs; assisted generation verifies with chunks that the prefill kernel serves.
PHASES: tuple[Phase, ...] = ("prefill", "decode")


class Bounds(NamedTuple):
    """The largest step the kernels are built for; `pages` are tokens, a page holds one."""

    rows: int = 8
    tokens: int = 2048
    pages: int = 2**16
    kv_len: int = 4096

    def including(self, step: Bounds) -> Bounds:
        """These, doubled where the step needs more until it fits."""
        return Bounds(*(_doubled(have, want) for have, want in zip(self, step, strict=True)))


class Place(NamedTuple):
    """What serves a layer in a phase: the built backend, the first index form its row reads, what its row declares."""

    backend: AttentionBackend[object]
    index_form: str
    features: frozenset[str]


@dataclass(slots=True)
class Kernels:
    """What one plan comes to.

    Attributes:
        backends: what was built, None before the first step and once it was let go.
        places, linear_places: what serves each attention and each linear layer, by phase and layer id.
    """

    plan: Plan
    catalogue: Catalogue
    device: torch.device
    bounds: Bounds = field(default_factory=Bounds)
    backends: RunnerBackends | None = None
    places: dict[tuple[Phase, int], Place] = field(default_factory=dict)
    linear_places: dict[tuple[Phase, int], object] = field(default_factory=dict)

    def build(self, layers: Sequence[LayerSpec]) -> None:
        """Build, stamp and place every kernel of the plan."""
        shape = RunnerShape(
            device=str(self.device),
            layers=layers,
            max_rows=self.bounds.rows,
            max_tokens=self.bounds.tokens,
            max_pages=self.bounds.pages,
            max_kv_len=self.bounds.kv_len,
        )
        self.backends = build(self.plan, shape, self.catalogue)
        tell_stamps(LOG, self.backends.objects.values(), f"pages of {self.plan.page_size}")
        states = f"states in order {dict(self.plan.layouts).get('linear')}"
        tell_stamps(LOG, self.backends.linear_objects.values(), states)
        self.places = dict(self._places(self.backends))
        rows = self.plan.linear.rows if self.plan.linear is not None else ()
        self.linear_places = {
            (row.phase, layer): self.backends.serving_linear_backend(row.phase, at)
            for row in rows
            if row.phase in PHASES
            for at, group in enumerate(row.groups)
            for layer in group.layers
        }

    def let_go(self) -> None:
        """Drop what was built; a later step builds it again."""
        self.backends, self.places, self.linear_places = None, {}, {}

    def _places(self, backends: RunnerBackends) -> Iterator[tuple[tuple[Phase, int], Place]]:
        for phase in PHASES:
            for at, group in enumerate(self.plan.phase(phase).groups):
                row = self.catalogue.row("attention", group)
                assert row is not None, "build found the row"
                backend = cast("AttentionBackend[object]", backends.serving_attention_backend(phase, at))
                forms = row.offer.index_forms
                form = next(form for form in ("page_table", "csr", "indirect") if form in forms)
                for layer in group.layers:
                    yield (phase, layer), Place(backend, form, row.offer.features)


def _doubled(have: int, want: int) -> int:
    while have < want:
        have *= 2
    return have
