"""`parity`: whether draft entry classes answer the loader exactly when their targets do.

.. versionadded:: 0.2
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from backstamp.cli.console import say
from backstamp.cli.options import AsJson
from backstamp.cli.report_options import Reports, emit
from backstamp.errors import BadInput
from backstamp.findings import Report

__all__ = ["add_to"]


def add_to(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command(name="parity")(_parity)


def _parity(
    distribution: Annotated[
        str | None, typer.Argument(metavar="[DIST]", help="A plugin's distribution; default all installed.")
    ] = None,
    source: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A folder of model modules, read and not imported.")
    ] = None,
    engine: Annotated[str | None, typer.Option(metavar="NAME", help="An installed engine: sglang or vllm.")] = None,
    hook: Annotated[list[str] | None, typer.Option(metavar="NAME", help="A hook to ask too; repeatable.")] = None,
    pair: Annotated[
        list[str] | None, typer.Option(metavar="DRAFT=TARGET", help="Whose draft it is; repeatable.")
    ] = None,
    gate: Annotated[
        list[str] | None,
        typer.Option(metavar="HOOK=NAME,...", help="Layers that call NAME need HOOK; repeatable."),
    ] = None,
    reports: Reports = None,
    as_json: AsJson = False,
) -> None:
    """Check that drafts answer the loader's hooks exactly when their targets do, and that gated layers have a gate."""
    from backstamp.parity import check_parity, from_engine, from_folder, from_plugins, read_gates, read_pairs
    from backstamp.parity_report import parity_json, parity_report

    pointed = [text for text in (distribution, source and "--source", engine and "--engine") if text]
    if len(pointed) > 1:
        raise BadInput("backstamp parity", needed="one of DIST, --source and --engine", found=" and ".join(pointed))
    gates = read_gates(gate or ())
    pairs = read_pairs(pair or ())
    if source is not None:
        # code hosts put an annotation where a path from the root of the checkout leads
        gathered = from_folder(source, beside=Path.cwd())
    elif engine is not None:
        gathered = from_engine(engine)
    else:
        gathered = from_plugins(distribution)
    parity = check_parity(gathered, hooks=hook or (), pairs=pairs, gates=gates)
    own = json.dumps(parity_json(parity), indent=2, ensure_ascii=False) + "\n"
    raise typer.Exit(emit(parity_report(parity), reports, json_flag=as_json, tell=_tell, own_json=own))


def _tell(report: Report) -> None:
    """Findings under what they were found in: names of entry classes are too long for a table's columns."""
    before = ("", "")
    for item in report.findings:
        if (item.level, item.subject) != before:
            say(f"{item.level}: {item.subject}", "red" if item.level == "fault" else "yellow")
        before = (item.level, item.subject)
        place = f"{item.file}:{item.line}: " if item.line else f"{item.file}: " if item.file else ""
        say(f"- {place}{item.text}.{f' {item.fix}.' if item.fix else ''}")
    for outcome in report.outcomes:
        if outcome.status == "skipped" and not outcome.findings:
            say(f"skipped: {outcome.reason}", "yellow")
    counts = f"{report.count('passed')} passed, {report.count('failed')} failed, {report.count('skipped')} skipped"
    nothing = "" if report.ran else "; nothing ran, which is no pass"
    say(f"{report.tool} {report.subject}: {counts}{nothing}", "green" if report.passed else "red")
