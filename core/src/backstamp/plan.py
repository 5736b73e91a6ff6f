"""The plan: the frozen decision of one runner, with a verdict for every candidate.

In: what resolution decided. Out: a value that pickles, compares, prints as byte-stable JSON and has a digest over
what runs (never over verdicts, warnings, host name, paths or times). It carries names and versions, never import
paths, and building one imports no plugin.

.. versionadded:: 0.1
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from backstamp.declarations import GraphLevel, Phase, Role
from backstamp.plan_rows import Conversion, FeaturePlan, Loss, PhasePlan, Timing, Warn

__all__ = ["SCHEMA", "LinearPlan", "Plan"]

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """The linear slot of a hybrid model: one `PhasePlan` for each of its three consumers."""

    decode: PhasePlan
    prefill: PhasePlan
    verify: PhasePlan

    @property
    def rows(self) -> tuple[PhasePlan, PhasePlan, PhasePlan]:
        """The three rows: decode, prefill, verify."""
        return self.decode, self.prefill, self.verify

    def as_json(self) -> dict[str, object]:
        """The slot for tools."""
        return {"decode": self.decode.as_json(), "prefill": self.prefill.as_json(), "verify": self.verify.as_json()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one runner runs, on `host`, a `device` ("cuda", "cpu"). `phases` always holds all five; `layouts` maps
    "attention" and "linear" to layout ids; `sub_settings` are what was asked of a kernel's insides, as
    ("dsa_prefill_backend", "trtllm"); `conv_sidecar` says that the draft has short convolutions of its own; `timings`
    are the figures of what a tune record decided."""

    host: str
    device: str
    model: str
    role: Role
    phases: tuple[PhasePlan, ...]
    linear: LinearPlan | None
    dtype: str
    kv_dtype: str
    page_size: int
    page_size_source: str
    layouts: tuple[tuple[str, str], ...]
    graph: GraphLevel
    num_steps: int
    topk: int
    losses: tuple[Loss, ...]
    warnings: tuple[Warn, ...]
    bypassed: tuple[str, ...] = ()
    features: tuple[FeaturePlan, ...] = ()
    conversions: tuple[Conversion, ...] = ()
    sub_settings: tuple[tuple[str, str], ...] = ()
    conv_sidecar: bool = False
    timings: tuple[Timing, ...] = ()

    def phase(self, phase: Phase) -> PhasePlan:
        """One phase's row."""
        for row in self.phases:
            if row.phase == phase:
                return row
        raise LookupError(f"plan of {self.model}: no phase {phase!r}; the phases are prefill, decode, verify, ...")

    @property
    def running(self) -> tuple[PhasePlan, ...]:
        """The phases this runner runs."""
        return tuple(row for row in self.phases if row.kernel is not None)

    @property
    def running_linear(self) -> tuple[PhasePlan, ...]:
        """The phases of the linear slot that layers of this runner run; only a target that verifies runs its verify."""
        rows = self.linear.rows if self.linear is not None else ()
        verifies = any(row.phase == "verify" for row in self.running)
        return tuple(row for row in rows if row.kernel is not None and (verifies or row.phase != "verify"))

    @property
    def digest(self) -> str:
        """sha256 over the canonical JSON of what runs: equal digests mean equal kernels, versions and layouts."""
        # a plan whose digest nobody reads is spared the import
        import hashlib

        decided = {
            "role": self.role,
            "phases": {row.phase: [group.decided() for group in row.groups] for row in self.phases},
            "linear": _decided_linear(self.linear),
            "page_size": self.page_size,
            "layouts": dict(self.layouts),
            "graph": self.graph,
        }
        return hashlib.sha256(json.dumps(decided, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def as_json(self) -> dict[str, object]:
        """The plan for tools; key order is fixed."""
        return {
            "schema": SCHEMA,
            "host": self.host,
            "device": self.device,
            "model": self.model,
            "role": self.role,
            "phases": {row.phase: row.as_json() for row in self.phases},
            "linear": self.linear.as_json() if self.linear else None,
            "page_size": self.page_size,
            "page_size_source": self.page_size_source,
            "dtype": self.dtype,
            "kv_cache_dtype": self.kv_dtype,
            "layouts": dict(self.layouts),
            "graph": self.graph,
            "speculative": {"num_steps": self.num_steps, "topk": self.topk, "conv_sidecar": self.conv_sidecar},
            "losses": [loss.as_json() for loss in self.losses],
            "warnings": [warning.as_json() for warning in self.warnings],
            "bypassed": list(self.bypassed),
            "features": [feature.as_json() for feature in self.features],
            "conversions": [conversion.as_json() for conversion in self.conversions],
            "sub_settings": dict(self.sub_settings),
            "timings": [timing.as_json() for timing in self.timings],
            "digest": self.digest,
        }


def _decided_linear(linear: LinearPlan | None) -> object:
    if linear is None:
        return None
    rows = linear.rows
    return {row.phase: [group.decided() for group in row.groups] for row in rows}
