"""Build every kernel of a plan here and run each phase once, so that nothing is compiled when the first request comes.

In: a plan of this machine, the model it was resolved for, the catalogue. Out: one `Warmed` for each slot, phase and
group of layers: how long it took, or why it could not be run. Values are random and answers are thrown away.

.. versionadded:: 0.2
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from backstamp.attention import LayerSpec, PagedKV, RaggedKV
from backstamp.catalogue import Catalogue
from backstamp.construction import RunnerBackends, RunnerShape, build
from backstamp.declarations import Offer, Phase, Slot
from backstamp.device_check import torch_device
from backstamp.made_steps import cannot, layer_spec, random_step
from backstamp.model import ModelFacts
from backstamp.plan import Plan
from backstamp.plan_rows import GroupPlan, PhasePlan
from backstamp.stamp import is_container, said, steps_of
from backstamp.warm_linear import warm_linear

if TYPE_CHECKING:
    from torch import Tensor

    from backstamp.attention import AttentionBackend, DraftContainer
    from backstamp.testing.batches import MadeStep

__all__ = ["Warmed", "warm"]

#: (query tokens, KV tokens) of the rows each phase is warmed with: more than one row, unlike lengths where it may be.
_ROWS: Final[dict[Phase, tuple[tuple[int, int], ...]]] = {
    "prefill": ((33, 33), (5, 80)),
    "decode": ((1, 40), (1, 17)),
    "verify": ((4, 40), (4, 20)),
    "draft_decode": ((1, 40), (1, 17)),
    "draft_extend": ((2, 40), (2, 20)),
}
#: Rows of an encoder: every token sees every other, and nothing was there before.
_UNCACHED: Final = ((33, 33), (5, 5))


class Warmed(NamedTuple):
    """One phase of one group of layers: `seconds` of planning and running it, or the `reason` it was not run."""

    phase: Phase
    kernel: str
    layers: int
    seconds: float
    reason: str = ""
    slot: Slot = "attention"

    def as_json(self) -> dict[str, object]:
        """The row for tools."""
        return self._asdict()


def warm(
    plan: Plan, model: ModelFacts, catalogue: Catalogue, told: Callable[[Warmed], None] | None = None
) -> list[Warmed]:
    """Build a plan on this machine and run each of its phases once; `told` hears of each as it ends.

    Raises:
        NoDevice: the plan is for another machine. BackstampError: as `build`.
    """
    device = torch_device(plan.device)
    layers = tuple(layer_spec(kind.facts, kind.layers[0], kind.component, device) for kind in model.groups)
    topk = max((kind.facts.index_topk for kind in model.groups), default=0)
    bounds = [kind.facts.gate_lower_bound for kind in model.groups]
    bound = next((value for value in bounds if value is not None), None)
    shape = RunnerShape(device=device, layers=layers, max_rows=8, max_tokens=64, max_pages=512, max_kv_len=128)
    backends = build(plan, shape, catalogue)
    done = []
    for slot, phase_plan in _running(plan):
        for at, group in enumerate(phase_plan.groups):
            row = catalogue.row(slot, group)
            assert row is not None, "the plan was just built on this catalogue"
            warmed = _run(slot, phase_plan.phase, at, group, row.offer, backends, layers, topk, bound)
            done.append(warmed)
            if told is not None:
                told(warmed)
    return done


def _running(plan: Plan) -> Iterator[tuple[Slot, PhasePlan]]:
    yield from (("attention", row) for row in plan.running)
    if plan.linear is not None:
        yield from (("linear", row) for row in plan.linear.rows if row.kernel is not None)


def _run(
    slot: Slot,
    phase: Phase,
    at: int,
    group: GroupPlan,
    offer: Offer,
    backends: RunnerBackends,
    layers: Sequence[LayerSpec],
    topk: int,
    bound: float | None,
) -> Warmed:
    """Run one built object over each kind of layer it serves, and time it."""
    served = [spec for spec in layers if spec.component == group.component and spec.layer_id in group.layers]
    reason = cannot(slot, group, offer)
    began = time.perf_counter()
    if not reason:
        try:
            if slot == "linear":
                linear = backends.serving_linear_backend(phase, at)
                warm_linear(linear, phase, group, offer, served, backends.plan, bound)
            else:
                backend = backends.serving_attention_backend(phase, at)
                _attend(backend, phase, group, offer, served, backends.plan, topk)
        except Exception as cause:
            # one phase that cannot run must not hide the others
            reason = said(cause)
    return Warmed(phase, group.kernel, len(group.layers), time.perf_counter() - began, reason, slot)


def _attend(
    backend: object, phase: Phase, group: GroupPlan, offer: Offer, served: Sequence[LayerSpec], plan: Plan, topk: int
) -> None:
    """Run one attention backend, every step of it where it is a draft loop."""
    for spec in served:
        for step, state, part in _planned(backend, phase, spec, group, offer, plan):
            kv, new = _keys(step, group)
            part.forward(step.q, kv, spec, state, new=new, indices=_indices(step, group, topk))


def _planned(
    backend: object, phase: Phase, spec: LayerSpec, group: GroupPlan, offer: Offer, plan: Plan
) -> Iterator[tuple[MadeStep, object, AttentionBackend[object]]]:
    whole = cast("AttentionBackend[object]", backend)
    if not group.cached:
        step = random_step(phase, spec, offer, plan, _UNCACHED)
        step = replace(step, batch=replace(step.batch, causal=False))
        yield step, whole.plan(step.batch), whole
        return
    if not is_container(backend):
        step = random_step(phase, spec, offer, plan, _ROWS[phase])
        yield step, whole.plan(step.batch), whole
        return
    container = cast("DraftContainer[object]", backend)
    rows = [tuple((q, kv + at) for q, kv in _ROWS[phase]) for at in range(len(steps_of(backend)))]
    steps = [random_step(phase, spec, offer, plan, of_step) for of_step in rows]
    states = container.plan([step.batch for step in steps])
    yield from zip(steps, states, container.attn_backends, strict=True)


def _keys(step: MadeStep, group: GroupPlan) -> tuple[PagedKV | None, RaggedKV | None]:
    """The cache; or this step's own keys, where there is none."""
    if group.cached:
        return step.kv, None
    from backstamp.testing.batches import split_new

    return None, split_new(step)[1]


def _indices(step: MadeStep, group: GroupPlan, topk: int) -> Tensor | None:
    """A selection of keys for sparse attention: the first of each row, over and over."""
    if group.family != "sparse_mla":
        return None
    import torch

    return torch.zeros(step.batch.num_tokens, topk, dtype=torch.int32, device=step.q.device)
