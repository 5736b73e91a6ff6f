"""A report as SARIF 2.1.0, the form code scanning takes up.

In: a `Report`. Out: one run: the tool with the rules that were broken, and a result a finding. What passed or was
skipped is no result; where nothing ran, the run says that it did not succeed.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import quote

import backstamp
from backstamp.findings import Finding, Report
from backstamp.formats.plain_json import json_text
from backstamp.formats.visible import visible

__all__ = ["as_sarif"]

#: Source: OASIS SARIF 2.1.0, errata 01, section 3.13.3
_SCHEMA: Final = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_HOME: Final = "https://pypi.org/project/backstamp/"
_LEVELS: Final = {"fault": "error", "note": "note"}


def as_sarif(report: Report) -> str:
    """The findings as results, faults first."""
    rules = sorted({finding.rule for finding in report.findings})
    driver = {
        "name": report.tool,
        "version": backstamp.__version__,
        "informationUri": _HOME,
        "rules": [_rule(rule, report) for rule in rules],
    }
    run = {
        "tool": {"driver": driver},
        # what keeps the uploads of two tools, or of two subjects, from replacing each other
        "automationDetails": {"id": f"{report.tool} {report.subject}/"},
        "invocations": [_invocation(report)],
        "results": [_result(finding, rules) for finding in report.findings],
    }
    return json_text({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]})


def _rule(rule: str, report: Report) -> dict[str, object]:
    """A rule in words: what the check says of it, else what all its findings say to do."""
    fixes = {finding.fix for finding in report.findings if finding.rule == rule}
    words = rule.replace("-", " ")
    text = report.rules.get(rule, "") or (fixes.pop() if len(fixes) == 1 else "")
    text = text or f"A rule of {report.tool}: {words}"
    return {"id": rule, "shortDescription": {"text": words}, "fullDescription": {"text": text}, "help": {"text": text}}


def _invocation(report: Report) -> dict[str, object]:
    if report.ran:
        return {"executionSuccessful": True}
    said = {"level": "error", "message": {"text": report.nothing_ran}}
    return {"executionSuccessful": False, "toolExecutionNotifications": [said]}


def _result(finding: Finding, rules: Sequence[str]) -> Mapping[str, object]:
    result = {
        "ruleId": finding.rule,
        "ruleIndex": rules.index(finding.rule),
        "level": _LEVELS[finding.level],
        "message": {"text": f"{finding.subject}: {finding.words}"},
    }
    return {**result, "locations": [_location(finding)]} if finding.file else result


def _location(finding: Finding) -> dict[str, object]:
    place: dict[str, object] = {"artifactLocation": {"uri": quote(visible(finding.file)), "uriBaseId": "%SRCROOT%"}}
    # a finding of the file as a whole has no region
    return {"physicalLocation": {**place, "region": {"startLine": finding.line}} if finding.line else place}
