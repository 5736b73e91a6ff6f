"""Third step: one plan and its stamped backends for each model vLLM runs, in the process that runs it.

In: a `VllmConfig` whose attention backend is one of our names, then the layers and the page size of its caches. Out: a
plan, told in vLLM's log before weights load, and built backends, told with their stamps. It holds no step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from vllm.platforms import current_platform

from backstamp.attention import AttentionBackend, LayerSpec, LinearBackend
from backstamp.catalogue import Row
from backstamp.compiled import HostCatalogue, compile_for
from backstamp.construction import RunnerBackends, RunnerShape, build
from backstamp.declarations import Offer, Phase, Slot
from backstamp.engine import EngineFacts
from backstamp.errors import BuiltMismatch, NotInstalled, UnknownKey
from backstamp.factory_loading import load_factory
from backstamp.host import this_host
from backstamp.launch import Launch
from backstamp.model import ModelFacts
from backstamp.plan import Plan
from backstamp.plan_rows import PhasePlan
from backstamp.resolution import resolve_on
from backstamp.telling import tell_phases, tell_stamps, tell_warnings
from backstamp_vllm.facts import question_of
from backstamp_vllm.living import Living
from backstamp_vllm.names import LOG, Asked, asked_by, catalogue_here

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = [
    "EngineRunner",
    "Halves",
    "halves_of",
    "host_here",
    "kernels_behind",
    "offers_of_name",
    "resolve_asked",
    "runner_of",
]


class Halves(NamedTuple):
    """The built backends of some layers: one object where one kernel serves both halves."""

    prefill: AttentionBackend[object]
    decode: AttentionBackend[object]


class EngineRunner:
    """One model's plan and what was built from it, once a page size: KV groups of unlike layers may differ in it."""

    def __init__(self, config: VllmConfig) -> None:
        self.config, self.name = config, config.attention_config.backend.name
        self.plan = self._resolve(None)
        self._rows = _rows_of("attention", self.plan.running)
        for row in (*self._rows, *_rows_of("linear", self.plan.running_linear)):
            # a kernel library that does not import is told now, not after minutes of loading weights
            load_factory(row, catalogue_here())
        self.check_layers()
        self._built: dict[int, RunnerBackends] = {}

    @property
    def offers(self) -> tuple[Offer, ...]:
        """The declared rows that the plan runs."""
        return tuple(row.offer for row in self._rows)

    def tell_plan(self) -> None:
        """Say in vLLM's log what will run and why, once for all layers."""
        tell_phases(LOG, self.plan, "", self.plan.running)
        if self.plan.running_linear:
            tell_phases(LOG, self.plan, ", linear layers", self.plan.running_linear)
        if current_platform.is_cpu():
            LOG.info("Backstamp answers for CPU_ATTN: %s was asked for, and vLLM's CPU knows no other", self.name)
        tell_warnings(LOG, self.plan)

    def check_layers(self) -> None:
        """Hold the layers vLLM has made so far against the plan.

        Raises:
            Refused: a recurrent layer that would not run the linear kernel asked for.
        """
        if self.plan.running_linear:
            from backstamp_vllm.linear import check_layers

            check_layers(self.config)

    def build(self, layers: Sequence[LayerSpec], page_size: int, device: str) -> RunnerBackends:
        """What runs over caches of one page size, built when its first KV group is."""
        if page_size not in self._built:
            # all layers are made by now
            self.check_layers()
            scheduler, max_len = self.config.scheduler_config, self.config.model_config.max_model_len
            shape = RunnerShape(
                device=device,
                layers=(*layers, *self._linear_layers()),
                max_rows=scheduler.max_num_seqs,
                max_tokens=scheduler.max_num_batched_tokens,
                max_pages=scheduler.max_num_seqs * -(-max_len // page_size),
                max_kv_len=max_len,
            )
            backends = build(self._resolve(page_size), shape, catalogue_here())
            tell_stamps(LOG, backends.objects.values(), f"pages of {backends.plan.page_size}")
            tell_stamps(
                LOG, backends.linear_objects.values(), f"states in order {dict(backends.plan.layouts).get('linear')}"
            )
            self._built[page_size] = backends
        return self._built[page_size]

    def linear_backend(self, phase: Phase, layer_id: int) -> LinearBackend[object]:
        """The backend of a linear layer; those of the first page size built, for states have none.

        Raises:
            BuiltMismatch: the plan knows no such layer.
        """
        backends = next(iter(self._built.values()))
        for row in backends.plan.running_linear:
            for at, group in enumerate(row.groups):
                if row.phase == phase and layer_id in group.layers:
                    return cast("LinearBackend[object]", backends.serving_linear_backend(phase, at))
        raise _unknown_layer(backends.plan, layer_id)

    def _resolve(self, page_size: int | None) -> Plan:
        asked = asked_by(self.name)
        question = question_of(self.config, asked.key, page_size)
        return resolve_asked(asked, *question)

    def _linear_layers(self) -> tuple[LayerSpec, ...]:
        """The linear layers as vLLM made them."""
        if not self.plan.running_linear:
            return ()
        from backstamp_vllm.linear import BackstampGatedDeltaNet

        layers = self.config.compilation_config.static_forward_context.values()
        return tuple(layer.spec for layer in layers if isinstance(layer, BackstampGatedDeltaNet))


@cache
def host_here() -> HostCatalogue:
    """What is installed, compiled for the machine this worker is on."""
    return compile_for(catalogue_here(), this_host())


def resolve_asked(asked: Asked, launch: Launch, engine: EngineFacts, model: ModelFacts) -> Plan:
    """The plan of what a name asks for, on this machine.

    Raises:
        NotInstalled: the process that named the key has a plugin this one lacks. BackstampError: as `resolve`.
    """
    try:
        return resolve_on(host_here(), launch, engine, model)
    except UnknownKey as cause:
        if asked.key is None or not asked.owner or catalogue_here().owner(asked.key, "attention") is not None:
            raise
        raise NotInstalled(
            f"attention backend {asked.key!r} in this worker",
            needed=f"{asked.owner}, which the process that was asked for it has",
            found="an environment without it",
            fix=f"Install {asked.owner} wherever vLLM runs workers",
        ) from cause


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
    return _runners.of(config)


def offers_of_name(name: str) -> tuple[Offer, ...]:
    """The rows a name stands for: those of the plan it was last asked for, else all its key has on this host."""
    runner = _runners.named(name)
    if runner is not None:
        return runner.offers
    key = asked_by(name).key
    kernels, rows = kernels_behind(key), host_here().slots["attention"].rows
    return tuple(row.offer for row in rows if not row.refusals and (key is None or row.name in kernels))


def kernels_behind(key: str | None) -> tuple[str, ...]:
    """The kernels a key stands for: itself, or those of an alias."""
    alias = catalogue_here().aliases.get(("attention", key or ""))
    return alias.alias.kernels if alias is not None else (key or "",)


_runners: Final = Living(EngineRunner)


def _rows_of(slot: Slot, phases: Sequence[PhasePlan]) -> tuple[Row, ...]:
    groups = dict.fromkeys(group for phase in phases for group in phase.groups)
    rows = [catalogue_here().row(slot, group) for group in groups]
    return tuple(row for row in rows if row is not None)


def _built_for(backends: RunnerBackends, phase: Phase, layer_id: int) -> AttentionBackend[object]:
    for at, group in enumerate(backends.plan.phase(phase).groups):
        if layer_id in group.layers:
            return cast("AttentionBackend[object]", backends.serving_attention_backend(phase, at))
    raise _unknown_layer(backends.plan, layer_id)


def _unknown_layer(plan: Plan, layer_id: int) -> BuiltMismatch:
    who = f"layer {layer_id} of {plan.model}"
    return BuiltMismatch(who, needed="a layer of the plan", found="one its config does not have")
