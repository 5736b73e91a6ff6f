"""docs/parity.md is run: its example finds what the page says, and its tables name what is asked by default."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from backstamp.entry_classes.engines import ENGINES
from backstamp.entry_classes.pairing import DRAFT_WORDS
from tests.children import COMMAND, ordinary_environment
from tests.documents import ROOT, blocks

DOCUMENT = "docs/parity.md"
PAGE = (ROOT / DOCUMENT).read_text("utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The two modules of the page as they stand."""
    for info, body in blocks(DOCUMENT, "python file="):
        path = tmp_path / info.partition("file=")[2]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(body, "utf-8")
    return tmp_path


def run(folder: Path, *program: str) -> subprocess.CompletedProcess[str]:
    """Python in that folder, at 80 columns."""
    environment = {**ordinary_environment(), "COLUMNS": "80", "NO_COLOR": "1"}
    command = [sys.executable, "-c", *program]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=False)


def test_the_example_finds_what_the_page_says(folder: Path) -> None:
    """The output line for line."""
    ((_, body),) = blocks(DOCUMENT, "console fails")
    command, *lines = body.splitlines()
    child = run(folder, COMMAND, *command.split()[2:])
    assert child.returncode == 1, child.stderr
    assert [line.rstrip() for line in child.stdout.splitlines()] == lines


def test_the_code_of_the_page_finds_the_same(folder: Path) -> None:
    """One call of the library for what the command prints."""
    ((_, body),) = blocks(DOCUMENT, "python run")
    child = run(folder, body)
    assert child.returncode == 0, child.stderr
    first, second = child.stdout.splitlines()
    assert "AcmeForCausalLMNextN (draft of AcmeForCausalLM): the draft lacks" in first
    assert second == "draft"


@pytest.mark.parametrize("name", ENGINES)
def test_every_default_hook_stands_in_the_table_with_its_place(name: str) -> None:
    """`file:line` of one version, for each hook asked of an engine's classes."""
    for hook in ENGINES[name].hooks:
        assert re.search(rf"\| `{hook}` \| `[\w/]+\.py:\d+`", PAGE), hook


def test_every_draft_word_stands_in_the_page() -> None:
    """Spelt any way: one word, one mention."""
    for word in DRAFT_WORDS:
        assert word.lower() in PAGE.lower(), word
