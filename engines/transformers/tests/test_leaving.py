"""A model that leaves our kernels runs Transformers' own, whichever way it leaves; towers never run ours."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
)

import backstamp_transformers
from backstamp_transformers.admission import server_of
from backstamp_transformers.errors import NotServed
from backstamp_transformers.served import Served
from engines.transformers.tests.small_models import config_of, generate, small_model

LINEAR_ZEROS = {"prefill": "torch_native", "decode": "torch_native", "linear": "linear_zeros"}


@pytest.fixture
def hybrid(wrong_kernels) -> tuple[PreTrainedModel, list[list[int]]]:
    """A Qwen3-Next that ran on a linear kernel which answers zeros, by name, and the tokens it has without."""
    model = small_model("qwen3_next")
    wanted = generate(model)
    model.set_attn_implementation(backstamp_transformers.implementation(**LINEAR_ZEROS))
    assert generate(model) != wanted
    return model, wanted


def test_a_hybrid_model_set_to_another_implementation_has_its_own_rule(hybrid) -> None:
    """Nobody told us: the hook finds out itself."""
    model, wanted = hybrid
    model.set_attn_implementation("eager")
    assert generate(model) == wanted


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_served_hybrid_model_is_not_served(copied, hybrid) -> None:
    """Hooks go along with a copy, and say nothing there."""
    model, wanted = hybrid
    other = copied(model)
    other.set_attn_implementation("eager")
    assert generate(other) == wanted
    assert generate(model) != wanted


def test_towers_of_a_model_loaded_by_name_keep_their_own_attention(tmp_path: Path) -> None:
    """An image goes through Transformers, the text through ours: the tokens of eager."""
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = CLIPVisionConfig(**vision, image_size=28, patch_size=14).to_dict()
    text = config_of("llama", vocab_size=200).to_dict()
    torch.manual_seed(0)
    whole = LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=vision, image_token_index=150))
    whole.eval().set_attn_implementation("eager")
    with torch.no_grad():
        for parameter in whole.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.2)
    whole.save_pretrained(tmp_path)
    tokens, pixels = torch.tensor([[3, 4, 150, 150, 150, 150, 7, 8]]), torch.randn(1, 3, 28, 28)

    def answer(model: PreTrainedModel) -> list[int]:
        found = model.generate(tokens, pixel_values=pixels, max_new_tokens=8, do_sample=False)
        return found[0, 8:].tolist()

    name = backstamp_transformers.implementation("torch_native")
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path, attn_implementation=name)
    assert loaded.config.text_config._attn_implementation == name
    assert loaded.config.vision_config._attn_implementation == "sdpa"
    assert answer(loaded) == answer(whole)


def test_a_second_handle_is_refused_until_the_first_is_released() -> None:
    """Two would each give back what the other took."""
    model = small_model("llama")
    with backstamp_transformers.use(model, "flex_attention") as handle:
        with pytest.raises(NotServed, match="Release that handle first"):
            backstamp_transformers.use(model, "torch_native")
        assert handle.plan.phase("decode").kernel == "flex_attention"
        generate(model)
    with backstamp_transformers.use(model, "torch_native"):
        generate(model)


def test_a_released_handle_is_not_entered_again() -> None:
    """Inside, plan and stamps would tell of kernels that do not run."""
    handle = backstamp_transformers.use(small_model("llama"), "torch_native")
    handle.release()
    with pytest.raises(NotServed, match="one that was released"), handle:
        pass


def test_a_use_that_fails_at_the_build_leaves_what_served_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The docstring's promise, for a model that was loaded by name and for one that nobody served."""
    model, other = small_model("llama"), small_model("llama")
    model.set_attn_implementation(backstamp_transformers.implementation("torch_native"))
    before, wanted = server_of(model.config), generate(model)

    def fail(served: Served) -> None:
        raise RuntimeError("does not build")

    with monkeypatch.context() as patch:
        patch.setattr(Served, "build", fail)
        for each in (model, other):
            with pytest.raises(RuntimeError, match="does not build"):
                backstamp_transformers.use(each, "flex_attention")
    assert before is not None
    assert server_of(model.config) is before
    assert server_of(other.config) is None
    assert generate(model) == wanted
    with backstamp_transformers.use(other, "torch_native"):
        generate(other)
