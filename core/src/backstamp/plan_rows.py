"""The rows a plan is made of: who ships a kernel, what each candidate was told, what runs which layers, what it costs.

In: what resolution decided, piece by piece. Out: values that pickle, compare and say themselves as JSON. They carry
names and versions, never import paths.

.. versionadded:: 0.2
"""

from __future__ import annotations

from typing import NamedTuple

from backstamp.declarations import Phase

__all__ = [
    "Conversion",
    "FeaturePlan",
    "GroupPlan",
    "LibraryRef",
    "Loss",
    "PhasePlan",
    "PluginRef",
    "SinkNeeds",
    "Timing",
    "Verdict",
    "Warn",
    "not_run",
]


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


class Timing(NamedTuple):
    """Two figures of a choice that a record of times decided, in microseconds a layer: its own, and that of the kernel
    priority would have taken (None: not timed). No time is part of a digest."""

    slot: str
    phase: str
    component: str
    kernel: str
    microseconds: float
    by_priority: str
    by_priority_microseconds: float | None

    def as_json(self) -> dict[str, object]:
        """The figures for tools."""
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


class SinkNeeds(NamedTuple):
    """How the sinks of a group of layers meet its kernel: the dtypes the model stores them in, those the kernel's row
    reads, and whether it converts others (`Offer.sink_conversion`)."""

    stored: tuple[str, ...]
    reads: tuple[str, ...]
    conversion: str

    def as_json(self) -> dict[str, object]:
        """The needs for tools."""
        return {"stored": list(self.stored), "reads": list(self.reads), "conversion": self.conversion}


class GroupPlan(NamedTuple):
    """The kernel of one group of like layers in one phase.

    `row` is the accepted one of its declared rows, `source` who decided; `cached` is False for layers without a KV
    cache, an encoder's for instance; `settings` are features to compile in, `skipped` the checks this row passes only
    because the operator bypassed them. `alignment_tokens` is what the row declares; `sinks` None without any.
    """

    component: str
    family: str
    layers: tuple[int, ...]
    kernel: str
    plugin: PluginRef
    library: LibraryRef | None
    row: int
    source: str
    cached: bool = True
    settings: tuple[tuple[str, float], ...] = ()
    skipped: tuple[str, ...] = ()
    alignment_tokens: int | None = None
    sinks: SinkNeeds | None = None

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
            "cached": self.cached,
            "settings": dict(self.settings),
            "skipped": list(self.skipped),
            "alignment_tokens": self.alignment_tokens,
            "sinks": self.sinks.as_json() if self.sinks else None,
        }

    def decided(self) -> dict[str, object]:
        """What the digest covers: all but how it was found (the row's position, who decided, what was skipped) and
        what follows from the kernel and its layers."""
        aside = ("row", "source", "cached", "settings", "skipped", "alignment_tokens", "sinks")
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


def not_run(phase: Phase, setting: str = "") -> PhasePlan:
    """The row of a phase this runner never runs; `setting` is the flag that would set it, if one would."""
    return PhasePlan(
        phase=phase,
        requested=None,
        setting=setting,
        kernel=None,
        plugin=None,
        library=None,
        source="not run",
        groups=(),
        verdicts=(),
    )
