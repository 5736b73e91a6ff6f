"""The checks of `bench/kernels.py --check` on a CPU: the same cases, run in processes, merged and told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent.parent / "bench"


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch):
    """The module that runs checks; bench/ is no package."""
    monkeypatch.syspath_prepend(str(BENCH))
    import check_runs

    yield check_runs
    for name in ("check_runs", "checks", "check_cases"):
        sys.modules.pop(name, None)


def lines_of(*arguments: str) -> list[dict[str, object]]:
    """What one checking process prints."""
    child = subprocess.run([sys.executable, str(BENCH / "checks.py"), *arguments], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    return [json.loads(line) for line in child.stdout.splitlines()]


def test_every_case_of_torch_native_is_right_or_refused_with_its_reason() -> None:
    """On the CPU too; only CUDA graphs are refused."""
    lines = [line for line in lines_of("torch_native") if line["status"] != "running"]
    assert {line["status"] for line in lines} == {"ok", "refused"}
    assert all("CUDA graph" in str(line["case"]) for line in lines if line["status"] == "refused")
    assert sum(line["status"] == "ok" for line in lines) >= 40


def test_a_process_that_dies_is_told_and_the_rest_still_runs(runs, tmp_path: Path) -> None:
    """A fault takes its process's device with it, not the other cases."""
    script = tmp_path / "dies.py"
    script.write_text(
        "import json, os, sys\n"
        "first = int(sys.argv[sys.argv.index('--from') + 1])\n"
        "for number in range(first, 4):\n"
        "    line = {'number': number, 'kernel': 'k', 'case': str(number)}\n"
        "    print(json.dumps({**line, 'status': 'running'}), flush=True)\n"
        "    if number == 1:\n"
        "        os._exit(7)\n"
        "    print(json.dumps({**line, 'status': 'ok'}), flush=True)\n",
        "utf-8",
    )
    lines = list(runs._run([str(script)], 60))
    assert [(line["number"], line["status"]) for line in lines] == [(0, "ok"), (1, "failed"), (2, "ok"), (3, "ok")]
    assert "exit 7" in str(lines[1]["reason"])


def test_a_kernel_that_hangs_is_told_and_has_no_second_turn(runs, tmp_path: Path) -> None:
    """Its time is its own: a case that never ends takes none from the other kernels."""
    script = tmp_path / "hangs.py"
    script.write_text(
        "import json, sys, time\n"
        "print(json.dumps({'number': 0, 'kernel': 'k', 'status': 'running'}), flush=True)\n"
        "time.sleep(600)\n",
        "utf-8",
    )
    (line,) = runs._run([str(script)], 3)
    assert (line["number"], line["status"]) == (0, "failed")
    assert "took over 3 s" in str(line["reason"])


def test_half_a_line_of_a_process_that_ended_is_none(runs, tmp_path: Path) -> None:
    """The other kernels' checks go on."""
    script = tmp_path / "half.py"
    script.write_text(
        "import json, os\n"
        "print(json.dumps({'number': 0, 'kernel': 'k', 'status': 'running'}), flush=True)\n"
        "print('{\"number\": 0, \"ker', end='', flush=True)\n"
        "os._exit(7)\n",
        "utf-8",
    )
    (line, *_) = runs._run([str(script)], 60)
    assert (line["number"], line["status"]) == (0, "failed")
    assert "exit 7" in str(line["reason"])


def test_two_builds_of_a_kernel_are_both_told_and_a_refusal_only_where_neither_served(runs) -> None:
    """The second run has another build installed, which refuses what the first served."""
    case = {"kernel": "fa3", "family": "mha", "phase": "prefill", "case": "ragged"}
    other = {**case, "case": "page 1", "status": "refused"}
    one = {**case, "status": "ok", "library": {"distribution": "one", "version": "1"}}
    two = {**case, "status": "ok", "library": {"distribution": "two", "version": "1"}}
    refused = {**case, "status": "refused", "reason": "no"}
    assert sorted(map(str, runs.merge_lines([one, other], [two, refused]))) == sorted(map(str, [one, two, other]))
    better = {**one, "rel_error": 0.1}
    assert runs.merge_lines([one], [better]) == [better]
