"""docs/locks.md is run: its commands and its code, in order, in a folder with two configs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.children import COMMAND, ordinary_environment
from tests.documents import blocks
from tests.models import FOLDER

DOCUMENT = "docs/locks.md"
COMMANDS = [line[2:] for _, body in blocks(DOCUMENT, "console run") for line in body.splitlines()]
CODE = [body for _, body in blocks(DOCUMENT, "python run")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader has: a model's config, a larger one, and the lock the page makes first."""
    folder = tmp_path_factory.mktemp("locks")
    shutil.copy(FOLDER / "mha.json", folder / "config.json")
    (folder / "large").mkdir()
    shutil.copy(FOLDER / "mla.json", folder / "large" / "config.json")
    for command in COMMANDS[:2]:
        run([sys.executable, "-c", COMMAND, *command.split()[1:]], folder)
    return folder


def run(program: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """One program in the reader's folder; it must succeed."""
    child = subprocess.run(program, capture_output=True, text=True, cwd=folder, env=ordinary_environment(), check=False)
    assert child.returncode == 0, f"{program[-1]}\n{child.stdout}{child.stderr}"
    return child


def test_the_page_makes_its_locks_first() -> None:
    """What the fixture runs is what the page says before anything else."""
    assert len(COMMANDS) == 6
    assert [command.split()[:3] for command in COMMANDS[:2]] == [["backstamp", "lock", "-o"]] * 2


@pytest.mark.parametrize("command", COMMANDS[2:])
def test_the_commands_of_the_page_succeed(folder: Path, command: str) -> None:
    """A lock made a moment ago is as it was locked, and what it allows is all there is."""
    said = run([sys.executable, "-c", COMMAND, *command.split()[1:]], folder).stdout
    assert "outside the allow list" not in said
    assert ("page size" if "resolve" in command else "no difference") in said


@pytest.mark.parametrize("at", range(len(CODE)))
def test_the_code_of_the_page_runs(folder: Path, at: int) -> None:
    """Each block as it stands."""
    run([sys.executable, "-c", CODE[at]], folder)
