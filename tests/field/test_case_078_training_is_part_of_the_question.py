"""Case 78, TransformerEngine #3481: a kernel without a backward is refused for training, by name or by auto."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backstamp.errors import NoKernel, Refused
from backstamp.launch import Requests
from tests.resolving import kernel
from tests.scenes import DENSE, GATED, GDN, model_with, plan_with

FORWARD = kernel("forward", head_dims=((192, 128),), priority=90)
BOTH = kernel("both", head_dims=((192, 128),), features=frozenset({"backward"}), priority=10)
MODEL = model_with((4, replace(DENSE, head_dim=192, v_head_dim=128)))
TRAIN = Requests(training=True)


@pytest.mark.parametrize("flag", ["attention_backend", "prefill_attention_backend"])
def test_training_refuses_a_kernel_that_has_no_backward_for_these_dims(flag: str) -> None:
    """TransformerEngine #3481: dqk 192, dv 128; the forward exists, the backward does not."""
    with pytest.raises(Refused, match="a kernel that declares backward"):
        plan_with([FORWARD, BOTH], replace(TRAIN, **{flag: "forward"}), model=MODEL)


def test_inference_accepts_it() -> None:
    """TransformerEngine #3481: without training nobody asks for gradients."""
    plan = plan_with([FORWARD, BOTH], Requests(attention_backend="forward", training=False), model=MODEL)
    assert plan.phase("prefill").kernel == "forward"
    assert plan_with([FORWARD, BOTH], model=MODEL).phase("prefill").kernel == "forward"


def test_auto_never_trains_with_it() -> None:
    """TransformerEngine #3481: auto takes the kernel with a backward, and errs with the reason where none has one."""
    assert plan_with([FORWARD, BOTH], TRAIN, model=MODEL).phase("prefill").kernel == "both"
    with pytest.raises(NoKernel, match="forward: needs a kernel that declares backward"):
        plan_with([FORWARD], TRAIN, model=MODEL)


def test_a_backward_for_other_dims_is_none_for_these() -> None:
    """The row that has gradients is another geometry's."""
    other = replace(FORWARD, head_dims=(128,), features=frozenset({"backward"}))
    with pytest.raises(Refused, match="declares backward"):
        plan_with([FORWARD, other], replace(TRAIN, attention_backend="forward"), model=MODEL)


def test_linear_layers_and_other_components_are_trained_too() -> None:
    """Gradients flow through every mixer."""
    hybrid = model_with((3, GATED), (1, DENSE))
    dense = kernel("dense", features=frozenset({"backward"}))
    with pytest.raises(NoKernel, match="lin: needs a kernel that declares backward"):
        plan_with([dense, kernel("lin", **GDN)], TRAIN, model=hybrid)
    vision = replace(DENSE, attn_type="encoder", causal=False, component="vision")
    with pytest.raises(NoKernel, match="enc: needs a kernel that declares backward"):
        plan_with(
            [dense, kernel("enc", features=frozenset({"encoder"}))], TRAIN, model=model_with((1, DENSE), (1, vision))
        )
