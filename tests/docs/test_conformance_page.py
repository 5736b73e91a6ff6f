"""docs/conformance.md says what the kit does: its checks, its tolerances, and what it has no reference for."""

from __future__ import annotations

import re

from backstamp.testing.conformance import CHECKS
from backstamp.testing.conformance.row_cases import UNCHECKED_FEATURES
from backstamp.testing.conformance.verdicts import ACCURACY_FACTORS, LSE_TOLERANCE, TOLERANCES
from tests.documents import ROOT

PAGE = (ROOT / "docs" / "conformance.md").read_text("utf-8")


def rows_under(head: str) -> list[list[str]]:
    """The cells of the table under a line."""
    lines = PAGE.partition(head)[2].lstrip("\n").splitlines()
    table = lines[next(at for at, line in enumerate(lines) if line.startswith("|---")) + 1 :]
    rows = [line.strip("|").split("|") for line in table[: next(at for at, line in enumerate(table) if not line)]]
    return [[cell.strip() for cell in row] for row in rows]


def test_every_check_is_told_in_the_order_it_runs() -> None:
    """No check without a line, no line without a check."""
    assert [row[0].strip("`") for row in rows_under("## What is checked")] == list(CHECKS)


def test_the_tolerances_are_those_of_the_code() -> None:
    """Per dtype, per accuracy class, and for LSE."""
    told = {row[0]: tuple(map(float, row[1:])) for row in rows_under("## When an answer is right")}
    assert told == {name: tuple(bound) for name, bound in TOLERANCES.items()}
    factors = {name: float(number) for name, number in re.findall(r"`(\w+)` (\d+)", PAGE)}
    assert factors == {name: factor for name, factor in ACCURACY_FACTORS.items() if name != "exact"}
    assert "LSE is held to 4e-3, 4e-3 and 2e-3" in PAGE
    assert tuple(LSE_TOLERANCE) == (4e-3, 4e-3, 2e-3)


def test_what_has_no_reference_is_told() -> None:
    """A feature the kit skips; states in between and selections of keys are other slots' and families'."""
    told = set(re.findall(r"`(\w+)`", PAGE.partition("no reference for (")[2].partition(")")[0]))
    assert told == UNCHECKED_FEATURES - {"tracked_states", "indices"}
