"""Linear mixers of a config: gated delta net, Kimi delta attention, Mamba-2, lightning attention, short convolution.

In: the `Fields` of a language model. Out: one `LayerFacts`. The family is told by the fields a family alone has, by
the model type only where it has none of its own; a recurrence of another kind (Mamba-1, xLSTM) is refused.

.. versionadded:: 0.1
"""

from __future__ import annotations

from typing import Final

from backstamp.model import LayerFacts
from backstamp.model_fields import Fields

__all__ = ["linear_mixer", "short_convolution"]

#: Lightning attention has no field of its own in these. Source: MiniMaxConfig; config.json of MiniMaxAI's Text-01, M1.
_LIGHTNING: Final = frozenset({"minimax", "minimax_text_01", "minimax_m1"})


def linear_mixer(fields: Fields, kind: str) -> LayerFacts:
    """The mixer of a model's `linear_attention` layers.

    Raises:
        BadModel: no known family's fields are there.
    """
    if fields.has("linear_num_value_heads"):
        return _gated_delta(fields)
    if fields.has("linear_attn_config"):
        return _kimi_delta(fields, nested=True)
    if fields.has("linear_num_heads"):
        return _kimi_delta(fields, nested=False)
    if fields.has("mamba_num_heads", "mamba_n_heads", "n_mamba_heads"):
        return _mamba2(fields)
    if kind in _LIGHTNING:
        return _lightning(fields)
    needed = "the fields of gdn (linear_num_value_heads), kda (linear_num_heads), mamba2 (mamba_num_heads) or lightning"
    raise fields.bad("layer_types", needed, f"linear layers of {kind}, a recurrence not known here")


def short_convolution(fields: Fields) -> LayerFacts:
    """LFM2's gated convolution over the whole width. Source: transformers 5.24, models/lfm2."""
    width = fields.whole("hidden_size")
    return LayerFacts(
        family="short_conv",
        num_qo_heads=1,
        num_kv_heads=1,
        head_dim=width,
        v_head_dim=width,
        conv_kernel=fields.whole("conv_L_cache"),
    )


def _gated_delta(fields: Fields) -> LayerFacts:
    """Qwen3-Next's gated delta net. Source: transformers 5.24, models/qwen3_next."""
    key_heads, value_heads = fields.whole("linear_num_key_heads"), fields.whole("linear_num_value_heads")
    if value_heads % key_heads:
        raise fields.bad("linear_num_value_heads", f"a multiple of the {key_heads} key heads", str(value_heads))
    return LayerFacts(
        family="gdn",
        num_qo_heads=key_heads,
        num_kv_heads=value_heads,
        head_dim=fields.whole("linear_key_head_dim"),
        v_head_dim=fields.whole("linear_value_head_dim"),
        conv_kernel=fields.whole("linear_conv_kernel_dim"),
    )


def _kimi_delta(fields: Fields, *, nested: bool) -> LayerFacts:
    """Kimi delta attention: keys and values have the same heads and dims.

    Source: KimiLinearConfig, both its forms; SGLang 0.5.23 models/kimi_k3.py (`gate_lower_bound`); Glm5NextConfig.
    """
    part = fields.part("linear_attn_config") if nested else None
    if part is not None:
        heads, dim = part.whole("num_heads"), part.whole("head_dim")
        taps, bound = part.whole("short_conv_kernel_size"), part.below_zero("gate_lower_bound")
    else:
        heads, dim = fields.whole("linear_num_heads"), fields.whole("linear_head_dim")
        taps, bound = fields.whole("linear_conv_kernel_dim"), fields.below_zero("linear_lower_bound")
    return LayerFacts(
        family="kda",
        num_qo_heads=heads,
        num_kv_heads=heads,
        head_dim=dim,
        v_head_dim=dim,
        conv_kernel=taps,
        gate_lower_bound=bound,
    )


def _mamba2(fields: Fields) -> LayerFacts:
    """Mamba-2: groups share B and C as key heads do, the state size is the key dim.

    Source: the mixers of nemotron_h, falcon_h1, bamba, granitemoehybrid and zamba2, transformers 5.24.
    """
    heads = fields.whole("mamba_num_heads", "mamba_n_heads", "n_mamba_heads")
    groups = fields.whole("n_groups", "mamba_n_groups", "mamba_ngroups", default=1)
    if heads % groups:
        raise fields.bad("mamba_n_groups", f"a divisor of the {heads} Mamba heads", str(groups))
    return LayerFacts(
        family="mamba2",
        num_qo_heads=groups,
        num_kv_heads=heads,
        head_dim=fields.whole("ssm_state_size", "mamba_d_state"),
        v_head_dim=_mamba_head_dim(fields, heads),
        conv_kernel=fields.whole("conv_kernel", "mamba_d_conv"),
    )


def _mamba_head_dim(fields: Fields, heads: int) -> int:
    """The width of a Mamba head; "auto" divides the inner width among the heads."""
    named = "mamba_head_dim" if fields.has("mamba_head_dim") else "mamba_d_head"
    if fields.has("mamba_head_dim", "mamba_d_head", "mamba_headdim") and fields.data.get(named) != "auto":
        return fields.whole("mamba_head_dim", "mamba_d_head", "mamba_headdim")
    inner = fields.whole("mamba_d_ssm", default=0) or fields.whole("mamba_expand") * fields.whole("hidden_size")
    if inner % heads:
        raise fields.bad("mamba_d_head", f"an inner width that {heads} heads divide", str(inner))
    return inner // heads


def _lightning(fields: Fields) -> LayerFacts:
    """Lightning attention: every query head has a key and a value head. Source: MiniMaxLightningAttention."""
    heads = fields.whole("num_attention_heads")
    dim = fields.whole("head_dim", default=0)
    if not dim:
        hidden = fields.whole("hidden_size")
        if hidden % heads:
            raise fields.bad("hidden_size", f"a multiple of the {heads} heads, or head_dim", str(hidden))
        dim = hidden // heads
    return LayerFacts(family="lightning", num_qo_heads=heads, num_kv_heads=heads, head_dim=dim, v_head_dim=dim)
