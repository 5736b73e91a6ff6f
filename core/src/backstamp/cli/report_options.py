"""Where the answers of a check go: as text on the terminal, and in the forms other tools read.

In: a `Report` and what `--report` asked for. Out: files, or one form on standard output in place of the text; and the
exit status, 0 where the report passed, else 1.

.. versionadded:: 0.2
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from backstamp.cli.console import print_table, say
from backstamp.errors import BadInput
from backstamp.findings import Report
from backstamp.formats import FORMATS

__all__ = ["Reports", "emit"]

Reports = Annotated[
    list[str] | None,
    typer.Option(
        "--report",
        metavar="FORM[=FILE]",
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
    """Write every form that was asked for, print what is left to print, and answer the exit status.

    `json_flag` is `--json`, short for `--report json`. `tell` prints the text where a command has words of its own, and
    `own_json` stands for the report's JSON where it has a form of its own.

    Raises:
        BadInput: a form that is not known, two for standard output, or a file that cannot be written.
    """
    asked = [one.partition("=")[::2] for one in (*(reports or ()), *(("json",) if json_flag else ()))]
    unknown = sorted({form for form, _ in asked if form not in FORMATS})
    if unknown:
        raise BadInput("--report", needed=f"one of {', '.join(FORMATS)}", found=", ".join(map(repr, unknown)))
    printed = [form for form, file in asked if not file]
    if len(printed) > 1:
        needed, fix = "one form for standard output", "Give the others a file, e.g. junit=report.xml"
        raise BadInput("--report", needed=needed, found=", ".join(printed), fix=fix)
    for form, file in asked:
        text = own_json if form == "json" and own_json else FORMATS[form](report)
        if not file:
            sys.stdout.write(text)
            continue
        try:
            Path(file).write_text(text, "utf-8")
        except OSError as cause:
            raise BadInput(f"--report {form}", needed="a file that can be written", found=str(cause)) from cause
    if not printed:
        (tell or print_report)(report)
    return 0 if report.passed else 1


def print_report(report: Report) -> None:
    """The findings as a table, why something was skipped, and a line that counts."""
    if report.findings:
        # a finding about declarations has no place in a file
        placed = any(finding.file for finding in report.findings)
        rows = []
        for finding in report.findings:
            place = (_place(finding.file, finding.line),) if placed else ()
            rows.append((finding.level, *place, finding.subject, _words(finding.text, finding.fix)))
        print_table(("", *(("where",) if placed else ()), "subject", "finding"), rows)
    reasons = dict.fromkeys(outcome.reason for outcome in report.outcomes if outcome.status == "skipped")
    for reason in reasons:
        count = sum(outcome.reason == reason and outcome.status == "skipped" for outcome in report.outcomes)
        say(f"skipped {count}: {reason}", "yellow")
    counts = f"{report.count('passed')} passed, {report.count('failed')} failed, {report.count('skipped')} skipped"
    nothing = "" if report.ran else "; nothing ran, which is no pass"
    say(f"{report.tool} {report.subject}: {counts}{nothing}", "green" if report.passed else "red")


def _place(file: str, line: int) -> str:
    return f"{file}:{line}" if line else file


def _words(text: str, fix: str) -> str:
    return f"{text}. {fix}" if fix else text
