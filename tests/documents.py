"""The fenced blocks of the documents, and the plugin that docs/write-a-plugin.md describes, installed."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from backstamp.new_plugin import write_plugin_project
from backstamp.testing.dists import write_distribution

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
GUIDE = "docs/write-a-plugin.md"
#: What the guide's reader types after `backstamp new`.
GUIDE_PLUGIN = "acme-attention"


def blocks(document: str, info: str) -> list[tuple[str, str]]:
    """The (info, body) of every fenced block whose info string starts with `info`."""
    text = (ROOT / document).read_text("utf-8")
    return [(match["info"], match["body"]) for match in FENCE.finditer(text) if match["info"].startswith(info)]


def install_documented_plugin(site: Path, change: Callable[[str], str]) -> Path:
    """Put the guide's plugin into a site folder as its reader would have it, each module through `change`."""
    made = write_plugin_project(GUIDE_PLUGIN, site.parent / "project")
    project = (made.folder / "pyproject.toml").read_text("utf-8")
    shutil.copytree(made.folder / "src", site)
    for path in site.rglob("*.py"):
        path.write_text(change(path.read_text("utf-8")), "utf-8")
    entry = re.search(r'plugins"\]\n(?P<name>\w+) = "(?P<target>[\w.]+)"', project)
    (required,) = re.findall(r"^dependencies = \[(.*)\]", project, re.MULTILINE)
    points = f"[backstamp.plugins]\n{entry['name']} = {entry['target']}\n"
    write_distribution(site, made.distribution, requires=tuple(re.findall('"(.*?)"', required)), entry_points=points)
    return site
