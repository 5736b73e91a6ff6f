"""Case 13, SGLang #34264: a helper written as a deny list answered yes about a backend that was not there."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from backstamp.decisions import any_phase_runs, both_halves_run, half_kernel, half_runs
from backstamp.errors import Unresolved
from backstamp.launch import Requests
from tests.resolving import kernel, plan_of

OFFERS = [kernel("torch_native", priority=1), kernel("triton", priority=90)]


@pytest.mark.parametrize("half", ["prefill", "decode"])
def test_a_two_phase_helper_runs_where_both_halves_do(half: str) -> None:
    """One half of another kernel is a no that names the half."""
    plan = plan_of(OFFERS, Requests(**{f"{half}_attention_backend": "torch_native"}))
    answer = both_halves_run(plan, {"triton"})
    assert not answer
    assert answer.reason == f"{half} half is torch_native"
    assert both_halves_run(plan_of(OFFERS), {"triton"})


@pytest.mark.parametrize(
    "ask",
    [
        lambda plan: both_halves_run(plan, {"triton"}),
        lambda plan: half_runs(plan, "prefill", {"triton"}),
        lambda plan: half_kernel(plan, "decode"),
        lambda plan: any_phase_runs(plan, "triton"),
    ],
    ids=["both", "half", "kernel", "any"],
)
def test_asking_about_no_backend_is_an_error(ask: Callable[[object], object]) -> None:
    """None is not a kernel that supports everything."""
    with pytest.raises(Unresolved, match="no backend given"):
        ask(None)
