"""`bench/sparse_checks.py` on a CPU: its cases, smaller, over the stand-in of the library; how `--check` runs it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from backstamp.catalogue import build_catalogue
from backstamp.construction import build, load_factory
from backstamp.discovery import discover
from backstamp.testing.conformance.sparse_cases import SparseCase
from backstamp.testing.hosts import described_host
from tests.plugins.dsa.flash_mla import install

BENCH = Path(__file__).parents[3] / "bench"
SMALL = {
    "prefill": ((5, 5), (1, 40), (0, 17), (3, 300)),
    "decode": ((1, 1), (0, 0), (1, 300)),
    "verify": ((4, 4), (4, 140)),
    "draft_extend": ((1, 20), (3, 3)),
    "draft_decode": ((1, 30), (1, 31)),
}
H100 = described_host("h100")


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch):
    """The script as a module, and the library's stand-in under our modules."""
    for name in ("dsa_library", "csa_cuda", "flashmla"):
        monkeypatch.delitem(sys.modules, f"backstamp_dsa.{name}", raising=False)
    install(monkeypatch)
    monkeypatch.syspath_prepend(str(BENCH))
    import checks
    import sparse_checks

    # a factory that is handed over is not asked for the plan's device
    monkeypatch.setattr(checks, "build", partial(build, load=load_factory))
    yield sparse_checks
    for name in ("sparse_checks", "sparse_cases", "checks", "check_cases", "check_runs"):
        sys.modules.pop(name, None)


def smaller(case):
    """The case with rows of a size for a CPU; our own kernels in fp16, which the interpreter multiplies rightly."""
    sparse = isinstance(case, SparseCase)
    ours = sparse and bool(case.asks or case.indexer)
    small = replace(
        case,
        rows=SMALL[case.phase],
        heads=(4 if ours else min(case.heads[0], 16), 1),
        dtype="fp16" if ours else case.dtype,
    )
    return replace(small, topk=min(case.topk, 20)) if sparse else small


@pytest.mark.parametrize("number", range(39))
def test_every_case_is_right_over_the_stand_in(checks, number):
    """What the script resolves, builds, runs and compares is what it will on a GPU; graphs need one."""
    assert len(checks.CASES) == 39
    case = checks.CASES[number]
    if case.graph:
        # everything up to the graph has been done then
        with pytest.raises((RuntimeError, AssertionError), match=r"NVIDIA driver|dummy base class CUDAGraph"):
            checks.check(smaller(case), H100, build_catalogue(discover()), "cpu")
        return
    line = checks.check(smaller(case), H100, build_catalogue(discover()), "cpu")
    assert line["status"] == "ok", line
    assert (line.get("lse_error") is not None) is case.lse


def test_a_wrong_answer_is_told(checks, monkeypatch):
    """A check that could not fail would hold nothing."""
    case = smaller(checks.CASES[0])
    answer = checks.sparse_answer

    def off(*given, **named):
        return answer(*given, **named)._replace(truth=answer(*given, **named).truth + 0.5)

    monkeypatch.setattr(checks, "sparse_answer", off)
    line = checks.check(case, H100, build_catalogue(discover()), "cpu")
    assert line["status"] == "wrong"
    assert line["rel_error"] > 0.1


def test_a_host_without_the_library_refuses_every_case_with_the_reason():
    """As `checks.py` does: one line before a case, one after."""
    command = [sys.executable, str(BENCH / "sparse_checks.py"), "dsv4", "--from", "24"]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    lines = child.stdout.splitlines()
    assert len(lines) == 2 * 9
    assert all('"status": "refused"' in line and "sgl-flash-mla is not installed" in line for line in lines[1::2])


def test_a_check_of_dsa_runs_its_sparse_cases(checks, monkeypatch):
    """`kernels.py --check dsa` is both scripts; a dense kernel's is one."""
    import check_runs

    asked: list[list[str]] = []
    monkeypatch.setattr(check_runs, "_run", lambda command, seconds: iter([asked.append(command) or {}]))
    list(check_runs.check_all(["dsa", "triton"], 1))
    sparse = [command for command in asked if command[0].endswith("sparse_checks.py")]
    assert [command[1:] for command in sparse] == [["dsa"]]
