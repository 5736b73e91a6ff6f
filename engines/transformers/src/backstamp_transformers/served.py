"""One model on its kernels: resolved when it is admitted, built at its first step, grown when a step needs more.

In: a request and a model. Out: the backend and the index form of each layer and phase. It resolves again where the
model runs in another dtype or on another device than it was admitted with, and never falls back.
"""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass, field
from typing import Final, NamedTuple, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PretrainedConfig

from backstamp.attention import AttentionBackend, LayerSpec
from backstamp.catalogue import Catalogue, build_catalogue
from backstamp.construction import RunnerBackends, RunnerShape, build
from backstamp.declarations import Phase
from backstamp.discovery import discover
from backstamp.host import HostFacts, this_host
from backstamp.plan import Plan
from backstamp.resolution import resolve
from backstamp.stamp import read_stamp
from backstamp_transformers.asked import Asked, is_asked
from backstamp_transformers.engine_facts import ENGINE, model_facts
from backstamp_transformers.errors import NotServed, in_engine_idiom
from backstamp_transformers.layers import layer_specs, linear_specs

__all__ = ["PHASES", "Bounds", "Place", "Served"]

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
class Served:
    """One model's plan and kernels.

    Attributes:
        model, config: the model, held weakly, and the config its attention modules carry; `asked` what was requested.
        plan, catalogue: the decision and what it was made on.
        backends: what was built, None before the first step.
        specs: the layers by id, empty before the first step; `places` what serves each of them.
        linear_specs, linear_places: the same of the linear layers; `hooks` are on their modules.
        in_force: False once it was released; `held` where a handle has it.
    """

    model: weakref.ref[nn.Module]
    config: weakref.ref[PretrainedConfig]
    asked: Asked
    catalogue: Catalogue
    plan: Plan
    dtype: torch.dtype
    device: torch.device
    bounds: Bounds = field(default_factory=Bounds)
    backends: RunnerBackends | None = None
    specs: dict[int, LayerSpec] = field(default_factory=dict)
    places: dict[tuple[Phase, int], Place] = field(default_factory=dict)
    linear_specs: dict[int, LayerSpec] = field(default_factory=dict)
    linear_places: dict[tuple[Phase, int], object] = field(default_factory=dict)
    hooks: list[RemovableHandle] = field(default_factory=list)
    in_force: bool = True
    held: bool = False

    @classmethod
    def admit(
        cls, model: nn.Module, config: PretrainedConfig, asked: Asked, dtype: torch.dtype, device: torch.device
    ) -> Served:
        """Resolve a model's request, before any of its weights are needed.

        Raises:
            BackstampError: a `ValueError` or `ImportError` with the verdicts of every candidate.
        """
        catalogue = asked.catalogue if asked.catalogue is not None else build_catalogue(discover())
        plan = _resolve(config, asked, catalogue, dtype, device)
        _tell_plan(plan)
        return cls(weakref.ref(model), weakref.ref(config), asked, catalogue, plan, dtype, device)

    def applies(self) -> bool:
        """Whether the model still runs as was asked: it may have been set to another implementation since."""
        config = self.config()
        return self.in_force and config is not None and is_asked(str(config._attn_implementation), self.asked)

    def fit(self, step: Bounds, dtype: torch.dtype, device: torch.device) -> None:
        """Have kernels for a step of this size, dtype and device; builds or builds anew where they are not there."""
        if (dtype, device) != (self.dtype, self.device):
            self.plan = _resolve(self._config(), self.asked, self.catalogue, dtype, device)
            _tell_plan(self.plan)
            self.dtype, self.device, self.backends = dtype, device, None
        grown = self.bounds.including(step)
        if self.backends is None or grown != self.bounds:
            self.bounds = grown
            self.build()

    def build(self) -> None:
        """Build, stamp and place every kernel of the plan."""
        model, config = self.model(), self._config()
        if model is None:
            raise NotServed(f"Transformers model {config.model_type}", needed="the model in memory", found="none")
        facts = model_facts(config, str(self.dtype))
        self.specs, self.linear_specs = layer_specs(model, config, facts), linear_specs(facts)
        shape = RunnerShape(
            device=str(self.device),
            layers=(*self.specs.values(), *self.linear_specs.values()),
            max_rows=self.bounds.rows,
            max_tokens=self.bounds.tokens,
            max_pages=self.bounds.pages,
            max_kv_len=self.bounds.kv_len,
        )
        with in_engine_idiom():
            self.backends = build(self.plan, shape, self.catalogue)
        _tell_stamps(self.backends)
        self.places = dict(self._places(self.backends))
        rows = self.plan.linear.rows if self.plan.linear is not None else ()
        self.linear_places = {
            (row.phase, layer): self.backends.serving_linear_backend(row.phase, at)
            for row in rows
            if row.phase in PHASES
            for at, group in enumerate(row.groups)
            for layer in group.layers
        }

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """The layers whose recurrence the plan gives a kernel."""
        rows = self.plan.linear.rows if self.plan.linear is not None else ()
        return tuple(sorted({layer for row in rows for group in row.groups for layer in group.layers}))

    def _places(self, backends: RunnerBackends) -> list[tuple[tuple[Phase, int], Place]]:
        found = []
        for phase in PHASES:
            for at, group in enumerate(self.plan.phase(phase).groups):
                row = self.catalogue.row("attention", group)
                assert row is not None, "build found the row"
                backend = cast("AttentionBackend[object]", backends.serving_attention_backend(phase, at))
                forms = row.offer.index_forms
                form = next(form for form in ("page_table", "csr", "indirect") if form in forms)
                found += [((phase, layer), Place(backend, form, row.offer.features)) for layer in group.layers]
        return found

    def _config(self) -> PretrainedConfig:
        config = self.config()
        assert config is not None, "whoever calls holds the config"
        return config


def _resolve(
    config: PretrainedConfig, asked: Asked, catalogue: Catalogue, dtype: torch.dtype, device: torch.device
) -> Plan:
    facts = model_facts(config, str(dtype))
    with in_engine_idiom():
        return resolve(asked.launch(), ENGINE, facts, _host(device), catalogue)


def _tell_plan(plan: Plan) -> None:
    phases = "; ".join(
        f"{row.phase} {row.kernel} ({row.plugin.distribution} {row.plugin.version}, {row.source})"
        for row in plan.running
        if row.plugin is not None
    )
    LOG.info("Backstamp plan for %s: %s; digest %s", plan.model, phases, plan.digest[:12])
    for warning in plan.warnings:
        LOG.warning("Backstamp plan, %s: %s", warning.code, warning.text)


def _tell_stamps(backends: RunnerBackends) -> None:
    built = (*backends.objects.values(), *backends.linear_objects.values())
    for stamp in dict.fromkeys(map(read_stamp, built)):
        plugin = f"{stamp.plugin.distribution} {stamp.plugin.version}"
        LOG.info("Backstamp built %s for %s: %s", stamp.kernel, ", ".join(stamp.phases), plugin)


def _host(device: torch.device) -> HostFacts:
    """This machine; torch says "cuda" of ROCm too, where the probe knows better."""
    return this_host(None if device.type == "cuda" else device.type, device.index or 0)


def _doubled(have: int, want: int) -> int:
    while have < want:
        have *= 2
    return have
