"""A report as GitHub annotations: one workflow command a finding, for the log of a step to carry.

In: a `Report`. Out: lines that begin with `::error` or `::notice`. Text that came from a plugin or a file stays in its
place: it neither ends a command nor starts one.

.. versionadded:: 0.2
"""

from __future__ import annotations

from backstamp.findings import Finding, Level, Report
from backstamp.formats.visible import visible

__all__ = ["as_github"]


def as_github(report: Report) -> str:
    """The findings as annotations, faults first; where nothing ran, an error says so."""
    lines = [_annotation(finding) for finding in report.findings]
    if not report.ran:
        lines.append(_command("fault", {"title": f"{report.tool} {report.subject}"}, report.nothing_ran))
    return "".join(f"{line}\n" for line in lines)


def _annotation(finding: Finding) -> str:
    place = {"file": finding.file, "line": str(finding.line or "")} if finding.file else {}
    return _command(finding.level, {**place, "title": f"{finding.rule}: {finding.subject}"}, finding.words)


def _command(level: Level, properties: dict[str, str], message: str) -> str:
    name = "error" if level == "fault" else "notice"
    given = ",".join(f"{key}={_property(value)}" for key, value in properties.items() if value)
    return f"::{name} {given}::{_data(message)}"


# Source: actions/toolkit packages/core/src/command.ts, escapeData and escapeProperty
def _data(text: str) -> str:
    """What follows the second `::`; percent first, or it would escape the escapes."""
    return visible(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """A value between the commas and colons of the command's own."""
    return _data(text).replace(":", "%3A").replace(",", "%2C")
