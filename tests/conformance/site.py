"""The loopback plugin installed into a folder, as it is or with something broken, and the kit run over it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from backstamp.testing.dists import write_distribution, write_record
from tests.sites import command

SOURCES = Path(__file__).parent / "loopback"


def install(site: Path, name: str, changes: Sequence[tuple[str, str, str]] = ()) -> str:
    """Write the distribution `name`; `changes` are (file, what stands there, what shall), and each must be there."""
    package = name.replace("-", "_")
    folder = site / package
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("", "utf-8")
    texts = {path.name: path.read_text("utf-8").replace("PACKAGE", package) for path in SOURCES.glob("*.py")}
    for file, old, new in changes:
        assert old in texts[file], f"{file} has no {old!r}"
        texts[file] = texts[file].replace(old, new)
    for file, text in texts.items():
        (folder / file).write_text(text, "utf-8")
    points = f"[backstamp.plugins]\n{package} = {package}.plugin\n"
    info = write_distribution(site, name, requires=("backstamp>=0.2,<0.3",), entry_points=points)
    made = command("declare", f"{package}.plugin", path=site)
    # a plugin that cannot be read has no declarations to carry
    assert made.returncode == 0 or not (folder / "backstamp.json").exists(), made.stderr
    write_record(info, [f"{package}/{path.name}" for path in sorted(folder.iterdir()) if path.is_file()])
    return name


def run_kit(site: Path, name: str, *options: str) -> dict[str, object]:
    """The JSON report of `backstamp check`, with the exit status."""
    done = command("check", name, "--json", *options, path=site)
    assert done.stdout, done.stderr
    return {**json.loads(done.stdout), "exit": done.returncode}


def failures(report: dict[str, object]) -> dict[str, list[str]]:
    """What was found wrong, by check."""
    found: dict[str, list[str]] = {}
    for finding in report["findings"]:
        if finding["level"] == "fault":
            found.setdefault(finding["rule"], []).append(f"{finding['subject']}: {finding['text']}")
    return found
