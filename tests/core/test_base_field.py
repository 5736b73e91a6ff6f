"""The static check of our own tree: nobody reads the base attention field on its own."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.documents import ROOT

FIELD = "attention_backend"
#: Files that may name the base field, each with its reason. The list only shrinks: an entry nobody needs is an error.
ALLOWED = {
    "core/src/backstamp/launch.py": "Launch.half reads it, as the fallback of a half",
}


def readings(tree: ast.AST) -> list[int]:
    """Lines that read the field: as an attribute, or by its name in a lookup."""
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == FIELD and isinstance(node.ctx, ast.Load):
            lines.append(node.lineno)
        asked = [node.slice] if isinstance(node, ast.Subscript) else node.args if isinstance(node, ast.Call) else []
        lines += [item.lineno for item in asked if isinstance(item, ast.Constant) and item.value == FIELD]
    return lines


def sources() -> dict[str, str]:
    """Every module of the library and of the plugins."""
    paths = [*(ROOT / "core" / "src").rglob("*.py"), *(ROOT / "plugins").rglob("src/**/*.py")]
    return {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in paths}


def test_only_a_half_of_a_launch_reads_the_base_field() -> None:
    """SGLang #34264: seven decisions read it, and a split launch had left it unset."""
    found = {name: lines for name, text in sources().items() if (lines := readings(ast.parse(text)))}
    assert set(found) == set(ALLOWED), found
    assert len(sources()) > 150


@pytest.mark.parametrize(
    "line",
    [
        "if args.attention_backend == 'fa3': pass",
        "getattr(args, 'attention_backend', None)",
        "kernel = args['attention_backend']",
        "flags.get('attention_backend')",
    ],
)
def test_a_reading_is_found_however_it_is_spelled(line: str) -> None:
    """The check itself is held: an attribute, getattr, a key, a lookup."""
    assert readings(ast.parse(line)) == [1]


def test_every_allowed_file_is_there() -> None:
    """An entry for a file that went is an error."""
    assert all((ROOT / Path(name)).is_file() for name in ALLOWED)
