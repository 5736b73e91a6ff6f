"""The work `bench/sparse_checks.py` holds against the reference: sparse latent attention, its indexer, dense steps.

A case is data. Rows are of unlike lengths, with empty ones among them; slots nobody may read hold NaN, and choices of
keys hold -1, keys past the row and keys ahead of their token.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from backstamp.attention import LayerSpec
from backstamp.declarations import Phase
from backstamp.model import LayerFacts, LayerGroup, ModelFacts

__all__ = ["CASES", "WINDOW", "SparseCase"]

#: DeepSeek V4's window, in keys before self.
WINDOW = 127
#: The kernel's own name of each packed cache, by what an operator asks.
PACKED = {"dsa": "fp8_ds_mla", "dsv4": "fp8_dsv4"}


class SparseCase(NamedTuple):
    """One step of one kernel: `rows` are (query tokens, KV tokens with them).

    `inside` asks for an implementation of dsa's halves; `rate` is how many tokens a compressed entry of dsv4 stands
    for, 0 in a layer without; `work` "index" runs the indexer and top-k before attention over what they chose.
    """

    kernel: str
    name: str
    phase: Phase
    rows: tuple[tuple[int, int], ...]
    heads: int = 128
    topk: int = 2048
    page_size: int = 64
    index_form: Literal["page_table", "csr", "indirect"] = "page_table"
    packed: bool = False
    inside: str = ""
    dtype: str = "bf16"
    rate: int = 0
    sinks: bool = False
    causal: bool = True
    lse: bool = False
    graph: bool = False
    work: Literal["attend", "index"] = "attend"

    @property
    def family(self) -> str:
        """The attention family of the layer."""
        return {"dsa": "sparse_mla", "dsv4": "csa", "flashmla": "mla"}[self.kernel]

    @property
    def layout(self) -> str:
        """The cache's layout."""
        return PACKED[self.kernel] if self.packed else "rows"

    def layer(self, sinks: object = None) -> LayerSpec:
        """The layer as a kernel sees it."""
        compressed = self.kernel == "dsv4"
        return LayerSpec(
            layer_id=0,
            num_qo_heads=self.heads,
            num_kv_heads=1,
            head_dim=512 if compressed else 576,
            v_head_dim=512,
            scale=512**-0.5 if compressed else 192**-0.5,
            window_left=WINDOW if compressed else -1,
            sinks=sinks,  # type: ignore[arg-type]
        )

    def model(self) -> ModelFacts:
        """The layer as the resolver sees it: a model of one."""
        layer, compressed = self.layer(), self.kernel == "dsv4"
        sparse = self.kernel == "dsa" or self.rate == 4
        facts = LayerFacts(
            family=self.family,  # type: ignore[arg-type]
            num_qo_heads=self.heads,
            num_kv_heads=1,
            head_dim=layer.head_dim,
            v_head_dim=layer.v_head_dim,
            window_left=layer.window_left,
            sinks="fp32" if self.sinks else None,
            causal=self.causal,
            index_topk=self.topk if sparse else 0,
            index_heads=64 if sparse else 0,
            index_head_dim=128 if sparse else 0,
            compress_rate=self.rate,
            kv_lora_rank=0 if compressed else 512,
            qk_rope_head_dim=0 if compressed else 64,
            ragged_dims=None if compressed else (192, 128),
        )
        groups = (LayerGroup("main", facts, (0,)),)
        return ModelFacts(name="check", architecture="", dtype=self.dtype, layers=((facts,),), groups=groups)


PREFILL = ((65, 65), (1, 40), (0, 17), (130, 3000), (33, 97))
DECODE = ((1, 1), (1, 17), (0, 0), (1, 3000), (1, 64), (1, 4000))
CHAIN = ((4, 4), (4, 40), (4, 3000), (4, 129))
EXTEND = ((1, 20), (3, 3), (0, 9), (4, 300))
EVEN = tuple((1, 20 + 310 * row) for row in range(8))

DSA = (
    SparseCase("dsa", "ragged", "prefill", PREFILL, lse=True),
    SparseCase("dsa", "64 heads, page 1, csr", "prefill", PREFILL, heads=64, page_size=1, index_form="csr"),
    SparseCase("dsa", "16 heads, page 16, top 300", "prefill", PREFILL, heads=16, page_size=16, topk=300),
    SparseCase("dsa", "long", "prefill", ((200, 4096), (150, 150))),
    SparseCase("dsa", "indexer", "prefill", PREFILL, work="index", topk=512),
    SparseCase("dsa", "packed", "prefill", PREFILL, packed=True, lse=True),
    SparseCase("dsa", "Triton", "prefill", PREFILL, inside="triton", lse=True),
    SparseCase("dsa", "Triton, 16 heads, page 1", "prefill", PREFILL, inside="triton", heads=16, page_size=1),
    SparseCase("dsa", "ragged", "decode", DECODE, lse=True),
    SparseCase("dsa", "16 heads, page 1, indirect", "decode", DECODE, heads=16, page_size=1, index_form="indirect"),
    SparseCase("dsa", "64 rows", "decode", tuple((1, 1 + 61 * row) for row in range(64)), heads=64),
    SparseCase("dsa", "indexer", "decode", DECODE, work="index", topk=512),
    SparseCase("dsa", "packed", "decode", DECODE, packed=True, lse=True),
    SparseCase("dsa", "packed, 16 heads", "decode", DECODE, packed=True, heads=16),
    SparseCase("dsa", "Triton", "decode", DECODE, inside="triton", lse=True),
    SparseCase("dsa", "Triton, one row", "decode", ((1, 4000),), inside="triton"),
    SparseCase("dsa", "CUDA graph", "decode", EVEN, graph=True),
    SparseCase("dsa", "packed, CUDA graph", "decode", EVEN, packed=True, graph=True),
    SparseCase("dsa", "Triton, CUDA graph", "decode", EVEN, inside="triton", graph=True),
    SparseCase("dsa", "chain", "verify", CHAIN),
    SparseCase("dsa", "packed, chain", "verify", CHAIN, packed=True),
    SparseCase("dsa", "ragged", "draft_extend", EXTEND),
    SparseCase("dsa", "steps", "draft_decode", DECODE),
)
DSV4 = (
    SparseCase("dsv4", "window alone, sinks", "prefill", PREFILL, page_size=256, sinks=True, heads=64),
    SparseCase("dsv4", "1/4, chosen", "prefill", PREFILL, page_size=256, rate=4, topk=512, sinks=True),
    SparseCase("dsv4", "1/128, all", "prefill", PREFILL, page_size=256, rate=128),
    SparseCase("dsv4", "packed, 1/4", "prefill", PREFILL, page_size=256, rate=4, topk=512, packed=True, sinks=True),
    SparseCase("dsv4", "1/4, chosen", "decode", DECODE, page_size=256, rate=4, topk=512, sinks=True, heads=64),
    SparseCase("dsv4", "packed, 1/4", "decode", DECODE, page_size=256, rate=4, topk=512, packed=True, sinks=True),
    SparseCase("dsv4", "packed, 1/128", "decode", DECODE, page_size=256, rate=128, packed=True),
    SparseCase("dsv4", "packed, window alone", "decode", DECODE, page_size=256, packed=True, heads=64, sinks=True),
    SparseCase("dsv4", "packed, CUDA graph", "decode", EVEN, page_size=256, rate=4, topk=512, packed=True, graph=True),
    SparseCase("dsv4", "chain", "verify", CHAIN, page_size=256, rate=4, topk=512, sinks=True),
)
# what the cases of `check_cases.py` leave out of the dense kernel
FLASHMLA = (
    SparseCase("flashmla", "fp16, ragged", "prefill", PREFILL, heads=16, dtype="fp16", lse=True),
    SparseCase("flashmla", "non-causal", "prefill", PREFILL, heads=16, causal=False),
    SparseCase("flashmla", "long rows", "decode", DECODE, lse=True),
    SparseCase("flashmla", "16 heads, 64 rows", "decode", tuple((1, 1 + 61 * row) for row in range(64)), heads=16),
    SparseCase("flashmla", "long chain", "verify", CHAIN, heads=64),
    SparseCase("flashmla", "long CUDA graph", "decode", EVEN, graph=True),
)
CASES = DSA + DSV4 + FLASHMLA
