"""The documents are run: the plugin a reader pastes works, and the code blocks of the README do what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from backstamp.testing.dists import write_distribution

ROOT = Path(__file__).parent.parent.parent
FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(document: str, info: str) -> list[tuple[str, str]]:
    """The (info, body) of every fenced block whose info string starts with `info`."""
    text = (ROOT / document).read_text("utf-8")
    return [(match["info"], match["body"]) for match in FENCE.finditer(text) if match["info"].startswith(info)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plugin of docs/write-a-plugin.md, installed as its reader would have it."""
    folder = tmp_path_factory.mktemp("docs") / "site-packages"
    for info, body in blocks("docs/write-a-plugin.md", "python file="):
        path = folder / info.partition("file=")[2]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(body, "utf-8")
    (project,) = blocks("docs/write-a-plugin.md", "toml")
    entry = re.search(r'plugins"\]\n(?P<name>\w+) = "(?P<target>[\w.]+)"', project[1])
    requires = re.search(r"dependencies = \[(?P<list>.*)\]", project[1])["list"].replace('"', "").split(", ")
    points = f"[backstamp.plugins]\n{entry['name']} = {entry['target']}\n"
    write_distribution(folder, "acme-attention", requires=tuple(requires), entry_points=points)
    return folder


@pytest.mark.parametrize(
    "command", [line[2:] for _, body in blocks("docs/write-a-plugin.md", "console run") for line in body.splitlines()]
)
def test_the_pasted_plugin_does_what_the_page_says(site: Path, command: str) -> None:
    """Every command of the page succeeds with the pasted plugin, the demo against float64 included."""
    environment = {**os.environ, "PYTHONPATH": str(site)}
    program = [sys.executable, "-c", "from backstamp.cli import main; main()", *command.split()[1:]]
    child = subprocess.run(program, capture_output=True, text=True, env=environment, check=False)
    assert child.returncode == 0, child.stdout + child.stderr
    assert "acme_naive" in child.stdout


@pytest.mark.parametrize("at", range(len(blocks("README.md", "python"))))
def test_the_code_of_the_readme_runs(at: int, tmp_path: Path) -> None:
    """Each Python block of the README runs as it stands."""
    info, body = blocks("README.md", "python")[at]
    child = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert child.returncode == 0, f"{info}\n{body}\n{child.stderr}"


def test_links_between_documents_lead_somewhere() -> None:
    """Every relative link of every document names a file."""
    for document in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text("utf-8")):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
