"""The full and the linear half of a hybrid runner as one backend of a phase: each layer goes to the kernel it has.

In: built backends, the runner's layers, a phase or a forward mode. Out: a `HybridBackend`, which plans both halves of a
step and finds a layer's kernel by its id. It chooses nothing, the plan did, and never holds the current batch.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

from backstamp.attention import (
    AttentionBackend,
    Batch,
    GraphBackend,
    LayerSpec,
    LinearBackend,
    LinearBatch,
    ParameterBackend,
)
from backstamp.errors import BadInput
from backstamp.forward import linear_phase_of, phase_named
from backstamp.stamp import copy_stamp, is_container, read_stamp

if TYPE_CHECKING:
    from torch import Tensor

    from backstamp.attention import ComputedGates, PagedKV, RaggedKV, RawGates, StatePool
    from backstamp.construction import RunnerBackends
    from backstamp.plan_rows import GroupPlan

__all__ = ["HybridBackend", "HybridState", "Place"]

_Step = TypeVar("_Step", Batch, LinearBatch)


class Place(NamedTuple):
    """What a layer's step is planned for: which built object of its half, and the layer's own group (its batch)."""

    at: int
    group: int


@dataclass(frozen=True, slots=True)
class HybridState:
    """One planned step: the state of each object and group, of the full and of the linear half."""

    full: Mapping[Place, object]
    linear: Mapping[Place, object]


class HybridBackend:
    """One phase of the main model's layers, full attention and recurrences together.

    It carries the stamp of the full-attention kernel, which a key such as `hybrid_linear_attn` names; the linear
    kernels carry their own. Where unlike full layers run unlike kernels it carries none: no one name would be true.

    Attributes:
        full, linear: the built objects, in the order of the plan's groups.
    """

    def __init__(self, backends: RunnerBackends, mode: str, layers: Sequence[LayerSpec]) -> None:
        """Compose one phase.

        Raises:
            BadInput: an unknown mode, a phase one half never runs, or a draft loop, whose steps are planned apart.
        """
        plan, phase, of_linear = backends.plan, phase_named(mode, backends.plan.role), linear_phase_of(mode)
        self._who = f"hybrid {phase} backend of {plan.model} ({plan.role})"
        full = [(at, group) for at, group in enumerate(plan.phase(phase).groups) if group.component == "main"]
        rows = plan.linear.rows if plan.linear is not None else ()
        linear = list(enumerate(next((row.groups for row in rows if row.phase == of_linear), ())))
        if not full or not linear:
            missing = "linear" if full else "full"
            raise BadInput(self._who, needed="kernels of full and of linear layers", found=f"no {missing} ones")
        built = [backends.serving_attention_backend(phase, at) for at, _ in full]
        if any(is_container(part) for part in built):
            raise BadInput(self._who, needed="one backend a step", found="a draft loop, whose steps are planned apart")
        self.full = tuple(cast("AttentionBackend[object]", part) for part in built)
        self.linear = tuple(
            cast("LinearBackend[object]", backends.serving_linear_backend(phase, at)) for at, _ in linear
        )
        main = [layer for layer in layers if layer.component == "main"]
        self._full_places = _places([group for _, group in full], main)
        self._linear_places = _places([group for _, group in linear], main)
        if len({read_stamp(part).kernel for part in self.full}) == 1:
            copy_stamp(self, self.full[0])

    def init_graphs(self, max_rows: int, max_tokens: int) -> None:
        """Let every part that has graph buffers allocate them."""
        for part in (*self.full, *self.linear):
            # an optional member of the call contract
            if hasattr(part, "init_graphs"):
                cast("GraphBackend[object]", part).init_graphs(max_rows, max_tokens)

    def refresh_parameters(self) -> None:
        """Let every part that keeps converted parameters convert them anew, after a reload of weights."""
        for part in (*self.full, *self.linear):
            # an optional member of the call contract
            if hasattr(part, "refresh_parameters"):
                cast("ParameterBackend[object]", part).refresh_parameters()

    def plan(
        self,
        batches: Mapping[int, Batch],
        linear_batches: Mapping[int, LinearBatch],
        *,
        state: HybridState | None = None,
        capture: bool = False,
    ) -> HybridState:
        """Plan a step: one batch for each group of layers (`LayerSpec.group`), of each half.

        Raises:
            BadInput: a group has no batch. UnsupportedBatch: a part does not take its batch.
        """
        full, linear = {}, {}
        for place in dict.fromkeys(self._full_places.values()):
            old = None if state is None else state.full[place]
            full[place] = self.full[place.at].plan(self._of(batches, place, "full"), state=old, capture=capture)
        for place in dict.fromkeys(self._linear_places.values()):
            old = None if state is None else state.linear[place]
            batch = self._of(linear_batches, place, "linear")
            linear[place] = self.linear[place.at].plan(batch, state=old, capture=capture)
        return HybridState(full, linear)

    def replan(self, state: HybridState) -> None:
        """Do the device half of every part that has one."""
        planned = [(self.full[place.at], of) for place, of in state.full.items()]
        for part, of in [*planned, *((self.linear[place.at], of) for place, of in state.linear.items())]:
            # an optional member of the call contract
            if hasattr(part, "replan"):
                cast("GraphBackend[object]", part).replan(of)

    def forward(
        self,
        q: Tensor,
        kv: PagedKV | None,
        layer: LayerSpec,
        state: HybridState,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        new: RaggedKV | None = None,
        q_rope: Tensor | None = None,
        indices: Tensor | None = None,
    ) -> Tensor:
        """Attend one full layer, as `AttentionBackend.forward`. Raises `BadInput` for a layer of the other half."""
        place = self._place(layer, self._full_places, "full", self._linear_places)
        part, of = self.full[place.at], state.full[place]
        return part.forward(q, kv, layer, of, out=out, lse=lse, new=new, q_rope=q_rope, indices=indices)

    def forward_linear(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: RawGates | ComputedGates,
        layer: LayerSpec,
        state: HybridState,
        *,
        pool: StatePool,
        slots: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """Run one linear layer, as `LinearBackend.forward`. Raises `BadInput` for a layer of the other half."""
        place = self._place(layer, self._linear_places, "linear", self._full_places)
        return self.linear[place.at].forward(
            q, k, v, gates, layer, state.linear[place], pool=pool, slots=slots, out=out
        )

    def _of(self, batches: Mapping[int, _Step], place: Place, half: str) -> _Step:
        if place.group in batches:
            return batches[place.group]
        had = ", ".join(str(group) for group in batches) or "none"
        raise BadInput(self._who, needed=f"a batch of group {place.group}, {half} layers", found=f"groups {had}")

    def _place(self, layer: LayerSpec, own: Mapping[int, Place], half: str, other: Mapping[int, Place]) -> Place:
        if layer.layer_id in own and layer.component == "main":
            return own[layer.layer_id]
        known = ", ".join(str(layer_id) for layer_id in own)
        what = "another's" if layer.layer_id not in other else "linear" if half == "full" else "full attention"
        found = f"layer {layer.layer_id} of {layer.component}, which is {what}"
        raise BadInput(self._who, needed=f"one of its {half} layers ({known})", found=found)


def _places(groups: Sequence[GroupPlan], layers: Sequence[LayerSpec]) -> dict[int, Place]:
    """Where each layer of one half is served; the runner's layers say which batch is theirs."""
    batch_of = {layer.layer_id: layer.group for layer in layers}
    return {
        layer_id: Place(at, batch_of[layer_id])
        for at, group in enumerate(groups)
        for layer_id in group.layers
        if layer_id in batch_of
    }
