"""What each layer of a model is: a word a layer and the config's numbers → `LayerFacts`.

In: a parsed config. Out: `ModelFacts`, through `read_model`. Decoders are read here, linear mixers in
`backstamp.model_linear`, towers in `backstamp.model_towers`, encoder-decoders in `backstamp.model_whisper`, drafts in
`backstamp.model_drafts`. A language model whose attention these facts cannot say (slopes, layers with head counts of
their own) is refused, never rounded to one they can.

.. versionadded:: 0.1
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from backstamp.errors import BadModel
from backstamp.model import DraftFacts, LayerFacts, ModelFacts, group_layers
from backstamp.model_attention import AttentionReader, Causality, is_causal
from backstamp.model_cache import kv_cache_dtype
from backstamp.model_defaults import NESTED_LANGUAGE
from backstamp.model_drafts import block_causality, block_fields, draft_facts, draft_layer_count
from backstamp.model_fields import Fields
from backstamp.model_linear import linear_mixer, short_convolution
from backstamp.model_towers import Towers, read_towers
from backstamp.model_whisper import WHISPER, whisper
from backstamp.model_words import MIXERS, Mixer, layer_words

__all__ = ["read_model"]

_POSITIONS: Final = ("max_position_embeddings", "model_max_length", "n_positions", "max_target_positions")
_DTYPES: Final = {"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32"}
#: Models whose config these facts would misread, and what they cannot say. Source: their modeling files.
_UNREADABLE: Final[Mapping[str, str]] = {
    "bloom": "alibi slopes",
    "mpt": "alibi slopes",
    "mimo_v2_flash": "sliding layers with head counts of their own",
    "hy_v4": "sinks on sparse layers",
    "hy_v4_vl_text": "sinks on sparse layers",
    "t5gemma2_text": "a window on both sides of a token",
    "flint": "layers with sinks and a router of their own",
    "openai_privacy_filter": "sinks and a window on both sides of a token",
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
    if fields is not outer:
        fields = fields.under(NESTED_LANGUAGE.get(kind, {}))
    architecture = (outer.words("architectures") or fields.words("architectures") or [""])[0]
    _refuse_unreadable(outer, fields, kind)
    draft = draft_facts(outer, fields, architecture)
    canonical = _dtype(fields, dtype)
    if kind == WHISPER:
        layers, towers = whisper(fields)
    else:
        # a draft takes the hidden states of its target, which ran the towers
        towers = read_towers(outer) if draft is None else Towers((), ())
        fields = fields.over(block_fields(outer)) if draft is not None else fields
        reader = _Reader(fields, kind, canonical, _causality(outer, fields, kind, draft))
        words = layer_words(fields, draft_layer_count(fields, architecture))
        layers = tuple(reader.mixers(at, word) for at, word in enumerate(words))
    groups = group_layers(layers)
    if not groups or groups[0].component != "main":
        raise BadModel(
            fields.who, needed="a layer with a mixer of the main model", found=f"none in {len(layers)} layers"
        )
    return ModelFacts(
        name=name,
        architecture=architecture,
        dtype=canonical,
        layers=layers,
        groups=groups + towers.groups,
        max_position=fields.whole(*_POSITIONS, default=0),
        draft=_settled(draft, layers),
        kv_cache_dtype=kv_cache_dtype(outer),
        unread=towers.unread,
    )


def _refuse_unreadable(outer: Fields, fields: Fields, kind: str) -> None:
    """Refuse what would be misread."""
    said = _UNREADABLE.get(kind)
    if said is None and fields.flag("alibi"):
        said = "alibi slopes"
    if said is None and fields.has("block_configs"):
        said = "layers with head counts of their own (block_configs)"
    if said is None and fields.has("sparse_attention_config") and not fields.has("layer_types"):
        said = "layers that attend to blocks an indexer picks (sparse_attention_config)"
    if said is None and kind != WHISPER and (outer.flag("is_encoder_decoder") or fields.flag("is_encoder_decoder")):
        said = "an encoder and cross-attention, of a kind not known here"
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


def _causality(outer: Fields, fields: Fields, kind: str, draft: DraftFacts | None) -> Causality:
    """Which layers are causal."""
    if draft is not None and draft.non_causal:
        return Causality(*block_causality(outer))
    causal = is_causal(fields, kind)
    return Causality(causal, causal, "decoder" if causal or draft is not None else "encoder")


def _settled(draft: DraftFacts | None, layers: tuple[tuple[LayerFacts, ...], ...]) -> DraftFacts | None:
    """A block draft's facts after its layers are known: one that slides everywhere needs nothing non-causal."""
    if draft is None or not draft.non_causal:
        return draft
    return replace(draft, non_causal=any(not facts.causal for layer in layers for facts in layer))


class _Reader:
    """The mixers of one config's layers; layers alike share one `LayerFacts`."""

    def __init__(self, fields: Fields, kind: str, dtype: str, causality: Causality) -> None:
        self._fields = fields
        self._kind = kind
        self._attention = AttentionReader(kind, dtype, causality)
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
        return self._attention.read(mixer, fields)


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
