"""docs/tune.md is run: its commands and its code, in order, in one folder."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from backstamp.measurements import DEFAULT_WORKLOAD, Machine, WorkClass
from backstamp.tune_record import times_from_json
from tests.children import COMMAND, ordinary_environment
from tests.documents import ROOT, blocks

DOCUMENT = "docs/tune.md"
PAGE = (ROOT / DOCUMENT).read_text("utf-8")
COMMANDS = [line[2:] for _, body in blocks(DOCUMENT, "console run") for line in body.splitlines()]
CODE = [body for _, body in blocks(DOCUMENT, "python run")]


def run(program: list[str], folder: Path) -> str:
    """One program in the reader's folder, with a cache of its own; it must succeed."""
    environment = {**ordinary_environment(), "XDG_CACHE_HOME": str(folder / "cache")}
    child = subprocess.run(program, capture_output=True, text=True, cwd=folder, env=environment, check=False)
    assert child.returncode == 0, f"{program[-1]}\n{child.stdout}{child.stderr}"
    return child.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader has after the page's first command."""
    folder = tmp_path_factory.mktemp("tune")
    assert COMMANDS[0].startswith("backstamp tune")
    run([sys.executable, "-c", COMMAND, *COMMANDS[0].split()[1:]], folder)
    return folder


@pytest.mark.parametrize("command", COMMANDS[1:])
def test_the_commands_of_the_page_succeed(folder: Path, command: str) -> None:
    """The record is shown, and ranks."""
    said = run([sys.executable, "-c", COMMAND, *command.split()[1:]], folder)
    assert "torch_native" in said
    assert ("auto (measured)" in said) == ("resolve" in command)


@pytest.mark.parametrize("at", range(len(CODE)))
def test_the_code_of_the_page_runs(folder: Path, at: int) -> None:
    """Each block as it stands."""
    run([sys.executable, "-c", CODE[at]], folder)


def test_the_record_on_the_page_is_one() -> None:
    """Every field there is, and no other."""
    ((_, body),) = blocks(DOCUMENT, "json")
    record = times_from_json(json.loads(body))
    assert record.as_json() == json.loads(body)
    assert len(record.machine) == len(Machine._fields)


def test_the_tables_name_every_field_and_every_default() -> None:
    """What a class is made of, and the load that counts where nobody says."""
    section = PAGE.partition("## Classes of work")[2]
    named = {word for row in re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE) for word in re.findall(r"\w+", row)}
    assert set(WorkClass._fields) <= named
    loads = dict(re.findall(r"^\| (prefill|decode|verify) \| (\d+ \| \d+)", section, re.MULTILINE))
    assert loads == {phase: f"{load.rows} | {load.tokens}" for phase, load in DEFAULT_WORKLOAD._asdict().items()}
