"""The work `bench/kernels.py --check` holds against float64: what a step looks like, and what its layer needs.

Cases are those of the conformance kit, with fixed numbers; `checks.py` resolves, builds and runs them. Head dim 128
with four query heads a key head, as the models that are served have it; every case has rows of unlike lengths, an empty
row, and NaN in every slot nobody may read.
"""

from __future__ import annotations

from typing import Any

from backstamp.declarations import Phase
from backstamp.testing.conformance.cases import AttentionCase

__all__ = ["CASES"]

_Rows = tuple[tuple[int, int], ...]


def _mha(name: str, phase: Phase, rows: _Rows, **more: Any) -> AttentionCase:
    known = {"heads": (8, 2), "dims": (128, 128), "dtype": "bf16"}
    return AttentionCase(name=name, phase=phase, rows=rows, **known | more)


def _mla(name: str, phase: Phase, rows: _Rows, heads: int = 64, page_size: int = 64, **more: Any) -> AttentionCase:
    known = {"family": "mla", "heads": (heads, 1), "dims": (576, 512), "page_size": page_size, "dtype": "bf16"}
    return AttentionCase(name=name, phase=phase, rows=rows, cache_form="latent", **known | more)


PREFILL = ((65, 65), (1, 40), (0, 17), (130, 300), (33, 97))
DECODE = ((1, 1), (1, 17), (0, 0), (1, 300), (1, 64), (1, 1000))
CHAIN = ((4, 4), (4, 40), (4, 300), (4, 129))
SHORT = tuple((1, 20 + 31 * row) for row in range(8))
SHORT_CHAIN = tuple((4, 24 + 31 * row) for row in range(8))
EXTEND = ((1, 20), (3, 3), (0, 9), (4, 300))
#: More rows than two warps have threads, none to four tiles of queries in each.
MANY = tuple((37 * row % 110, 37 * row % 110 + 11 * row % 90) for row in range(70))
#: Drafts of one tile a key head, whose keys several programs share.
LONG_CHAIN = tuple((32, 40 + 531 * row) for row in range(8))
#: One window whose size a kernel may compile in.
WINDOW = 127

MHA = (
    _mha("ragged", "prefill", PREFILL, lse=True),
    _mha("page 1", "prefill", PREFILL, page_size=1),
    _mha("page 64", "prefill", PREFILL, page_size=64),
    _mha("32/8 heads, long", "prefill", ((512, 2048), (700, 700)), heads=(32, 8), page_size=64),
    _mha("70 rows", "prefill", MANY, page_size=64, lse=True),
    _mha("padding", "prefill", PREFILL, page_size=64, pad_tokens=200),
    _mha("window", "prefill", PREFILL, window=WINDOW),
    _mha("softcap", "prefill", PREFILL, softcap=30.0),
    _mha("sinks", "prefill", PREFILL, sinks="fp32"),
    _mha("window and sinks", "prefill", PREFILL, window=WINDOW, sinks="fp32"),
    _mha("non-causal", "prefill", PREFILL, causal=False),
    _mha("no cache", "prefill", ((65, 65), (1, 1), (130, 130)), new="all", lse=True),
    _mha("no cache, 32/8 heads", "prefill", ((700, 700), (1, 1), (333, 333)), heads=(32, 8), new="all"),
    _mha("no cache in a window", "prefill", ((65, 65), (300, 300)), window=WINDOW, new="all"),
    _mha("no cache, non-causal", "prefill", ((65, 65), (1, 1), (130, 130)), causal=False, new="all"),
    _mha("no cache, sinks", "prefill", ((65, 65), (1, 1), (130, 130)), sinks="fp32", new="all"),
    _mha("no cache, softcap", "prefill", ((65, 65), (1, 1), (130, 130)), softcap=30.0, new="all"),
    _mha("new beside a prefix", "prefill", PREFILL, new="beside"),
    _mha("fp16", "prefill", PREFILL, dtype="fp16"),
    _mha("ragged", "decode", DECODE, lse=True),
    _mha("page 1", "decode", DECODE, page_size=1),
    _mha("page 64", "decode", DECODE, page_size=64),
    _mha("32/8 heads, 64 rows", "decode", tuple((1, 1 + 37 * row) for row in range(64)), heads=(32, 8), page_size=64),
    _mha("window", "decode", DECODE, window=WINDOW),
    _mha("softcap", "decode", DECODE, softcap=30.0),
    _mha("sinks", "decode", DECODE, sinks="fp32"),
    _mha("window and sinks", "decode", DECODE, window=WINDOW, sinks="fp32"),
    _mha("fp16", "decode", DECODE, dtype="fp16"),
    _mha("CUDA graph", "decode", SHORT, graph=True),
    _mha("chain", "verify", CHAIN, lse=True),
    _mha("chain, page 64", "verify", CHAIN, page_size=64),
    _mha("chain of 32", "verify", LONG_CHAIN, page_size=64, lse=True),
    _mha("ragged chain", "verify", EXTEND),
    _mha("qlen tree", "verify", CHAIN, tree="qlen"),
    _mha("full tree", "verify", CHAIN, tree="full"),
    _mha("packed tree", "verify", CHAIN, tree="packed"),
    _mha("chain in a window", "verify", CHAIN, window=WINDOW),
    _mha("CUDA graph", "verify", SHORT_CHAIN, graph=True),
    _mha("chain of 32 in a CUDA graph", "verify", LONG_CHAIN, page_size=64, graph=True),
    _mha("tree in a CUDA graph", "verify", SHORT_CHAIN, tree="qlen", graph=True),
    _mha("window and tree", "verify", CHAIN, tree="qlen", window=WINDOW),
    _mha("steps", "draft_decode", DECODE),
    _mha("ragged", "draft_extend", EXTEND),
    _mha("page 64", "draft_extend", EXTEND, page_size=64),
)
MLA = (
    _mla("ragged", "prefill", PREFILL, lse=True),
    _mla("128 heads", "prefill", ((300, 300), (64, 512)), heads=128),
    _mla("page 1", "prefill", PREFILL, heads=16, page_size=1),
    _mla("ragged", "decode", DECODE, lse=True),
    _mla("128 heads", "decode", tuple((1, 1 + 53 * row) for row in range(40)), heads=128),
    _mla("page 1", "decode", DECODE, heads=16, page_size=1),
    _mla("page 16", "decode", DECODE, heads=16, page_size=16),
    _mla("CUDA graph", "decode", tuple((1, 20 + 31 * row) for row in range(8)), graph=True),
    _mla("chain", "verify", CHAIN),
    _mla("ragged", "draft_extend", EXTEND),
    _mla("steps", "draft_decode", DECODE),
)
CASES = MHA + MLA
