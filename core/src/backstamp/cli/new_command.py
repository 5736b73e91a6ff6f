"""`new`: a complete plugin project to begin with.

.. versionadded:: 0.2
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from backstamp.cli.console import print_json, say
from backstamp.cli.options import AsJson
from backstamp.new_plugin import write_plugin_project

__all__ = ["add_to"]


def add_to(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command(name="new")(_new)


def _new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The distribution's name, e.g. acme-attention.")],
    path: Annotated[
        Path | None, typer.Option("--path", metavar="FOLDER", help="A new or empty folder; default ./NAME.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a plugin project of one naive kernel: it installs, passes `check`, and is yours to change."""
    made = write_plugin_project(name, path)
    if as_json:
        print_json(made.as_json())
        return
    for file in made.files:
        say(f"{made.folder / file}")
    say("")
    say(f"Next, in {made.folder}:", "bold")
    say('  pip install -e ".[test]"')
    say(f"  backstamp check {made.distribution}")
    say("  pytest")
