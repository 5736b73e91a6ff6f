"""Last step before serving: a plan and a runner → built, checked and stamped backends.

In: a `Plan`, the catalogue it was resolved on, and what the runner is. Out: `RunnerBackends`, every object stamped
with the kernel it runs. A name that is an alias, was not declared, or is not the plan's is refused, and so is a
build-time setting the object does not report back. What is stamped is the plugin's own object: there is no wrapper.

.. versionadded:: 0.1
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, cast

from backstamp.catalogue import Catalogue, Row
from backstamp.declarations import GraphLevel, Offer, Phase
from backstamp.draft import DraftSteps
from backstamp.errors import (
    BackstampError,
    BadInput,
    BuiltMismatch,
    ContainerWithoutChildren,
    DeclarationError,
    FactoryFailed,
    FactoryImportFailed,
)
from backstamp.factories import BuildRequest, Built
from backstamp.forward import phase_of
from backstamp.plan import GroupPlan, Plan
from backstamp.stamp import Stamp, is_container, put_stamp, steps_of, verify_consumed
from backstamp.text import plain

if TYPE_CHECKING:
    from backstamp.attention import AttentionBackend, LayerSpec

__all__ = ["Factory", "Runner", "RunnerBackends", "RunnerShape", "build", "load_factory"]

Factory = Callable[[BuildRequest], Built]


class Runner(Protocol):
    """What construction reads of an engine's runner."""

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


@dataclass(frozen=True, slots=True)
class RunnerBackends:
    """The built backends of one runner, by (phase, index of the group of layers in the plan's phase)."""

    plan: Plan
    objects: Mapping[tuple[Phase, int], object] = field(default_factory=dict)

    def attention_backends(self) -> tuple[str | None, str | None]:
        """The resolved pair: the kernels of the prefill and the decode half; a draft answers with its own."""
        decode: Phase = "draft_decode" if self.plan.role == "draft" else "decode"
        return self.plan.phase("prefill").kernel, self.plan.phase(decode).kernel

    def serving_attention_backend(self, mode: str, group: int = 0) -> object:
        """The backend that serves a phase or a forward mode, for one group of layers.

        Raises:
            BadInput: an unknown mode, or a phase this runner never runs.
        """
        phase = mode if mode in [row.phase for row in self.plan.phases] else phase_of(mode)
        for (at, index), built in self.objects.items():
            if at == phase and index == group:
                return built
        running = ", ".join(row.phase for row in self.plan.running)
        raise BadInput(f"{self.plan.role} of {self.plan.model}", needed=f"a phase it runs ({running})", found=phase)


def build(
    plan: Plan, runner: Runner, catalogue: Catalogue, *, load: Callable[[Row, Catalogue], Factory] | None = None
) -> RunnerBackends:
    """Build every kernel of a plan once, stamp it, and hold the result against the plan.

    `load` finds a row's factory; tests hand in recording ones. The default imports the plugin's own.

    Raises:
        FactoryImportFailed: a factory path does not import, cause chained. BuiltMismatch: the answer is not what the
        plan and the declaration say. ContainerWithoutChildren: a draft container hides its steps.
    """
    jobs: dict[tuple[str, str, GroupPlan], list[tuple[Phase, int]]] = {}
    for phase_plan in plan.running:
        for at, group in enumerate(phase_plan.groups):
            # the draft loop has objects of its own: each step holds its own plan state
            kind = "steps" if phase_plan.phase == "draft_decode" else "backend"
            # who decided is no reason to build twice
            jobs.setdefault((kind, group.kernel, group._replace(source="")), []).append((phase_plan.phase, at))
    objects: dict[tuple[Phase, int], object] = {}
    for (kind, _, group), places in jobs.items():
        job = _Job(plan, runner, catalogue, group, tuple(phase for phase, _ in places), load or load_factory)
        built = job.steps() if kind == "steps" else job.leaf()
        if built is not None:
            job.stamp(built)
            objects.update(dict.fromkeys(places, built))
    backends = RunnerBackends(plan, objects)
    verify_consumed(backends)
    return backends


def load_factory(row: Row, catalogue: Catalogue) -> Factory:
    """Import a row's factory, and its plugin module if the declarations came from data.

    Raises:
        FactoryImportFailed: the module or the callable is missing, or its import raises; the cause is chained.
        DeclarationError: `backstamp.json` no longer says what plugin.py says.
    """
    module_name, _, name = row.offer.factory.partition(":")
    who = f"kernel {row.offer.kernel!r} (plugin {row.plugin.name}, {row.plugin.distribution} {row.plugin.version})"
    try:
        _validate_plugin(row, catalogue)
        factory = getattr(importlib.import_module(module_name), name)
    except (KeyboardInterrupt, DeclarationError):
        raise
    except BaseException as cause:  # a plugin or a kernel library may raise anything at import, SystemExit included
        raise FactoryImportFailed(
            who,
            needed=f"factory {row.offer.factory} to import",
            found=f"{type(cause).__name__}: {cause}",
            fix="Reinstall the plugin and its kernel library, or report it to the plugin's author",
        ) from cause
    if not callable(factory):
        raise FactoryImportFailed(who, needed=f"{row.offer.factory} to be callable", found=type(factory).__name__)
    loaded: Factory = factory
    return loaded


def _validate_plugin(row: Row, catalogue: Catalogue) -> None:
    from backstamp.discovery import import_plugin

    for found in catalogue.found:
        if found.plugin == row.plugin and found.origin.startswith("data "):
            if import_plugin(found.module) != found.declared:
                raise DeclarationError(
                    f"plugin {row.plugin.name} ({row.plugin.distribution} {row.plugin.version})",
                    needed="backstamp.json to say what plugin.py says",
                    found="two different declarations",
                    fix="Write backstamp.json anew with `backstamp declare` and reinstall",
                )
            return


@dataclass(frozen=True, slots=True)
class _Job:
    """One group of layers to build for."""

    plan: Plan
    runner: Runner
    catalogue: Catalogue
    group: GroupPlan
    phases: tuple[Phase, ...]
    load: Callable[[Row, Catalogue], Factory]

    @property
    def who(self) -> str:
        plugin = self.group.plugin
        return f"{self.plan.role} {', '.join(self.phases)} backend {self.group.kernel!r} (plugin {plugin.name})"

    def row(self) -> Row:
        """The declared row the plan accepted."""
        rows = self.catalogue.rows.get(("attention", self.group.kernel), ())
        at = self.group.row
        if at < len(rows) and rows[at].plugin == self.group.plugin and rows[at].offer.family == self.group.family:
            return rows[at]
        raise BuiltMismatch(
            self.who,
            needed=f"{self.group.plugin.distribution} {self.group.plugin.version} and its row for {self.group.family}",
            found="another set of plugins in this catalogue",
            fix="Resolve again here, or install what the plan names",
        )

    def leaf(self) -> object | None:
        """Build one backend; None where the factory answers none."""
        row = self.row()
        request = self._request(row.offer)
        factory = self.load(row, self.catalogue)
        try:
            answer = factory(request)
        except (KeyboardInterrupt, BackstampError):
            raise
        except BaseException as cause:  # SystemExit from a kernel library must not end an engine
            raise FactoryFailed(
                self.who,
                needed=f"factory {row.offer.factory} to build it",
                found=plain(f"{type(cause).__name__}: {cause}"),
                fix="Report it to the plugin's author, or ask for another kernel",
            ) from cause
        self._check(answer, row, request)
        return answer[1]

    def steps(self) -> object | None:
        """Build the draft loop: the plugin's own container, or one leaf a step in `DraftSteps`."""
        count = self.plan.num_steps - 1
        first = self.leaf()
        if first is None:
            return None
        if is_container(first):
            if len(steps_of(first)) != count:
                raise BuiltMismatch(self.who, needed=f"{count} steps", found=str(len(steps_of(first))))
            return first
        if not callable(getattr(first, "forward", None)):
            raise ContainerWithoutChildren(
                self.who,
                needed="a decode backend, or a container that exposes its steps as attn_backends",
                found=f"{type(first).__name__}, which has neither forward nor attn_backends",
            )
        leaves = [first, *(self.leaf() for _ in range(count - 1))]
        return DraftSteps(cast("list[AttentionBackend[object]]", leaves))

    def stamp(self, built: object) -> None:
        """Put the stamp on what was built."""
        rows = {row.phase: row for row in self.plan.phases}
        origin_module = sys.modules.get(type(built if not is_container(built) else steps_of(built)[0]).__module__)
        put_stamp(
            built,
            Stamp(
                kernel=self.group.kernel,
                slot="attention",
                role=self.plan.role,
                plugin=self.group.plugin,
                library=self.group.library,
                origin=str(getattr(origin_module, "__file__", None) or "built in memory"),
                sources=tuple((phase, rows[phase].source) for phase in self.phases),
                skipped=self.plan.bypassed,
            ),
        )

    def _request(self, offer: Offer) -> BuildRequest:
        layers = tuple(layer for layer in self.runner.layers if layer.layer_id in self.group.layers)
        if self.runner.layers and not layers:
            found = ", ".join(str(layer.layer_id) for layer in self.runner.layers)
            raise BuiltMismatch(self.who, needed=f"layers {self.group.layers} in the runner", found=f"layers {found}")
        softcaps = {layer.softcap for layer in layers}
        compiled_in = "softcap" in offer.build_settings
        if compiled_in and len(softcaps) > 1:
            found = ", ".join(str(softcap) for softcap in sorted(softcaps))
            raise BuiltMismatch(self.who, needed="one softcap, because it is compiled in", found=found)
        graph: GraphLevel = self.plan.graph
        return BuildRequest(
            kernel=self.group.kernel,
            family=self.group.family,
            phases=self.phases,
            role=self.plan.role,
            layers=layers,
            dtype=self.plan.dtype,
            kv_dtype=self.plan.kv_dtype,
            page_size=self.plan.page_size,
            layout=dict(self.plan.layouts)["attention"],
            device=self.runner.device,
            max_rows=self.runner.max_rows,
            max_tokens=self.runner.max_tokens,
            max_pages=self.runner.max_pages,
            max_kv_len=self.runner.max_kv_len,
            topk=self.plan.topk,
            num_steps=self.plan.num_steps,
            graph=graph,
            settings={"softcap": max(softcaps)} if compiled_in and any(softcaps) else {},
        )

    def _check(self, answer: Built, row: Row, request: BuildRequest) -> None:
        """Refuse an answer that is not what the plan and the declaration say."""
        if not isinstance(answer, tuple) or len(answer) < 2 or not isinstance(answer[0], str):
            raise BuiltMismatch(self.who, needed="Built(kernel, backend)", found=type(answer).__name__)
        name = answer[0]
        if self.catalogue.is_alias_only(name, "attention"):
            raise BuiltMismatch(
                self.who, needed="a kernel name", found=f"{name!r}, which is an alias and never a stamp"
            )
        if name != request.kernel:
            declared = {row.offer.kernel for rows in self.catalogue.rows.values() for row in rows}
            known = "another kernel" if name in declared else "a name nobody declared"
            raise BuiltMismatch(self.who, needed=repr(request.kernel), found=f"{name!r}, {known}")
        reported = answer[2] if len(answer) > 2 else {}
        for setting, value in request.settings.items():
            if reported.get(setting) != value:
                found = f"{setting} {reported.get(setting, 'not reported')}"
                raise BuiltMismatch(self.who, needed=f"{setting} {value} compiled in", found=found)
