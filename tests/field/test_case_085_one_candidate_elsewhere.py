"""Case 85, tokenspeed #502: the only linear kernel wants another card; the error says so, another plugin mends it."""

from __future__ import annotations

import pytest

from backstamp.errors import NoKernel, Refused
from backstamp.launch import Requests
from backstamp.testing.fakes import fake_plugin
from tests.building import GDN, KDA, MLA, host_of, model_of, plan_on
from tests.resolving import kernel

ATTENTION = fake_plugin("full", [kernel("full", head_dims=(256,)), kernel("full", **MLA)])
NEWEST = {"archs": ("10.0",), "runtimes": ("cuda>=13",)}
ONLY = fake_plugin("only", [kernel("blackwell", **NEWEST, **GDN), kernel("blackwell", **NEWEST, **KDA)])
SECOND = fake_plugin("second", [kernel("hopper", priority=10, **GDN), kernel("hopper", priority=10, **KDA)])
MODELS = [pytest.param("hybrid", id="gdn"), pytest.param("kda", id="kda")]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("flag", ["", "linear_attn_backend", "linear_attn_prefill_backend"])
def test_the_error_says_what_is_wanted_and_what_there_is(model: str, flag: str) -> None:
    """tokenspeed #502: SM100 wanted, SM90 here; by auto and asked for."""
    requests = Requests(**({flag: "blackwell"} if flag else {}))
    with pytest.raises((NoKernel, Refused)) as caught:
        plan_on("h100", ATTENTION, ONLY, requests=requests, model=model_of(model))
    assert "SM100 (10.0), got SM90 (9.0)" in caught.value.message
    (verdict,) = [item for item in caught.value.verdicts if item.kernel == "blackwell"]
    assert (verdict.code, verdict.wanted, verdict.have) == ("arch", "SM100 (10.0)", "SM90 (9.0)")


def test_the_runtime_is_told_where_the_arch_is_right() -> None:
    """The other fact: SM100 with CUDA 12.8 wants CUDA 13."""
    old = host_of("b200", runtimes=(("cuda", "12.8"),))
    attention = fake_plugin("full", [kernel("full", archs=("10.0",), head_dims=(256,))])
    with pytest.raises(NoKernel, match=r"blackwell: needs cuda>=13, got 12\.8"):
        plan_on(old, attention, ONLY, model=model_of("hybrid"))
    assert plan_on("b200", attention, ONLY, model=model_of("hybrid")).linear is not None


def test_both_facts_are_told_where_both_are_wrong() -> None:
    """Wanted and actual for each fact: another card and an older CUDA, in the first error."""
    old = host_of("h100", runtimes=(("cuda", "12.8"),))
    with pytest.raises(NoKernel) as caught:
        plan_on(old, ATTENTION, ONLY, model=model_of("hybrid"))
    for fact in ("needs SM100 (10.0), got SM90 (9.0)", "needs cuda>=13, got 12.8"):
        assert fact in caught.value.considered


@pytest.mark.parametrize("model", MODELS)
def test_a_second_plugin_is_chosen_and_nothing_else_changed(model: str) -> None:
    """tokenspeed #502: installing it is enough, in each linear phase; on SM100 the first one stays."""
    linear = plan_on("h100", ATTENTION, ONLY, SECOND, model=model_of(model)).linear
    assert linear is not None
    for row in (linear.prefill, linear.decode, linear.verify):
        assert row.kernel == "hopper"
        assert [item.code for item in row.verdicts if item.kernel == "blackwell"] == ["arch"]


def test_the_same_holds_of_attention() -> None:
    """The relative in the attention slot."""
    only, second = fake_plugin("only", [kernel("blackwell", **NEWEST)]), fake_plugin("second", [kernel("hopper")])
    with pytest.raises(NoKernel, match="blackwell: needs SM100"):
        plan_on("h100", only)
    assert plan_on("h100", only, second).phase("decode").kernel == "hopper"
