"""`lint`: the faults the field has met, found in the source of an engine or a plugin without importing it.

.. versionadded:: 0.2
"""

from __future__ import annotations

from typing import Annotated

import typer

from backstamp.catalogue import build_catalogue
from backstamp.cli.console import say
from backstamp.cli.options import AsJson
from backstamp.cli.report_options import Reports, emit
from backstamp.discovery import discover
from backstamp.findings import Report
from backstamp.source_lint import BASE_FIELDS, aliases_of, lint_source
from backstamp.source_lint.linting import WHAT_TO_KNOW

__all__ = ["add_to"]


def add_to(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command(name="lint")(_lint)


def _lint(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A folder, or one Python file.")],
    field: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help=f"The base field's name; default {BASE_FIELDS[0]}.")
    ] = None,
    alias: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A key that is never a kernel, beside installed ones.")
    ] = None,
    config: Annotated[
        str | None, typer.Option(metavar="FILE", help="The list of exceptions; default backstamp-lint.toml.")
    ] = None,
    report: Reports = None,
    as_json: AsJson = False,
) -> None:
    """Check source for base-field reads, aliases as stamps, containers without children, predicates true for None."""
    aliases = aliases_of(build_catalogue(discover())) | frozenset(alias or ())
    found = lint_source(path, fields=tuple(field or BASE_FIELDS), aliases=aliases, config=config)
    raise typer.Exit(emit(found, report, json_flag=as_json, tell=_print))


def _print(report: Report) -> None:
    """Each rule that found something: why it is one, every place, and once what to do."""
    for outcome in report.outcomes:
        if not outcome.findings:
            continue
        why, fix = WHAT_TO_KNOW[outcome.name]
        say(f"{outcome.name}: {why}", "bold")
        for finding in outcome.findings:
            place = f"{finding.file}:{finding.line}" if finding.line else finding.file
            say(f"{finding.level} {place} {finding.subject}")
            said = f". {finding.fix}" if finding.fix != fix else ""
            say(f"  {finding.text}{said}", "red" if finding.level == "fault" else "yellow")
        say(f"{fix}.")
        say("")
    faults = sum(finding.level == "fault" for finding in report.findings)
    notes = len(report.findings) - faults
    if not report.ran:
        say(f"{report.subject}: no Python file was found, so nothing ran, which is no pass", "red")
    else:
        say(f"{report.subject}: {faults} fault(s), {notes} note(s)", "green" if report.passed else "red")
