"""One declared row, alone: resolved with nothing else behind its key, and built by its real factory.

In: a plugin, one of its rows and a case. Out: the plan, and the stamped backend of the case's phase. Phases that are
not under test go to a companion that accepts everything and computes nothing, so a row that serves one phase alone can
be planned like any other.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Mapping
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

__all__ = ["Solo"]

_COMPANION: Final = "conformance-companion"
_KEY: Final = "conformance"
#: Steps of a draft loop under test: two, so that it has a container and a second step.
_NUM_STEPS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Solo:
    """One row of a plugin on one host."""

    found: Found
    offer: Offer
    host: HostFacts

    @property
    def interpreted(self) -> bool:
        """Whether Triton's interpreter stands for the GPU this row is for."""
        return self.host.triton_interpreter and self.host.device == "cpu" != self.offer.device != "any"

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
        return resolve(launch, engine, case.model(), self.host, self._catalogue(case.phase), role=role)

    def build(self, case: AttentionCase, plan: Plan, layer: LayerSpec, num_pages: int) -> RunnerBackends:
        """Build the plan for one layer.

        Raises:
            BackstampError: as `backstamp.construction.build`.
        """
        tokens = sum(q for q, _ in case.rows) + case.pad_tokens
        # each step of a draft loop sees a token more
        longest = max((kv for _, kv in case.rows), default=0) + _NUM_STEPS
        runner = RunnerShape(
            device=torch_device(plan.device),
            layers=(layer,),
            max_rows=max(8, len(case.rows)),
            max_tokens=max(64, tokens),
            max_pages=max(8, num_pages),
            max_kv_len=max(64, longest),
        )
        return build(plan, runner, self._catalogue(case.phase), load=self._load)

    def _asked(self, case: AttentionCase) -> Mapping[str, object]:
        key = f"{self.found.plugin.distribution}:{_KEY}"
        asked: dict[str, object] = {"attention_backend": key, "draft_attention_backend": key}
        asked["page_size"] = case.page_size
        if case.kv_dtype != "same":
            names = {canonical: name for name, canonical in self.offer.kv_dtype_names.items()}
            asked["kv_cache_dtype"] = names.get(case.kv_dtype, case.kv_dtype)
        if case.phase == "verify":
            asked["verify_attention_backend"] = key
        if "spec" in case.said or "topk" in case.said:
            asked |= {"speculative_algorithm": "EAGLE", "speculative_num_steps": _NUM_STEPS}
            asked["speculative_topk"] = 2 if "topk" in case.said else 1
        for word, name, value in (
            ("deterministic", "deterministic", True),
            ("training", "training", True),
            ("tp", "tp_size", 2),
            ("dcp", "dcp_size", 2),
            ("chunked_prefill", "chunked_prefill_size", 64),
        ):
            if word in case.words:
                asked[name] = value
        return asked

    def _catalogue(self, phase: Phase) -> Catalogue:
        """The row behind a key of its own in one phase, the companion in the others."""
        others = {other: (_COMPANION,) for other in PHASES if other != phase}
        alias = Alias(key=_KEY, kernels=(self.offer.kernel,), by_phase=others)
        # the plugin's own keys stay known, so that a leaf that answers one is told so
        declared = Declared(offers=(self.offer,), aliases=(alias, *self.found.declared.aliases))
        companion = fake_plugin(_COMPANION, (_companion_of(self.offer),))
        # one row is not what `backstamp.json` says: the declarations check holds that, with all of them
        alone = replace(self.found, declared=declared, origin=f"one row of {self.found.origin}")
        return catalogue_of(alone, companion)

    def _load(self, row: Row, catalogue: Catalogue) -> Factory:
        if row.offer.kernel == _COMPANION:
            return recording_factory(row, catalogue)
        return load_factory(row, catalogue)


def _companion_of(offer: Offer) -> Offer:
    """A row that takes all that this one does, and all else."""
    return Offer(
        kernel=_COMPANION,
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
