"""Hybrid models: gated delta rules on the resolved linear kernel, states kept by Transformers' own cache."""

from __future__ import annotations

import pytest
from transformers import AutoModelForCausalLM

import backstamp_transformers
from backstamp_transformers.admission import served_for
from engines.transformers.tests.small_models import generate, padded_prompts, small_model
from engines.transformers.tests.wrong_kernels import WRONG_LINEAR


def test_the_plan_names_a_linear_kernel_and_it_is_stamped() -> None:
    """Both slots are planned, built and stamped, each under its own name."""
    model = small_model("qwen3_next")
    with backstamp_transformers.use(model, "flex_attention", linear="torch_native") as handle:
        assert {stamp.kernel for stamp in handle.stamps.values()} == {"flex_attention"}
        assert {(stamp.kernel, stamp.slot) for stamp in handle.linear_stamps.values()} == {("torch_native", "linear")}


def test_states_are_carried_through_chunks_and_decode() -> None:
    """A prompt in chunks, then tokens one by one: each starts from the state the last one left."""
    model = small_model("qwen3_next")
    prompts = padded_prompts(rows=1, length=40)
    wanted = generate(model, prompts)
    with backstamp_transformers.use(model, "torch_native"):
        assert generate(model, prompts, prefill_chunk_size=7) == wanted


@pytest.mark.parametrize("wrong", WRONG_LINEAR)
@pytest.mark.usefixtures("wrong_kernels")
def test_a_wrong_rule_changes_the_tokens(wrong: str) -> None:
    """The kernel runs, and what it leaves in the states is what the next token starts from."""
    model = small_model("qwen3_next")
    wanted = generate(model)
    with backstamp_transformers.use(model, "torch_native", linear=wrong):
        assert generate(model) != wanted


@pytest.mark.usefixtures("wrong_kernels")
def test_another_hybrid_model_keeps_its_own_rule() -> None:
    """Transformers' rule is one function for all models: only the served model's layers reach ours."""
    ours, theirs = small_model("qwen3_next", seed=1), small_model("qwen3_next", seed=2)
    wanted = generate(ours), generate(theirs)
    with backstamp_transformers.use(ours, "torch_native", linear="linear_zeros"):
        assert generate(ours) != wanted[0]
        assert generate(theirs) == wanted[1]
    assert generate(ours) == wanted[0]


def test_a_loaded_hybrid_model_runs_its_linear_kernel(tmp_path: object) -> None:
    """`from_pretrained` resolves both slots, and the first step finds the linear layers."""
    small_model("qwen3_next").save_pretrained(tmp_path)
    wanted = generate(AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager"))
    name = backstamp_transformers.implementation("torch_native")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=name)
    assert generate(model) == wanted
    assert len(served_for(model.config).hooks) == 2 * len(served_for(model.config).linear_layers) == 4
