"""The work `bench/sparse_checks.py` holds against the reference: sparse latent attention, its indexer, dense steps.

Cases are those of the conformance kit, with fixed numbers. Rows are of unlike lengths, with empty ones among them;
slots nobody may read hold NaN, and choices of keys hold -1, keys past the row and keys ahead of their token.
"""

from __future__ import annotations

from typing import Any

from backstamp.declarations import Phase
from backstamp.testing.conformance.cases import AttentionCase
from backstamp.testing.conformance.sparse_cases import SparseCase

__all__ = ["CASES", "KERNELS", "WINDOW"]

#: The kernel that serves the cases of a family.
KERNELS = {"sparse_mla": "dsa", "csa": "dsv4", "mla": "flashmla"}
#: DeepSeek V4's window, in keys before self.
WINDOW = 127
#: Both halves of dsa by our own kernels.
TRITON = (("dsa_decode_backend", "triton"), ("dsa_prefill_backend", "triton"))
_Rows = tuple[tuple[int, int], ...]


def _dsa(name: str, phase: Phase, rows: _Rows, heads: int = 128, packed: bool = False, **more: Any) -> SparseCase:
    known: dict[str, Any] = {"topk": 2048, "page_size": 64, "dtype": "bf16", "choices": "mixed", "dims": (576, 512)}
    known |= {"layout": "fp8_ds_mla", "kv_dtype": "fp8_ds_mla"} if packed else {}
    return SparseCase(
        name=name, phase=phase, rows=rows, family="sparse_mla", heads=(heads, 1), cache_form="latent", **known | more
    )


def _dsv4(name: str, phase: Phase, rows: _Rows, heads: int = 128, packed: bool = False, **more: Any) -> SparseCase:
    """`topk` where the layer chooses among its compressed entries."""
    known: dict[str, Any] = {"topk": 0, "page_size": 256, "dtype": "bf16", "choices": "mixed", "dims": (512, 512)}
    known |= {"layout": "fp8_dsv4", "kv_dtype": "fp8_dsv4"} if packed else {}
    return SparseCase(
        name=name,
        phase=phase,
        rows=rows,
        family="csa",
        heads=(heads, 1),
        window=WINDOW,
        cache_form="latent",
        **known | more,
    )


def _flashmla(name: str, phase: Phase, rows: _Rows, heads: int = 128, **more: Any) -> AttentionCase:
    known = {"page_size": 64, "dtype": "bf16", "dims": (576, 512)}
    return AttentionCase(
        name=name, phase=phase, rows=rows, family="mla", heads=(heads, 1), cache_form="latent", **known | more
    )


PREFILL = ((65, 65), (1, 40), (0, 17), (130, 3000), (33, 97))
DECODE = ((1, 1), (1, 17), (0, 0), (1, 3000), (1, 64), (1, 4000))
CHAIN = ((4, 4), (4, 40), (4, 3000), (4, 129))
EXTEND = ((1, 20), (3, 3), (0, 9), (4, 300))
EVEN = tuple((1, 20 + 310 * row) for row in range(8))

DSA = (
    _dsa("ragged", "prefill", PREFILL, lse=True),
    _dsa("64 heads, page 1, csr", "prefill", PREFILL, heads=64, page_size=1, index_form="csr"),
    _dsa("16 heads, page 16, top 300", "prefill", PREFILL, heads=16, page_size=16, topk=300),
    _dsa("long", "prefill", ((200, 4096), (150, 150))),
    _dsa("indexer", "prefill", PREFILL, indexer=True, topk=512),
    _dsa("packed", "prefill", PREFILL, packed=True, lse=True),
    _dsa("Triton", "prefill", PREFILL, asks=TRITON, lse=True),
    _dsa("Triton, 16 heads, page 1", "prefill", PREFILL, asks=TRITON, heads=16, page_size=1),
    _dsa("ragged", "decode", DECODE, lse=True),
    _dsa("16 heads, page 1, indirect", "decode", DECODE, heads=16, page_size=1, index_form="indirect"),
    _dsa("64 rows", "decode", tuple((1, 1 + 61 * row) for row in range(64)), heads=64),
    _dsa("indexer", "decode", DECODE, indexer=True, topk=512),
    _dsa("packed", "decode", DECODE, packed=True, lse=True),
    _dsa("packed, 16 heads", "decode", DECODE, packed=True, heads=16),
    _dsa("Triton", "decode", DECODE, asks=TRITON, lse=True),
    _dsa("Triton, one row", "decode", ((1, 4000),), asks=TRITON),
    _dsa("CUDA graph", "decode", EVEN, graph=True),
    _dsa("packed, CUDA graph", "decode", EVEN, packed=True, graph=True),
    _dsa("Triton, CUDA graph", "decode", EVEN, asks=TRITON, graph=True),
    _dsa("chain", "verify", CHAIN),
    _dsa("packed, chain", "verify", CHAIN, packed=True),
    _dsa("ragged", "draft_extend", EXTEND),
    _dsa("steps", "draft_decode", DECODE),
)
DSV4 = (
    _dsv4("window alone, sinks", "prefill", PREFILL, sinks="fp32", heads=64),
    _dsv4("1/4, chosen", "prefill", PREFILL, rate=4, topk=512, sinks="fp32"),
    _dsv4("1/128, all", "prefill", PREFILL, rate=128),
    _dsv4("packed, 1/4", "prefill", PREFILL, rate=4, topk=512, packed=True, sinks="fp32"),
    _dsv4("1/4, chosen", "decode", DECODE, rate=4, topk=512, sinks="fp32", heads=64),
    _dsv4("packed, 1/4", "decode", DECODE, rate=4, topk=512, packed=True, sinks="fp32"),
    _dsv4("packed, 1/128", "decode", DECODE, rate=128, packed=True),
    _dsv4("packed, window alone", "decode", DECODE, packed=True, heads=64, sinks="fp32"),
    _dsv4("packed, CUDA graph", "decode", EVEN, rate=4, topk=512, packed=True, graph=True),
    _dsv4("chain", "verify", CHAIN, rate=4, topk=512, sinks="fp32"),
)
# what the cases of `check_cases.py` leave out of the dense kernel
FLASHMLA = (
    _flashmla("fp16, ragged", "prefill", PREFILL, heads=16, dtype="fp16", lse=True),
    _flashmla("non-causal", "prefill", PREFILL, heads=16, causal=False),
    _flashmla("long rows", "decode", DECODE, lse=True),
    _flashmla("16 heads, 64 rows", "decode", tuple((1, 1 + 61 * row) for row in range(64)), heads=16),
    _flashmla("long chain", "verify", CHAIN, heads=64),
    _flashmla("long CUDA graph", "decode", EVEN, graph=True),
)
CASES = DSA + DSV4 + FLASHMLA
