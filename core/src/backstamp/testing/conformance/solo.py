"""One declared row, alone: resolved with nothing else behind its key, and built by its real factory.

In: a plugin, one of its rows and a case. Out: the plan, and the stamped backend of the case's phase. Phases that are
not under test go to a companion that accepts everything and computes nothing, so a row that serves one phase alone can
be planned like any other.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from backstamp.attention import LayerSpec
from backstamp.catalogue import Catalogue, Row
from backstamp.construction import RunnerBackends, RunnerShape, build
from backstamp.declarations import ANY, FEATURES, PHASES, Alias, Offer, PageSizes, Phase, Role
from backstamp.declared import Declared
from backstamp.device_check import torch_device
from backstamp.discovery import Found
from backstamp.engine import EngineFacts
from backstamp.factory_loading import Factory, load_factory
from backstamp.host import HostFacts
from backstamp.launch import Requests, make_launch
from backstamp.plan import Plan
from backstamp.resolution import resolve
from backstamp.testing.conformance.cases import AttentionCase
from backstamp.testing.fakes import catalogue_of, fake_plugin, recording_factory

__all__ = ["COMPANION", "KEY", "NUM_STEPS", "Alone", "Solo", "asked_by", "companion_of", "load_alone", "second_layer"]

COMPANION: Final = "conformance-companion"
KEY: Final = "conformance"
#: Words of a launch, and the field of `Requests` that makes each true.
_ASKED: Final[Mapping[str, tuple[str, object]]] = {
    "deterministic": ("deterministic", True),
    "training": ("training", True),
    "tp": ("tp_size", 2),
    "dcp": ("dcp_size", 2),
    "chunked_prefill": ("chunked_prefill_size", 64),
}
#: Steps of a draft loop where a case does not say: two, so that it has a container and a second step.
NUM_STEPS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """One row of a plugin on one host, of either slot."""

    found: Found
    offer: Offer
    host: HostFacts

    @property
    def interpreted(self) -> bool:
        """Whether Triton's interpreter stands for the GPU this row is for."""
        return self.host.triton_interpreter and self.host.device == "cpu" != self.offer.device != "any"

    @property
    def key(self) -> str:
        """What an operator types for this row and no other."""
        return f"{self.found.plugin.distribution}:{KEY}"

    def catalogue(self, others: Iterable[Phase], companions: Sequence[Offer]) -> Catalogue:
        """The row behind a key of its own, the companion in the `others` of its slot's phases."""
        by_phase = dict.fromkeys(others, (companions[0].kernel,))
        alias = Alias(key=KEY, kernels=(self.offer.kernel,), by_phase=by_phase, slot=self.offer.slot)
        # the plugin's own keys stay known, so that a leaf that answers one is told so
        declared = Declared(offers=(self.offer,), aliases=(alias, *self.found.declared.aliases))
        # one row is not what `backstamp.json` says: the declarations check holds that, with all of them
        alone = replace(self.found, declared=declared, origin=f"one row of {self.found.origin}")
        return catalogue_of(alone, fake_plugin(COMPANION, companions))


def load_alone(row: Row, catalogue: Catalogue) -> Factory:
    """The row's real factory, and a recording one for a companion."""
    if row.plugin.name == COMPANION:
        return recording_factory(row, catalogue)
    return load_factory(row, catalogue)


@dataclass(frozen=True, slots=True, kw_only=True)
class Solo(Alone):
    """One attention row of a plugin on one host."""

    def plan(self, case: AttentionCase) -> Plan:
        """Resolve the case with this row behind its phase.

        Raises:
            BackstampError: the row does not serve the case, or not on this host.
        """
        engine = EngineFacts(
            name="conformance",
            index_forms=frozenset({case.index_form}),
            layouts=frozenset({case.layout}),
            graph="uniform" if case.graph else "never",
            prefix_cache=case.cached_prefix,
        )
        role: Role = "draft" if case.phase.startswith("draft") else "target"
        launch = make_launch(Requests(**self._asked(case)), role=role)  # type: ignore[arg-type]
        return resolve(launch, engine, case.model(), self.host, self._catalogue(case), role=role)

    def build(self, case: AttentionCase, plan: Plan, layer: LayerSpec, num_pages: int) -> RunnerBackends:
        """Build the plan for a layer and the next.

        Raises:
            BackstampError: as `backstamp.construction.build`.
        """
        tokens = sum(q for q, _ in case.rows) + case.pad_tokens
        # each step of a draft loop sees a token more
        longest = max((kv for _, kv in case.rows), default=0) + case.num_steps
        runner = RunnerShape(
            device=torch_device(plan.device),
            layers=(layer, second_layer(layer)),
            max_rows=max(8, len(case.rows)),
            max_tokens=max(64, tokens),
            max_pages=max(8, num_pages),
            max_kv_len=max(64, longest),
        )
        return build(plan, runner, self._catalogue(case), load=load_alone)

    def _asked(self, case: AttentionCase) -> Mapping[str, object]:
        key = self.key
        asked: dict[str, object] = {"attention_backend": key, "draft_attention_backend": key, **dict(case.asks)}
        asked["page_size"] = case.page_size
        if case.kv_dtype != "same":
            names = {canonical: name for name, canonical in self.offer.kv_dtype_names.items()}
            asked["kv_cache_dtype"] = names.get(case.kv_dtype, case.kv_dtype)
        if case.phase == "verify":
            asked["verify_attention_backend"] = key
        if "spec" in case.said or "topk" in case.said:
            asked |= {"speculative_algorithm": "EAGLE", "speculative_num_steps": case.num_steps}
            asked["speculative_topk"] = 2 if "topk" in case.said else 1
        return asked | asked_by(case.words)

    def _catalogue(self, case: AttentionCase) -> Catalogue:
        # what is asked of a kernel's insides is a conflict where another kernel serves a phase
        others = () if case.asks else [other for other in PHASES if other != case.phase]
        return self.catalogue(others, (companion_of(self.offer),))


def second_layer(layer: LayerSpec) -> LayerSpec:
    """The next layer of the same group: alike in all that groups layers, with numbers of its own."""
    sinks = None if layer.sinks is None else layer.sinks.flip(0) + 1
    return replace(layer, layer_id=1, scale=0.7 * layer.scale, sinks=sinks)


def asked_by(words: frozenset[str]) -> dict[str, object]:
    """The requests that make these words of `SITUATIONS` true of a launch."""
    return {name: value for word, (name, value) in _ASKED.items() if word in words}


def companion_of(offer: Offer) -> Offer:
    """A row that takes all that this one does, and all else."""
    return Offer(
        kernel=COMPANION,
        factory="conformance_companion.backend:build",
        family=offer.family,
        device="any",
        archs=ANY,
        phases=frozenset({"prefill", "decode", "verify"}),
        dtypes=frozenset({"fp16", "bf16", "fp32"}),
        kv_dtypes=frozenset({"same", "e4m3fn", "e4m3fnuz", "e5m2"}) | offer.kv_dtypes,
        kv_dtype_names=offer.kv_dtype_names,
        head_dims=ANY,
        page_sizes=PageSizes(preferred=offer.page_sizes.preferred, multiple_of=1),
        kv_forms=frozenset({"paged", "ragged"}),
        index_forms=frozenset({"page_table", "csr", "indirect"}),
        prefix=True,
        features=FEATURES,
        graph="any",
        plan="device",
        deterministic=True,
        alignment_tokens=1,
        sink_dtypes=frozenset({"fp16", "bf16", "fp32"}),
        layouts=offer.layouts,
        mask_format="internal_causal",
        priority=0,
    )
