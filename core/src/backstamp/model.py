"""A Hugging Face config.json → what its attention layers are, as facts.

In: a parsed config. Out: `ModelFacts`: every layer's family, heads, dims, window, sinks and softcap, and equal layers
grouped. It imports no transformers and guesses nothing: a config it cannot read is a `BadModel` naming the field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Final

from backstamp.declarations import Family
from backstamp.errors import BadModel

__all__ = [
    "LINEAR_FAMILIES",
    "DraftFacts",
    "LayerFacts",
    "LayerGroup",
    "ModelFacts",
    "default_model",
    "load_model",
    "model_from_config",
]

LINEAR_FAMILIES: Final[frozenset[Family]] = frozenset({"gdn", "kda", "mamba2", "lightning", "short_conv"})
_DEFAULT: Final = "models/llama-3.1-8b.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFacts:
    """One attention or linear layer; layers with equal facts run the same kernel.

    MLA layers give the absorbed shape: one KV head, head_dim = latent + rotary, v_head_dim = latent. Linear layers
    give key heads as `num_qo_heads` and value heads as `num_kv_heads`.

    Attributes:
        window_left: visible keys before self, -1 none.
        softcap: 0.0 none. sinks: dtype of the learned sink logits, None without sinks.
        index_topk: keys a sparse layer selects, 0 dense.
    """

    family: Family
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    window_left: int = -1
    softcap: float = 0.0
    sinks: str | None = None
    causal: bool = True
    index_topk: int = 0
    component: str = "main"


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers with equal facts, by index in the model."""

    component: str
    facts: LayerFacts
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFacts:
    """What a draft needs of its target.

    Attributes:
        shares_kv: reads the target's KV cache instead of its own.
        aux_hidden_states: hidden states of the target it consumes beside the last, 0 none.
        conv_sidecar: carries short convolutions with a state of their own.
    """

    shares_kv: bool = False
    aux_hidden_states: int = 0
    conv_sidecar: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """One model; `groups` holds its layers grouped by equal facts, in order of first appearance."""

    name: str
    architecture: str
    dtype: str
    layers: tuple[LayerFacts, ...]
    groups: tuple[LayerGroup, ...]
    max_position: int = 0
    draft: DraftFacts | None = None

    @property
    def linear_groups(self) -> tuple[LayerGroup, ...]:
        """Groups of recurrent layers."""
        return tuple(group for group in self.groups if group.facts.family in LINEAR_FAMILIES)

    @property
    def attention_groups(self) -> tuple[LayerGroup, ...]:
        """Groups of attention layers."""
        return tuple(group for group in self.groups if group.facts.family not in LINEAR_FAMILIES)

    @property
    def is_hybrid(self) -> bool:
        """Whether the model has both attention and recurrent layers."""
        return bool(self.linear_groups) and bool(self.attention_groups)

    def describe(self) -> str:
        """One line: what the layers are and how many."""
        parts = []
        for group in self.groups:
            facts = group.facts
            window = f", window {facts.window_left + 1}" if facts.window_left >= 0 else ""
            dims = str(facts.head_dim) if facts.head_dim == facts.v_head_dim else f"{facts.head_dim}/{facts.v_head_dim}"
            heads = f"{facts.num_qo_heads}/{facts.num_kv_heads} heads"
            parts.append(f"{len(group.layers)} x {facts.family} {heads}, head dim {dims}{window}")
        return f"{self.name} ({self.dtype}): {'; '.join(parts)}"


def load_model(path: str) -> ModelFacts:
    """Read a config.json.

    Raises:
        BadModel: the file is missing or malformed, or a field is missing, contradictory or unknown.
    """
    try:
        data = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as cause:
        raise BadModel(f"model config {path}", needed="a readable config.json", found=str(cause)) from cause
    if not isinstance(data, dict):
        raise BadModel(f"model config {path}", needed="a JSON object", found=type(data).__name__)
    return model_from_config(data, f"model config {path}")


def default_model() -> ModelFacts:
    """The model asked about when none is named: the shape of Llama 3.1 8B."""
    return model_from_config(json.loads(files("backstamp").joinpath(_DEFAULT).read_text("utf-8")))


def model_from_config(config: Mapping[str, object], who: str = "model config") -> ModelFacts:
    """The facts of a parsed config.

    Raises:
        BadModel: as `load_model`.
    """
    from backstamp.model_layers import ConfigReader, draft_of, layers_of

    reader = ConfigReader(config, who)
    layers = layers_of(reader)
    grouped: dict[LayerFacts, list[int]] = {}
    for at, facts in layers:
        grouped.setdefault(facts, []).append(at)
    return ModelFacts(
        name=reader.model_type,
        architecture=reader.architecture,
        dtype=reader.dtype,
        layers=tuple(facts for _, facts in layers),
        groups=tuple(LayerGroup(facts.component, facts, tuple(at)) for facts, at in grouped.items()),
        max_position=reader.number("max_position_embeddings", "model_max_length", default=0),
        draft=draft_of(reader),
    )
