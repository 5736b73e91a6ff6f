"""Padding and masks: served exactly or refused by name, never dropped."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
)

import backstamp_transformers
from backstamp.errors import UnsupportedBatch
from backstamp_transformers.errors import NotServed
from backstamp_transformers.masks import mask_for
from engines.transformers.tests.small_models import ARCHITECTURES, padded_prompts, small_model

RIGHT = torch.tensor([[1] * 12, [1] * 7 + [0] * 5, [1] * 2 + [0] * 10])
BOTH = torch.tensor([[0] * 3 + [1] * 9, [0] * 4 + [1] * 5 + [0] * 3, [0] * 11 + [1]])


def logits(model: PreTrainedModel, mask: Tensor | None, **more: object) -> Tensor:
    """Logits of the same unpadded ids under a mask."""
    ids, _ = padded_prompts()
    with torch.inference_mode():
        return model(ids.clamp(min=2), attention_mask=mask, use_cache=False, **more).logits


@pytest.mark.parametrize("mask", [RIGHT, BOTH], ids=["right", "both-sides"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_padding_on_either_side_hides_the_same_tokens_as_in_eager(name: str, mask: Tensor) -> None:
    """Real tokens see real tokens alone, wherever the padding lies."""
    model = small_model(name)
    wanted = logits(model, mask)
    with backstamp_transformers.use(model, "torch_native"):
        found = logits(model, mask)
    real = mask.bool()
    torch.testing.assert_close(found[real], wanted[real], rtol=1e-4, atol=1e-5)
    assert found.isfinite().all()


def test_a_row_of_padding_alone_is_let_by() -> None:
    """A row without a real token has no query and no key, and disturbs no other row."""
    model = small_model("qwen3")
    mask = torch.ones(3, 12, dtype=torch.int64)
    mask[1] = 0
    wanted = logits(model, mask)
    with backstamp_transformers.use(model, "torch_native"):
        found = logits(model, mask)
    torch.testing.assert_close(found[[0, 2]], wanted[[0, 2]], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(3, 12), (1, 1)])
def test_a_batch_of_padding_alone_is_let_by(shape: tuple[int, int]) -> None:
    """No row has a query or a key, and every answer is a number."""
    model = small_model("qwen3")
    with backstamp_transformers.use(model, "torch_native"), torch.inference_mode():
        found = model(torch.ones(shape, dtype=torch.int64), attention_mask=torch.zeros(shape), use_cache=False)
    assert found.logits.isfinite().all()


OTHER_RULES = {
    "another-window": sliding_window_causal_mask_function(7),
    "a-window-and-more": and_masks(sliding_window_causal_mask_function(8), causal_mask_function),
    "or-more": or_masks(sliding_window_causal_mask_function(8), causal_mask_function),
    "chunks": chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.int64)),
}


@pytest.mark.parametrize("rule", OTHER_RULES)
def test_a_rule_that_is_no_window_of_the_layers_size_is_refused(rule: str) -> None:
    """Transformers hands over a function and a number, and the number alone does not say what the function does."""
    where = {"batch_size": 1, "q_length": 12, "q_offset": 0, "kv_offset": 0, "attention_mask": None}
    model = small_model("gemma3")
    with backstamp_transformers.use(model, "torch_native") as handle:
        told = {**where, "local_size": 8, "device": torch.device("cpu")}
        mask_for(handle.served, mask_function=sliding_window_causal_mask_function(8), **told)
        with pytest.raises(NotServed, match="got another rule"):
            mask_for(handle.served, mask_function=OTHER_RULES[rule], **told)


def test_a_model_told_to_look_both_ways_does() -> None:
    """`config.is_causal = False` makes a decoder bidirectional, and reaches the kernel."""
    model = small_model("qwen3")
    causal = logits(model, RIGHT)
    model.config.is_causal = False
    wanted = logits(model, RIGHT)
    assert not torch.allclose(causal, wanted)
    with backstamp_transformers.use(model, "torch_native"):
        found = logits(model, RIGHT)
    torch.testing.assert_close(found[RIGHT.bool()], wanted[RIGHT.bool()], rtol=1e-4, atol=1e-5)


def no_tokens_between(mask: Tensor) -> Tensor:
    holes = mask.clone()
    holes[0, 5] = 0
    return holes


@pytest.mark.parametrize(
    ("mask", "more", "got"),
    [
        (no_tokens_between(torch.ones(3, 12)), {}, "row 0 with padding between its tokens"),
        (None, {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]] * 3)}, "another rule"),
        (None, {"output_attentions": True}, "output_attentions"),
    ],
    ids=["holes", "packed", "weights"],
)
def test_a_mask_no_kernel_is_told_of_is_refused(mask: Tensor | None, more: dict[str, object], got: str) -> None:
    """Holes, packed rows and attention weights raise at the first layer."""
    model = small_model("qwen3")
    with backstamp_transformers.use(model, "torch_native"), pytest.raises((NotServed, ValueError), match=got):
        logits(model, mask, **more)


def test_gradients_are_refused() -> None:
    """Kernels write their outputs in place and have no backward: a silent zero gradient would be worse."""
    model = small_model("qwen3")
    with backstamp_transformers.use(model, "torch_native"), pytest.raises(NotServed, match="without gradients"):
        model(padded_prompts()[0], use_cache=False)


PARTS = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "sinks": "sinks"}


@pytest.mark.parametrize("trained", PARTS)
def test_a_part_of_a_layer_that_is_trained_alone_is_refused(trained: str) -> None:
    """One projection of the first layer, or its sinks: whatever of it reaches the layer would lose its gradient."""
    model = small_model("gpt_oss").requires_grad_(False)
    for name, weight in model.model.layers[0].self_attn.named_parameters():
        weight.requires_grad_(trained in name)
    got = f"got {PARTS[trained]} with them"
    with backstamp_transformers.use(model, "torch_native"):
        with pytest.raises(NotServed, match=f"layer 0: needs a call without gradients, {got}"):
            model(padded_prompts()[0], use_cache=False)
        with torch.no_grad():
            model(padded_prompts()[0], use_cache=False)


def test_what_is_trained_behind_the_last_layer_keeps_its_gradient() -> None:
    """No kernel lies between the logits and a head that is trained alone."""
    model = small_model("qwen3").requires_grad_(False)
    model.lm_head.weight.requires_grad_()
    with backstamp_transformers.use(model, "torch_native"):
        model(padded_prompts()[0], use_cache=False).logits.sum().backward()
    assert model.lm_head.weight.grad is not None


def look_both_ways(module: torch.nn.Module, args: tuple[object, ...], given: dict[str, object]) -> object:
    return args, {**given, "is_causal": False}


CHANGES = {
    "sliding_window": ("gemma3", lambda module: setattr(module, "sliding_window", 5)),
    "scaling": ("gemma3", lambda module: setattr(module, "scaling", 5)),
    "softcap": ("gemma2", lambda module: setattr(module, "attn_logit_softcapping", None)),
    "sinks": ("gpt_oss", lambda module: setattr(module, "sinks", torch.nn.Parameter(module.sinks.clone()))),
    "is_causal": ("qwen3", lambda module: module.register_forward_pre_hook(look_both_ways, with_kwargs=True)),
    "the mask's window": ("gemma3", lambda module: module.config.layer_types.__setitem__(0, "full_attention")),
}


@pytest.mark.parametrize("field", CHANGES)
def test_a_layer_changed_after_the_plan_is_refused(field: str) -> None:
    """What the kernels were told of a layer is held against what the model says in every call."""
    name, change = CHANGES[field]
    model = small_model(name)
    with backstamp_transformers.use(model, "torch_native"):
        change(model.model.layers[0].self_attn)
        with pytest.raises(NotServed, match=f"layer 0: needs .*{field}"):
            logits(model, None)


def test_a_layer_called_without_a_mask_is_refused() -> None:
    """The mask is what names the step: a layer on its own has none."""
    model = small_model("qwen3")
    layer, hidden = model.model.layers[0].self_attn, torch.zeros(1, 3, 64)
    places = model.model.rotary_emb(hidden, torch.arange(3)[None])
    with backstamp_transformers.use(model, "torch_native"), torch.inference_mode():
        with pytest.raises(NotServed, match=r"layer 0: needs the mask that the model made .*, got none"):
            layer(hidden, places, None)
        with pytest.raises(NotServed, match=r"got one of shape \[3, 3\]"):
            layer(hidden, places, torch.ones(3, 3))


@pytest.mark.parametrize(
    ("asked", "training", "got"),
    [
        ({"position_bias": torch.zeros(1)}, False, "a call without position_bias"),
        ({}, True, "a call without dropout"),
    ],
    ids=["position_bias", "dropout"],
)
def test_what_a_call_asks_beside_its_mask_is_refused(asked: dict[str, object], training: bool, got: str) -> None:
    """A bias or dropout that reaches a layer and no kernel."""
    model = small_model("qwen3", attention_dropout=0.5)
    with backstamp_transformers.use(model, "torch_native"), pytest.raises(NotServed, match=got):
        logits(model.train(training), None, **asked)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_next"])
def test_autocast_over_a_model_of_another_dtype_is_refused(name: str) -> None:
    """It leaves queries and keys in the model's dtype and values in its own; a model of its dtype is served."""
    model = small_model(name)
    with backstamp_transformers.use(model, "torch_native"), torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(NotServed, match=r"float32, torch\.bfloat16\. Leave torch\.autocast"):
            logits(model, None)
        assert logits(model.to(torch.bfloat16), None).isfinite().all()


def test_a_model_compiled_around_our_attention_gives_the_same_logits() -> None:
    """The attention function and all it does on the host stay outside the compiled part."""
    model = small_model("qwen3")
    wanted = logits(model, RIGHT)
    with backstamp_transformers.use(model, "torch_native"):
        found = logits(torch.compile(model, backend="eager"), RIGHT)
    torch.testing.assert_close(found[RIGHT.bool()], wanted[RIGHT.bool()], rtol=1e-4, atol=1e-5)


def test_a_kernel_refuses_what_it_does_not_declare() -> None:
    """A bidirectional step on a causal kernel is an UnsupportedBatch of the kernel's own checks."""
    from dataclasses import replace

    model = small_model("qwen3")
    with backstamp_transformers.use(model, "torch_native") as handle:
        backend = handle.served.now.places["prefill", 0].backend
        offer = backend._request.offer
        backend._request = replace(backend._request, offer=replace(offer, features=offer.features - {"non_causal"}))
        model.config.is_causal = False
        with pytest.raises(UnsupportedBatch, match="causal"):
            logits(model, None)


@pytest.mark.parametrize(("rows", "keys", "got"), [(3, 11, "3 rows of 11"), (2, 12, "2 rows of 12")])
def test_a_cache_that_hands_over_fewer_keys_than_its_mask_counts_is_refused(rows: int, keys: int, got: str) -> None:
    """Keys are addressed by their strides: what the cache does not hold would be some other tensor's memory."""
    from transformers import DynamicCache

    class Short(DynamicCache):
        def update(self, key: Tensor, value: Tensor, *where: object, **more: object) -> tuple[Tensor, Tensor]:
            k, v = super().update(key, value, *where, **more)
            return k[:rows, :, :keys], v[:rows, :, :keys]

    model = small_model("qwen3")
    with (
        backstamp_transformers.use(model, "torch_native"),
        torch.inference_mode(),
        pytest.raises(NotServed, match=f"needs 3 rows of at least 12 keys, as its mask counts them, got {got}"),
    ):
        model(padded_prompts()[0], cache=Short(config=model.config), use_cache=True)
