"""Third step: one plan and its stamped backends for each model vLLM runs, in the process that runs it.

In: a `VllmConfig` whose attention backend is one of our names, then the layers and the page size of its caches. Out: a
plan, told in vLLM's log before weights load, and built backends, told with their stamps. It holds no step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, cast
from weakref import WeakValueDictionary

from vllm.platforms import current_platform

from backstamp.attention import AttentionBackend, LayerSpec
from backstamp.compiled import HostCatalogue, compile_for
from backstamp.construction import RunnerBackends, RunnerShape, build
from backstamp.declarations import Offer, Phase
from backstamp.errors import BuiltMismatch, NotInstalled, UnknownKey
from backstamp.factory_loading import load_factory
from backstamp.host import this_host
from backstamp.plan import Plan
from backstamp.plan_rows import GroupPlan
from backstamp.resolution import resolve_on
from backstamp.stamp import read_stamp
from backstamp_vllm.facts import question_of
from backstamp_vllm.names import LOG, asked_by, catalogue_here

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["EngineRunner", "Halves", "halves_of", "offers_of_name", "runner_of"]


class Halves(NamedTuple):
    """The built backends of some layers: one object where one kernel serves both halves."""

    prefill: AttentionBackend[object]
    decode: AttentionBackend[object]


class EngineRunner:
    """One model's plan and what was built from it, once a page size: KV groups of unlike layers may differ in it."""

    def __init__(self, config: VllmConfig) -> None:
        self.config, self.name = config, config.attention_config.backend.name
        self.plan = self._resolve(None)
        rows = [catalogue_here().row("attention", group) for group in _groups_of(self.plan)]
        self._rows = tuple(row for row in rows if row is not None)
        for row in self._rows:
            # a kernel library that does not import is told now, not after minutes of loading weights
            load_factory(row, catalogue_here())
        self._built: dict[int, RunnerBackends] = {}

    @property
    def offers(self) -> tuple[Offer, ...]:
        """The declared rows that the plan runs."""
        return tuple(row.offer for row in self._rows)

    def tell_plan(self) -> None:
        """Say in vLLM's log what will run and why, once for all layers."""
        phases = "; ".join(
            f"{row.phase} {row.kernel} ({row.plugin.distribution} {row.plugin.version}, {row.source})"
            for row in self.plan.running
            if row.plugin is not None
        )
        LOG.info("Backstamp plan for %s: %s; digest %s", self.plan.model, phases, self.plan.digest[:12])
        if current_platform.is_cpu():
            LOG.info("Backstamp answers for CPU_ATTN: %s was asked for, and vLLM's CPU knows no other", self.name)
        for warning in self.plan.warnings:
            LOG.warning("Backstamp plan, %s: %s", warning.code, warning.text)

    def build(self, layers: Sequence[LayerSpec], page_size: int, device: str) -> RunnerBackends:
        """What runs over caches of one page size, built when its first KV group is."""
        if page_size not in self._built:
            scheduler, max_len = self.config.scheduler_config, self.config.model_config.max_model_len
            shape = RunnerShape(
                device=device,
                layers=layers,
                max_rows=scheduler.max_num_seqs,
                max_tokens=scheduler.max_num_batched_tokens,
                max_pages=scheduler.max_num_seqs * -(-max_len // page_size),
                max_kv_len=max_len,
            )
            backends = build(self._resolve(page_size), shape, catalogue_here())
            self._tell_stamps(backends)
            self._built[page_size] = backends
        return self._built[page_size]

    def _resolve(self, page_size: int | None) -> Plan:
        asked = asked_by(self.name)
        question = question_of(self.config, asked.key, page_size)
        try:
            return resolve_on(_host_here(), question.launch, question.engine, question.model)
        except UnknownKey as cause:
            if asked.key is None or not asked.owner or catalogue_here().owner(asked.key, "attention") is not None:
                raise
            raise NotInstalled(
                f"attention backend {asked.key!r} in this worker",
                needed=f"{asked.owner}, which the process that was asked for it has",
                found="an environment without it",
                fix=f"Install {asked.owner} wherever vLLM runs workers",
            ) from cause

    def _tell_stamps(self, backends: RunnerBackends) -> None:
        for stamp in dict.fromkeys(read_stamp(built) for built in backends.objects.values()):
            library = f"{stamp.library.distribution} {stamp.library.version}" if stamp.library else "no library"
            plugin = f"{stamp.plugin.distribution} {stamp.plugin.version}"
            phases = ", ".join(stamp.phases)
            page_size = backends.plan.page_size
            LOG.info("Backstamp built %s for %s: %s, %s, pages of %d", stamp.kernel, phases, plugin, library, page_size)


def halves_of(backends: RunnerBackends, layer_id: int) -> Halves:
    """The backends of one layer of the main model.

    Raises:
        BuiltMismatch: the plan knows no such layer: vLLM runs another model than its config says.
    """
    return Halves(_built_for(backends, "prefill", layer_id), _built_for(backends, "decode", layer_id))


def runner_of(config: VllmConfig) -> EngineRunner:
    """The runner of a config; its layers keep it alive.

    Raises:
        BackstampError: as `resolve`.
    """
    runner = _runners.get(id(config))
    if runner is None:
        runner = _runners[id(config)] = EngineRunner(config)
        runner.tell_plan()
    return runner


def offers_of_name(name: str) -> tuple[Offer, ...]:
    """The rows a name stands for: those of the plan it was last asked for, else all its key has on this host."""
    for runner in _runners.values():
        if runner.name == name:
            return runner.offers
    key = asked_by(name).key
    alias = catalogue_here().aliases.get(("attention", key or ""))
    kernels = alias.alias.kernels if alias is not None else (key,)
    rows = _host_here().slots["attention"].rows
    return tuple(row.offer for row in rows if not row.refusals and (key is None or row.name in kernels))


# a runner holds its config, so an id in here is that of a living one
_runners: WeakValueDictionary[int, EngineRunner] = WeakValueDictionary()


@cache
def _host_here() -> HostCatalogue:
    return compile_for(catalogue_here(), this_host())


def _groups_of(plan: Plan) -> tuple[GroupPlan, ...]:
    return tuple(dict.fromkeys(group for phase in plan.running for group in phase.groups))


def _built_for(backends: RunnerBackends, phase: Phase, layer_id: int) -> AttentionBackend[object]:
    for at, group in enumerate(backends.plan.phase(phase).groups):
        if layer_id in group.layers:
            return cast("AttentionBackend[object]", backends.serving_attention_backend(phase, at))
    raise BuiltMismatch(
        f"layer {layer_id} of {backends.plan.model}", needed="a layer of the plan", found="one its config does not have"
    )
