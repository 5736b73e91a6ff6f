"""`check`: whether plugins can be shipped, for their authors and for CI; exit 1 on a fault, 0 with notes alone.

.. versionadded:: 0.2
"""

from __future__ import annotations

from typing import Annotated

import typer

from backstamp.checking import check_installed, check_modules
from backstamp.cli.console import print_json, print_table, say
from backstamp.cli.options import AsJson
from backstamp.lint import known_hosts

__all__ = ["add_to"]


def add_to(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command(name="check")(_check)


def _check(
    modules: Annotated[
        list[str] | None, typer.Argument(metavar="[MODULE]...", help="Plugin modules; default all installed.")
    ] = None,
    host: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="A recorded host beside the named ones; repeatable.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check plugins: they import, are sound, match backstamp.json, and nothing in them is out of reach."""
    hosts = known_hosts(host or ())
    plugins, flaws = check_modules(modules, hosts) if modules else check_installed(hosts)
    faults = sum(flaw.level == "fault" for flaw in flaws)
    notes = len(flaws) - faults
    if as_json:
        found = [flaw.as_json() for flaw in flaws]
        print_json({"plugins": list(plugins), "flaws": found, "faults": faults, "notes": notes})
    else:
        if flaws:
            rows = [(flaw.level, flaw.plugin, flaw.subject, f"{flaw.text}. {flaw.fix}") for flaw in flaws]
            print_table(("", "plugin", "subject", "finding"), rows)
        checked = ", ".join(plugins) or "no plugin"
        say(f"{checked}: {faults} fault(s), {notes} note(s)", "red" if faults else "green")
    raise typer.Exit(1 if faults else 0)
