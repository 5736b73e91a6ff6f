"""What the page of kernel speed claims is what the record holds: a figure nobody measured cannot stay on it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "performance.md").read_text("utf-8")
RECORD = json.loads((ROOT / "bench" / "results" / "h200.json").read_text("utf-8"))
#: Microseconds, and in brackets the speed beside the fastest of the shape.
FIGURE = re.compile(r"([0-9.]+) \(([01]\.[0-9]{2})\)")


def _figures() -> list[tuple[str, str]]:
    return FIGURE.findall(PAGE)


def _as_told(row: dict[str, object], us: str) -> str:
    decimals = len(us.partition(".")[2])
    return f"{row['us']:.{decimals}f}"


def test_the_page_has_figures() -> None:
    """A page whose table is written another way would pass for want of anything to hold."""
    assert len(_figures()) > 50


@pytest.mark.parametrize(("us", "ratio"), _figures(), ids=lambda part: part)
def test_a_figure_on_the_page_is_in_the_record(us: str, ratio: str) -> None:
    """Time and ratio together, as they are rounded there."""
    known = {(_as_told(row, us), f"{row['ratio_to_best'] or 0:.2f}") for row in RECORD["results"]}
    assert (us, ratio) in known


def test_what_the_page_links_is_there() -> None:
    """Plots and records are committed with the page."""
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert target.startswith("http") or (ROOT / "docs" / target).exists(), target
