"""A child process that stands for an ordinary machine: its environment, and what it answers of Triton's kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

COMMAND = "from backstamp.cli import main; main()"


def ordinary_environment(path: Path | None = None) -> dict[str, str]:
    """This environment without the interpreter the tests switch on; `path` comes first on the module path."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, (str(path or ""), os.environ.get("PYTHONPATH"))))
    return kept


def compiled_by(program: str, jobs: Sequence[Any], cache: Path) -> list[dict[str, Any]]:
    """What a program that compiles kernels answers, a line a job; Triton would keep this process's interpreter setting.

    `jobs` are dataclasses, which it reads as a JSON list; `cache` is where its Triton keeps what it compiles.
    """
    environment = ordinary_environment(Path(__file__).parents[1])
    environment |= {"TRITON_CACHE_DIR": str(cache), "TRITON_DEFAULT_FP_FUSION": "1"}
    child = subprocess.run(
        [sys.executable, program],
        input=json.dumps([asdict(job) for job in jobs]),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-4000:]
    answers: list[dict[str, Any]] = [json.loads(line) for line in child.stdout.splitlines()]
    assert len(answers) == len(jobs)
    return answers
