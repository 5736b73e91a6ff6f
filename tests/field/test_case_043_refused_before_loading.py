"""Case 43, FreeToken #442 and #468: an explicit choice is refused before loading, by auto's own table."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backstamp.declarations import Offer
from backstamp.engine import EngineFacts
from backstamp.errors import NoKernel, Refused
from backstamp.host import profile_names
from backstamp.launch import Requests
from backstamp.testing.fakes import fake_plugin
from tests.building import plan_on
from tests.resolving import kernel

FA = kernel("fa", archs=("9.0", "10.0"), priority=90)
OTHER = kernel("triton", archs=("8.0",), forward_archs="any", priority=1)


@pytest.mark.parametrize(
    ("requests", "role"),
    [
        pytest.param({"attention_backend": "fa"}, "target", id="base"),
        pytest.param({"decode_attention_backend": "fa"}, "target", id="decode"),
        pytest.param({"verify_attention_backend": "fa"}, "target", id="verify"),
        pytest.param({"draft_attention_backend": "fa"}, "draft", id="draft"),
    ],
)
@pytest.mark.parametrize("graph", ["never", "any"])
def test_an_explicit_kernel_without_this_arch_is_refused_at_resolve_time(
    requests: dict[str, str], role: str, graph: str
) -> None:
    """FreeToken #442: no driver error in graph capture; needed and actual arch, from facts alone."""
    asked = Requests(speculative_algorithm="EAGLE", **requests)
    plugin = fake_plugin("p", [replace(FA, graph="any"), OTHER])
    with pytest.raises(Refused) as caught:
        plan_on("l40s", plugin, requests=asked, role=role, engine=EngineFacts(graph=graph))
    assert caught.value.needed == "SM90 (9.0), SM100 (10.0)"
    assert "SM89 (8.9)" in caught.value.found


def test_auto_passes_the_same_kernel_over_for_the_same_reason() -> None:
    """FreeToken #468: one table, so the verdict auto writes down is what the explicit path raises."""
    plan = plan_on("l40s", fake_plugin("p", [FA, OTHER]))
    (verdict,) = [item for item in plan.phase("decode").verdicts if item.kernel == "fa"]
    with pytest.raises(Refused) as caught:
        plan_on("l40s", fake_plugin("p", [FA, OTHER]), requests=Requests(attention_backend="fa"))
    assert plan.phase("decode").kernel == "triton"
    assert caught.value.needed == verdict.wanted
    assert caught.value.verdicts == (verdict,)


def _some(values: list[str]) -> st.SearchStrategy[frozenset[str]]:
    return st.frozensets(st.sampled_from(values), min_size=1)


OFFERS = st.builds(
    lambda archs, forward, dtypes, dims, phases, needs, excludes, priority: kernel(
        "k",
        archs=tuple(sorted(archs)),
        forward_archs=forward,
        dtypes=dtypes,
        head_dims=tuple(sorted(dims)),
        phases=phases,
        needs=needs,
        excludes=excludes - needs,
        priority=priority,
    ),
    _some(["8.0", "8.9", "9.0", "9.0a", "10.0", "12.0"]),
    st.sampled_from(["no", "major", "any"]),
    _some(["bf16", "fp16"]),
    st.frozensets(st.sampled_from([64, 128]), min_size=1),
    _some(["prefill", "decode", "verify"]),
    st.frozensets(st.sampled_from(["tp", "prefix_cache"])),
    st.frozensets(st.sampled_from(["tp", "prefix_cache", "spec"])),
    st.integers(0, 3),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(OFFERS, min_size=1, max_size=4), st.sampled_from(profile_names()))
def test_what_auto_picks_is_accepted_when_asked_for_and_what_is_refused_is_never_picked(
    offers: list[Offer], host: str
) -> None:
    """One table: auto's choice binds when it is asked for; a kernel that is refused when asked for is not auto's."""
    named = [replace(offer, kernel=f"k{at}") for at, offer in enumerate(offers)]
    plugin = fake_plugin("p", named)
    try:
        plan = plan_on(host, plugin)
    except NoKernel:
        plan = None
    for half in ("prefill", "decode"):
        picked = plan.phase(half).kernel if plan is not None else None
        for offer in named:
            try:
                asked = plan_on(host, plugin, requests=Requests(**{f"{half}_attention_backend": offer.kernel}))
            except Refused:
                assert picked != offer.kernel
            except NoKernel:
                # it binds its half, and the other half has nobody
                assert plan is None
            else:
                assert asked.phase(half).kernel == offer.kernel
