"""The attention of one decoder layer: heads, dims, window, chunks, sinks, softcap, latent ranks and indexer.

In: the `Fields` of a language model and what a layer is called. Out: one `LayerFacts`. It reads no list of layers and
no linear mixer.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

from backstamp.declarations import Family
from backstamp.model import LayerFacts
from backstamp.model_fields import Fields
from backstamp.model_words import Mixer

__all__ = ["AttentionReader", "Causality", "divided", "divisor", "is_bidirectional", "is_causal"]

#: Models with a learned sink logit a head, and the dtype they store it in; None is the model's own.
#: Source: `self.sinks` in their modeling files, transformers 5.24.
_SINKS: Final[Mapping[str, str | None]] = {
    "gpt_oss": None,
    "granite_swa": None,
    "granitemoe_swa": None,
    "deepseek_v4": "fp32",
}
#: Models that are encoders without saying so. Source: their modeling files, where `is_decoder` alone makes them causal.
_ENCODERS: Final = frozenset({"bert", "roberta", "xlm-roberta", "camembert", "electra"})


class Causality(NamedTuple):
    """Whether layers are causal: those that see everything, and those with a window."""

    full: bool
    windowed: bool
    attn_type: Literal["decoder", "encoder"] = "decoder"


class AttentionReader:
    """Reads the attention of one model's layers."""

    def __init__(self, kind: str, dtype: str, causality: Causality) -> None:
        self._sinks = (_SINKS[kind] or dtype) if kind in _SINKS else None
        self._causality = causality

    def read(self, mixer: Mixer, fields: Fields) -> LayerFacts:
        """One layer's attention.

        Raises:
            BadModel: a field is missing, contradictory or one these facts cannot say.
        """
        if mixer in ("csa", "hca") or fields.has("compress_rates", "compress_ratios"):
            return self._compressed(mixer, fields)
        if fields.has("kv_lora_rank") and fields.flag("use_mla") is not False:
            return self._latent(mixer, fields)
        if mixer == "indexed":
            # an indexer over plain keys (Qwen's, MiniMax's) is another family than DeepSeek's
            raise fields.bad("kv_lora_rank", "a latent cache under indexed attention", "no such field")
        return self._cross(fields) if mixer == "cross" else self._plain(mixer, fields)

    def _causal(self, mixer: Mixer) -> bool:
        return self._causality.windowed if mixer == "sliding" else self._causality.full

    def _plain(self, mixer: Mixer, fields: Fields) -> LayerFacts:
        heads, kv_heads = _heads(fields)
        if mixer == "full" and fields.has("global_head_dim"):
            # Gemma 4's full layers have wider heads, and may have fewer of them
            fields = fields.over({"head_dim": fields.data["global_head_dim"]})
            if fields.flag("attention_k_eq_v"):
                kv_heads = divisor(fields, heads, fields.whole("num_global_key_value_heads", default=kv_heads))
        head_dim = _head_dim(fields, heads)
        window = _window(fields) if mixer == "sliding" else -1
        if mixer in ("sliding", "chunked") and self._causality.attn_type == "encoder":
            named = "use_bidirectional_attention" if is_bidirectional(fields) else "is_causal"
            raise fields.bad(named, "a window on one side", "a window on both sides of a token")
        return LayerFacts(
            family="mha",
            num_qo_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            v_head_dim=fields.whole("v_head_dim", default=0, least=0) or head_dim,
            window_left=window,
            softcap=fields.factor("attn_logit_softcapping"),
            sinks=self._sinks,
            causal=self._causal(mixer),
            attn_type=self._causality.attn_type,
            chunk_tokens=fields.whole("attention_chunk_size") if mixer == "chunked" else 0,
        )

    def _cross(self, fields: Fields) -> LayerFacts:
        """A layer whose queries attend to another sequence's keys, cached once a request."""
        heads, kv_heads = _heads(fields)
        head_dim = _head_dim(fields, heads)
        return LayerFacts(
            family="mha",
            num_qo_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            v_head_dim=head_dim,
            causal=False,
            attn_type="cross",
            component="cross_attention",
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
            causal=self._causal(mixer),
            index_topk=fields.whole("index_topk") if mixer == "indexed" else 0,
            index_heads=fields.whole("index_n_heads") if mixer == "indexed" else 0,
            index_head_dim=fields.whole("index_head_dim") if mixer == "indexed" else 0,
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
            causal=self._causal(mixer),
            index_topk=fields.whole("index_topk") if mixer == "csa" else 0,
            index_heads=fields.whole("index_n_heads") if mixer == "csa" else 0,
            index_head_dim=fields.whole("index_head_dim") if mixer == "csa" else 0,
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
    return heads, divisor(fields, heads, fields.whole("num_key_value_heads", *grouped, "num_kv_heads", default=heads))


def divisor(fields: Fields, heads: int, kv_heads: int) -> int:
    """The key-value heads, each shared by as many query heads as the others."""
    if heads % kv_heads:
        raise fields.bad("num_key_value_heads", f"a divisor of the {heads} query heads", str(kv_heads))
    return kv_heads


def _head_dim(fields: Fields, heads: int) -> int:
    if fields.has("head_dim", "attention_head_dim", "kv_channels"):
        return fields.whole("head_dim", "attention_head_dim", "kv_channels")
    return divided(fields, heads, "hidden_size", "n_embd")


def divided(fields: Fields, heads: int, *names: str) -> int:
    """The width of a head where a config gives that of them all."""
    width = fields.whole(*names)
    if width % heads:
        named = next((name for name in names if fields.has(name)), names[0])
        raise fields.bad(named, f"a multiple of the {heads} heads, or head_dim", str(width))
    return width // heads


def _window(fields: Fields) -> int:
    # a Hugging Face window counts the token itself
    return fields.whole("sliding_window") - 1


def is_causal(fields: Fields, kind: str) -> bool:
    """Whether a model's tokens see those before them alone."""
    if kind in _ENCODERS and not fields.flag("is_decoder"):
        return False
    return fields.flag("is_causal") is not False and not is_bidirectional(fields)


def is_bidirectional(fields: Fields) -> bool:
    """Whether a decoder's config turns it into an encoder."""
    # "vision" is bidirectional between the tokens of one image, which an engine says with a mask
    return fields.data.get("use_bidirectional_attention") in (True, "all")
