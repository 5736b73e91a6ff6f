"""`use` and `generate`: greedy tokens are `eager`'s and `sdpa`'s own, and wrong attention shows."""

from __future__ import annotations

import pytest
import torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

import backstamp_transformers
from backstamp_transformers.kernels import Bounds
from engines.transformers.tests.small_models import (
    ARCHITECTURES,
    config_of,
    generate,
    one_token_at_a_time,
    padded_prompts,
    small_model,
)

KEYS = ("torch_native", "flex_attention")


@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_left_padded_rows_give_eager_tokens(name: str, key: str, cache: str | None) -> None:
    """Rows of three lengths generate what `eager` generates of the same cache, token for token."""
    model = small_model(name)
    wanted = generate(model, cache_implementation=cache)
    with backstamp_transformers.use(model, key):
        assert generate(model, cache_implementation=cache) == wanted


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_tokens_are_those_of_sdpa(name: str) -> None:
    """Where Transformers has an `sdpa` of a model, its tokens are ours too."""
    model = small_model(name)
    model.set_attn_implementation("sdpa")
    wanted = generate(model)
    with backstamp_transformers.use(model, "torch_native"):
        assert generate(model) == wanted


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_one_row_and_a_prompt_of_one_token_generate_as_in_eager(name: str) -> None:
    """A batch of one row has no row stride, and a prompt of one token is a decode step from the start."""
    model = small_model(name)
    prompts = padded_prompts(rows=1, length=1)
    wanted = generate(model, prompts)
    with backstamp_transformers.use(model, "torch_native"):
        assert generate(model, prompts) == wanted


def test_a_prompt_continued_in_chunks_gives_the_same_tokens() -> None:
    """Chunks of a prompt are prefill over a prefix, in caches longer than the window too."""
    for name in ("qwen3", "gemma3"):
        model = small_model(name)
        prompts = padded_prompts(rows=1, length=40)
        wanted = generate(model, prompts)
        with backstamp_transformers.use(model, "torch_native"):
            assert generate(model, prompts, prefill_chunk_size=7) == wanted


def test_beams_share_and_reorder_their_cache() -> None:
    """Beam search copies rows of the cache between steps; scores and choices stay `eager`'s."""
    model = small_model("qwen3")
    wanted = generate(model, num_beams=3)
    with backstamp_transformers.use(model, "torch_native"):
        assert generate(model, num_beams=3) == wanted


def test_the_handle_names_what_runs() -> None:
    """Plan and stamps name both halves' kernels, and each phase runs on its own."""
    model = small_model("qwen3")
    wanted = generate(model)
    with backstamp_transformers.use(model, prefill="torch_native", decode="flex_attention") as handle:
        stamps = handle.stamps
        assert {phase: stamp.kernel for (phase, _), stamp in stamps.items()} == {
            "prefill": "torch_native",
            "decode": "flex_attention",
        }
        assert handle.plan.phase("decode").kernel == "flex_attention"
        assert generate(model) == wanted


def test_release_gives_the_former_attention_back() -> None:
    """After release the model runs what it ran before, and its name is gone from both registries."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    model = small_model("llama")
    handle = backstamp_transformers.use(model, "torch_native")
    name = model.config._attn_implementation
    assert name in AttentionInterface._global_mapping
    handle.release()
    handle.release()
    assert model.config._attn_implementation == "eager"
    assert name not in AttentionInterface._global_mapping
    assert name not in AttentionMaskInterface._global_mapping
    generate(model)


def test_two_models_with_different_keys_do_not_disturb_each_other() -> None:
    """Steps of two models, taken in turns, stay each with its own kernel and cache."""
    one, other = small_model("qwen3", seed=1), small_model("gemma3", seed=2)
    prompts = padded_prompts()
    wanted = generate(one, prompts), generate(other, prompts)
    alone = [list(one_token_at_a_time(model, prompts[0])) for model in (one, other)]
    with (
        backstamp_transformers.use(one, "torch_native") as first,
        backstamp_transformers.use(other, "flex_attention") as second,
    ):
        assert (generate(one, prompts), generate(other, prompts)) == wanted
        turns = zip(one_token_at_a_time(one, prompts[0]), one_token_at_a_time(other, prompts[0]), strict=True)
        assert [[*tokens] for tokens in zip(*turns, strict=True)] == alone
        assert {stamp.kernel for stamp in first.stamps.values()} == {"torch_native"}
        assert {stamp.kernel for stamp in second.stamps.values()} == {"flex_attention"}
        second.release()
        assert generate(one, prompts) == wanted[0]
        assert generate(other, prompts) == wanted[1]


def test_only_the_language_model_of_a_composite_model_is_served() -> None:
    """A vision tower keeps its own attention: a plan of the language model says nothing of it."""
    text = config_of("gemma3")
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(text_config=text.to_dict(), vision_config=vision)
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(config).eval()
    model.set_attn_implementation("eager")
    wanted = generate(model)
    with backstamp_transformers.use(model, "torch_native") as handle:
        assert handle.plan.model == "gemma3_text"
        assert model.config.vision_config._attn_implementation == "eager"
        assert generate(model) == wanted


def test_kernels_grow_with_the_batch() -> None:
    """A batch of more rows, tokens and keys than the kernels were built for builds larger ones, once."""
    model = small_model("llama")
    prompts = padded_prompts(rows=6, length=100)
    wanted = generate(model, prompts)
    with backstamp_transformers.use(model, "torch_native") as handle:
        handle.served.now.bounds = Bounds(1, 4, 16, 8)
        handle.served.build()
        assert generate(model, prompts) == wanted
        built = handle.served.now.backends
        assert generate(model, prompts) == wanted
        assert handle.served.now.backends is built


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *[(name, "zeros") for name in ARCHITECTURES],
        *[(name, "no_causal") for name in ARCHITECTURES],
        *[(name, "no_first_key") for name in ARCHITECTURES],
        *[(name, "no_window") for name in ("gemma2", "gemma3", "gpt_oss")],
        ("gpt_oss", "no_sinks"),
        ("gemma2", "no_softcap"),
    ],
)
@pytest.mark.usefixtures("wrong_kernels")
def test_wrong_attention_changes_the_tokens(name: str, wrong: str) -> None:
    """Token equality is worth something: each model shows every fact its attention has."""
    model = small_model(name)
    wanted = generate(model)
    with backstamp_transformers.use(model, wrong):
        assert generate(model) != wanted
