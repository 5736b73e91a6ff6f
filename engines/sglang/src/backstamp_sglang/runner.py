"""Fourth step: one plan and its stamped backends for each model runner, in the process that runs it.

In: a `ModelRunner` whose attention backend is one of our names, then its layers and the page size of its cache. Out: a
plan, told in SGLang's log before weights load, and built backends, told with their stamps. It holds no step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, cast
from weakref import WeakKeyDictionary

from sglang.srt.arg_groups.overrides import model_config_of, resolved_view

from backstamp.attention import AttentionBackend, LinearBackend
from backstamp.compiled import HostCatalogue, compile_for
from backstamp.construction import RunnerBackends, RunnerShape, build
from backstamp.declarations import Phase, Role, Slot
from backstamp.errors import BuiltMismatch, NotInstalled, Refused
from backstamp.factory_loading import load_factory
from backstamp.host import this_host
from backstamp.plan import Plan
from backstamp.plan_rows import GroupPlan, PhasePlan
from backstamp.resolution import resolve_on
from backstamp.stamp import read_stamp
from backstamp_sglang.asked import is_asked
from backstamp_sglang.facts import question_of
from backstamp_sglang.names import LOG, catalogue_here, plugins_sent

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

__all__ = ["EngineRunner", "Serving", "resolve_for", "runner_of"]


class Serving(NamedTuple):
    """What serves some layers in one phase: a built backend and the index forms its row reads."""

    backend: AttentionBackend[object]
    index_forms: frozenset[str]


class EngineRunner:
    """One model runner's plan and what was built from it."""

    def __init__(self, server_args: ServerArgs, config: ModelConfig, role: Role) -> None:
        self.plan = resolve_for(server_args, config, role)
        linear = self.plan.running_linear
        for slot, group in (*_groups_of("attention", self.plan.running), *_groups_of("linear", linear)):
            row = catalogue_here().row(slot, group)
            if row is not None:
                # a kernel library that does not import is told now, not after minutes of loading weights
                load_factory(row, catalogue_here())
        self._backends: RunnerBackends | None = None

    def tell_plan(self) -> None:
        """Say in SGLang's log what will run and why, once for all layers."""
        rows = [("", row) for row in self.plan.running] + [("linear ", row) for row in self.plan.running_linear]
        phases = "; ".join(
            f"{slot}{row.phase} {row.kernel} ({row.plugin.distribution} {row.plugin.version}, {row.source})"
            for slot, row in rows
            if row.plugin is not None
        )
        LOG.info("Backstamp plan for the %s, %s: %s", self.plan.role, self.plan.model, phases)
        for warning in self.plan.warnings:
            LOG.warning("Backstamp plan, %s: %s", warning.code, warning.text)

    def build(self, shape: RunnerShape) -> RunnerBackends:
        """What runs, built once: both halves of a pair ask for it."""
        if self._backends is None:
            self._backends = build(self.plan, shape, catalogue_here())
            self._tell_stamps(self._backends)
        return self._backends

    def serving(self, phase: Phase, layer_id: int) -> Serving:
        """What serves one layer in one phase.

        Raises:
            BuiltMismatch: the plan knows no such layer: SGLang runs another model than its config says.
        """
        assert self._backends is not None, "built with the layers"
        for at, group in enumerate(self.plan.phase(phase).groups):
            if layer_id in group.layers:
                row = catalogue_here().row("attention", group)
                assert row is not None, "a planned group has a row"
                built = cast("AttentionBackend[object]", self._backends.serving_attention_backend(phase, at))
                return Serving(built, row.offer.index_forms)
        needed, found = "a layer of the plan", "one its config does not have"
        raise BuiltMismatch(f"layer {layer_id} of {self.plan.model}", needed=needed, found=found)

    def serving_linear(self, phase: Phase) -> LinearBackend[object]:
        """What serves the gated delta nets in one phase.

        Raises:
            Refused: they are of several groups, or their states lie as SGLang's do not.
        """
        assert self._backends is not None, "built with the layers"
        groups = {at for of, at in self._backends.linear_objects if of == phase}
        layout = dict(self.plan.layouts).get("linear")
        if groups != {0} or layout != "vk":
            needed, found = "one group of states [HV, V, K]", f"{len(groups)} groups, states {layout}"
            raise Refused(f"linear {phase} of {self.plan.model}", needed=needed, found=found)
        return cast("LinearBackend[object]", self._backends.serving_linear_backend(phase))

    def _tell_stamps(self, backends: RunnerBackends) -> None:
        every = (*backends.objects.values(), *backends.linear_objects.values())
        for stamp in dict.fromkeys(map(read_stamp, every)):
            library = f"{stamp.library.distribution} {stamp.library.version}" if stamp.library else "no library"
            plugin = f"{stamp.plugin.distribution} {stamp.plugin.version}"
            phases, page_size = ", ".join(stamp.phases), self.plan.page_size
            LOG.info("Backstamp built %s for %s: %s, %s, pages of %d", stamp.kernel, phases, plugin, library, page_size)


def resolve_for(server_args: ServerArgs, config: ModelConfig, role: Role = "target") -> Plan:
    """The plan of a model in a launch that asks for one of our names; a draft may inherit from its target's.

    Raises:
        NotInstalled: a plugin that the launched process planned with is not here. BackstampError: as `resolve`.
    """
    _check_plugins()
    launch, engine, model = question_of(server_args, config, role)
    target = None
    if role == "draft" and is_asked(resolved_view(server_args), "target"):
        target = resolve_for(server_args, model_config_of(server_args))
    return resolve_on(_host_here(), launch, engine, model, role=role, target=target)


def _check_plugins() -> None:
    """Another kernel may not stand in for one whose plugin the launched process has and this one lacks."""
    here = {found.plugin.distribution for found in catalogue_here().found}
    failed = {failure.plugin.distribution: failure for failure in catalogue_here().failures}
    for name in sorted(plugins_sent() - here):
        raise NotInstalled(
            "backstamp-sglang, in a process that SGLang spawned",
            needed=f"{name}, which the launched process plans with",
            found=f"one that fails to load: {failed[name].cause}" if name in failed else "an environment without it",
            fix=f"Install {name} wherever SGLang runs schedulers",
        )


def runner_of(runner: ModelRunner) -> EngineRunner:
    """The plan of a model runner, made and told once.

    Raises:
        BackstampError: as `resolve_for`.
    """
    found = _runners.get(runner)
    if found is None:
        role: Role = "draft" if runner.is_draft_worker else "target"
        found = _runners[runner] = EngineRunner(runner.server_args, runner.model_config, role)
        found.tell_plan()
    return found


_runners: WeakKeyDictionary[ModelRunner, EngineRunner] = WeakKeyDictionary()


@cache
def _host_here() -> HostCatalogue:
    return compile_for(catalogue_here(), this_host())


def _groups_of(slot: Slot, phases: Sequence[PhasePlan]) -> Sequence[tuple[Slot, GroupPlan]]:
    return tuple(dict.fromkeys((slot, group) for phase in phases for group in phase.groups))
