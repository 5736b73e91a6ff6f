"""`check`: whether plugins are what they declare, for their authors and for CI; exit 1 on a fault, 0 with notes alone.

.. versionadded:: 0.2
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from backstamp.cli.options import AsJson
from backstamp.cli.report_options import Reports, emit
from backstamp.findings import Outcome
from backstamp.lint import known_hosts

__all__ = ["add_to"]


def add_to(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command(name="check")(_check)


def _check(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Distributions, plugins or their modules; default all installed."),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="CHECK,...",
            help="Of declarations, imports, stamps, contract, undeclared, numerics, determinism, processes; default "
            "all of them for a NAME, declarations where none is given.",
        ),
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="A recorded host beside the named ones, for declarations; repeatable."),
    ] = None,
    as_json: AsJson = False,
    report: Reports = None,
) -> None:
    """Check plugins: declarations, pure imports, stamps, contract, and numbers against float64 on this machine."""
    from backstamp.testing.conformance.suite import check_plugins

    checks = [check.strip() for check in (only or "").split(",") if check.strip()]
    with Console(stderr=True).status("checking") as status:
        done = 0

        def told(outcome: Outcome) -> None:
            nonlocal done
            done += 1
            status.update(f"checking {outcome.check}: {done} done")

        checked = check_plugins(names or (), checks, hosts=known_hosts(host or ()), told=told)
    raise typer.Exit(emit(checked, report, json_flag=as_json))
