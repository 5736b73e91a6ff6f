"""A caller's own 4-D mask: who sees whom reaches the kernel as it was given, or the call is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import backstamp_transformers
from backstamp_transformers.custom import custom_step, read_mask
from backstamp_transformers.errors import NotServed
from engines.transformers.tests.small_models import padded_prompts, small_model

LENGTH = 12
#: Earlier tokens in the cache, and the tokens of a step after them.
PREFIX, STEP = 7, 5


def causal(rows: int = 3, q_len: int = LENGTH, num_keys: int = LENGTH) -> Tensor:
    """The causal rule as a mask of four dimensions."""
    return torch.ones(rows, 1, q_len, num_keys, dtype=torch.bool).tril(num_keys - q_len)


def packed() -> Tensor:
    """Two sequences in each row, of another length in each, that do not see each other."""
    mask = causal()
    for row, at in enumerate((4, 7, 9)):
        mask[row, :, at:, :at] = False
    return mask


def image_block() -> Tensor:
    """Tokens 3 to 6 see each other both ways."""
    mask = causal()
    mask[..., 3:7, 3:7] = True
    return mask


def left_padded() -> Tensor:
    """The causal rule over left padding, whose own rows see nothing."""
    mask = causal()
    for row, pads in enumerate((0, 5, 2)):
        mask[row, :, :, :pads] = False
    return mask


def additive(mask: Tensor, least: float) -> Tensor:
    """The same mask as numbers that are added to logits."""
    return torch.zeros(mask.shape).masked_fill(~mask, least)


LEAST = torch.finfo(torch.float32).min
MASKS = {"causal": causal, "packed": packed, "image-block": image_block, "left-padded": left_padded}


def logits(model: PreTrainedModel, mask: Tensor, **more: object) -> Tensor:
    ids = padded_prompts()[0].clamp(min=2)
    with torch.inference_mode():
        return model(ids, attention_mask=mask, use_cache=False, **more).logits


@pytest.mark.parametrize("key", ["torch_native", "flex_attention"])
@pytest.mark.parametrize("least", [LEAST, float("-inf"), None], ids=["min", "inf", "bool"])
@pytest.mark.parametrize("name", MASKS)
def test_a_custom_mask_hides_the_same_tokens_as_in_eager(name: str, least: float | None, key: str) -> None:
    """Packed sequences, blocks that look both ways and padding, bool or additive."""
    model, mask = small_model("qwen3"), MASKS[name]()
    wanted = logits(model, additive(mask, LEAST))
    with backstamp_transformers.use(model, key):
        found = logits(model, mask if least is None else additive(mask, least))
    real = mask[:, 0].any(2)
    torch.testing.assert_close(found[real], wanted[real], rtol=1e-4, atol=1e-5)
    assert found.isfinite().all()
    if name != "causal":
        assert not torch.allclose(wanted[real], logits(model, additive(causal(), LEAST))[real], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["gpt_oss", "gemma2"])
def test_sinks_and_softcap_hold_under_a_custom_mask(name: str) -> None:
    """In layers without a window; one mask for all rows is enough."""
    model = small_model(name, layer_types=["full_attention"] * 4)
    mask = additive(image_block()[:1], LEAST)
    wanted = logits(model, mask)
    with backstamp_transformers.use(model, "torch_native"):
        torch.testing.assert_close(logits(model, mask), wanted, rtol=1e-4, atol=1e-5)


def verified(model: PreTrainedModel, masks: list[Tensor]) -> Tensor:
    """Logits of a step that takes two branches of a tree at once, after a prefix in the cache."""
    ids, cache = padded_prompts()[0].clamp(min=2), DynamicCache(config=model.config)
    with torch.inference_mode():
        model(ids[:, :PREFIX], attention_mask=masks[0], cache=cache, use_cache=True)
        return model(ids[:, PREFIX:], attention_mask=masks[1], cache=cache, use_cache=True).logits


def branches() -> list[Tensor]:
    """A prefix with padding, then tokens 0 1 3 and 0 2 4 as two branches."""
    first, second = causal(q_len=PREFIX, num_keys=PREFIX), causal(q_len=STEP)
    for mask in (first, second):
        mask[1, :, :, :2] = False
    second[..., 2, PREFIX + 1] = second[..., 3, PREFIX + 2] = False
    second[..., 4, [PREFIX + 1, PREFIX + 3]] = False
    return [first, second]


def test_branches_after_a_prefix_see_their_own_tokens_alone() -> None:
    """Keys of earlier steps are seen but for a row's first ones, and the step's own as the mask says."""
    model, masks = small_model("qwen3"), branches()
    wanted = verified(model, [additive(mask, LEAST) for mask in masks])
    with backstamp_transformers.use(model, "torch_native"):
        torch.testing.assert_close(verified(model, masks), wanted, rtol=1e-4, atol=1e-5)


def test_a_mask_is_read_again_in_each_forward() -> None:
    """A caller may write to a mask it passes twice, and pass it to two models."""
    model, other = small_model("qwen3"), small_model("qwen3", seed=1)
    mask = packed()
    wanted = [logits(model, additive(causal(), LEAST)), logits(other, additive(causal(), LEAST))]
    with backstamp_transformers.use(model, "torch_native"), backstamp_transformers.use(other, "flex_attention"):
        logits(model, mask)
        mask.copy_(causal())
        found = [logits(model, mask), logits(other, mask)]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_kernel_that_declares_no_tree_is_refused_and_serves_the_causal_rule() -> None:
    """The refusal names the kernel; a 4-D mask that says no more than the causal rule needs nothing of it."""
    model = small_model("qwen3")
    wanted = logits(model, additive(causal(), LEAST))
    with backstamp_transformers.use(model, "torch_native") as handle:
        places = handle.served.now.places
        for at, place in places.items():
            places[at] = replace_features(place)
        torch.testing.assert_close(logits(model, causal()), wanted, rtol=1e-4, atol=1e-5)
        with pytest.raises(NotServed, match=r"prefill attention backend 'torch_native' \(plugin cpu\).*no tree_mask"):
            logits(model, packed())


def replace_features(place: object) -> object:
    return place._replace(features=place.features - {"tree_mask"})


def hidden_prefix() -> Tensor:
    mask = causal(q_len=STEP)
    mask[0, 0, 2, 3] = False
    return mask


def seen_padding() -> Tensor:
    mask = causal()
    mask[2, 0, 4] = False
    return mask


BAD = {
    "heads": (causal().expand(-1, 4, -1, -1), LENGTH, r"\[3, 1, 12, 12\].*got \[3, 4, 12, 12\]"),
    "rows": (causal(rows=2), LENGTH, r"got \[2, 1, 12, 12\]"),
    "static": (causal(q_len=STEP, num_keys=32), STEP, r"got \[3, 1, 5, 32\]"),
    "integers": (causal().long(), LENGTH, "got torch.int64"),
    "bias": (additive(causal(), -3.0), LENGTH, "numbers between"),
    "prefix": (hidden_prefix(), STEP, "earlier keys that all tokens of a row see"),
    "padding": (seen_padding(), LENGTH, "got one that sees nothing"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_no_row_and_no_tree_can_say_is_refused(name: str) -> None:
    """Nothing is rounded: a mask by head, a bias, or a hole in what earlier steps left is not served."""
    mask, q_len, got = BAD[name]
    with pytest.raises(NotServed, match=got):
        read_mask(mask, 3, q_len, LENGTH)


@pytest.mark.parametrize(("name", "got"), [("gemma3", "a window of 8 tokens"), ("qwen3_next", "linear ones")])
def test_a_layer_with_a_rule_beside_the_mask_is_refused(name: str, got: str) -> None:
    """A sliding window counts positions, which a mask of the caller's own does not tell."""
    model = small_model(name)
    with backstamp_transformers.use(model, "torch_native"), pytest.raises(NotServed, match=got):
        logits(model, causal())


def test_models_in_turns_read_one_mask_each_for_itself() -> None:
    """What one model read of a mask is no other model's step, whichever layer comes first."""
    one, other, mask = small_model("qwen3"), small_model("qwen3", seed=1), packed()
    with backstamp_transformers.use(one, "torch_native") as mine, backstamp_transformers.use(other) as theirs:
        first = custom_step(mine.served, mask, 3, LENGTH, LENGTH, 0)
        assert custom_step(mine.served, mask, 3, LENGTH, LENGTH, 1) is first
        assert custom_step(theirs.served, mask, 3, LENGTH, LENGTH, 2).served is theirs.served
