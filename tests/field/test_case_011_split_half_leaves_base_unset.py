"""Case 11, SGLang #34264: seven decisions read the base field and answered from a value nobody had set."""

from __future__ import annotations

import pytest

from backstamp.decisions import any_phase_runs, half_runs, pair
from backstamp.launch import Requests
from tests.resolving import kernel, plan_of

OFFERS = [kernel("flashinfer", priority=90), kernel("fa3", priority=10)]


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        (Requests(prefill_attention_backend="fa3"), ("fa3", "flashinfer")),
        (Requests(decode_attention_backend="flashinfer"), ("flashinfer", "flashinfer")),
        (Requests(decode_attention_backend="fa3"), ("flashinfer", "fa3")),
        (Requests(), ("flashinfer", "flashinfer")),
    ],
    ids=["prefill-alone", "decode-alone", "decode-other", "nothing"],
)
def test_the_pair_is_resolved_whatever_was_set(requests: Requests, expected: tuple[str, str]) -> None:
    """No half is None, and a launch that set one half leaves the other to auto."""
    plan = plan_of(OFFERS, requests)
    assert pair(plan) == expected
    assert None not in [row.kernel for row in plan.running]


def test_a_prefill_only_feature_asks_the_prefill_half() -> None:
    """Its gate sees fa3 though the base field is unset."""
    plan = plan_of(OFFERS, Requests(prefill_attention_backend="fa3"))
    assert half_runs(plan, "prefill", {"fa3"})
    assert not half_runs(plan, "decode", {"fa3"})


@pytest.mark.parametrize("kernel_name", ["flashinfer", "fa3"])
def test_a_guard_fires_for_a_kernel_no_flag_names(kernel_name: str) -> None:
    """The guard asks every phase that runs it, not the flags."""
    plan = plan_of(OFFERS, Requests(prefill_attention_backend="fa3", speculative_algorithm="EAGLE"))
    assert any_phase_runs(plan, kernel_name)
    assert not any_phase_runs(plan, "triton")
