"""`warm`: build a plan on this machine and run each of its phases once, before anything is served."""

from __future__ import annotations

import logging
from importlib.util import find_spec

import typer

from backstamp.catalogue import build_catalogue
from backstamp.cli.console import print_json, print_plan, say
from backstamp.cli.options import AsJson, Flags, with_flags
from backstamp.compiled import compile_for
from backstamp.discovery import discover
from backstamp.errors import BadInput
from backstamp.resolution import resolve_on
from backstamp.warm import Warmed, warm

__all__ = ["add_to"]


def add_to(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command(name="warm")(with_flags(_warm))


def _warm(flags: Flags, as_json: AsJson = False) -> None:
    """Compile what a plan needs: build it here and run each phase once; exit 1 where a phase could not be run."""
    if flags.host is not None:
        raise BadInput("warm --host", needed="this machine", found=flags.host, fix="It compiles for the device it has")
    if find_spec("torch") is None:
        raise BadInput("warm", needed="torch, to run kernels", found="none", fix="pip install torch")
    # what compiles says so through logging; whoever runs this command wants to read it
    logging.basicConfig(format="%(message)s")
    catalogue, model, host = build_catalogue(discover()), flags.runner_model(), flags.host_facts()
    at, measured = compile_for(catalogue, host), flags.measured(host)
    plan = resolve_on(at, flags.launch(), flags.engine_facts(), model, measured, role=flags.role)
    if not as_json:
        print_plan(plan, verdicts=False)
        say("")
    done = warm(plan, model, catalogue, None if as_json else _tell)
    if as_json:
        print_json({"host": plan.host, "digest": plan.digest, "warmed": [row.as_json() for row in done]})
    raise typer.Exit(int(any(row.reason for row in done)))


def _tell(row: Warmed) -> None:
    slot = "linear " if row.slot == "linear" else ""
    say(
        f"{slot}{row.phase}: {row.kernel} {row.reason or 'ran'} ({row.seconds:.1f} s)", "red" if row.reason else "green"
    )
