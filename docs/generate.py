"""Write the generated parts of the documents: which key runs what where, what was measured, and the demo's output.

python docs/generate.py            tables
python docs/generate.py --demo     tables, and the output of `backstamp demo` on this machine
python docs/generate.py --check    exit 1 when a table is not what the declarations say
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

from backends import backend_rows, read_records

from backstamp.catalogue import build_catalogue
from backstamp.discovery import discover
from backstamp.engine import EngineFacts
from backstamp.explanation import matrix
from backstamp.host import load_host, profile_names
from backstamp.launch import Requests, make_launch
from backstamp.model import ModelFacts, default_model, load_model
from backstamp.tables import markdown_matrix

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / "tests" / "data" / "models"
#: The hosts of the root README's table; docs/backends.md has all of them.
COMMON: Final = ("a100", "h100", "b200", "rtx5090", "mi355x", "ascend910b", "xeon_amx", "epyc")


def main(arguments: list[str]) -> int:
    """Rewrite, or compare."""
    stale = []
    for path, parts in documents().items():
        text = path.read_text("utf-8")
        written = text
        for name, body in parts.items():
            written = between(written, name, body)
        if path == ROOT / "README.md" and "--demo" in arguments:
            written = between(written, "demo", f"```\n{demo_output()}```\n")
        if written != text:
            stale.append(str(path.relative_to(ROOT)))
            if "--check" not in arguments:
                path.write_text(written, "utf-8")
    print(f"{'stale' if '--check' in arguments else 'written'}: {', '.join(stale) or 'nothing'}")
    return 1 if stale and "--check" in arguments else 0


def documents() -> dict[Path, dict[str, str]]:
    """Each document's generated parts: all keys in the root's README, a plugin's own keys and rows in its own."""
    catalogue, records = build_catalogue(discover()), read_records(ROOT / "bench" / "results")
    keys = catalogue.keys("attention")
    pages = {ROOT / "README.md": {"table": table_of(keys, COMMON, rows="alias")}}
    sections = []
    for found in catalogue.found:
        rows = backend_rows(catalogue, records, found.plugin.distribution)
        folder = ROOT / "plugins" / found.plugin.name
        sections.append(f"### [{found.plugin.distribution}](../plugins/{folder.name}/README.md)\n\n{rows}\n")
        own = tuple(key for key in keys if catalogue.owner(key, "attention") == found.plugin)
        # a plugin may have linear kernels alone
        table = {"table": table_of(own, profile_names())} if own else {}
        pages[folder / "README.md"] = {**table, "rows": rows}
    pages[ROOT / "docs" / "backends.md"] = {
        "hosts": table_of(keys, profile_names(), rows="alias"),
        "latent": table_of(keys, profile_names(), rows="alias", model=load_model(MODELS / "mla.json")),
        "sparse": table_of(keys, profile_names(), rows="alias", model=load_model(MODELS / "dsa.json")),
        "compressed": table_of(keys, profile_names(), rows="alias", model=load_model(MODELS / "dsv4.json")),
        "rows": "\n".join(sections),
    }
    return pages


def table_of(
    keys: Sequence[str],
    hosts: Sequence[str],
    rows: Literal["host", "alias"] = "host",
    model: ModelFacts | None = None,
) -> str:
    """The table of some keys over some named hosts with speculation, for the default model or another; of another,
    keys that serve it nowhere are left out."""
    launch = make_launch(Requests(speculative_algorithm="STANDALONE"))
    described = [load_host(name) for name in hosts]
    cells = matrix(build_catalogue(discover()), described, launch, EngineFacts(), model or default_model(), tuple(keys))
    serving = {cell.alias for cell in cells if cell.kernel is not None}
    return markdown_matrix([cell for cell in cells if model is None or cell.alias in serving], rows)


def demo_output() -> str:
    """What `backstamp demo` prints on 80 columns."""
    program = [sys.executable, "-c", "from backstamp.cli import main; main()", "demo"]
    environment = {**os.environ, "COLUMNS": "80"}
    child = subprocess.run(program, capture_output=True, text=True, env=environment, check=True)
    return re.sub(r" +$", "", child.stdout, flags=re.MULTILINE)


def between(text: str, name: str, body: str) -> str:
    """`text` with what lies between the markers of `name` replaced."""
    begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
    head, _, rest = text.partition(begin)
    _, found, tail = rest.partition(end)
    if not found:
        raise SystemExit(f"no {begin.strip()} ... {end} in the document")
    return f"{head}{begin}{body}{end}{tail}"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
