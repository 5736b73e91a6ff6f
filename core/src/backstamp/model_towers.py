"""The attention of a composite model beside its language model: vision and audio towers.

In: the `Fields` of a whole config. Out: one group of layers a tower, and the parts that could not be read, each with
its reason. A tower these facts cannot say never stops the language model from being served, so nothing here raises;
and none is rounded to plain attention: a kind is read only when it is known to be plain.

A tower's own windows are not told: Qwen2.5-VL's blocks of 8 x 8 patches, like the chunks of an audio encoder, are
rows of their own in `cu_seqlens` (`get_vision_window_index`), shorter at an image's edge, and a kernel that took them
for a sliding window would let a patch see its neighbours' block. Padding is packed away the same way.

Source of every kind: its modeling file in transformers 5.24 (non-causal, no bias, no softcap, no sinks).

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from backstamp.errors import BadModel
from backstamp.model import LayerFacts, LayerGroup, UnreadPart
from backstamp.model_defaults import NESTED_TOWER
from backstamp.model_fields import LANGUAGE_PARTS, Fields

__all__ = ["Towers", "encoder_group", "read_towers"]

#: Where a config keeps a tower of each component, in the order the components are told.
_PARTS: Final = {
    "vision": ("vision_config", "vit_config", "vision_tower_config"),
    "audio": ("audio_config", "audio_encoder_config", "audio_tower_config", "speech_config", "sound_config"),
}
#: Towers of plain attention. A tower's kind is its `model_type` without what `_kind` strips, the model's own where
#: it has none. intern_vit_6b and moonvit: the modeling files beside InternVL's and Kimi-VL's checkpoints.
_VISION: Final = frozenset({
    "aimv2", "clip", "ernie4_5_vl_moe", "gemma4", "glm4v", "glm4v_moe", "idefics2", "idefics3", "intern_vit_6b",
    "internvl", "kimi_k25", "llama4", "mllama", "moonvit", "paddleocr_vl", "pixtral", "qwen2_5_omni", "qwen2_5_vl",
    "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_omni_moe", "qwen3_vl", "qwen3_vl_moe", "siglip", "siglip2", "smolvlm",
})  # fmt: skip
_AUDIO: Final = frozenset(
    {"audioflamingo3", "qwen2_5_omni_audio", "qwen2_audio", "qwen3_omni_moe_audio", "voxtral", "whisper"}
)
#: Why some well-known towers are left to the engine.
_OTHERS: Final = {
    "gemma3n": "a convolutional tower with attention in some stages",
    "gemma3n_audio": "a conformer: relative positions and a softcap in chunks",
    "gemma4_audio": "a conformer: relative positions and a softcap in chunks",
    "granite_speech": "a conformer with relative positions",
}
_ENDINGS: Final = ("_vision_model", "_vision_encoder", "_vision", "_encoder", "_model")
_HEADS: Final = ("num_heads", "num_attention_heads", "attention_heads", "encoder_attention_heads")
#: A part with one of these attends.
_ATTENDS: Final = (*_HEADS, "n_head", "n_heads", "decoder_attention_heads", "conf_num_attention_heads")


class Towers(NamedTuple):
    """The towers of one model, in the order vision, audio."""

    groups: tuple[LayerGroup, ...]
    unread: tuple[UnreadPart, ...]


def read_towers(outer: Fields) -> Towers:
    """Every tower of a composite config, and every other part of it that attends."""
    groups: list[LayerGroup] = []
    unread: list[UnreadPart] = []
    holders = [outer]
    if isinstance(thinker := outer.data.get("thinker_config"), Mapping):
        # Qwen-Omni's towers are its thinker's
        holders.append(Fields(f"{outer.who}, thinker_config", thinker))
    for component, names in _PARTS.items():
        for holder, name in [(holder, name) for holder in holders for name in names if holder.has(name)]:
            try:
                groups.append(_tower(holder, name, component))
            except BadModel as reason:
                unread.append(UnreadPart(component, reason.message))
    return Towers(tuple(groups), (*unread, *_other_parts(holders)))


def encoder_group(component: str, heads: int, kv_heads: int, head_dim: int, layers: int) -> LayerGroup:
    """A tower whose layers are all alike; its layers count from 0."""
    facts = LayerFacts(
        family="mha",
        num_qo_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        causal=False,
        attn_type="encoder",
        component=component,
    )
    return LayerGroup(component, facts, tuple(range(layers)))


def _tower(holder: Fields, name: str, component: str) -> LayerGroup:
    part = holder.part(name)
    if part is None:
        raise holder.bad(name, "an object", "null")
    kind = _kind(holder, part, component)
    if kind not in (_VISION if component == "vision" else _AUDIO):
        reason = _OTHERS.get(kind, "a tower not known here")
        raise part.bad("model_type", "a tower of plain attention", f"{kind}: {reason}")
    part = part.under(NESTED_TOWER.get(kind, {}))
    heads = part.whole(*_HEADS)
    # Llama 3.2 Vision's global layers come after the others and attend like them
    more = part.count("num_global_layers") if part.has("num_global_layers") else 0
    layers = part.count("depth", "encoder_layers", "num_hidden_layers") + more
    kv_heads = part.whole("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise part.bad("num_key_value_heads", f"a divisor of the {heads} query heads", str(kv_heads))
    return encoder_group(component, heads, kv_heads, _head_dim(part, heads), layers)


def _head_dim(part: Fields, heads: int) -> int:
    if part.has("head_dim"):
        return part.whole("head_dim")
    # Qwen2-VL's tower is embed_dim wide; its hidden_size is the language model's
    named = next((name for name in ("embed_dim", "d_model", "hidden_size") if part.has(name)), "hidden_size")
    width = part.whole(named)
    if width % heads:
        raise part.bad(named, f"a multiple of the {heads} heads, or head_dim", str(width))
    return width // heads


def _kind(holder: Fields, part: Fields, component: str) -> str:
    """What a tower is called; Qwen's older configs leave that to the model around it."""
    whole = (holder.text("model_type") or "").removesuffix("_thinker")
    kind = part.text("model_type") or whole
    for ending in _ENDINGS:
        if kind.endswith(ending):
            kind = kind.removesuffix(ending)
            break
    return f"{kind}_audio" if component == "audio" and kind == whole and f"{kind}_audio" in _AUDIO else kind


def _other_parts(holders: list[Fields]) -> list[UnreadPart]:
    """Parts of a composite that attend and are neither its language model nor a tower: talkers, resamplers."""
    known = {*LANGUAGE_PARTS, *[name for names in _PARTS.values() for name in names]}
    composite = any(holder.has(*LANGUAGE_PARTS) for holder in holders)
    return [
        UnreadPart(name.removesuffix("_config"), f"{holder.who}, {name}: a part of its own, served apart")
        for holder in holders
        for name, value in holder.data.items()
        if composite and name not in known and isinstance(value, Mapping) and _attends(value)
    ]


def _attends(part: Mapping[str, object], depth: int = 3) -> bool:
    if any(part.get(name) is not None for name in _ATTENDS):
        return True
    inner = [value for value in part.values() if isinstance(value, Mapping)]
    return depth > 0 and any(_attends(value, depth - 1) for value in inner)
