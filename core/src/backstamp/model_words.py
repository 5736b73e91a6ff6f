"""What each layer of a model is called: one word a layer, from whichever field its config writes them in.

In: the `Fields` of a language model. Out: words of `MIXERS`, one a layer. It reads no heads and no dims, and never
takes a layer it does not know for full attention. Source of every rule: the configuration classes of transformers
5.24 (`ALLOWED_ATTN_LAYER_TYPES` and `_LEGACY_LAYER_TYPE_REMAP` in configuration_utils.py) and, where named, older
checkpoints' own config.json.

.. versionadded:: 0.1
"""

from __future__ import annotations

from typing import Final, Literal

from backstamp.errors import BadModel
from backstamp.model_fields import Fields

__all__ = ["MIXERS", "Mixer", "layer_words"]

Mixer = Literal["full", "sliding", "chunked", "cross", "indexed", "csa", "hca", "linear", "conv"]

#: What runs in a layer of each name; layers that hold an MLP alone run nothing.
MIXERS: Final[dict[str, tuple[Mixer, ...]]] = {
    "full_attention": ("full",),
    "attention": ("full",),
    "sliding_attention": ("sliding",),
    "chunked_attention": ("chunked",),
    "cross_attention": ("cross",),
    "indexed_attention": ("indexed",),
    "deepseek_sparse_attention": ("indexed",),
    "compressed_sparse_attention": ("csa",),
    "heavily_compressed_attention": ("hca",),
    "linear_attention": ("linear",),
    "mamba": ("linear",),
    "mamba2": ("linear",),
    "conv": ("conv",),
    "hybrid": ("full", "linear"),
    "hybrid_sliding": ("sliding", "linear"),
    "moe": (),
    "mlp": (),
}
#: Nemotron-H's letters. Source: NemotronHConfig._pattern_to_list.
_LETTERS: Final = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
#: Fields that list layers by number: what those are, and what the others are. Source: LFM2, Bamba, Llama 3.2 Vision.
_BY_INDEX: Final = {
    "full_attn_idxs": ("full_attention", "conv"),
    "attn_layer_indices": ("full_attention", "linear_attention"),
    "cross_attention_layers": ("cross_attention", "full_attention"),
}
#: DeepSeek V4's tokens a cache entry stands for. Source: its configuration, _COMPRESS_RATIO_TO_LAYER_TYPE.
_RATIOS: Final = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
#: Every n-th layer is full where a config gives a window and no list. Source: the defaults of the config classes.
_FULL_EVERY: Final = {
    "gemma2": 2,
    "gpt_oss": 2,
    "cohere2": 4,
    "exaone4": 4,
    "olmo3": 4,
    "gemma3n_text": 5,
    "gemma3": 6,
    "gemma3_text": 6,
    "gemma4_text": 6,
}
#: Fields only models with linear mixers or convolutions have; with them, a list of the layers must be there.
_NOT_ALL_ATTENTION: Final = (
    "linear_num_value_heads",
    "linear_num_heads",
    "linear_attn_config",
    "linear_attn_alpha_factor",
    "layernorm_linear_attention_alpha",
    "mamba_d_state",
    "ssm_state_size",
    "conv_L_cache",
)


def layer_words(fields: Fields, draft_layers: int | None = None) -> list[str]:
    """One word of `MIXERS` a layer; `draft_layers` counts the layers of a draft cut from its target's config.

    Raises:
        BadModel: an unknown word (named beside those known), a list of the wrong length, or no list where one is due.
    """
    if draft_layers is not None:
        return _draft_words(fields, draft_layers)
    found, words = _listed(fields)
    if words is None:
        count = _count(fields)
        found, words = "num_hidden_layers", _by_rule(fields, count)
    else:
        count = _count(fields, default=len(words))
        if len(words) != count:
            raise fields.bad(found, f"one entry for each of {count} layers", f"{len(words)} entries")
    for at, word in enumerate(words):
        if word not in MIXERS:
            raise _unknown(fields, found, word, at)
    if fields.flag("use_sliding_window") is False:
        # Qwen writes a window and its layers, and switches both off beside
        words = ["full_attention" if word == "sliding_attention" else word for word in words]
    return words


def _count(fields: Fields, default: int | None = None) -> int:
    return fields.count("num_hidden_layers", "n_layer", "n_layers", "num_layers", default=default)


def _listed(fields: Fields) -> tuple[str, list[str] | None]:
    """The field that lists the layers, and its words; transformers' own lists win over older forms."""
    for name in ("layer_types", "layers_block_type"):
        words = fields.words(name)
        if words is not None:
            return name, words
    letters = fields.text("hybrid_override_pattern")
    if letters is not None:
        return "hybrid_override_pattern", _spelled(fields, "hybrid_override_pattern", letters)
    numbers = fields.wholes("attn_type_list")
    if numbers is not None:
        # MiniMax-Text-01: 1 full attention, 0 lightning
        words = ["full_attention" if number == 1 else "linear_attention" for number in numbers]
        return "attn_type_list", words
    ratios = fields.wholes("compress_ratios")
    if ratios is not None:
        strange = sorted(set(ratios) - set(_RATIOS))
        if strange:
            raise fields.bad("compress_ratios", "0, 4 or 128 for each layer", repr(strange))
        # the checkpoint lists its draft layer last, which is no layer of the target
        return "compress_ratios", [_RATIOS[ratio] for ratio in ratios[: _count(fields)]]
    return _listed_by_index(fields)


def _listed_by_index(fields: Fields) -> tuple[str, list[str] | None]:
    """Lists of some of the layers; the others are what the field says they are."""
    linear = fields.part("linear_attn_config")
    if linear is not None:
        return "linear_attn_config", _kimi_words(linear, _count(fields))
    for name, (inside, outside) in _BY_INDEX.items():
        listed = fields.wholes(name)
        if listed is not None:
            count = _count(fields)
            beyond = [at for at in listed if at >= count]
            if beyond:
                raise fields.bad(name, f"layers below {count}", repr(beyond))
            return name, [inside if at in listed else outside for at in range(count)]
    if fields.has("attention_chunk_size"):
        return "no_rope_layers", _llama4_words(fields, _count(fields))
    interval = fields.whole("full_attention_interval", default=0)
    if interval:
        # Qwen3-Next: the last of every interval attends
        words = ["linear_attention" if (at + 1) % interval else "full_attention" for at in range(_count(fields))]
        return "full_attention_interval", words
    if fields.text("model_type") == "falcon_h1":
        # every layer runs both, side by side, and the config does not say so
        return "model_type", ["hybrid"] * _count(fields)
    return "", None


def _kimi_words(linear: Fields, count: int) -> list[str]:
    """Kimi Linear's first form: two lists that count layers from 1. Source: KimiLinearConfig.__post_init__."""
    full, kda = linear.wholes("full_attn_layers", least=1), linear.wholes("kda_layers", least=1)
    if full is None or kda is None:
        missing = "full_attn_layers" if full is None else "kda_layers"
        raise linear.bad(missing, "full_attn_layers and kda_layers", "no such field")
    if sorted(full + kda) != list(range(1, count + 1)):
        raise linear.bad("full_attn_layers", f"each of layers 1 to {count} here or in kda_layers", "another set")
    return ["full_attention" if at in full else "linear_attention" for at in range(1, count + 1)]


def _llama4_words(fields: Fields, count: int) -> list[str]:
    """Llama 4: a layer with positions attends in chunks, one without (marked 0) to everything. An empty list is unset.

    Source: Llama4TextConfig.__post_init__.
    """
    every = fields.whole("no_rope_layer_interval", default=4)
    marks = fields.wholes("no_rope_layers") or [int((at + 1) % every != 0) for at in range(count)]
    return ["chunked_attention" if mark else "full_attention" for mark in marks]


def _by_rule(fields: Fields, count: int) -> list[str]:
    """Words of a config without a list: all layers alike, or every n-th full between sliding ones."""
    telling = [name for name in _NOT_ALL_ATTENTION if fields.has(name)]
    if telling:
        needed = f"layer_types, because {telling[0]} says that not every layer is attention"
        raise fields.bad("layer_types", needed, "no such field")
    base = "indexed_attention" if fields.has("index_topk") else "full_attention"
    if not fields.has("sliding_window") or fields.flag("use_sliding_window") is False:
        return [base] * count
    if fields.flag("use_sliding_window") and fields.has("max_window_layers"):
        # Qwen2: the layers below this one keep full attention
        first = fields.whole("max_window_layers", least=0)
        return [base if at < first else "sliding_attention" for at in range(count)]
    pattern = fields.data.get("sliding_window_pattern")
    if isinstance(pattern, str):
        # EXAONE 4: L slides, G is full
        letters = {"L": "sliding_attention", "G": base}
        if not pattern or set(pattern) - set(letters):
            raise fields.bad("sliding_window_pattern", "letters L and G, or a number", repr(pattern))
        return [letters[pattern[at % len(pattern)]] for at in range(count)]
    default = _FULL_EVERY.get(fields.text("model_type") or "", 0)
    every = fields.whole("sliding_window_pattern", default=default)
    if every == 0:
        # Mistral and those after it: a window without a list is every layer's
        return ["sliding_attention"] * count
    return ["sliding_attention" if (at + 1) % every else base for at in range(count)]


def _draft_words(fields: Fields, count: int) -> list[str]:
    """Words of the next-token layers a config keeps beside the target's own."""
    words = fields.words("mtp_layers_block_type", "mtp_layer_types")
    letters = fields.text("mtp_hybrid_override_pattern")
    if words is None and letters is not None:
        words = _spelled(fields, "mtp_hybrid_override_pattern", letters)
    if words is None:
        # DeepSeek V4's draft layer does not compress; every other one attends as its target does
        compressed = fields.has("compress_ratios", "compress_rates")
        base = "indexed_attention" if fields.has("index_topk") else "full_attention"
        words = ["sliding_attention" if compressed else base]
    for at, word in enumerate(words):
        if word not in MIXERS:
            raise _unknown(fields, "mtp_layers_block_type", word, at)
    return words * count


def _spelled(fields: Fields, name: str, letters: str) -> list[str]:
    for at, letter in enumerate(letters):
        if letter not in _LETTERS:
            raise fields.bad(name, f"letters among {' '.join(_LETTERS)}", f"{letter!r} for layer {at}")
    return [_LETTERS[letter] for letter in letters]


def _unknown(fields: Fields, name: str, word: str, at: int) -> BadModel:
    return fields.bad(name, f"layer types among {', '.join(sorted(MIXERS))}", f"{word!r} for layer {at}")
