"""Case 100: each rank picks for itself, the picks differ, and a collective hangs.

https://github.com/flashinfer-ai/flashinfer/issues/3186
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from backstamp.agreement import compare, differences
from backstamp.errors import Disagreement
from backstamp.launch import Requests
from backstamp.plan import Plan
from tests.resolving import kernel, plan_of, times_of

OFFERS = [kernel("flashinfer", priority=60), kernel("triton", priority=50)]


def rank_plan(rank: int, timed: Mapping[tuple[str, str], float] | None = None) -> Plan:
    """What one rank resolves on a host of its own name, by its own timing."""
    measured = times_of(OFFERS, timed) if timed else None
    return replace(plan_of(OFFERS, Requests(), measurements=measured), host=f"node{rank}")


PLANS = [rank_plan(rank) for rank in range(8)]
#: Rank 5 timed triton as the faster one for decode.
TIMED = rank_plan(5, {("decode", "triton"): 9.0, ("decode", "flashinfer"): 10.0})


def test_eight_ranks_that_run_the_same_go_on() -> None:
    """Equal digests, whatever their hosts are called."""
    assert len({plan.digest for plan in PLANS}) == 1
    compare(PLANS)


def test_ranks_that_measured_differently_and_run_the_same_go_on() -> None:
    """A time is each rank's own; only what it decided must be one."""
    times = [{("decode", "triton"): 9.0 + rank, ("decode", "flashinfer"): 1.0 + rank} for rank in (0, 1)]
    plans = [rank_plan(rank, timed) for rank, timed in enumerate(times)]
    assert plans[0].timings != plans[1].timings
    compare(plans)


def test_rank_5_of_8_differs_in_its_decode_kernel() -> None:
    """An error before the first collective: the rank, the field, both values."""
    with pytest.raises(Disagreement) as caught:
        compare([*PLANS[:5], TIMED, *PLANS[6:]])
    assert caught.value.who == "rank 5, phases.decode.kernel"
    assert caught.value.needed.startswith("flashinfer, as rank 0 and 6 others")
    assert caught.value.found == "triton"
    assert "rank 5, phases.decode.kernel: needs flashinfer" in caught.value.message


def test_tools_get_the_same_as_data() -> None:
    """Nothing is raised, and nothing has to be read out of a message."""
    (found,) = differences([*PLANS[:5], TIMED, *PLANS[6:]])
    assert (found.who, found.field, found.value, found.reference) == (
        "rank 5",
        "phases.decode.kernel",
        "triton",
        "flashinfer",
    )
    assert len(found.agreeing) == 7
