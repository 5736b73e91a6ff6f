"""The bench of generation goes the whole way with a small model, and tells what it could not run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[3] / "bench" / "transformers_speed.py"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """What a run over two that serve, one that cannot here and one nobody knows leaves."""
    output = tmp_path_factory.mktemp("bench") / "speed.json"
    names = ("sdpa", "backstamp/torch_native", "backstamp/fa3", "other/torch_native")
    command = [sys.executable, str(BENCH), "--tiny", "--rounds", "1", "--output", str(output), "--implementations"]
    child = subprocess.run([*command, *names], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr[-2000:]
    assert "backstamp/torch_native" in child.stdout
    return json.loads(output.read_text("utf-8"))["results"]


def test_both_works_are_told_of_every_implementation(rows) -> None:
    """A speed and its ratio, or why there is none."""
    for work in ("generate", "generate_batch"):
        told = {row["implementation"]: row for row in rows if row["work"] == work}
        served = [told[name] for name in ("sdpa", "backstamp/torch_native")]
        assert all(row["tokens_per_s"] > 0 for row in served)
        assert max(row["ratio_to_best"] for row in served) == 1.0
        assert "needs cuda or musa, got cpu" in told["backstamp/fa3"]["reason"]
        assert "needs backstamp/KEY or a name of Transformers" in told["other/torch_native"]["reason"]
