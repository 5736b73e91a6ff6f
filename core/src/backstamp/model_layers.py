"""How each model family writes its layers into config.json.

In: a `ConfigReader` over one config. Out: (layer index, facts) pairs; a layer that runs attention and a recurrence side
by side gives two. Source: the configuration classes of transformers 5.24, one rule a field they use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from backstamp.declarations import Family
from backstamp.errors import BadModel
from backstamp.model import DraftFacts, LayerFacts

__all__ = ["ConfigReader", "draft_of", "layers_of"]

_DTYPES: Final = {"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32"}
#: What `layer_types` and its older forms call a layer, and what it is.
_ATTENTION: Final = frozenset({"full_attention", "attention", "indexed_attention", "full", "hybrid", "parallel_hybrid"})
_SLIDING: Final = frozenset({"sliding_attention", "chunked_attention", "local", "sliding"})
_COMPRESSED: Final = frozenset({"compressed_sparse_attention", "heavily_compressed_attention"})
_RECURRENT: Final = frozenset({"linear_attention", "mamba", "mamba2", "conv", "linear"})
_NO_MIXER: Final = frozenset({"moe", "mlp"})
#: What "linear_attention" means to a model type.
_LINEAR_KIND: Final[Mapping[str, Family]] = {
    "kimi_linear": "kda",
    "minimax": "lightning",
    "minimax_text_01": "lightning",
    "qwen3_next": "gdn",
}
_NEMOTRON: Final = {"M": "mamba2", "*": "attention", "-": "mlp", "E": "moe"}


class ConfigReader:
    """Reads fields of one config; every error names the config and the field."""

    def __init__(self, config: Mapping[str, object], who: str) -> None:
        # composite models keep the decoder under text_config
        text = config.get("text_config")
        self._config: Mapping[str, object] = {**config, **text} if isinstance(text, Mapping) else config
        self.who = who
        self.model_type = self._word("model_type")
        named = config.get("architectures") or self._config.get("architectures")
        self.architecture = str(named[0]) if isinstance(named, list) and named else ""
        self.dtype = self._dtype()

    def has(self, *fields: str) -> bool:
        """Whether any of the fields is set."""
        return any(self._config.get(field) is not None for field in fields)

    def value(self, field: str) -> object:
        """A field as it stands, or None."""
        return self._config.get(field)

    def number(self, *fields: str, default: int | None = None) -> int:
        """The first set field of these, as a positive whole number."""
        for field in fields:
            value = self._config.get(field)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0 or (value == 0 and default != 0):
                raise self.bad(fields[0] if field == fields[0] else field, "a whole number >= 1", repr(value))
            return value
        if default is None:
            raise self.bad(fields[0], f"{' or '.join(fields)}", "no such field")
        return default

    def factor(self, field: str) -> float:
        """A field as a number, 0.0 where unset."""
        value = self._config.get(field)
        if value is None:
            return 0.0
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.bad(field, "a number", repr(value))
        return float(value)

    def words(self, field: str) -> list[str] | None:
        """A field as a list of words, or None."""
        value = self._config.get(field)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.bad(field, "a list of words", repr(value))
        return value

    def bad(self, field: str, needed: str, found: str) -> BadModel:
        """An error about one field."""
        return BadModel(f"{self.who}, field {field}", needed=needed, found=found)

    def _word(self, field: str) -> str:
        value = self._config.get(field)
        if not isinstance(value, str) or not value:
            raise self.bad(field, "a model type", repr(value))
        return value

    def _dtype(self) -> str:
        value = self._config.get("dtype") or self._config.get("torch_dtype") or "bfloat16"
        name = str(value).removeprefix("torch.")
        if name not in _DTYPES:
            raise self.bad("dtype", f"one of {', '.join(_DTYPES)}", repr(value))
        return _DTYPES[name]


def layers_of(reader: ConfigReader) -> list[tuple[int, LayerFacts]]:
    """Every layer's facts, with its index; MLP-only layers have none."""
    count = reader.number("num_hidden_layers", "n_layer", "num_layers")
    names = _layer_names(reader, count)
    full = _full_layer(reader)
    layers: list[tuple[int, LayerFacts]] = []
    for at, name in enumerate(names):
        if name in _ATTENTION:
            layers.append((at, full))
            if reader.model_type == "falcon_h1" or name in ("hybrid", "parallel_hybrid"):
                layers.append((at, _mamba2(reader)))
        elif name in _SLIDING:
            layers.append((at, replace(full, window_left=_window(reader))))
        elif name in _COMPRESSED:
            layers.append((at, full))
        elif name in _RECURRENT:
            layers.append((at, _recurrent(reader, name)))
        elif name not in _NO_MIXER:
            known = ", ".join(sorted(_ATTENTION | _SLIDING | _COMPRESSED | _RECURRENT | _NO_MIXER))
            raise reader.bad("layer_types", f"layer types among {known}", f"{name!r} at layer {at}")
    return layers


def draft_of(reader: ConfigReader) -> DraftFacts | None:
    """What a draft head needs, told by its architecture's name; None for a model that is no draft.

    Source: SGLang 0.5.23 and vLLM 0.32 name draft classes ...Eagle, ...Eagle3, ...NextN, ...MTP, ...DFlash.
    """
    name = reader.architecture.lower()
    if "eagle3" in name:
        return DraftFacts(aux_hidden_states=3)
    if any(word in name for word in ("eagle", "nextn", "mtp", "dflash", "dspark")):
        return DraftFacts(conv_sidecar=reader.has("conv_L_cache", "short_conv_kernel_size"))
    return None


def _layer_names(reader: ConfigReader, count: int) -> list[str]:
    """One name a layer, from whichever field the family writes them in."""
    pattern = reader.value("hybrid_override_pattern")
    if isinstance(pattern, str):
        unknown = sorted(set(pattern) - set(_NEMOTRON))
        if unknown:
            raise reader.bad("hybrid_override_pattern", f"letters among {''.join(_NEMOTRON)}", repr(unknown))
        names = [_NEMOTRON[letter] for letter in pattern]
    else:
        names = reader.words("layer_types") or reader.words("layers_block_type") or _derived_names(reader, count)
    if len(names) != count:
        raise reader.bad("layer_types", f"one entry a layer ({count})", str(len(names)))
    return names


def _derived_names(reader: ConfigReader, count: int) -> list[str]:
    """Layer names of configs that give a rule instead of a list."""
    kinds = reader.value("attn_type_list")
    if isinstance(kinds, list):
        # MiniMax: 0 lightning, 1 full
        return ["full_attention" if kind == 1 else "linear_attention" for kind in kinds]
    linear = reader.value("linear_attn_config")
    if isinstance(linear, Mapping):
        # Kimi Linear's first form counts layers from 1
        listed = linear.get("full_attn_layers")
        full = {int(at) - 1 for at in listed} if isinstance(listed, list) else set()
        return ["full_attention" if at in full else "linear_attention" for at in range(count)]
    indices = reader.value("full_attn_idxs")
    if isinstance(indices, list):
        return ["full_attention" if at in indices else "conv" for at in range(count)]
    if not _has_window(reader):
        return ["full_attention"] * count
    period = reader.number("sliding_window_pattern", default=1)
    if period > 1:
        return ["full_attention" if (at + 1) % period == 0 else "sliding_attention" for at in range(count)]
    if reader.model_type == "gemma2":
        return ["full_attention" if at % 2 else "sliding_attention" for at in range(count)]
    return ["sliding_attention"] * count


def _has_window(reader: ConfigReader) -> bool:
    # Qwen writes a window and switches it off beside
    return reader.has("sliding_window") and reader.value("use_sliding_window") is not False


def _window(reader: ConfigReader) -> int:
    # a Hugging Face window counts the token itself
    return reader.number("sliding_window", "attention_chunk_size") - 1


def _full_layer(reader: ConfigReader) -> LayerFacts:
    """The full-attention layer of a model."""
    heads = reader.number("num_attention_heads", "n_head")
    kv_heads = reader.number("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise reader.bad("num_key_value_heads", f"a divisor of the {heads} query heads", str(kv_heads))
    if reader.has("compress_rates", "compress_rope_theta"):
        head_dim = reader.number("head_dim")
        topk = reader.number("index_topk", default=0)
        window = _window(reader) if _has_window(reader) else -1
        return LayerFacts(
            family="csa",
            num_qo_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            v_head_dim=head_dim,
            window_left=window,
            index_topk=topk,
        )
    if reader.has("kv_lora_rank"):
        latent, rotary = reader.number("kv_lora_rank"), reader.number("qk_rope_head_dim")
        topk = reader.number("index_topk", default=0)
        return LayerFacts(
            family="sparse_mla" if topk else "mla",
            num_qo_heads=heads,
            num_kv_heads=1,
            head_dim=latent + rotary,
            v_head_dim=latent,
            index_topk=topk,
        )
    head_dim = _head_dim(reader, heads)
    return LayerFacts(
        family="mha",
        num_qo_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=reader.number("v_head_dim", default=head_dim),
        softcap=reader.factor("attn_logit_softcapping"),
        sinks=reader.dtype if reader.model_type == "gpt_oss" else None,
        causal=reader.value("is_causal") is not False,
    )


def _head_dim(reader: ConfigReader, heads: int) -> int:
    if reader.has("head_dim", "attention_head_dim"):
        return reader.number("head_dim", "attention_head_dim")
    hidden = reader.number("hidden_size", "n_embd")
    if hidden % heads:
        raise reader.bad("hidden_size", f"a multiple of the {heads} heads, or head_dim", str(hidden))
    return hidden // heads


def _recurrent(reader: ConfigReader, name: str) -> LayerFacts:
    if name in ("mamba", "mamba2"):
        return _mamba2(reader)
    if name == "conv":
        hidden = reader.number("hidden_size")
        return LayerFacts(family="short_conv", num_qo_heads=1, num_kv_heads=1, head_dim=hidden, v_head_dim=hidden)
    family = _LINEAR_KIND.get(reader.model_type)
    if family is None and reader.has("linear_num_value_heads"):
        family = "gdn"
    if family is None:
        known = ", ".join(sorted(_LINEAR_KIND))
        raise reader.bad("layer_types", f"a model type whose linear attention is known ({known})", reader.model_type)
    return _linear_layer(reader, family)


def _linear_layer(reader: ConfigReader, family: Family) -> LayerFacts:
    nested = reader.value("linear_attn_config")
    if isinstance(nested, Mapping):
        reader = ConfigReader({"model_type": reader.model_type, **nested}, f"{reader.who}, linear_attn_config")
        heads, dim = reader.number("num_heads"), reader.number("head_dim")
        return LayerFacts(family=family, num_qo_heads=heads, num_kv_heads=heads, head_dim=dim, v_head_dim=dim)
    if family == "gdn":
        return LayerFacts(
            family=family,
            num_qo_heads=reader.number("linear_num_key_heads"),
            num_kv_heads=reader.number("linear_num_value_heads"),
            head_dim=reader.number("linear_key_head_dim"),
            v_head_dim=reader.number("linear_value_head_dim"),
        )
    heads = reader.number("linear_num_heads", "num_attention_heads")
    dim = reader.number("linear_head_dim", "head_dim")
    return LayerFacts(family=family, num_qo_heads=heads, num_kv_heads=heads, head_dim=dim, v_head_dim=dim)


def _mamba2(reader: ConfigReader) -> LayerFacts:
    """A Mamba-2 mixer: groups share keys as query heads do, state size is the key dim."""
    heads = reader.number("mamba_num_heads", "mamba_n_heads", "n_mamba_heads")
    return LayerFacts(
        family="mamba2",
        num_qo_heads=reader.number("n_groups", "mamba_n_groups", default=1),
        num_kv_heads=heads,
        head_dim=reader.number("ssm_state_size", "mamba_d_state"),
        v_head_dim=reader.number("mamba_head_dim", "mamba_d_head"),
    )
