"""The work `bench/kernels.py --check` holds against float64: what a step looks like, and what its layer needs.

A case is data; `checks.py` resolves, builds and runs it. Head dim 128 with four query heads a key head, as the models
that are served have it; every case has rows of unlike lengths, an empty row, and NaN in every slot nobody may read.
"""

from __future__ import annotations

from typing import NamedTuple

from backstamp.attention import LayerSpec
from backstamp.declarations import Phase
from backstamp.model import LayerFacts, LayerGroup, ModelFacts
from backstamp.testing.batches import TreeKind

__all__ = ["CASES", "Case"]


class Case(NamedTuple):
    """One step: `rows` are (query tokens, KV tokens with them), the window counts keys before self.

    `new` hands this step's keys over ragged: "all" of them, or "beside" a cached prefix.
    """

    name: str
    phase: Phase
    rows: tuple[tuple[int, int], ...]
    family: str = "mha"
    heads: tuple[int, int] = (8, 2)
    page_size: int = 16
    window: int = -1
    softcap: float = 0.0
    sinks: bool = False
    tree: TreeKind | None = None
    causal: bool = True
    lse: bool = False
    new: str = ""
    dtype: str = "bf16"
    graph: bool = False

    @property
    def dims(self) -> tuple[int, int]:
        """Key and value head dims; MLA in its absorbed form."""
        return (128, 128) if self.family == "mha" else (576, 512)

    @property
    def scale(self) -> float:
        """Factor on the logits; MLA's is that of its heads before absorption, 128 + 64."""
        return 128**-0.5 if self.family == "mha" else 192**-0.5

    def layer(self, sinks: object = None) -> LayerSpec:
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
            sinks=sinks,  # type: ignore[arg-type]
        )

    def model(self) -> ModelFacts:
        """The layer as the resolver sees it: a model of one."""
        mla = self.family == "mla"
        facts = LayerFacts(
            family="mla" if mla else "mha",
            num_qo_heads=self.heads[0],
            num_kv_heads=self.heads[1],
            head_dim=self.dims[0],
            v_head_dim=self.dims[1],
            window_left=self.window,
            softcap=self.softcap,
            sinks="fp32" if self.sinks else None,
            causal=self.causal,
            kv_lora_rank=512 if mla else 0,
            qk_rope_head_dim=64 if mla else 0,
            ragged_dims=(192, 128) if mla else None,
        )
        groups = (LayerGroup("main", facts, (0,)),)
        return ModelFacts(name="check", architecture="", dtype=self.dtype, layers=((facts,),), groups=groups)


PREFILL = ((65, 65), (1, 40), (0, 17), (130, 300), (33, 97))
DECODE = ((1, 1), (1, 17), (0, 0), (1, 300), (1, 64), (1, 1000))
CHAIN = ((4, 4), (4, 40), (4, 300), (4, 129))
SHORT = tuple((1, 20 + 31 * row) for row in range(8))
SHORT_CHAIN = tuple((4, 24 + 31 * row) for row in range(8))
EXTEND = ((1, 20), (3, 3), (0, 9), (4, 300))
#: One window whose size a kernel may compile in.
WINDOW = 127

MHA = (
    Case("ragged", "prefill", PREFILL, lse=True),
    Case("page 1", "prefill", PREFILL, page_size=1),
    Case("page 64", "prefill", PREFILL, page_size=64),
    Case("32/8 heads, long", "prefill", ((512, 2048), (700, 700)), heads=(32, 8), page_size=64),
    Case("window", "prefill", PREFILL, window=WINDOW),
    Case("softcap", "prefill", PREFILL, softcap=30.0),
    Case("sinks", "prefill", PREFILL, sinks=True),
    Case("window and sinks", "prefill", PREFILL, window=WINDOW, sinks=True),
    Case("non-causal", "prefill", PREFILL, causal=False),
    Case("no cache", "prefill", ((65, 65), (1, 1), (130, 130)), new="all", lse=True),
    Case("no cache, 32/8 heads", "prefill", ((700, 700), (1, 1), (333, 333)), heads=(32, 8), new="all"),
    Case("no cache in a window", "prefill", ((65, 65), (300, 300)), window=WINDOW, new="all"),
    Case("no cache, non-causal", "prefill", ((65, 65), (1, 1), (130, 130)), causal=False, new="all"),
    Case("no cache, sinks", "prefill", ((65, 65), (1, 1), (130, 130)), sinks=True, new="all"),
    Case("no cache, softcap", "prefill", ((65, 65), (1, 1), (130, 130)), softcap=30.0, new="all"),
    Case("new beside a prefix", "prefill", PREFILL, new="beside"),
    Case("fp16", "prefill", PREFILL, dtype="fp16"),
    Case("ragged", "decode", DECODE, lse=True),
    Case("page 1", "decode", DECODE, page_size=1),
    Case("page 64", "decode", DECODE, page_size=64),
    Case("32/8 heads, 64 rows", "decode", tuple((1, 1 + 37 * row) for row in range(64)), heads=(32, 8), page_size=64),
    Case("window", "decode", DECODE, window=WINDOW),
    Case("softcap", "decode", DECODE, softcap=30.0),
    Case("sinks", "decode", DECODE, sinks=True),
    Case("window and sinks", "decode", DECODE, window=WINDOW, sinks=True),
    Case("fp16", "decode", DECODE, dtype="fp16"),
    Case("CUDA graph", "decode", SHORT, graph=True),
    Case("chain", "verify", CHAIN, lse=True),
    Case("chain, page 64", "verify", CHAIN, page_size=64),
    Case("ragged chain", "verify", EXTEND),
    Case("qlen tree", "verify", CHAIN, tree="qlen"),
    Case("full tree", "verify", CHAIN, tree="full"),
    Case("packed tree", "verify", CHAIN, tree="packed"),
    Case("chain in a window", "verify", CHAIN, window=WINDOW),
    Case("CUDA graph", "verify", SHORT_CHAIN, graph=True),
    Case("tree in a CUDA graph", "verify", SHORT_CHAIN, tree="qlen", graph=True),
    Case("window and tree", "verify", CHAIN, tree="qlen", window=WINDOW),
    Case("steps", "draft_decode", DECODE),
    Case("ragged", "draft_extend", EXTEND),
    Case("page 64", "draft_extend", EXTEND, page_size=64),
)
MLA = (
    Case("ragged", "prefill", PREFILL, "mla", (64, 1), page_size=64, lse=True),
    Case("128 heads", "prefill", ((300, 300), (64, 512)), "mla", (128, 1), page_size=64),
    Case("page 1", "prefill", PREFILL, "mla", (16, 1), page_size=1),
    Case("ragged", "decode", DECODE, "mla", (64, 1), page_size=64, lse=True),
    Case("128 heads", "decode", tuple((1, 1 + 53 * row) for row in range(40)), "mla", (128, 1), page_size=64),
    Case("page 1", "decode", DECODE, "mla", (16, 1), page_size=1),
    Case("page 16", "decode", DECODE, "mla", (16, 1), page_size=16),
    Case(
        "CUDA graph", "decode", tuple((1, 20 + 31 * row) for row in range(8)), "mla", (64, 1), page_size=64, graph=True
    ),
    Case("chain", "verify", CHAIN, "mla", (64, 1), page_size=64),
    Case("ragged", "draft_extend", EXTEND, "mla", (64, 1), page_size=64),
    Case("steps", "draft_decode", DECODE, "mla", (64, 1), page_size=64),
)
CASES = MHA + MLA
