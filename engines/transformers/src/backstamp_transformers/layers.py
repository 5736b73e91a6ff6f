"""A model's attention layers as the call contract's `LayerSpec`s: what the facts say, and what only the modules hold.

In: the model's facts and its modules. Out: one spec a full-attention layer, by layer id. The scale and the sink logits
are a module's own; everything else is the facts', and a module that says otherwise is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, cast

from torch import Tensor, nn
from transformers import PretrainedConfig

from backstamp.attention import LayerSpec
from backstamp.model import LINEAR_FAMILIES, LayerFacts, ModelFacts
from backstamp_transformers.errors import NotServed

__all__ = ["AttentionModule", "attention_modules", "layer_specs", "linear_specs"]


class AttentionModule(Protocol):
    """What Transformers' attention modules have, as far as it is read here; `sinks [Hq]` where the config has them."""

    layer_idx: int
    config: PretrainedConfig
    num_key_value_groups: int
    scaling: float
    sinks: Tensor


def attention_modules(model: nn.Module, config: PretrainedConfig) -> dict[int, AttentionModule]:
    """The modules of one config that call an attention function, by layer id."""
    found: dict[int, AttentionModule] = {}
    for module in cast("Iterator[AttentionModule]", model.modules()):
        # the two attributes by which Transformers' own attention functions know such a module
        if hasattr(module, "layer_idx") and hasattr(module, "num_key_value_groups") and module.config is config:
            found.setdefault(module.layer_idx, module)
    return found


def layer_specs(model: nn.Module, config: PretrainedConfig, facts: ModelFacts) -> dict[int, LayerSpec]:
    """One spec for each full-attention layer of the main model.

    Raises:
        NotServed: the modules are not those the config describes.
    """
    modules = attention_modules(model, config)
    windows = sorted({group.facts.window_left for group in facts.attention_groups})
    specs: dict[int, LayerSpec] = {}
    for at, mixers in enumerate(facts.layers):
        for layer in mixers:
            if layer.family in LINEAR_FAMILIES:
                continue
            if at not in modules:
                who = f"Transformers model {config.model_type}, layer {at}"
                needed = "an attention module with layer_idx and num_key_value_groups"
                raise NotServed(who, needed=needed, found="none", fix="Use sdpa or eager for this model")
            module = modules[at]
            _check_heads(config, at, layer, module)
            specs[at] = LayerSpec(
                layer_id=at,
                num_qo_heads=layer.num_qo_heads,
                num_kv_heads=layer.num_kv_heads,
                head_dim=layer.head_dim,
                v_head_dim=layer.v_head_dim,
                scale=module.scaling,
                group=windows.index(layer.window_left),
                window_left=layer.window_left,
                softcap=layer.softcap,
                attn_type=layer.attn_type,
                sinks=module.sinks if layer.sinks is not None else None,
            )
    return specs


def _check_heads(config: PretrainedConfig, at: int, layer: LayerFacts, module: AttentionModule) -> None:
    wanted = layer.num_qo_heads // layer.num_kv_heads
    if module.num_key_value_groups != wanted:
        raise NotServed(
            f"Transformers model {config.model_type}, layer {at}",
            needed=f"{wanted} query heads a KV head, as the config says",
            found=str(module.num_key_value_groups),
            fix="Use sdpa or eager for this model",
        )


def linear_specs(facts: ModelFacts) -> dict[int, LayerSpec]:
    """One spec for each linear layer of the main model: key heads as `num_qo_heads`, value heads as `num_kv_heads`."""
    return {
        at: LayerSpec(
            layer_id=at,
            num_qo_heads=layer.num_qo_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            v_head_dim=layer.v_head_dim,
            scale=layer.head_dim**-0.5,
        )
        for at, mixers in enumerate(facts.layers)
        for layer in mixers
        if layer.family in LINEAR_FAMILIES
    }
