"""A parity check as every check answers: a `Report`, and the JSON that tools of model registries read.

In: a `Parity`. Out: outcomes with findings of the rules hook-parity, gate-coverage, unpaired-draft, and those that say
what could not be read; it passes where something was paired and no fault was found. It compares nothing itself.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from backstamp.entry_classes.facts import Trouble, Uncovered, Violation
from backstamp.findings import Finding, Level, Outcome, Report
from backstamp.parity import Parity

__all__ = ["RULES", "parity_json", "parity_report"]

TOOL = "backstamp parity"
#: What each rule holds and why, for readers of one finding.
RULES: Final[Mapping[str, str]] = {
    "hook-parity": "The loader asks the entry class it instantiates. Where a draft and its target do not answer the "
    "same hooks, one of them gets its weights laid out by a decision that was not taken for it.",
    "gate-coverage": "An entry class that builds gated layers answers the hook by which the loader decides how they "
    "are built.",
    "unpaired-draft": "A draft whose target is not known was compared with nothing.",
    "nothing-paired": "Nothing was compared, which is no pass.",
    "absent-class": "An entry class whose module is not installed here was compared with nothing.",
    "live-registry": "Classes that plugins add to an engine's registry at run time were compared only if it was asked.",
    "unanswered-hook": "A hook that no entry class answers compares nothing; its name may be misspelt.",
    "unread-assignment": "What a module gives its classes by names that are not read may be a hook.",
    "unread-base": "A base class that was not read may have the hook that is missing.",
    "unread-class": "A class that was named and not read was compared with nothing.",
    "unread-decorator": "A decorator may give a class the hook that is missing, or give one of a pair a hook.",
    "unread-list": "A list of entry classes that is not read whole has entry classes nobody compared.",
    "unread-plugin": "A plugin whose declarations cannot be read has entry classes nobody compared.",
    "unread-source": "Source that cannot be read has entry classes nobody compared.",
}


def parity_report(parity: Parity) -> Report:
    """Every pair, every draft without one, every class with gated layers, and what could not be read."""
    return Report(tool=TOOL, subject=parity.subject, outcomes=tuple(_outcomes(parity)), rules=RULES)


def parity_json(parity: Parity) -> dict[str, object]:
    """What was compared and what was found, by class."""
    report = parity_report(parity)
    return {
        "subject": parity.subject,
        "passed": report.passed,
        "hooks": list(parity.hooks),
        "classes": len(parity.classes),
        "pairs": [{"draft": pair.draft.name, "target": pair.target.name, "by": pair.why} for pair in parity.pairs],
        "unpaired": [
            {"draft": item.draft.name, "why": item.why, "file": item.draft.file, "line": item.draft.line}
            for item in parity.unpaired
        ],
        "violations": [{**item._asdict(), "platforms": list(item.platforms)} for item in parity.violations],
        "uncovered": [
            {**item._asdict(), "markers": list(item.markers), "platforms": list(item.platforms)}
            for item in parity.uncovered
        ],
        "unread": [item._asdict() for item in (*parity.troubles, *parity.absent)],
        "notes": [item._asdict() for item in parity.notes],
    }


def _outcomes(parity: Parity) -> Iterator[Outcome]:
    for item in parity.troubles:
        yield Outcome(check=item.rule, name=f"{item.subject} {item.text}", findings=(_trouble(item, "fault"),))
    for item in parity.absent:
        yield Outcome(check="hook-parity", name=item.subject, reason=f"{item.subject} {item.text}")
    for pair in parity.pairs:
        names = (pair.draft.name, pair.target.name)
        found = [item for item in parity.violations if (item.draft, item.target) == names]
        yield Outcome(check="hook-parity", name=" of ".join(names), findings=tuple(map(_violation, found)))
    for unpaired in parity.unpaired:
        draft = unpaired.draft
        fix = f"--pair {draft.name}=TARGET"
        text = f"has no target: {unpaired.why}"
        note = Finding("note", "unpaired-draft", draft.name, text, fix, draft.file, draft.line)
        yield Outcome(check="hook-parity", name=draft.name, findings=(note,), reason="a draft that is not paired")
    for name in dict.fromkeys(item.name for item in parity.uncovered):
        lacking = [_uncovered(item) for item in parity.uncovered if item.name == name]
        yield Outcome(check="gate-coverage", name=name, findings=tuple(lacking))
    for name in parity.covered:
        yield Outcome(check="gate-coverage", name=name)
    if parity.notes:
        notes = tuple(_trouble(item, "note") for item in parity.notes)
        yield Outcome(check="unread", name="bases and registries", findings=notes, reason="not read")
    # absent classes alone are skipped, and a report of nothing else says itself that nothing ran
    if not parity.pairs and (parity.covered or not parity.absent):
        text = f"needs a draft and its target, got {len(parity.classes)} entry class(es) and no pair"
        fix = "Name one with --pair DRAFT=TARGET"
        nothing = Finding("fault", "nothing-paired", parity.subject, text, fix)
        yield Outcome(check="hook-parity", name="pairs", findings=(nothing,))


def _violation(item: Violation) -> Finding:
    lacking, other = (item.draft, item.target) if item.missing_on == "draft" else (item.target, item.draft)
    kind = "target" if item.missing_on == "draft" else "draft"
    text = f"the {item.missing_on} needs {item.hook}, which its {kind} has{_on(item.platforms)}, got none"
    fix = f"Give it to {lacking}; it may delegate to {other}'s"
    return Finding("fault", "hook-parity", f"{item.draft} (draft of {item.target})", text, fix, item.file, item.line)


def _uncovered(item: Uncovered) -> Finding:
    asked = " and ".join(item.markers)
    text = f"builds layers that call {asked}, so it needs {item.hook}{_on(item.platforms)}, got none"
    fix = f"Give it {item.hook}, which the loader asks before it builds a layer"
    return Finding("fault", "gate-coverage", item.name, text, fix, item.file, item.line)


def _on(platforms: tuple[str, ...]) -> str:
    return f" on {', '.join(platforms)}" if platforms else ""


def _trouble(item: Trouble, level: Level) -> Finding:
    return Finding(level, item.rule, item.subject, item.text, "", item.file, item.line)
