"""What every check answers: each thing it looked at with what came of it, and what was found there.

In: outcomes, as the checks of `lint`, `parity` and `check` make them. Out: one `Report`, which the command prints and
`backstamp.formats` turns into files. It decides one thing alone: whether a report stands for a pass. A check that
looked at nothing does not.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

__all__ = ["Finding", "Level", "Outcome", "Report", "Status"]

#: A fault fails the report, a note does not.
Level: TypeAlias = Literal["fault", "note"]
Status: TypeAlias = Literal["passed", "failed", "skipped"]


class Finding(NamedTuple):
    """One thing that is wrong, or worth a look.

    Attributes:
        rule: which rule, in kebab case ("base-field", "hook-parity"): what a list of exceptions names.
        subject: what it was found in: a class, a pair, a kernel and its row.
        text: needs X, got Y. fix: what to do, empty where the text says it.
        file: path of the source, relative to what was checked, with forward slashes; empty without one.
        line: 1-based; 0 for the file as a whole.
    """

    level: Level
    rule: str
    subject: str
    text: str
    fix: str = ""
    file: str = ""
    line: int = 0

    @property
    def words(self) -> str:
        """What is wrong and what to do, as sentences."""
        return f"{self.text}. {self.fix}" if self.fix else self.text

    @property
    def place(self) -> str:
        """Where, as `file:line`; empty without a file."""
        return f"{self.file}:{self.line}" if self.file and self.line else self.file

    def as_json(self) -> dict[str, str | int]:
        """The finding for tools."""
        return self._asdict()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One thing that was checked.

    Attributes:
        check: which check ("numerics"). name: of what ("acme mha decode bf16, page 16"), unique within the check.
        findings: empty unless it failed, or passed with notes.
        reason: why it was skipped: the hardware or library it needs.
        seconds: how long it took, wall clock.
    """

    check: str
    name: str
    findings: tuple[Finding, ...] = ()
    reason: str = ""
    seconds: float = 0.0

    @property
    def status(self) -> Status:
        """Failed with a fault, skipped with a reason, else passed."""
        if any(finding.level == "fault" for finding in self.findings):
            return "failed"
        return "skipped" if self.reason else "passed"

    def as_json(self) -> dict[str, object]:
        """The outcome for tools; its findings stand in the report's own list."""
        return {
            "check": self.check,
            "name": self.name,
            "status": self.status,
            "reason": self.reason,
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one command checked.

    Attributes:
        tool: the command's name ("backstamp lint"). subject: what it was pointed at.
        rules: what each rule holds and why, for readers of a finding who never saw the rule.
    """

    tool: str
    subject: str
    outcomes: tuple[Outcome, ...]
    rules: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), hash=False)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Every finding, faults first, else in the order of the outcomes."""
        every = [finding for outcome in self.outcomes for finding in outcome.findings]
        return tuple(sorted(every, key=lambda finding: finding.level != "fault"))

    def count(self, status: Status) -> int:
        """How many outcomes have this status."""
        return sum(outcome.status == status for outcome in self.outcomes)

    @property
    def ran(self) -> bool:
        """Whether anything was checked at all: skipped is not checked."""
        return any(outcome.status != "skipped" for outcome in self.outcomes)

    @property
    def nothing_ran(self) -> str:
        """What to say where nothing ran; empty where something did."""
        if self.ran:
            return ""
        reasons = dict.fromkeys(outcome.reason for outcome in self.outcomes)
        why = f": {'; '.join(reasons)}" if reasons else ""
        return f"needs at least one check that runs, got {self.count('skipped')} skipped{why}"

    @property
    def passed(self) -> bool:
        """Something ran and nothing failed."""
        return self.ran and not self.count("failed")

    def as_json(self) -> dict[str, object]:
        """The report for tools."""
        return {
            "tool": self.tool,
            "subject": self.subject,
            "passed": self.passed,
            "counts": {status: self.count(status) for status in ("passed", "failed", "skipped")},
            "findings": [finding.as_json() for finding in self.findings],
            "outcomes": [outcome.as_json() for outcome in self.outcomes],
        }
