"""Case 67, vllm #14221, #13133, #11329: a cache dtype a kernel does not read is refused, never accepted and ignored."""

from __future__ import annotations

import pytest

from backstamp.errors import BadInput, NoKernel, Refused
from backstamp.launch import Requests
from backstamp.testing.fakes import fake_plugin
from tests.building import MLA, built_from, model_of, plan_on, stamps_of
from tests.resolving import kernel, kernels

FP8 = frozenset({"bf16", "e4m3fn"})
PLUGIN = fake_plugin("p", [kernel("a", kv_dtypes=frozenset({"bf16"}), priority=90), kernel("b", kv_dtypes=FP8)])


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8", "e4m3fn"])
@pytest.mark.parametrize("role", ["target", "draft"])
def test_auto_takes_the_kernel_that_reads_it(name: str, role: str) -> None:
    """vllm #14221: fp8 goes to B in every phase of both roles, although A ranks higher; the plan says so."""
    plan = plan_on("h100", PLUGIN, requests=Requests(kv_cache_dtype=name, speculative_algorithm="EAGLE"), role=role)
    assert {row.kernel for row in plan.running} == {"b"}
    assert plan.kv_dtype == "e4m3fn"
    backends = built_from(plan, PLUGIN)
    assert set().union(*stamps_of(backends).values()) == {"b"}
    assert backends.serving_attention_backend("prefill").request.kv_dtype == "e4m3fn"


@pytest.mark.parametrize(
    ("requests", "role"),
    [
        pytest.param({"attention_backend": "a"}, "target", id="base"),
        pytest.param({"prefill_attention_backend": "a"}, "target", id="prefill"),
        pytest.param({"decode_attention_backend": "a"}, "target", id="decode"),
        pytest.param({"verify_attention_backend": "a"}, "target", id="verify"),
        pytest.param({"draft_attention_backend": "a"}, "draft", id="draft"),
    ],
)
def test_an_explicit_kernel_that_does_not_read_it_is_an_error(requests: dict[str, str], role: str) -> None:
    """vllm #13133: refused with what it reads and what was asked, in whichever flag."""
    asked = Requests(kv_cache_dtype="fp8_e4m3", speculative_algorithm="EAGLE", **requests)
    with pytest.raises(Refused) as caught:
        plan_on("h100", PLUGIN, requests=asked, role=role)
    assert caught.value.needed == "KV dtype bf16"
    assert caught.value.found.startswith("e4m3fn")


def test_without_it_the_higher_kernel_is_taken() -> None:
    """The default cache is the model's own dtype, which A reads."""
    assert kernels(plan_on("h100", PLUGIN))["decode"] == "a"


@pytest.mark.parametrize("name", ["fp7", "int3", "e4m3fnn"])
def test_a_name_unknown_to_every_kernel_is_an_error_that_lists_the_accepted_ones(name: str) -> None:
    """vllm #11329: at config time, before any kernel is asked."""
    plugin = fake_plugin("p", [kernel("c", kv_dtypes=frozenset({"same", "int4"}), kv_dtype_names={"tq4": "int4"})])
    with pytest.raises(BadInput) as caught:
        plan_on("h100", plugin, requests=Requests(kv_cache_dtype=name))
    assert caught.value.who == "--kv-cache-dtype"
    for accepted in ("auto", "bf16", "fp8_e4m3", "fp8_e5m2", "int4", "tq4"):
        assert accepted in caught.value.needed


def test_a_known_name_no_kernel_reads_is_an_error_with_a_reason_for_each() -> None:
    """The relative: e5m2 is a dtype, and neither reads it."""
    with pytest.raises(NoKernel) as caught:
        plan_on("h100", PLUGIN, requests=Requests(kv_cache_dtype="fp8_e5m2"))
    assert "a: needs KV dtype bf16, got e5m2" in caught.value.considered
    assert "b: needs KV dtype bf16, e4m3fn, got e5m2" in caught.value.considered


def test_a_name_of_the_operators_is_read_as_the_row_maps_it() -> None:
    """The relative: a kernel's own name for a packed cache reaches that kernel and no other."""
    packed = kernel("packed", kv_dtypes=frozenset({"int4"}), kv_dtype_names={"tq4": "int4"})
    plugin = fake_plugin("p", [packed, kernel("plain", priority=90)])
    plan = plan_on("h100", plugin, requests=Requests(kv_cache_dtype="tq4"))
    assert kernels(plan)["decode"] == "packed"


def test_mla_caches_follow_the_same_rule() -> None:
    """The relative in another family."""
    plugin = fake_plugin("m", [kernel("a", priority=90, **MLA), kernel("b", kv_dtypes=FP8, **MLA)])
    plan = plan_on("h100", plugin, requests=Requests(kv_cache_dtype="fp8_e4m3"), model=model_of("mla"))
    assert kernels(plan)["decode"] == "b"
