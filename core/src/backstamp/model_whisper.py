"""Whisper: an encoder of sound, and a decoder whose layers attend to their own tokens and to the sound.

In: the `Fields` of its config. Out: the decoder's layers, each of two mixers, and the encoder as the component
"audio". Other encoder-decoders are refused before they come here. Source: transformers 5.24, models/whisper.

.. versionadded:: 0.2
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from backstamp.model import LayerFacts
from backstamp.model_attention import divided
from backstamp.model_fields import Fields
from backstamp.model_towers import Towers, encoder_group

__all__ = ["WHISPER", "whisper"]

WHISPER: Final = "whisper"


def whisper(fields: Fields) -> tuple[tuple[tuple[LayerFacts, ...], ...], Towers]:
    """The decoder's layers and the encoder.

    Raises:
        BadModel: a count or a width is missing or does not fit.
    """
    heads = fields.whole("decoder_attention_heads")
    head_dim = divided(fields, heads, "d_model")
    own = LayerFacts(family="mha", num_qo_heads=heads, num_kv_heads=heads, head_dim=head_dim, v_head_dim=head_dim)
    cross = replace(own, causal=False, attn_type="cross", component="cross_attention")
    hearing = fields.whole("encoder_attention_heads")
    layers = fields.count("encoder_layers")
    encoder = encoder_group("audio", hearing, hearing, divided(fields, hearing, "d_model"), layers)
    return ((own, cross),) * fields.count("decoder_layers"), Towers((encoder,), ())
