"""Assisted generation: a target and a draft, each with a key of its own."""

from __future__ import annotations

import pytest

import backstamp_transformers
from engines.transformers.tests.small_models import ARCHITECTURES, generate, padded_prompts, small_draft, small_model


# hybrid models have states, which Transformers cannot take back to an earlier token
@pytest.mark.parametrize("name", sorted(ARCHITECTURES.keys() - {"qwen3_next"}))
def test_a_draft_of_its_own_key_gives_the_targets_tokens(name: str) -> None:
    """Drafted tokens are verified in chunks over the target's prefix; what is kept is what the target alone says."""
    target, draft = small_model(name), small_draft(name)
    prompts = padded_prompts(rows=1)
    wanted = generate(target, prompts)
    with (
        backstamp_transformers.use(target, "torch_native") as of_target,
        backstamp_transformers.use(draft, "flex_attention") as of_draft,
    ):
        assert generate(target, prompts, assistant_model=draft) == wanted
        assert {stamp.kernel for stamp in of_target.stamps.values()} == {"torch_native"}
        assert {stamp.kernel for stamp in of_draft.stamps.values()} == {"flex_attention"}


@pytest.mark.usefixtures("wrong_kernels")
def test_a_wrong_draft_costs_time_and_changes_no_token() -> None:
    """The draft proposes, the target decides: a draft whose attention answers zeros still gives the target's tokens."""
    target, draft = small_model("qwen3"), small_model("qwen3")
    prompts = padded_prompts(rows=1)
    wanted = generate(target, prompts)
    with backstamp_transformers.use(target, "torch_native"), backstamp_transformers.use(draft, "zeros"):
        assert generate(target, prompts, assistant_model=draft) == wanted


@pytest.mark.usefixtures("wrong_kernels")
def test_a_wrong_target_shows_through_any_draft() -> None:
    """Verifying runs the target's own kernel: one that drops the causal rule answers other tokens."""
    target, draft = small_model("qwen3"), small_model("qwen3")
    prompts = padded_prompts(rows=1)
    wanted = generate(target, prompts)
    with backstamp_transformers.use(target, "no_causal"), backstamp_transformers.use(draft, "torch_native"):
        assert generate(target, prompts, assistant_model=draft) != wanted
