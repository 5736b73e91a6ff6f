"""A report as JUnit XML, as Jenkins, GitLab and the test tabs of other CIs read it.

In: a `Report`. Out: a suite a check, a test case an outcome. A report in which nothing ran has a test case that errs,
because an empty file counts as a pass everywhere.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape, quoteattr

from backstamp.findings import Finding, Outcome, Report
from backstamp.formats.visible import visible

__all__ = ["as_junit"]


class _Case(NamedTuple):
    """A test case as text, and what it counts for: "" where it passed."""

    check: str
    text: str
    counts_as: str
    seconds: float


def as_junit(report: Report) -> str:
    """The outcomes as suites of test cases."""
    cases = [_case(report.tool, outcome) for outcome in report.outcomes]
    if not report.ran:
        cases.append(_nothing_ran(report))
    checks = dict.fromkeys(case.check for case in cases)
    suites = [_suite(check, [case for case in cases if case.check == check]) for check in checks]
    counted = {key: value for key, value in _counts(cases).items() if key != "skipped"}
    body = _element("testsuites", {"name": f"{report.tool} {report.subject}", **counted}, *suites)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{body}\n'


def _suite(check: str, cases: Sequence[_Case]) -> str:
    return _element("testsuite", {"name": check, **_counts(cases)}, *(case.text for case in cases))


def _counts(cases: Sequence[_Case]) -> dict[str, str]:
    every = {"failures": "failure", "errors": "error", "skipped": "skipped"}
    counted = {name: str(sum(case.counts_as == kind for case in cases)) for name, kind in every.items()}
    return {"tests": str(len(cases)), **counted, "time": _time(sum(case.seconds for case in cases))}


def _case(tool: str, outcome: Outcome) -> _Case:
    faults = [finding for finding in outcome.findings if finding.level == "fault"]
    notes = [finding for finding in outcome.findings if finding.level == "note"]
    parts = []
    counts_as = {"failed": "failure", "skipped": "skipped", "passed": ""}[outcome.status]
    if faults:
        # one element however many faults there are: most readers show the first alone
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        attributes = {"message": faults[0].words + more, "type": faults[0].rule}
        parts.append(_element("failure", attributes, _said(faults)))
    elif counts_as == "skipped":
        parts.append(_element("skipped", {"message": outcome.reason}))
    if notes:
        parts.append(_element("system-out", {}, _said(notes)))
    place = {"classname": f"{tool}.{outcome.check}", "name": outcome.name, "time": _time(outcome.seconds)}
    return _Case(outcome.check, _element("testcase", place, *parts), counts_as, outcome.seconds)


def _nothing_ran(report: Report) -> _Case:
    error = _element("error", {"message": report.nothing_ran, "type": "nothing-ran"})
    place = {"classname": report.tool, "name": "nothing ran", "time": _time(0.0)}
    return _Case(report.tool, _element("testcase", place, error), "error", 0.0)


def _said(findings: Sequence[Finding]) -> str:
    """Each finding on a line: where, in what, what is wrong and what to do."""
    lines = [": ".join(filter(None, (finding.place, finding.subject, finding.words))) for finding in findings]
    # a carriage return as it is reads back as a line feed; a line feed as it is begins a line of a log that CI obeys
    return escape(visible("\n".join(lines)), {"\r": "&#13;", "\n": "&#10;"})


def _element(name: str, attributes: Mapping[str, str], *inside: str) -> str:
    """An element; `inside` is XML already, attributes are any text."""
    given = "".join(f" {key}={quoteattr(visible(value))}" for key, value in attributes.items())
    return f"<{name}{given}>{''.join(inside)}</{name}>" if inside else f"<{name}{given}/>"


def _time(seconds: float) -> str:
    return f"{seconds:.3f}"
