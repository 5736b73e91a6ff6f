"""docs/plan-json.md lists every code the library can write, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import backstamp
from backstamp.hostfit import INSTALLATION
from backstamp.plan_warnings import STRICT_CODES
from backstamp.refusal_words import WORDS
from tests.documents import ROOT

PAGE = (ROOT / "docs" / "plan-json.md").read_text("utf-8")
CORE = Path(backstamp.__file__).parent


def calls(name: str, position: int) -> Iterator[str]:
    """The literal at one position of every call of a class, over the whole library."""
    for path in CORE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
            if is_call and len(node.args) > position and isinstance(node.args[position], ast.Constant):
                yield node.args[position].value


def test_every_warning_code_is_on_the_page_with_what_strict_makes_of_it() -> None:
    """The table names the codes the library writes, and those strict mode turns into errors."""
    table = dict(re.findall(r"^\| `(\w+)` \|.*\| (yes|no) \|$", PAGE, re.MULTILINE))
    assert set(table) == set(calls("Warn", 0))
    assert {code for code, strict in table.items() if strict == "yes"} == STRICT_CODES


def test_every_verdict_code_is_on_the_page() -> None:
    """Machine, model, situation, engine, installation: whatever refuses has its code written down."""
    section = PAGE.partition("## Verdict codes")[2]
    listed = set(re.findall(r"`(\w+)`", section))
    written = {wording.code for wording in WORDS.values()} | INSTALLATION
    written |= {code for code in calls("Refusal", 1) if isinstance(code, str)}
    written |= {code for code in calls("Verdict", 2) if isinstance(code, str)}
    assert listed == written
