"""The linear checks of `bench/kernels.py --check` on a CPU: what is right, wrong and refused."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from backstamp.catalogue import build_catalogue
from backstamp.discovery import discover
from backstamp.errors import BackstampError
from backstamp.host import this_host
from backstamp_cpu.linear import TorchNativeLinear

BENCH = Path(__file__).parent.parent.parent / "bench"


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch):
    """The module; bench/ is no package."""
    monkeypatch.syspath_prepend(str(BENCH))
    import linear_checks

    yield linear_checks
    for name in ("linear_checks", "linear_cases", "checks", "check_cases", "check_runs"):
        sys.modules.pop(name, None)


def small(checks, phase: str, name: str, family: str = "gdn"):
    """One of the shared cases with fewer, narrower heads."""
    found = next(of for of in checks.CASES if (of.family, of.phase, of.name) == (family, phase, name))
    return replace(found, heads=(1, 2), dims=(16, 32))


CASES = [
    ("gdn", "prefill", "empty rows and pads"),
    ("kda", "decode", "state order kv"),
    ("gdn", "verify", "slots a token"),
    ("kda", "verify", "tree"),
]


@pytest.mark.parametrize(("family", "phase", "name"), CASES)
def test_a_right_kernel_is_told_as_right(checks, family: str, phase: str, name: str) -> None:
    """Through the resolver, the real factory and the stamp."""
    case = small(checks, phase, name, family)
    told = checks.check("torch_native", case, this_host("cpu"), build_catalogue(discover()))
    assert told["status"] == "ok"
    assert told["library"]["distribution"] == "torch"


@pytest.mark.parametrize("what", ["outputs", "states", "a slot of others", "nan"])
def test_a_wrong_kernel_is_told_as_wrong(checks, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs, the states of live rows, and slots that nobody may touch."""
    real = TorchNativeLinear.forward

    def forward(self, q, k, v, gates, layer, state, *, pool, slots, out=None):
        answer = real(self, q, k, v, gates, layer, state, pool=pool, slots=slots, out=out)
        if what == "outputs":
            answer.mul_(1.02)
        elif what == "states":
            pool.ssm[slots[0]] *= 1.1
        elif what == "nan":
            answer[0, 0, 0] = float("nan")
        else:
            untouched = next(at for at in range(pool.ssm.shape[0]) if at not in slots.tolist())
            pool.ssm[untouched] = 0.0
        return answer

    monkeypatch.setattr(TorchNativeLinear, "forward", forward)
    told = checks.check("torch_native", small(checks, "decode", "rows"), this_host("cpu"), build_catalogue(discover()))
    assert told["status"] == "wrong"


def test_a_kernel_that_cannot_is_refused_with_its_reason(checks) -> None:
    """Nothing falls back to another kernel."""
    case = small(checks, "decode", "rows")
    with pytest.raises(BackstampError, match="triton"):
        checks.check("triton", case, this_host("cpu"), build_catalogue(discover()))


def test_the_lines_say_running_first_and_go_on_from_a_number(checks, monkeypatch, capsys) -> None:
    """What `check_runs` reads."""
    monkeypatch.setattr(checks, "CASES", tuple(small(checks, "decode", name) for name in ("rows", "pads", "one row")))
    monkeypatch.setattr(sys, "argv", ["linear_checks.py", "torch_native", "--from", "1", "--tune"])
    assert checks.main() == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    told = [(line["number"], line["case"], line["status"]) for line in lines]
    # the kernel runs on this machine's device, and the machine that tests may have another than the CPU
    assert [(number, case) for number, case, _ in told] == [(1, "pads")] * 2 + [(2, "one row")] * 2
    assert [status for _, _, status in told] == ["running", "ok"] * 2


def test_every_linear_kernel_of_a_gpu_is_checked_beside_the_others(checks) -> None:
    """A kernel of the slot that no command names would never be run."""
    import check_runs

    commanded = {more[0] for script, *more in check_runs.OTHER_CHECKS if script == "linear_checks.py"}
    rows = [row.offer for rows in build_catalogue(discover()).rows.values() for row in rows]
    assert commanded == {of.kernel for of in rows if of.slot == "linear" and of.device in ("cuda", "any")}


def test_autotuners_take_their_first_configuration(checks, monkeypatch) -> None:
    """Compiling every one of fla-core's would take longer than all other checks."""
    from triton.runtime.autotuner import Autotuner

    monkeypatch.setattr(Autotuner, "prune_configs", lambda self, kwargs: ["first", "second"])
    checks.take_first_configurations()
    assert Autotuner.prune_configs(None, {}) == ["first"]
