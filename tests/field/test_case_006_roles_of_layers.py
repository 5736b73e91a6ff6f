"""Case 6, TensorRT-LLM #17698: layers the requested kernel cannot serve get another one, and the plan says which."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backstamp.errors import Refused, StrictViolation
from backstamp.launch import Requests
from backstamp.policy import Policy
from backstamp.stamp import read_stamp
from tests.resolving import kernel
from tests.scenes import DENSE, built_with, groups_of, model_with, plan_with, texts_of

K = kernel("K", priority=90)
PLAIN = kernel("plain", features=frozenset({"cross"}), priority=10)
CROSS = replace(DENSE, attn_type="cross", component="cross_attention", causal=False)
MODEL = model_with((10, DENSE), (2, CROSS))
ASKED = Requests(attention_backend="K")


@pytest.mark.parametrize("phase", ["prefill", "decode", "verify"])
def test_each_role_of_layers_has_its_kernel_in_the_plan(phase: str) -> None:
    """TensorRT-LLM #17698: 10 x K and 2 x plain, in every phase that runs."""
    plan = plan_with([K, PLAIN], replace(ASKED, speculative_algorithm="EAGLE"), model=MODEL)
    groups = plan.phase(phase).groups
    assert {group.kernel: len(group.layers) for group in groups} == {"K": 10, "plain": 2}


def test_each_role_resolved_and_requested_is_warned_of_once() -> None:
    """TensorRT-LLM #17698: one line for (cross_attention, K, plain), however many phases said it."""
    plan = plan_with([K, PLAIN], replace(ASKED, speculative_algorithm="EAGLE"), model=MODEL)
    (text,) = texts_of(plan, "changed")
    assert "cross_attention" in text
    assert "'K'" in text
    assert "plain" in text
    assert "declares cross" in text


def test_two_requests_that_cannot_serve_are_two_warnings() -> None:
    """Split flags: (cross_attention, K, plain) and (cross_attention, L, plain) are different things to know."""
    asked = Requests(prefill_attention_backend="K", decode_attention_backend="L")
    plan = plan_with([K, PLAIN, kernel("L")], asked, model=MODEL)
    assert [("'K'" in text, "'L'" in text) for text in sorted(texts_of(plan, "changed"))] == [
        (True, False),
        (False, True),
    ]


def test_a_role_verifies_by_the_half_the_mode_names() -> None:
    """Under mode decode the cross-attention layers verify with what decode asked for, as the others do."""
    both = [replace(item, features=frozenset({"cross"})) for item in (K, PLAIN)]
    asked = Requests(
        prefill_attention_backend="K",
        decode_attention_backend="plain",
        speculative_algorithm="EAGLE",
        speculative_attention_mode="decode",
    )
    plan = plan_with(both, asked, model=MODEL)
    assert {group.kernel for group in plan.phase("verify").groups} == {"plain"}


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_each_built_child_is_stamped_with_its_own_kernel(phase: str) -> None:
    """TensorRT-LLM #17698: the object of the cross-attention layers says plain, the other K."""
    plan = plan_with([K, PLAIN], ASKED, model=MODEL)
    backends = built_with([K, PLAIN], plan, MODEL)
    built = [backends.serving_attention_backend(phase, at) for at in (0, 1)]
    assert [read_stamp(item).kernel for item in built] == ["K", "plain"]
    assert [len(item.request.layers) for item in built] == [10, 2]


def test_strict_mode_refuses_the_change() -> None:
    """TensorRT-LLM #17698: strict names the role, what was asked and what would run."""
    with pytest.raises(StrictViolation, match=r"cross_attention: 'K' cannot serve it, plain does"):
        plan_with([K, PLAIN], ASKED, model=MODEL, policy=Policy(strict=True))


def test_a_request_scoped_to_the_role_binds() -> None:
    """Asked for by its own flag, a kernel that cannot serve the role is an error, never another one."""
    with pytest.raises(Refused, match=r"component cross_attention 'K'.*declares cross"):
        plan_with([K, PLAIN], Requests(component_backends={"cross_attention": "K"}), model=MODEL)


def test_auto_needs_no_warning() -> None:
    """Nobody asked for K, so nothing was changed: the plan shows both kernels and is silent, strict too."""
    plan = plan_with([K, PLAIN], model=MODEL, policy=Policy(strict=True))
    assert {name: group.kernel for name, group in groups_of(plan).items()} == {"main": "K", "cross_attention": "plain"}
    assert texts_of(plan, "changed") == []
