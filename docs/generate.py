"""Write the generated parts of the READMEs: alias x host tables, and the demo's output where asked.

python docs/generate.py            tables
python docs/generate.py --demo     tables, and the output of `backstamp demo` on this machine
python docs/generate.py --check    exit 1 when a table is not what the declarations say
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from backstamp.catalogue import build_catalogue
from backstamp.discovery import discover
from backstamp.engine import EngineFacts
from backstamp.explanation import matrix
from backstamp.host import load_host, profile_names
from backstamp.launch import Requests, make_launch
from backstamp.model import default_model
from backstamp.tables import markdown_matrix

ROOT = Path(__file__).resolve().parent.parent


def main(arguments: list[str]) -> int:
    """Rewrite, or compare."""
    stale = []
    for path, keys in tables().items():
        text = path.read_text("utf-8")
        written = between(text, "table", table_of(keys))
        if path == ROOT / "README.md" and "--demo" in arguments:
            written = between(written, "demo", f"```\n{demo_output()}```\n")
        if written != text:
            stale.append(str(path.relative_to(ROOT)))
            if "--check" not in arguments:
                path.write_text(written, "utf-8")
    print(f"{'stale' if '--check' in arguments else 'written'}: {', '.join(stale) or 'nothing'}")
    return 1 if stale and "--check" in arguments else 0


def tables() -> dict[Path, tuple[str, ...]]:
    """Each README with the keys its table shows: all in the root's, a plugin's own in its own."""
    catalogue = build_catalogue(discover())
    pages = {ROOT / "README.md": catalogue.keys("attention")}
    for found in catalogue.found:
        path = ROOT / "plugins" / found.plugin.name / "README.md"
        if path.is_file():
            own = {key for key in catalogue.keys("attention") if catalogue.owner(key, "attention") == found.plugin}
            pages[path] = tuple(sorted(own))
    return pages


def table_of(keys: tuple[str, ...]) -> str:
    """The table of some keys over every named host, for the default model with speculation."""
    launch = make_launch(Requests(speculative_algorithm="STANDALONE"))
    hosts = [load_host(name) for name in profile_names()]
    cells = matrix(build_catalogue(discover()), hosts, launch, EngineFacts(), default_model(), keys)
    return markdown_matrix(cells)


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
