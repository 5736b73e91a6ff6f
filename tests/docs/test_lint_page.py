"""docs/lint.md is run: its file is linted as the page says, its list allows what it says, its code runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from backstamp.source_lint import RULES
from tests.children import COMMAND, ordinary_environment
from tests.documents import ROOT, blocks

DOCUMENT = "docs/lint.md"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the reader has: the file the page shows."""
    for info, body in blocks(DOCUMENT, "python file="):
        path = tmp_path / info.partition("file=")[2]
        path.parent.mkdir()
        path.write_text(body, "utf-8")
    return tmp_path


def lint(folder: Path, *arguments: str) -> tuple[int, str]:
    """Run the command in the reader's folder, on a terminal of 80 columns."""
    program = [sys.executable, "-c", COMMAND, "lint", *arguments]
    environment = {**ordinary_environment(), "COLUMNS": "80"}
    child = subprocess.run(program, capture_output=True, text=True, cwd=folder, env=environment, check=False)
    return child.returncode, child.stdout + child.stderr


def test_the_command_prints_what_the_page_shows(folder: Path) -> None:
    """Each of the four rules once."""
    ((_, body),) = blocks(DOCUMENT, "console run")
    command, _, shown = body.partition("\n")
    code, printed = lint(folder, *command.split()[3:])
    assert code == 1
    assert [line.rstrip() for line in printed.splitlines()] == shown.splitlines()


def test_the_list_of_the_page_allows_what_it_names(folder: Path) -> None:
    """And is found where the page says: at PATH."""
    ((_, body),) = blocks(DOCUMENT, "toml file=")
    (folder / "backstamp-lint.toml").write_text(body, "utf-8")
    code, printed = lint(folder, ".")
    assert code == 1
    assert "base-field" not in printed
    assert ".: 3 fault(s)" in printed


def test_the_code_of_the_page_runs(folder: Path) -> None:
    """As it stands."""
    ((_, body),) = blocks(DOCUMENT, "python run")
    program = [sys.executable, "-c", body]
    child = subprocess.run(program, capture_output=True, text=True, cwd=folder, env=ordinary_environment(), check=False)
    assert child.returncode == 0, child.stderr
    assert len(child.stdout.splitlines()) == 4


def test_every_rule_has_its_words_on_the_page() -> None:
    """A rule nobody can look up is no rule."""
    text = (ROOT / DOCUMENT).read_text("utf-8")
    assert all(f"### {rule}\n" in text or f"(`{rule}`)" in text for rule in RULES)
