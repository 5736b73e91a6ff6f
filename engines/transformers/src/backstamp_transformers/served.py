"""One model on its kernels: resolved when it is admitted, its kernels kept for each dtype and device it runs in.

In: a request and a model. Out: the layers and the `Kernels` of each step. It resolves again where the model runs in
another dtype or on another device than before, and never falls back.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PretrainedConfig

from backstamp.attention import LayerSpec
from backstamp.catalogue import Catalogue, build_catalogue
from backstamp.declarations import Slot
from backstamp.discovery import discover
from backstamp.errors import BadHost
from backstamp.factory_loading import load_factory
from backstamp.host import HostFacts, this_host
from backstamp.plan_rows import PhasePlan
from backstamp.resolution import resolve
from backstamp.telling import tell_phases, tell_warnings
from backstamp_transformers.asked import Asked, is_asked
from backstamp_transformers.engine_facts import ENGINE, model_facts
from backstamp_transformers.errors import NotServed, in_engine_idiom
from backstamp_transformers.kernels import Bounds, Kernels
from backstamp_transformers.layers import layer_specs, linear_specs

__all__ = ["Served"]

LOG: Final = logging.getLogger(__name__)


@dataclass(slots=True)
class Served:
    """One model's plans and kernels.

    Attributes:
        model, config: the model, held weakly, and the config its attention modules carry; `asked` what was requested.
        now: the kernels in force, which are those of the last step; `kernels` all there are, by dtype and device.
        specs, linear_specs: the layers by id, empty before they are read of the modules.
        masks: what was read of masks of the caller's own, by mask; `hooks` are on the linear layers' modules.
        in_force: False once it was released; `held` where a handle has it.
    """

    model: weakref.ref[nn.Module]
    config: weakref.ref[PretrainedConfig]
    asked: Asked
    catalogue: Catalogue
    now: Kernels
    kernels: dict[tuple[torch.dtype, torch.device], Kernels]
    specs: dict[int, LayerSpec] = field(default_factory=dict)
    linear_specs: dict[int, LayerSpec] = field(default_factory=dict)
    masks: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)
    hooks: list[RemovableHandle] = field(default_factory=list)
    in_force: bool = True
    held: bool = False

    @classmethod
    def admit(
        cls, model: nn.Module, config: PretrainedConfig, asked: Asked, dtype: torch.dtype, device: torch.device
    ) -> Served:
        """Resolve a model's request and import its kernels, before any of its weights are needed.

        Raises:
            BackstampError: a `ValueError` or `ImportError` with the verdicts of every candidate.
        """
        catalogue = asked.catalogue if asked.catalogue is not None else build_catalogue(discover())
        place = dtype, numbered(device)
        kernels = _resolved(config, asked, catalogue, *place)
        return cls(weakref.ref(model), weakref.ref(config), asked, catalogue, kernels, {place: kernels})

    def applies(self) -> bool:
        """Whether the model still runs as was asked: it may have been set to another implementation since."""
        config = self.config()
        return self.in_force and config is not None and is_asked(str(config._attn_implementation), self.asked)

    def fit(self, step: Bounds, dtype: torch.dtype, device: torch.device) -> Kernels:
        """The kernels of a step of this size, dtype and device; builds or builds anew where they are not there."""
        kernels = self.kernels.get((dtype, device))
        if kernels is None:
            kernels = self.kernels[dtype, device] = self._at(dtype, numbered(device))
        self.now = kernels
        grown = kernels.bounds.including(step)
        if kernels.backends is None or grown != kernels.bounds:
            kernels.bounds = grown
            self.build()
        return kernels

    def build(self) -> None:
        """Build the kernels in force, for the layers as the model has them now."""
        self.read_layers()
        with in_engine_idiom(self.asked.words):
            self.now.build((*self.specs.values(), *self.linear_specs.values()))

    def read_layers(self) -> None:
        """Read the layers of the model's modules.

        Raises:
            NotServed: the modules are not those the config describes, or the model is gone.
        """
        model, config = self.model(), self._config()
        if model is None:
            raise NotServed(f"Transformers model {config.model_type}", needed="the model in memory", found="none")
        # a layer is the same in every dtype
        facts = model_facts(config, str(torch.float32))
        self.specs, self.linear_specs = layer_specs(model, config, facts), linear_specs(facts)

    def spec(self, layer: int) -> LayerSpec:
        """One attention layer."""
        if not self.specs:
            self.read_layers()
        return self.specs[layer]

    def let_go(self) -> None:
        """Drop all that was built; a later step builds what it needs."""
        for kernels in self.kernels.values():
            kernels.let_go()
        self.masks.clear()

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """The layers whose recurrence the plan gives a kernel."""
        rows = self.now.plan.linear.rows if self.now.plan.linear is not None else ()
        return tuple(sorted({layer for row in rows for group in row.groups for layer in group.layers}))

    def _at(self, dtype: torch.dtype, device: torch.device) -> Kernels:
        """The kernels there are under a device's full name, or new ones."""
        if (dtype, device) not in self.kernels:
            self.kernels[dtype, device] = _resolved(self._config(), self.asked, self.catalogue, dtype, device)
        return self.kernels[dtype, device]

    def _config(self) -> PretrainedConfig:
        config = self.config()
        assert config is not None, "whoever calls holds the config"
        return config


def numbered(device: torch.device) -> torch.device:
    """A device under one name: torch compares `cuda` and `cuda:0` as two, and numbers a CPU where it was asked to."""
    return torch.device("cpu") if device.type == "cpu" else torch.device(device.type, device.index or 0)


def _resolved(
    config: PretrainedConfig, asked: Asked, catalogue: Catalogue, dtype: torch.dtype, device: torch.device
) -> Kernels:
    facts = model_facts(config, str(dtype))
    with in_engine_idiom(asked.words):
        plan = resolve(asked.launch(), ENGINE, facts, _host(config, device), catalogue)
        _load_factories("attention", plan.running, catalogue)
        _load_factories("linear", plan.running_linear, catalogue)
    tell_phases(LOG, plan, "", plan.running)
    tell_warnings(LOG, plan)
    return Kernels(plan, catalogue, device)


def _load_factories(slot: Slot, phases: Sequence[PhasePlan], catalogue: Catalogue) -> None:
    """A kernel library that does not import is told now, not after minutes of loading weights."""
    for group in dict.fromkeys(group for phase in phases for group in phase.groups):
        row = catalogue.row(slot, group)
        assert row is not None, "resolve found the row"
        load_factory(row, catalogue)


def _host(config: PretrainedConfig, device: torch.device) -> HostFacts:
    """This machine; torch says "cuda" of ROCm too."""
    kind = "rocm" if device.type == "cuda" and torch.version.hip is not None else device.type
    try:
        return this_host(kind, device.index or 0)
    except BadHost as cause:
        raise NotServed(
            f"Transformers model {config.model_type} on {device}",
            needed=cause.needed,
            found=cause.found,
            considered=cause.considered,
            fix="Name a device of this machine, or none",
        ) from cause
