"""The environment of a child process that stands for an ordinary machine."""

from __future__ import annotations

import os
from pathlib import Path

COMMAND = "from backstamp.cli import main; main()"


def ordinary_environment(path: Path | None = None) -> dict[str, str]:
    """This environment without the interpreter the tests switch on; `path` comes first on the module path."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, (str(path or ""), os.environ.get("PYTHONPATH"))))
    return kept
