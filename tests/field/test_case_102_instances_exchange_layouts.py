"""Case 102: prefill and decode instances shake hands on an equal cache dtype and exchange incompatible bytes.

https://github.com/sgl-project/sglang/issues/37838, https://github.com/ai-dynamo/dynamo/pull/12821,
https://github.com/NVIDIA/TensorRT-LLM/issues/6507
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from backstamp.agreement import compare, differences
from backstamp.declarations import PageSizes
from backstamp.engine import EngineFacts
from backstamp.errors import Disagreement
from backstamp.launch import Requests
from backstamp.plan import Plan
from tests.resolving import kernel, plan_of

#: 512 and 584 bytes a token, both of them fp8_e4m3.
LAYOUTS = {"flashmla": "mla_512", "trtllm_mla": "mla_584", "triton": "mla_584"}
ENGINE = EngineFacts(layouts=frozenset(LAYOUTS.values()))
FP8 = frozenset({"e4m3fn", "bf16"})


def instance(name: str, **asked: object) -> Plan:
    """What one instance resolves when it is asked for one kernel."""
    offers = [
        kernel(
            name,
            kv_dtypes=FP8,
            layouts=(layout,),
            page_sizes=PageSizes(preferred=16, multiple_of=16),
        )
        for name, layout in LAYOUTS.items()
    ]
    return plan_of(offers, Requests(attention_backend=name, kv_cache_dtype="fp8_e4m3", **asked), engine=ENGINE)


def test_unlike_layouts_of_one_dtype_are_incompatible_and_named() -> None:
    """The dtype is equal and says nothing."""
    prefill, decode = instance("flashmla"), instance("trtllm_mla")
    assert prefill.kv_dtype == decode.kv_dtype == "e4m3fn"
    with pytest.raises(Disagreement) as caught:
        compare({"prefill": prefill, "decode": decode}, of="instances")
    assert caught.value.who == "instance decode, layouts.attention"
    assert (caught.value.needed, caught.value.found) == ("mla_512, as instance prefill has it", "mla_584")


def test_unlike_kernels_of_one_layout_are_compatible() -> None:
    """Which kernel reads a cache is each instance's own matter; ranks of one instance must still run the same."""
    plans = {"prefill": instance("triton"), "decode": instance("trtllm_mla")}
    compare(plans, of="instances")
    with pytest.raises(Disagreement, match=r"phases\.prefill\.kernel"):
        compare(plans)


def test_unlike_page_sizes_are_incompatible_unless_declared_convertible() -> None:
    """A transfer that copies pages needs one size; one that copies tokens says that it converts."""
    plans = {"prefill": instance("triton", page_size=16), "decode": instance("trtllm_mla", page_size=64)}
    (found,) = differences(plans, of="instances")
    assert (found.who, found.field, found.value, found.reference) == ("instance decode", "page_size", "64", "16")
    with pytest.raises(Disagreement, match=r"instance decode, page_size: needs 16, .* got 64"):
        compare(plans, of="instances")
    compare(plans, of="instances", convertible=frozenset({"page_size"}))


def test_a_declared_conversion_of_pages_converts_no_layout() -> None:
    """The permission is for what it names."""
    plans = {"prefill": instance("flashmla", page_size=16), "decode": instance("trtllm_mla", page_size=64)}
    with pytest.raises(Disagreement, match=r"layouts\.attention"):
        compare(plans, of="instances", convertible=frozenset({"page_size"}))


def test_unlike_cache_dtypes_are_incompatible() -> None:
    """What the handshake did check."""
    other = replace(instance("triton"), kv_dtype="bf16")
    with pytest.raises(Disagreement, match="kv_cache_dtype: needs e4m3fn"):
        compare({"prefill": instance("triton"), "decode": other}, of="instances")
