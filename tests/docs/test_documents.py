"""The documents are run: the plugin the guide shows works, and the code blocks of the README do what they say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from backstamp.new_plugin import write_plugin_project
from tests.children import COMMAND, ordinary_environment
from tests.documents import GUIDE, GUIDE_PLUGIN, ROOT, blocks, install_documented_plugin


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plugin of docs/write-a-plugin.md, installed as its reader would have it."""
    return install_documented_plugin(tmp_path_factory.mktemp("docs") / "site-packages", lambda text: text)


@pytest.mark.parametrize(
    "command", [line[2:] for _, body in blocks(GUIDE, "console run") for line in body.splitlines()]
)
def test_the_documented_plugin_does_what_the_page_says(site: Path, command: str) -> None:
    """Every command of the page succeeds with the plugin it shows, the demo against float64 included."""
    program = [sys.executable, "-c", COMMAND, *command.split()[1:]]
    child = subprocess.run(program, capture_output=True, text=True, env=ordinary_environment(site), check=False)
    assert child.returncode == 0, child.stdout + child.stderr
    assert "acme_attention_naive" in child.stdout


def test_the_guide_shows_what_the_command_writes(tmp_path: Path) -> None:
    """Each file of the page is the file `backstamp new` writes, to the letter, and every module is on the page."""
    made = write_plugin_project(GUIDE_PLUGIN, tmp_path / "new")
    shown = {info.partition("file=")[2]: body for info, body in blocks(GUIDE, "") if "file=" in info}
    assert {path: (made.folder / path).read_text("utf-8") for path in shown} == shown
    modules = {path for path in made.files if path.endswith((".py", ".toml")) and not path.endswith("__init__.py")}
    assert set(shown) == modules
    page = (ROOT / GUIDE).read_text("utf-8")
    assert all(f"`{path}`" in page for path in made.files if not path.endswith("__init__.py"))


@pytest.mark.parametrize("at", range(len(blocks("README.md", "python"))))
def test_the_code_of_the_readme_runs(at: int, tmp_path: Path) -> None:
    """Each Python block of the README runs as it stands."""
    info, body = blocks("README.md", "python")[at]
    program = [sys.executable, "-c", body]
    environment = ordinary_environment()
    child = subprocess.run(program, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert child.returncode == 0, f"{info}\n{body}\n{child.stderr}"


def test_links_between_documents_lead_somewhere() -> None:
    """Every relative link of every document names a file."""
    for document in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text("utf-8")):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_the_tables_of_the_readmes_are_what_the_declarations_say() -> None:
    """`python docs/generate.py` was run after the last change of a declaration."""
    program = [sys.executable, "docs/generate.py", "--check"]
    child = subprocess.run(program, capture_output=True, text=True, cwd=ROOT, env=ordinary_environment(), check=False)
    assert child.returncode == 0, child.stdout + child.stderr
