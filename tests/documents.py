"""The fenced blocks of the documents, and the plugin that docs/write-a-plugin.md describes, installed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from backstamp.testing.dists import write_distribution

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
GUIDE = "docs/write-a-plugin.md"


def blocks(document: str, info: str) -> list[tuple[str, str]]:
    """The (info, body) of every fenced block whose info string starts with `info`."""
    text = (ROOT / document).read_text("utf-8")
    return [(match["info"], match["body"]) for match in FENCE.finditer(text) if match["info"].startswith(info)]


def install_documented_plugin(site: Path, change: Callable[[str], str]) -> Path:
    """Write the guide's plugin into a site folder as its reader would have it, each module through `change`."""
    for info, body in blocks(GUIDE, "python file="):
        path = site / info.partition("file=")[2]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(change(body), "utf-8")
    ((_, project),) = blocks(GUIDE, "toml")
    entry = re.search(r'plugins"\]\n(?P<name>\w+) = "(?P<target>[\w.]+)"', project)
    requires = re.search(r"dependencies = \[(?P<list>.*)\]", project)["list"].replace('"', "").split(", ")
    points = f"[backstamp.plugins]\n{entry['name']} = {entry['target']}\n"
    write_distribution(site, "acme-attention", requires=tuple(requires), entry_points=points)
    return site
