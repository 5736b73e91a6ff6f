"""Source text, and trees of it, as `backstamp lint` sees them."""

from __future__ import annotations

from pathlib import Path

from backstamp.findings import Finding, Report
from backstamp.source_lint.source import Source, read_source

READS = "def decide(args):\n    return args.attention_backend == 'fa3'\n"
ENTRY = '[[allow]]\nrule = "base-field"\nfile = "a.py"\nreason = "makes the pair"\n'


def parsed(text: str, file: str = "engine.py") -> Source:
    """One module, which has to be one."""
    source = read_source(file, text.encode())
    assert isinstance(source, Source), source
    return source


def said(findings: list[Finding]) -> list[tuple[str, int]]:
    """Level and line of each, in the order of lines."""
    return sorted(((finding.level, finding.line) for finding in findings), key=lambda pair: pair[1])


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    """A tree of files, and its folder."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def found(report: Report) -> list[tuple[str, str, int]]:
    """Rule, file and line of every finding."""
    return [(finding.rule, finding.file, finding.line) for finding in report.findings]
