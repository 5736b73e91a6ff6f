"""The plan: the frozen decision of one runner, with a verdict for every candidate.

In: what resolution decided. Out: a value that pickles, compares, prints as byte-stable JSON and has a digest over
what runs (never over verdicts, warnings, host name, paths or times). It carries names and versions, never import
paths, and building one imports no plugin.

.. versionadded:: 0.1
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import NamedTuple

from backstamp.declarations import GraphLevel, Phase, Role

__all__ = [
    "SCHEMA",
    "Conversion",
    "FeaturePlan",
    "GroupPlan",
    "LibraryRef",
    "LinearPlan",
    "Loss",
    "PhasePlan",
    "Plan",
    "PluginRef",
    "Verdict",
    "Warn",
]

SCHEMA = 1


class PluginRef(NamedTuple):
    """Which plugin: its entry name, distribution and version."""

    name: str
    distribution: str
    version: str

    def as_json(self) -> dict[str, str]:
        """The reference for tools."""
        return self._asdict()


class LibraryRef(NamedTuple):
    """The kernel library a row runs on; `version` None on a described host without a library list."""

    distribution: str
    version: str | None

    def as_json(self) -> dict[str, str | None]:
        """The reference for tools."""
        return self._asdict()


class Verdict(NamedTuple):
    """What one candidate kernel was told: accepted, or refused with the first fact that does not fit.

    `code` and `field` name the check, `wanted` and `have` are its two sides; the text is made when asked for.
    """

    kernel: str
    accepted: bool
    code: str = "accepted"
    field: str = ""
    wanted: str = ""
    have: str = ""
    plugin: str = ""

    @property
    def message(self) -> str:
        """One line: "needs X, got Y"."""
        if self.accepted:
            return "accepted"
        return f"needs {self.wanted}, got {self.have}"

    def as_json(self) -> dict[str, object]:
        """The verdict for tools."""
        return {
            "kernel": self.kernel,
            "accepted": self.accepted,
            "code": self.code,
            "field": self.field,
            "wanted": self.wanted,
            "have": self.have,
            "message": self.message,
            "plugin": self.plugin,
        }


class Warn(NamedTuple):
    """A row of the plan an operator should read, printed once."""

    code: str
    text: str

    def as_json(self) -> dict[str, str]:
        """The warning for tools."""
        return self._asdict()


class Loss(NamedTuple):
    """What a choice costs, and the accepted kernel that would not cost it ("" if none)."""

    code: str
    phase: str
    kernel: str
    cost: str
    alternative: str

    def as_json(self) -> dict[str, str]:
        """The loss for tools."""
        return self._asdict()


class FeaturePlan(NamedTuple):
    """An optimisation that plugins switch by default: on or off here, who decided, and why."""

    feature: str
    on: bool
    source: str
    reason: str

    def as_json(self) -> dict[str, object]:
        """The feature for tools."""
        return self._asdict()


class Conversion(NamedTuple):
    """One stored parameter a kernel reads in another dtype: converted once in `plan`, into a buffer of its own."""

    parameter: str
    phase: str
    kernel: str
    stored: str
    wanted: str

    def as_json(self) -> dict[str, str]:
        """The conversion for tools."""
        return self._asdict()


class GroupPlan(NamedTuple):
    """The kernel of one group of like layers in one phase.

    `row` is the accepted one of its declared rows, `source` who decided; `settings` are features to compile in,
    `skipped` the checks this row passes only because the operator bypassed them.
    """

    component: str
    family: str
    layers: tuple[int, ...]
    kernel: str
    plugin: PluginRef
    library: LibraryRef | None
    row: int
    source: str
    settings: tuple[tuple[str, float], ...] = ()
    skipped: tuple[str, ...] = ()

    def as_json(self) -> dict[str, object]:
        """The group for tools."""
        return {
            "component": self.component,
            "family": self.family,
            "layers": list(self.layers),
            "kernel": self.kernel,
            "plugin": self.plugin.as_json(),
            "library": self.library.as_json() if self.library else None,
            "row": self.row,
            "source": self.source,
            "settings": dict(self.settings),
            "skipped": list(self.skipped),
        }

    def decided(self) -> dict[str, object]:
        """What the digest covers: all but how it was found (the row's position, who decided, what was skipped)."""
        aside = ("row", "source", "settings", "skipped")
        return {name: value for name, value in self.as_json().items() if name not in aside}


class PhasePlan(NamedTuple):
    """One phase: what was asked, what runs, who decided, and why the others do not.

    `setting` is the flag that decided, or, where nobody asked, the flag that would; "" where the phase has none.
    """

    phase: Phase
    requested: str | None
    setting: str
    kernel: str | None
    plugin: PluginRef | None
    library: LibraryRef | None
    source: str
    groups: tuple[GroupPlan, ...]
    verdicts: tuple[Verdict, ...]

    def as_json(self) -> dict[str, object]:
        """The phase for tools."""
        return {
            "requested": self.requested,
            "setting": self.setting,
            "kernel": self.kernel,
            "plugin": self.plugin.as_json() if self.plugin else None,
            "library": self.library.as_json() if self.library else None,
            "source": self.source,
            "groups": [group.as_json() for group in self.groups],
            "verdicts": [verdict.as_json() for verdict in self.verdicts],
        }


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """The linear slot of a hybrid model: one `PhasePlan` for each of its three consumers."""

    decode: PhasePlan
    prefill: PhasePlan
    verify: PhasePlan

    def as_json(self) -> dict[str, object]:
        """The slot for tools."""
        return {"decode": self.decode.as_json(), "prefill": self.prefill.as_json(), "verify": self.verify.as_json()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one runner runs, on `host`, a `device` ("cuda", "cpu"). `phases` always holds all five; `layouts` maps
    "attention" and "linear" to layout ids."""

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
    def digest(self) -> str:
        """sha256 over the canonical JSON of what runs: equal digests mean equal kernels, versions and layouts."""
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
            "speculative": {"num_steps": self.num_steps, "topk": self.topk},
            "losses": [loss.as_json() for loss in self.losses],
            "warnings": [warning.as_json() for warning in self.warnings],
            "bypassed": list(self.bypassed),
            "features": [feature.as_json() for feature in self.features],
            "conversions": [conversion.as_json() for conversion in self.conversions],
            "digest": self.digest,
        }


def _decided_linear(linear: LinearPlan | None) -> object:
    if linear is None:
        return None
    rows = (linear.decode, linear.prefill, linear.verify)
    return {row.phase: [group.decided() for group in row.groups] for row in rows}
