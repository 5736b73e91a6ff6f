"""The `backstamp` command: reads flags, calls the library, prints what it answered.

In: a command line. Out: text or JSON, and an exit status: 0 done, 1 refused or violations found, 2 usage. It holds no
logic: whatever it prints can be had by one call of the library.
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as cause:
        sys.stderr.write(f"backstamp: the command needs typer and rich ({cause}); pip install 'backstamp[cli]'\n")
        raise SystemExit(2) from cause
    from backstamp.cli.app import run

    run(sys.argv[1:])
