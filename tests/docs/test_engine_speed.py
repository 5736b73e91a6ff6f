"""What the page of engines says of speed is what the record of that run holds."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "engines.md").read_text("utf-8")
RECORD = json.loads((ROOT / "bench" / "results" / "engines" / "transformers-h200.json").read_text("utf-8"))
LINES = re.findall(r"^\| (generate\w*) \| ([\w/+]+) \| ([0-9.]+) \| ([0-9.]+) \|$", PAGE, re.MULTILINE)


def test_every_implementation_of_the_record_is_told() -> None:
    """None is left out for being slow."""
    assert {line[:2] for line in LINES} == {(row["work"], row["implementation"]) for row in RECORD["results"]}


@pytest.mark.parametrize(("work", "implementation", "speed", "ratio"), LINES)
def test_a_speed_is_in_the_record(work: str, implementation: str, speed: str, ratio: str) -> None:
    """Rounded as it is told, and so beside the fastest of its work."""
    rows = {row["implementation"]: row["tokens_per_s"] for row in RECORD["results"] if row["work"] == work}
    found = rows[implementation]
    assert (f"{found:.1f}", f"{found / max(rows.values()):.2f}") == (speed, ratio)
