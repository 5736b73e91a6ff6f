"""Source text as the rules of `backstamp lint` see it."""

from __future__ import annotations

from backstamp.findings import Finding
from backstamp.source_lint.source import Source, read_source


def parsed(text: str, file: str = "engine.py") -> Source:
    """One module, which has to be one."""
    source = read_source(file, text.encode())
    assert isinstance(source, Source), source
    return source


def said(findings: list[Finding]) -> list[tuple[str, int]]:
    """Level and line of each, in the order of lines."""
    return sorted(((finding.level, finding.line) for finding in findings), key=lambda pair: pair[1])
