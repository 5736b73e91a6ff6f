"""Run a built linear-attention kernel once in a phase, in each form an engine may hand it: nothing is left cold.

In: a built object, its plan's group and row, the layers it serves. Out: nothing; what it raises is the caller's to
tell. Values and states are random; the states are fp32, as served models keep them.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, Literal, cast

from backstamp.attention import LayerSpec
from backstamp.declarations import Offer, Phase
from backstamp.device_check import torch_device
from backstamp.plan import Plan
from backstamp.plan_rows import GroupPlan

if TYPE_CHECKING:
    from backstamp.attention import LinearBackend
    from backstamp.testing.linear_batches import MadeLinearStep

__all__ = ["warm_linear"]

#: Query tokens of the rows each phase is warmed with; in verify as many in each row: some kernels take no other.
_ROWS: Final[dict[Phase, tuple[int, ...]]] = {"prefill": (33, 5), "decode": (1, 1), "verify": (4, 4)}


def warm_linear(
    backend: object,
    phase: Phase,
    group: GroupPlan,
    offer: Offer,
    layers: Sequence[LayerSpec],
    plan: Plan,
    bound: float | None = None,
) -> None:
    """Plan and run one phase over each kind of layer it serves; `bound` is the model's own, of a decay that has one."""
    kernel = cast("LinearBackend[object]", backend)
    for spec in layers:
        for step in _steps(phase, spec, group, offer, plan, bound):
            state = kernel.plan(step.batch)
            kernel.forward(step.q, step.k, step.v, step.gates, spec, state, pool=step.pool, slots=step.batch.slots)


def _steps(
    phase: Phase, spec: LayerSpec, group: GroupPlan, offer: Offer, plan: Plan, bound: float | None
) -> Iterator[MadeLinearStep]:
    import torch

    from backstamp.testing.linear_batches import make_linear_step

    family: Literal["gdn", "kda"] = "gdn" if group.family == "gdn" else "kda"
    order: Literal["vk", "kv"] = "vk" if dict(plan.layouts)["linear"] == "vk" else "kv"
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[plan.dtype]
    rows = _ROWS[phase]
    # engines compute the gates of a gated delta net's prefill, and hand on all others raw. Source: SGLang 0.5.23
    # gdn_backend.py, kda_backend.py
    make = partial(
        make_linear_step,
        family=family,
        layer=spec,
        order=order,
        dtype=dtype,
        raw_gates=phase != "prefill" or family == "kda",
        lower_bound=bound if family == "kda" else None,
        phase=phase,
        device=torch_device(plan.device),
    )
    if phase != "verify":
        yield make(rows, has_state=[row > 0 for row in range(len(rows))])
        return
    yield make(rows, form="slot_table")
    yield make(rows, form="intermediate")
    if plan.topk > 1 and "tree_mask" in offer.features:
        yield make(rows, form="intermediate", parents=[(-1, 0, 0, 1)] * len(rows))
