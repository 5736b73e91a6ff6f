"""Case 14, sglang #34917 and #9161: sinks are stored once, and every kernel that reads them is held to that dtype."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backstamp.errors import NoKernel, Refused
from backstamp.launch import Requests
from backstamp.plan_rows import Conversion
from tests.resolving import kernel
from tests.scenes import DENSE, model_with, plan_with

SINKS = frozenset({"sinks"})
FA4 = kernel("fa4", features=SINKS, sink_dtypes=frozenset({"bf16"}))
TRTLLM = kernel("trtllm_mha", features=SINKS, sink_dtypes=frozenset({"fp32"}), sink_conversion="lossless")
SPLIT = Requests(prefill_attention_backend="fa4", decode_attention_backend="trtllm_mha")
BF16, FP32 = (model_with((4, replace(DENSE, sinks=dtype))) for dtype in ("bf16", "fp32"))


def test_a_split_pair_reads_one_stored_parameter() -> None:
    """sglang #34917: stored bf16; fa4 reads it, trtllm_mha carries a note that it widens at the call."""
    plan = plan_with([FA4, TRTLLM], SPLIT, model=BF16)
    assert (plan.phase("prefill").kernel, plan.phase("decode").kernel) == ("fa4", "trtllm_mha")
    assert plan.conversions == (Conversion("sinks", "decode", "trtllm_mha", "bf16", "fp32"),)
    assert plan.as_json()["conversions"] == [plan.conversions[0].as_json()]


def test_a_lossy_conversion_nobody_declared_is_refused_with_both_kernels_and_both_dtypes() -> None:
    """sglang #9161: stored fp32 and a kernel that reads bf16 only."""
    with pytest.raises(Refused) as caught:
        plan_with([FA4, TRTLLM], SPLIT, model=FP32)
    assert "'fa4'" in caught.value.who
    assert (caught.value.needed, caught.value.found[:10]) == ("sinks stored as bf16", "fp32 sinks")
    assert "decode asks for trtllm_mha" in caught.value.considered


def test_a_lossless_conversion_is_never_taken_for_a_narrowing() -> None:
    """The direction counts: lossless widens bf16 to fp32, not fp32 to bf16."""
    narrow = replace(FA4, sink_conversion="lossless")
    with pytest.raises(NoKernel, match="sinks stored as bf16, got fp32 sinks"):
        plan_with([narrow], model=FP32)
    lossy = replace(FA4, sink_conversion="any")
    assert plan_with([lossy], model=FP32).conversions[0].wanted == "bf16"


def test_a_lossless_conversion_is_noted_as_the_wider_dtype() -> None:
    """A kernel that reads fp16 and fp32 sinks widens stored bf16 to fp32; fp16 would lose its range."""
    both = replace(TRTLLM, sink_dtypes=frozenset({"fp16", "fp32"}))
    assert {item.wanted for item in plan_with([both], model=BF16).conversions} == {"fp32"}


@pytest.mark.parametrize("role", ["target", "draft"])
def test_every_phase_of_every_runner_is_held_to_it(role: str) -> None:
    """sglang #34917: the draft's backend is not known when the parameter is allocated, so it is checked by itself."""
    asked = Requests(speculative_algorithm="EAGLE", speculative_num_steps=3)
    plan = plan_with([TRTLLM], asked, model=BF16, role=role)
    assert {item.phase for item in plan.conversions} == {row.phase for row in plan.running}
    with pytest.raises(NoKernel, match="fp32 sinks"):
        plan_with([FA4], asked, model=FP32, role=role)


def test_layers_that_store_sinks_in_two_dtypes_are_all_asked_about() -> None:
    """One kernel for all layers must read both, whichever group comes first."""
    for first, second in (("bf16", "fp32"), ("fp32", "bf16")):
        model = model_with((2, replace(DENSE, sinks=first)), (2, replace(DENSE, sinks=second, window_left=127)))
        with pytest.raises(NoKernel, match="fp32 sinks"):
            plan_with([replace(FA4, features=SINKS | {"window"})], model=model)


def test_a_model_without_sinks_asks_for_no_dtype() -> None:
    """The check is about a parameter that is there."""
    assert plan_with([FA4]).conversions == ()
