"""One step that a declared row has to serve, as data: what a batch looks like and what its layer needs.

In: numbers. Out: the layer as a kernel sees it and the model as the resolver does. Nothing here touches a tensor.

.. versionadded:: 0.2
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from backstamp.attention import LayerSpec
from backstamp.declarations import Family, Phase
from backstamp.model import LayerFacts, LayerGroup, ModelFacts

if TYPE_CHECKING:
    from torch import Tensor

    from backstamp.testing.batches import CacheForm, IndexForm, TreeKind

__all__ = ["LATENT_FAMILIES", "AttentionCase", "New"]

#: Families whose values lie inside their keys.
LATENT_FAMILIES: frozenset[Family] = frozenset({"mla", "sparse_mla", "csa"})
#: What of this step's keys is handed over ragged: nothing, what lies beside a cached prefix, or all there is.
New: TypeAlias = Literal["", "beside", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase:
    """One step of one layer.

    Attributes:
        name: unique among the cases of a row and phase.
        rows: (query tokens, KV tokens with them) of each row.
        heads: query and KV heads. dims: key and value head dims; MLA's in absorbed form.
        window: visible keys before self, -1 none. sinks: the dtype they are stored in, None without.
        kv_dtype: "same", or the canonical name of the cache's own dtype.
        rope_apart: the rotary part of an absorbed query comes as `q_rope`.
        pad_tokens: query tokens at the end that belong to no row.
        host_exact: False makes the host lengths upper bounds.
        num_steps: of a draft loop, which has one step fewer.
        loudness: factor on the query: logits of exp that overflow without their maximum.
        scales: how a cache of another dtype carries its scales.
        words: situations of `backstamp.declarations.SITUATIONS` the launch has beside what its phase brings.
        asks: what an operator asks of the kernel's insides, (field of `Requests`, value).
    """

    name: str
    phase: Phase
    rows: tuple[tuple[int, int], ...]
    family: Family = "mha"
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (64, 64)
    page_size: int = 16
    dtype: str = "fp32"
    kv_dtype: str = "same"
    layout: str = "rows"
    index_form: IndexForm = "page_table"
    cache_form: CacheForm = "nhd"
    window: int = -1
    softcap: float = 0.0
    sinks: str | None = None
    alibi: bool = False
    tree: TreeKind | None = None
    causal: bool = True
    attn_type: Literal["decoder", "encoder", "cross"] = "decoder"
    lse: bool = False
    new: New = ""
    rope_apart: bool = False
    pad_tokens: int = 0
    host_lens: bool = True
    token_rows: bool = False
    host_exact: bool = True
    graph: bool = False
    num_steps: int = 3
    loudness: float = 1.0
    scales: Literal["floats", "tensors", "none"] = "floats"
    words: frozenset[str] = frozenset()
    asks: tuple[tuple[str, str], ...] = ()

    @property
    def latent(self) -> bool:
        """Whether values lie inside keys."""
        return self.family in LATENT_FAMILIES

    @property
    def scale(self) -> float:
        """Factor on the logits: near the usual one, and not what a head dim gives away."""
        return 1.25 / math.sqrt(192 if self.latent else self.dims[0])

    @property
    def said(self) -> frozenset[str]:
        """Every word an offer's `needs` and `excludes` may hold against this case."""
        words = set(self.words)
        holds = {
            "window": self.window >= 0,
            "softcap": self.softcap > 0,
            "sinks": self.sinks is not None,
            "alibi": self.alibi,
            "tree_mask": self.tree is not None,
            "topk": self.tree is not None or "topk" in self.words,
            "non_causal": not self.causal,
            "lse": self.lse,
            "split_kv": self.new == "beside",
            "encoder": self.attn_type == "encoder",
            "cross": self.attn_type == "cross",
            "spec": self.phase not in ("prefill", "decode"),
            "draft": self.phase.startswith("draft"),
            "graph": self.graph,
            "prefix_cache": self.cached_prefix,
        }
        words |= {word for word, true in holds.items() if true}
        return frozenset(words if self.kv_dtype == "same" else words | {f"kv_{self.kv_dtype}"})

    @property
    def cached_prefix(self) -> bool:
        """Whether a query attends over tokens of earlier steps."""
        return any(kv > q for q, kv in self.rows)

    def layer(self, sinks: Tensor | None = None, alibi: Tensor | None = None) -> LayerSpec:
        """The layer as a kernel sees it."""
        return LayerSpec(
            layer_id=0,
            num_qo_heads=self.heads[0],
            num_kv_heads=self.heads[1],
            head_dim=self.dims[0],
            v_head_dim=self.dims[1],
            scale=self.scale,
            window_left=self.window,
            softcap=self.softcap,
            sinks=sinks,
            alibi=alibi,
            attn_type=self.attn_type,
        )

    def model(self) -> ModelFacts:
        """The layer as the resolver sees it: a model of two alike."""
        dk, dv = self.dims
        facts = LayerFacts(
            family=self.family,
            num_qo_heads=self.heads[0],
            num_kv_heads=self.heads[1],
            head_dim=dk,
            v_head_dim=dv,
            window_left=self.window,
            softcap=self.softcap,
            sinks=self.sinks,
            causal=self.causal,
            attn_type=self.attn_type,
            kv_lora_rank=dv if self.latent else 0,
            qk_rope_head_dim=dk - dv if self.latent else 0,
            ragged_dims=(192, 128) if self.latent else None,
        )
        groups, layers = (LayerGroup("main", facts, (0, 1)),), ((facts,), (facts,))
        return ModelFacts(name="conformance", architecture="", dtype=self.dtype, layers=layers, groups=groups)
