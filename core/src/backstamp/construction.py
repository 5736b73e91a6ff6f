"""Last step before serving: a plan and a runner → built, checked and stamped backends.

In: a `Plan`, the catalogue it was resolved on, and what the runner is. Out: `RunnerBackends`, every object stamped
with the kernel it runs. A name that is an alias, was not declared, or is not the plan's is refused, and so is a
build-time setting the object does not report back. What is stamped is the plugin's own object: there is no wrapper.

.. versionadded:: 0.1
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, cast

from backstamp.build_job import BuildJob
from backstamp.catalogue import Catalogue, Row
from backstamp.conv_sidecar import wrap_with_convolutions
from backstamp.declarations import Phase, Slot
from backstamp.device_check import check_device
from backstamp.errors import BadInput, Unresolved
from backstamp.factory_loading import Factory, load_factory
from backstamp.forward import check_entry, linear_phase_of, phase_named
from backstamp.linear import LinearAttnBackends, settle_linear_attn_backends
from backstamp.plan import Plan
from backstamp.plan_rows import GroupPlan, PhasePlan
from backstamp.stamp import parts_of, verify_consumed

if TYPE_CHECKING:
    from backstamp.attention import LayerSpec, ParameterBackend

__all__ = ["Factory", "Runner", "RunnerBackends", "RunnerShape", "build", "load_factory"]


class Runner(Protocol):
    """What construction reads of an engine's runner.

    A runner with linear layers also takes the attribute `linear_attn_backends`: the engine's stamp, or else the plan's.
    """

    device: str
    layers: Sequence[LayerSpec]
    max_rows: int
    max_tokens: int
    max_pages: int
    max_kv_len: int


@dataclass(slots=True)
class RunnerShape:
    """A `Runner` as plain values, for engines that have no such object and for builds without an engine."""

    device: str = "cpu"
    layers: Sequence[LayerSpec] = ()
    max_rows: int = 8
    max_tokens: int = 256
    max_pages: int = 64
    max_kv_len: int = 1024
    linear_attn_backends: LinearAttnBackends | None = None


@dataclass(frozen=True, slots=True)
class RunnerBackends:
    """The built backends of one runner, by (phase, index of the group of layers in the plan's phase); those of the
    linear slot apart, by its own phases and groups."""

    plan: Plan
    objects: Mapping[tuple[Phase, int], object] = field(default_factory=dict)
    linear_objects: Mapping[tuple[Phase, int], object] = field(default_factory=dict)

    def attention_backends(self) -> tuple[str | None, str | None]:
        """The resolved pair: the kernels of the prefill and the decode half; a draft answers with its own."""
        prefill, decode = (self.plan.phase(phase_named(half, self.plan.role)) for half in ("prefill", "decode"))
        return prefill.kernel, decode.kernel

    def serving_attention_backend(self, mode: str, group: int = 0) -> object:
        """The backend that serves a phase or a forward mode, for one group of layers; one swapped in after start is
        held against both. A draft's decode is its loop; a target's draft-extend is its prefill half.

        Raises:
            BadInput: an unknown mode, or a phase this runner never runs. Unstamped, BuiltMismatch: as `check_entry`.
        """
        phase = phase_named(mode, self.plan.role)
        for (at, index), built in self.objects.items():
            if at == phase and index == group:
                check_entry(built, phase, self.plan.role)
                return built
        running = ", ".join(row.phase for row in self.plan.running)
        raise BadInput(f"{self.plan.role} of {self.plan.model}", needed=f"a phase it runs ({running})", found=phase)

    def serving_linear_backend(self, mode: str, group: int = 0) -> object:
        """The linear-attention backend that serves a phase or a forward mode, for one group of linear layers.

        A draft's phases run by the halves they follow: draft_decode by decode, draft_extend by prefill.

        Raises:
            BadInput: an unknown mode, or a phase whose linear layers this runner never runs. Unstamped, BuiltMismatch:
            as `check_entry`.
        """
        phase = linear_phase_of(mode)
        for (at, index), built in self.linear_objects.items():
            if at == phase and index == group:
                check_entry(built, phase)
                return built
        running = ", ".join(row.phase for row in _running_linear(self.plan)) or "none: it has no linear layers"
        who = f"linear attention of {self.plan.model} ({self.plan.role})"
        raise BadInput(who, needed=f"a phase it runs ({running})", found=f"{phase}, group {group}")

    def refresh_parameters(self) -> None:
        """Let every object and step that keeps converted parameters, sinks of another dtype, convert them anew.

        To be called after a reload of weights that ticks no counter, as `param.data.copy_()`: `plan` sees the others.

        .. versionadded:: 0.2
        """
        every = (*self.objects.values(), *self.linear_objects.values())
        parts = {id(part): part for built in every for part in parts_of(built)}
        for part in parts.values():
            # an optional member of the call contract
            if hasattr(part, "refresh_parameters"):
                cast("ParameterBackend[object]", part).refresh_parameters()


def build(
    plan: Plan, runner: Runner, catalogue: Catalogue, *, load: Callable[[Row, Catalogue], Factory] | None = None
) -> RunnerBackends:
    """Build every kernel of a plan once, stamp it, and hold the result against the plan.

    `load` finds a row's factory; tests hand in recording ones. The default imports the plugin's own.

    Raises:
        Unresolved: what should be a plan is none. NoDevice: the plan is for a device that is not the runner's, or not
        on this machine; not asked where `load` is given.
        FactoryImportFailed: a factory path does not import, cause chained. BuiltMismatch: the answer is not what the
        plan and the declaration say. ContainerWithoutChildren: a draft container hides its steps. ConflictingRequest:
        the runner is stamped with other linear kernels than the plan's.
    """
    if not isinstance(plan, Plan):
        raise Unresolved(
            "build",
            needed="a resolved plan",
            found=f"an unresolved request ({plan!r})",
            fix="Run the resolver first: plan = backstamp.resolve(launch, engine, model, host, catalogue)",
        )
    if load is None:
        check_device(plan, runner.device)
    # before anything that reads it is built
    settle_linear_attn_backends(plan, runner)
    objects = _build_slot("attention", plan.running, plan, runner, catalogue, load or load_factory)
    linear = _build_slot("linear", _running_linear(plan), plan, runner, catalogue, load or load_factory)
    backends = RunnerBackends(plan, objects, linear)
    verify_consumed(backends)
    _tell_halves(backends)
    return backends


def _running_linear(plan: Plan) -> tuple[PhasePlan, ...]:
    return tuple(row for row in plan.linear.rows if row.kernel is not None) if plan.linear is not None else ()


def _build_slot(
    slot: Slot,
    rows: Sequence[PhasePlan],
    plan: Plan,
    runner: Runner,
    catalogue: Catalogue,
    load: Callable[[Row, Catalogue], Factory],
) -> dict[tuple[Phase, int], object]:
    """Build every kernel of one slot once, for all the phases and groups it serves alike."""
    jobs: dict[tuple[str, str, GroupPlan], list[tuple[Phase, int]]] = {}
    for phase_plan in rows:
        for at, group in enumerate(phase_plan.groups):
            # the draft loop has objects of its own: each step holds its own plan state
            kind = "steps" if phase_plan.phase == "draft_decode" else "backend"
            # who decided is no reason to build twice
            jobs.setdefault((kind, group.kernel, group._replace(source="")), []).append((phase_plan.phase, at))
    objects: dict[tuple[Phase, int], object] = {}
    for (kind, _, group), places in jobs.items():
        job = BuildJob(plan, runner, catalogue, group, tuple(phase for phase, _ in places), load, slot)
        built = job.steps() if kind == "steps" else job.leaf()
        if built is not None:
            job.stamp(built)
            objects.update(dict.fromkeys(places, built))
            if plan.conv_sidecar:
                objects.update({place: wrap_with_convolutions(built) for place in places if place[0] == "draft_extend"})
    return objects


def _tell_halves(backends: RunnerBackends) -> None:
    """Leave the resolved pair on every object and step, under the names engines read; the stamp stays what counts."""
    prefill, decode = backends.attention_backends()
    for built in backends.objects.values():
        for part in parts_of(built):
            # an object with __slots__ carries its stamp, and need not carry these
            with suppress(AttributeError):
                part.prefill_attention_backend_str = prefill  # type: ignore[attr-defined]
                part.decode_attention_backend_str = decode  # type: ignore[attr-defined]
