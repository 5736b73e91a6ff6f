"""Where the answers of a check go: as text on the terminal, and in the forms other tools read.

In: a `Report` and what `--report` asked for. Out: files, or one form on standard output in place of the text; and the
exit status, 0 where the report passed, else 1.

.. versionadded:: 0.2
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from backstamp.cli.console import print_table, say
from backstamp.errors import BadInput
from backstamp.findings import Report
from backstamp.formats import FORMATS

__all__ = ["Reports", "emit"]


class _Asked(NamedTuple):
    """One form and the file it goes to; standard output without one."""

    form: str
    file: str


def _held(given: list[str] | None) -> list[str] | None:
    """What `--report` was given, refused before a check runs for minutes."""
    _asked(given, json_flag=False)
    return given


Reports = Annotated[
    list[str] | None,
    typer.Option(
        "--report",
        metavar="FORM[=FILE]",
        callback=_held,
        help=f"{', '.join(FORMATS)}: to FILE, else to standard output in place of the text; repeatable.",
    ),
]


def emit(
    report: Report,
    reports: Sequence[str] | None,
    *,
    json_flag: bool = False,
    tell: Callable[[Report], None] | None = None,
    own_json: str = "",
) -> int:
    """Print what is to be printed, write every form that was asked for, and answer the exit status.

    `json_flag` is `--json`, short for `--report json`. `tell` prints the text where a command has words of its own, and
    `own_json` stands for the report's JSON where it has a form of its own.

    Raises:
        BadInput: a form that is not known, two for one place, or a file that cannot be written; then all else that was
            asked for has been printed and written.
    """
    asked = _asked(reports, json_flag=json_flag)
    texts = {one: own_json if one.form == "json" and own_json else FORMATS[one.form](report) for one in asked}
    printed = [text for one, text in texts.items() if not one.file]
    # what was found is said before a file can fail
    for text in printed:
        sys.stdout.write(text)
    if not printed:
        (tell or print_report)(report)
    failures = [failure for one, text in texts.items() if one.file and (failure := _write(one, text)) is not None]
    if failures:
        raise failures[0]
    return 0 if report.passed else 1


def _asked(reports: Sequence[str] | None, *, json_flag: bool) -> list[_Asked]:
    """Every form with its file, each once."""
    given = dict.fromkeys((*(reports or ()), *(("json",) if json_flag else ())))
    asked = [_Asked(form, file) for form, _, file in (one.partition("=") for one in given)]
    unknown = sorted({one.form for one in asked if one.form not in FORMATS})
    if unknown:
        raise BadInput("--report", needed=f"one of {', '.join(FORMATS)}", found=", ".join(map(repr, unknown)))
    for one in given:
        if one.endswith("="):
            raise BadInput("--report", needed="a file after the =", found=repr(one))
    places = [os.path.normpath(one.file) if one.file else "" for one in asked]
    for at, place in enumerate(places):
        if place in places[:at]:
            needed = f"one form for {place or 'standard output'}"
            found = ", ".join(one.form for one, other in zip(asked, places, strict=True) if other == place)
            raise BadInput("--report", needed=needed, found=found, fix="Give each a file, e.g. junit=report.xml")
    return asked


def _write(asked: _Asked, text: str) -> BadInput | None:
    """Write one form, in a folder that is made where it is missing; the refusal where that cannot be done."""
    path = Path(asked.file)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("utf-8"))
    except (OSError, ValueError) as cause:
        refused = BadInput(f"--report {asked.form}", needed="a file that can be written", found=str(cause))
        refused.__cause__ = cause
        return refused
    return None


def print_report(report: Report) -> None:
    """The findings as a table, why something was skipped, and a line that counts."""
    if report.findings:
        # a finding about declarations has no place in a file
        placed = any(finding.place for finding in report.findings)
        rows = []
        for finding in report.findings:
            place = (finding.place,) if placed else ()
            rows.append((finding.level, *place, finding.subject, finding.words))
        print_table(("", *(("where",) if placed else ()), "subject", "finding"), rows)
    reasons = dict.fromkeys(outcome.reason for outcome in report.outcomes if outcome.status == "skipped")
    for reason in reasons:
        count = sum(outcome.reason == reason and outcome.status == "skipped" for outcome in report.outcomes)
        say(f"skipped {count}: {reason}", "yellow")
    counts = f"{report.count('passed')} passed, {report.count('failed')} failed, {report.count('skipped')} skipped"
    nothing = "" if report.ran else "; nothing ran, which is no pass"
    say(f"{report.tool} {report.subject}: {counts}{nothing}", "green" if report.passed else "red")
