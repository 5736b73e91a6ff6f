"""What each layer of a model is: a word a layer and the config's numbers → `LayerFacts`.

In: a parsed config. Out: `ModelFacts`, through `read_model`. Attention is read here, linear mixers in
`backstamp.model_linear`, drafts in `backstamp.model_drafts`. A model whose attention these facts cannot say (slopes,
cross-attention, layers with head counts of their own) is refused, never rounded to one they can.

.. versionadded:: 0.1
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from backstamp.declarations import Family
from backstamp.errors import BadModel
from backstamp.model import DraftFacts, LayerFacts, ModelFacts, group_layers
from backstamp.model_drafts import draft_facts, draft_layer_count
from backstamp.model_fields import Fields
from backstamp.model_linear import linear_mixer, short_convolution
from backstamp.model_words import MIXERS, Mixer, layer_words

__all__ = ["read_model"]

_DTYPES: Final = {"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32"}
#: Models with a learned sink logit a head, and the dtype they store it in; None is the model's own.
#: Source: `self.sinks` in their modeling files, transformers 5.24.
_SINKS: Final[Mapping[str, str | None]] = {
    "gpt_oss": None,
    "granite_swa": None,
    "granitemoe_swa": None,
    "deepseek_v4": "fp32",
}
#: Models whose config these facts would misread, and what they cannot say. Source: their modeling files.
_UNREADABLE: Final[Mapping[str, str]] = {
    "bloom": "alibi slopes",
    "mpt": "alibi slopes",
    "mimo_v2_flash": "sliding layers with head counts of their own",
    "hy_v4": "sinks on sparse layers",
    "flint": "layers with sinks and a router of their own",
}
#: What composite configs leave out because their class has it. Source: Gemma3TextConfig; google/gemma-3-4b-it.
_CLASS_DEFAULTS: Final[Mapping[str, Mapping[str, object]]] = {
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
}


def read_model(config: Mapping[str, object], who: str, dtype: str | None = None) -> ModelFacts:
    """Every fact of one config; `dtype` overrides what it says.

    Raises:
        BadModel: a field is missing, contradictory or unknown, or the model is one these facts cannot describe.
    """
    outer = Fields(who, config)
    name = outer.text("model_type") or outer.text("speculators_model_type")
    if name is None:
        raise outer.bad("model_type", "a model type", "no such field")
    fields = outer.language_model()
    kind = fields.text("model_type") or name
    fields = fields.under(_CLASS_DEFAULTS.get(kind, {}))
    architecture = (outer.words("architectures") or fields.words("architectures") or [""])[0]
    _refuse_unreadable(outer, fields, kind)
    draft = draft_facts(outer, fields, architecture)
    canonical = _dtype(fields, dtype)
    reader = _Reader(fields, kind, canonical, draft)
    layers = tuple(
        reader.mixers(at, word) for at, word in enumerate(layer_words(fields, draft_layer_count(fields, architecture)))
    )
    return ModelFacts(
        name=name,
        architecture=architecture,
        dtype=canonical,
        layers=layers,
        groups=group_layers(layers),
        max_position=fields.whole("max_position_embeddings", "model_max_length", "n_positions", default=0),
        draft=draft,
    )


def _refuse_unreadable(outer: Fields, fields: Fields, kind: str) -> None:
    """Refuse what would be misread."""
    said = _UNREADABLE.get(kind)
    if said is None and fields.flag("alibi"):
        said = "alibi slopes"
    if said is None and fields.has("block_configs"):
        said = "layers with head counts of their own (block_configs)"
    if said is None and (outer.flag("is_encoder_decoder") or fields.flag("is_encoder_decoder")):
        said = "an encoder and cross-attention"
    if said is not None:
        raise BadModel(fields.who, needed="a decoder these facts can describe", found=f"{kind} with {said}")


def _dtype(fields: Fields, asked: str | None) -> str:
    """The canonical dtype of a model's activations; unsaid is bf16, what engines serve such a config in.

    Source: vLLM 0.32 reads an unsaid dtype as float32 and serves float32 configs in bf16 (`dtype="auto"`).
    """
    value = asked or fields.text("dtype") or fields.text("torch_dtype") or "bfloat16"
    name = value.removeprefix("torch.")
    if name in _DTYPES.values():
        return name
    if name not in _DTYPES:
        raise fields.bad("dtype", f"one of {', '.join(_DTYPES)}", repr(value))
    return _DTYPES[name]


class _Reader:
    """The mixers of one config's layers; layers alike share one `LayerFacts`."""

    def __init__(self, fields: Fields, kind: str, dtype: str, draft: DraftFacts | None) -> None:
        self._fields = fields
        self._kind = kind
        self._sinks = (_SINKS[kind] or dtype) if kind in _SINKS else None
        self._causal = _is_causal(fields) and not (draft is not None and draft.non_causal)
        self._own = _own_fields(fields)
        self._known: dict[tuple[Mixer, int | None], LayerFacts] = {}

    def mixers(self, at: int, word: str) -> tuple[LayerFacts, ...]:
        """The mixers of layer `at`."""
        return tuple(self._mixer(mixer, at) for mixer in MIXERS[word])

    def _mixer(self, mixer: Mixer, at: int) -> LayerFacts:
        own = at if at in self._own else None
        if (mixer, own) not in self._known:
            fields = self._fields if own is None else self._fields.over(self._own[own])
            self._known[mixer, own] = self._read(mixer, fields)
        return self._known[mixer, own]

    def _read(self, mixer: Mixer, fields: Fields) -> LayerFacts:
        if mixer == "linear":
            return linear_mixer(fields, self._kind)
        if mixer == "conv":
            return short_convolution(fields)
        if mixer in ("csa", "hca") or fields.has("compress_rates", "compress_ratios"):
            return self._compressed(mixer, fields)
        if fields.has("kv_lora_rank") and fields.flag("use_mla") is not False:
            return self._latent(mixer, fields)
        if mixer == "indexed":
            # an indexer over plain keys (Qwen's, MiniMax's) is another family than DeepSeek's
            raise fields.bad("kv_lora_rank", "a latent cache under indexed attention", "no such field")
        return self._plain(mixer, fields)

    def _plain(self, mixer: Mixer, fields: Fields) -> LayerFacts:
        heads, kv_heads = _heads(fields)
        if mixer == "full" and fields.has("global_head_dim"):
            # Gemma 4's full layers have wider heads, and may have fewer of them
            fields = fields.over({"head_dim": fields.data["global_head_dim"]})
            if fields.flag("attention_k_eq_v"):
                kv_heads = _divisor(fields, heads, fields.whole("num_global_key_value_heads", default=kv_heads))
        head_dim = _head_dim(fields, heads)
        window = _window(fields) if mixer == "sliding" else -1
        if window >= 0 and not self._causal and _is_bidirectional(fields):
            raise fields.bad("use_bidirectional_attention", "a window on one side", "a window on both sides of a token")
        return LayerFacts(
            family="mha",
            num_qo_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            v_head_dim=fields.whole("v_head_dim", default=0, least=0) or head_dim,
            window_left=window,
            softcap=fields.factor("attn_logit_softcapping"),
            sinks=self._sinks,
            causal=self._causal,
        )

    def _latent(self, mixer: Mixer, fields: Fields) -> LayerFacts:
        """Multi-head latent attention, absorbed: one cache row of latent and rotary part for all heads."""
        heads, _ = _heads(fields)
        latent, rotary = fields.whole("kv_lora_rank"), fields.whole("qk_rope_head_dim", least=0)
        family: Family = "sparse_mla" if mixer == "indexed" else "mla"
        return LayerFacts(
            family=family,
            num_qo_heads=heads,
            num_kv_heads=1,
            head_dim=latent + rotary,
            v_head_dim=latent,
            window_left=_window(fields) if mixer == "sliding" else -1,
            sinks=self._sinks,
            causal=self._causal,
            index_topk=fields.whole("index_topk") if mixer == "indexed" else 0,
            kv_lora_rank=latent,
            qk_rope_head_dim=rotary,
            ragged_dims=(fields.whole("qk_nope_head_dim") + rotary, fields.whole("v_head_dim")),
        )

    def _compressed(self, mixer: Mixer, fields: Fields) -> LayerFacts:
        """DeepSeek V4: one shared key-value head, a window of plain entries, and compressed ones behind it.

        Source: transformers 5.24, models/deepseek_v4; only the lightly compressed layers have an indexer.
        """
        heads, kv_heads = _heads(fields)
        head_dim = _head_dim(fields, heads)
        return LayerFacts(
            family="csa",
            num_qo_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            v_head_dim=head_dim,
            window_left=_window(fields),
            sinks=self._sinks,
            causal=self._causal,
            index_topk=fields.whole("index_topk") if mixer == "csa" else 0,
            compress_rate=_compress_rate(fields, mixer),
        )


def _compress_rate(fields: Fields, mixer: Mixer) -> int:
    """Tokens a compressed entry stands for; configs that leave the rates out have the released model's."""
    if mixer not in ("csa", "hca"):
        return 0
    name, default = ("compressed_sparse_attention", 4) if mixer == "csa" else ("heavily_compressed_attention", 128)
    rates = fields.part("compress_rates")
    return default if rates is None else rates.whole(name, default=default)


def _heads(fields: Fields) -> tuple[int, int]:
    """Query and key-value heads."""
    heads = fields.whole("num_attention_heads", "n_head")
    if fields.flag("multi_query") and not fields.flag("new_decoder_architecture"):
        # Falcon 7B and GPT-BigCode say one shared head this way
        return heads, 1
    grouped = ("multi_query_group_num",) if fields.flag("multi_query_attention") else ()
    return heads, _divisor(fields, heads, fields.whole("num_key_value_heads", *grouped, "num_kv_heads", default=heads))


def _divisor(fields: Fields, heads: int, kv_heads: int) -> int:
    if heads % kv_heads:
        raise fields.bad("num_key_value_heads", f"a divisor of the {heads} query heads", str(kv_heads))
    return kv_heads


def _head_dim(fields: Fields, heads: int) -> int:
    if fields.has("head_dim", "attention_head_dim", "kv_channels"):
        return fields.whole("head_dim", "attention_head_dim", "kv_channels")
    hidden = fields.whole("hidden_size", "n_embd")
    if hidden % heads:
        raise fields.bad("hidden_size", f"a multiple of the {heads} heads, or head_dim", str(hidden))
    return hidden // heads


def _window(fields: Fields) -> int:
    # a Hugging Face window counts the token itself
    return fields.whole("sliding_window") - 1


def _is_causal(fields: Fields) -> bool:
    return fields.flag("is_causal") is not False and not _is_bidirectional(fields)


def _is_bidirectional(fields: Fields) -> bool:
    # "vision" is bidirectional between the tokens of one image, which an engine says with a mask
    return fields.data.get("use_bidirectional_attention") in (True, "all")


def _own_fields(fields: Fields) -> dict[int, Mapping[str, object]]:
    """Fields that single layers have of their own (`per_layer_config` of transformers 5)."""
    part = fields.part("per_layer_config")
    if part is None:
        return {}
    own: dict[int, Mapping[str, object]] = {}
    for key, value in part.data.items():
        if not key.isdigit() or not isinstance(value, Mapping):
            raise fields.bad("per_layer_config", "fields by layer number", repr(key))
        own[int(key)] = value
    return own
