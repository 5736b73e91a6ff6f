"""Second step of the flow: a Hugging Face config.json → what its attention layers are, as facts.

In: a parsed config, or the path of one. Out: `ModelFacts`: every layer's family, heads, dims, window, sinks and
softcap, equal layers grouped, and the same of a composite model's towers. It imports no transformers and guesses
nothing: a language model it cannot read is a `BadModel` that names the field, a tower it cannot read is named beside.

.. versionadded:: 0.1
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import get_data
from typing import Final, Literal, NamedTuple

from backstamp.declarations import Family
from backstamp.errors import BadModel

__all__ = [
    "DEFAULT_CONFIG",
    "LINEAR_FAMILIES",
    "DraftFacts",
    "LayerFacts",
    "LayerGroup",
    "ModelFacts",
    "UnreadPart",
    "default_model",
    "group_layers",
    "load_model",
    "model_from_config",
]

LINEAR_FAMILIES: Final[frozenset[Family]] = frozenset({"gdn", "kda", "mamba2", "lightning", "short_conv"})
DEFAULT_CONFIG: Final = "models/llama-3.1-8b.json"
#: ModelOpt writes what a checkpoint's cache holds here, beside a config.json that may say nothing of it.
_BESIDE: Final = "hf_quant_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFacts:
    """One attention or linear mixer; layers with equal facts run the same kernel.

    MLA gives its absorbed form: one KV head, head_dim = latent + rotary, v_head_dim = latent. A linear mixer gives its
    key heads as `num_qo_heads`, its value heads as `num_kv_heads`, and their dims (Mamba-2: groups and heads, state
    size and head dim; a short convolution is one head as wide as the model).

    An encoder's own windows and tiles (Qwen2.5-VL's blocks of patches, an audio encoder's chunks) are no fact here:
    they do not slide, each is a row of its own in `cu_seqlens`, and the kernel sees full attention within a row.

    Attributes:
        window_left: visible keys before self, -1 none. In csa layers it bounds the uncompressed branch only.
        chunk_tokens: a token sees keys of its own aligned chunk of so many tokens, 0 without chunks. Unlike a window,
            it does not slide: the first token of a chunk sees itself alone.
        softcap: 0.0 none.
        sinks: dtype of the learned sink logits as the model stores them, None without sinks.
        causal: False where every token of a row sees every key.
        attn_type: "decoder"; "encoder" where the tokens of one input see one another and nothing is cached; "cross"
            where they see another sequence's.
        index_topk: keys an indexer selects for each token, 0 without an indexer.
        index_heads, index_head_dim: the indexer's own query heads and the width of its one cached key, 0 without one.
        compress_rate: tokens a compressed entry stands for (csa), 0 where nothing is compressed.
        kv_lora_rank, qk_rope_head_dim: latent and rotary parts of an MLA cache row, 0 elsewhere; the second is there,
            unrotated, in models without positions (Kimi Linear) too.
        ragged_dims: (qk, v) head dims of MLA before absorption, the form prefill may run; None elsewhere.
        conv_kernel: taps of a linear mixer's convolution, 0 without one.
        gate_lower_bound: of Kimi delta attention with a bounded decay, in log space; None without a bound.
        component: "main", "cross_attention" (layers of the main model's numbering), "vision" or "audio".
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
    attn_type: Literal["decoder", "encoder", "cross"] = "decoder"
    chunk_tokens: int = 0
    index_topk: int = 0
    index_heads: int = 0
    index_head_dim: int = 0
    compress_rate: int = 0
    kv_lora_rank: int = 0
    qk_rope_head_dim: int = 0
    ragged_dims: tuple[int, int] | None = None
    conv_kernel: int = 0
    gate_lower_bound: float | None = None
    component: str = "main"

    def describe(self) -> str:
        """The facts in a few words, without what is unset."""
        dims = str(self.head_dim) if self.head_dim == self.v_head_dim else f"{self.head_dim}/{self.v_head_dim}"
        parts = [f"{self.family} {self.num_qo_heads}/{self.num_kv_heads} heads", f"head dim {dims}"]
        if self.window_left >= 0:
            parts.append(f"window {self.window_left + 1}")
        if self.chunk_tokens:
            parts.append(f"chunks of {self.chunk_tokens}")
        if self.softcap:
            parts.append(f"softcap {self.softcap:g}")
        if self.sinks is not None:
            parts.append(f"sinks {self.sinks}")
        if self.index_topk:
            parts.append(f"top {self.index_topk}")
        if self.compress_rate:
            parts.append(f"1/{self.compress_rate}")
        if self.gate_lower_bound is not None:
            parts.append(f"gates from {self.gate_lower_bound:g}")
        if self.attn_type != "decoder":
            parts.append(self.attn_type)
        elif not self.causal:
            parts.append("non-causal")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers with equal facts, by index in their component; cross-attention counts with the main model's layers."""

    component: str
    facts: LayerFacts
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFacts:
    """What a draft needs of its target and of its runner.

    Attributes:
        shares_kv: reads the target's KV cache instead of writing its own.
        aux_hidden_states: hidden states of the target it consumes beside the last, 0 none.
        non_causal: drafts a block at once; its tokens see each other.
        conv_sidecar: carries short convolutions with a state of their own.
    """

    shares_kv: bool = False
    aux_hidden_states: int = 0
    non_causal: bool = False
    conv_sidecar: bool = False


class UnreadPart(NamedTuple):
    """A part of a composite model whose attention these facts do not say, and why; the engine chooses its kernel."""

    component: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """One model.

    Attributes:
        name, architecture: `model_type` and the first of `architectures` ("" where unsaid).
        dtype: "fp16", "bf16" or "fp32".
        layers: the mixers of each layer of the main model: usually one; two where attention and a recurrence, or self-
            and cross-attention, are in one layer; none in a layer that is an MLP alone. Towers are in `groups` alone.
        groups: mixers with equal facts together: the main model's in order of first appearance, then its
            cross-attention, then vision and audio.
        max_position: tokens, 0 where unsaid.
        draft: what a draft needs, None for a model that is no draft.
        kv_cache_dtype: what the checkpoint was quantised to cache in ("e4m3fn", else its own word in lower case), None
            where it does not say. The fnuz form of a host is the resolver's business.
        unread: towers and other parts whose attention is not in `groups`.
    """

    name: str
    architecture: str
    dtype: str
    layers: tuple[tuple[LayerFacts, ...], ...]
    groups: tuple[LayerGroup, ...]
    max_position: int = 0
    draft: DraftFacts | None = None
    kv_cache_dtype: str | None = None
    unread: tuple[UnreadPart, ...] = ()

    @property
    def components(self) -> tuple[str, ...]:
        """The components whose attention is known, the main model first."""
        return tuple(dict.fromkeys(group.component for group in self.groups))

    @property
    def linear_groups(self) -> tuple[LayerGroup, ...]:
        """Groups of the main model's linear mixers."""
        return tuple([group for group in self._main() if group.facts.family in LINEAR_FAMILIES])

    @property
    def attention_groups(self) -> tuple[LayerGroup, ...]:
        """Groups of the main model's own attention."""
        return tuple([group for group in self._main() if group.facts.family not in LINEAR_FAMILIES])

    @property
    def is_hybrid(self) -> bool:
        """Whether the main model has both attention and linear mixers, whatever its towers are."""
        return bool(self.linear_groups) and bool(self.attention_groups)

    @property
    def main_family(self) -> Family | None:
        """The family of the main model's attention, None in a model without any."""
        groups = self.attention_groups
        return groups[0].facts.family if groups else None

    def describe(self) -> str:
        """One line: what the layers of each component are and how many, then what is not known."""
        said: list[str] = []
        for component in self.components:
            alike = [group for group in self.groups if group.component == component]
            shown = "; ".join([f"{len(group.layers)} x {group.facts.describe()}" for group in alike])
            said.append(shown if component == "main" else f"{component}: {shown}")
        if self.unread:
            said.append(f"not read: {', '.join([part.component for part in self.unread])}")
        return f"{self.name} ({self.dtype}): {' | '.join(said)}"

    def _main(self) -> list[LayerGroup]:
        return [group for group in self.groups if group.component == "main"]


def group_layers(layers: Sequence[tuple[LayerFacts, ...]]) -> tuple[LayerGroup, ...]:
    """Mixers with equal facts together, in order of first appearance; those of the main component come first."""
    grouped: dict[LayerFacts, list[int]] = {}
    for at, mixers in enumerate(layers):
        for facts in mixers:
            grouped.setdefault(facts, []).append(at)
    groups = [LayerGroup(facts.component, facts, tuple(at)) for facts, at in grouped.items()]
    return tuple(sorted(groups, key=lambda group: group.component != "main"))


def load_model(path: str | Path, dtype: str | None = None) -> ModelFacts:
    """Read a config.json, or the one in a folder; `dtype` as in `model_from_config`.

    A `hf_quant_config.json` beside a `config.json` counts as its quantisation where it has none of its own.

    Raises:
        BadModel: the file is missing or malformed, or a field is missing, contradictory or unknown.
    """
    file = Path(path)
    who = f"model config {path}"
    try:
        if file.is_dir():
            file = file / "config.json"
        if file.exists() and not file.is_file():
            raise BadModel(who, needed="a readable config.json", found="a pipe or a device")
        data = json.loads(file.read_text("utf-8"))
        beside = file.with_name(_BESIDE)
        told = not isinstance(data, dict) or data.get("quantization_config") is not None
        if not told and file.name == "config.json" and beside.is_file():
            data["quantization_config"] = json.loads(beside.read_text("utf-8"))
    except OSError as cause:
        raise BadModel(who, needed="a readable config.json", found=cause.strerror or str(cause)) from cause
    except (ValueError, RecursionError) as cause:
        raise BadModel(who, needed="JSON", found=f"malformed text ({cause})") from cause
    return model_from_config(data, who, dtype)


def default_model() -> ModelFacts:
    """The model asked about when none is named: the shape of Llama 3.1 8B."""
    return model_from_config(json.loads(get_data("backstamp", DEFAULT_CONFIG) or b""))


def model_from_config(config: Mapping[str, object], who: str = "model config", dtype: str | None = None) -> ModelFacts:
    """The facts of a parsed config; `dtype` is what the engine loads the model as, where that is settled elsewhere.

    Raises:
        BadModel: as `load_model`.
    """
    # the rules need the types above
    from backstamp.model_layers import read_model

    if not isinstance(config, Mapping):
        raise BadModel(who, needed="a JSON object", found=type(config).__name__)
    return read_model(config, who, dtype)
