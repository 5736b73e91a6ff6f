"""The commands of `backstamp` and how a refusal becomes an exit status.

In: arguments. Out: one command run; exit 0 done, 1 refused or violations found, 2 usage.
"""

from __future__ import annotations

from collections.abc import Sequence

import typer

from backstamp.cli import (
    check_command,
    demo,
    inspect_commands,
    lint_command,
    lock_commands,
    new_command,
    parity_command,
    resolve_commands,
    tune_command,
    warm_command,
)
from backstamp.cli.console import print_error
from backstamp.errors import BackstampError, BadInput

__all__ = ["app", "run"]

app = typer.Typer(
    name="backstamp",
    help="A plugin registry for attention kernels: what runs here, why, and what was really built.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
resolve_commands.add_to(app)
inspect_commands.add_to(app)
lock_commands.add_to(app)
check_command.add_to(app)
lint_command.add_to(app)
new_command.add_to(app)
parity_command.add_to(app)
warm_command.add_to(app)
tune_command.add_to(app)
demo.add_to(app)


def run(arguments: Sequence[str]) -> None:
    """Run one command line and exit with its status; with `--json` an error of usage is JSON too."""
    as_json = "--json" in arguments
    try:
        status = app(list(arguments), prog_name="backstamp", standalone_mode=not as_json)
    except BackstampError as error:
        print_error(error, as_json)
        raise SystemExit(2 if isinstance(error, BadInput) else 1) from None
    except Exception as error:
        # the command line's own errors, whose class typer keeps to itself, are those that can say themselves
        if not as_json or not hasattr(error, "format_message"):
            raise
        found = str(error.format_message())
        print_error(BadInput("backstamp", needed="flags as --help lists them", found=found), as_json)
        raise SystemExit(2) from None
    raise SystemExit(status if isinstance(status, int) else 0)
