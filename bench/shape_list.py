"""The shapes `bench/kernels.py` measures, the most asked-about of each work first; and tiny ones for any machine.

Source of the first ones: figures of the fastest kernels on one H200 (docs/performance.md): 32/8 heads of 128, absorbed
MLA with 128 heads, gated delta net with 16/32 heads, Kimi delta attention with 32.
"""

from __future__ import annotations

from typing import Final

from shapes import Shape, Work

__all__ = ["SHAPES", "TINY"]

_K: Final = 1024
#: Most KV tokens of a decode step here: 32 GiB of cache.
_MOST_TOKENS: Final = 8 << 20


def _alike(work: Work, rows: int, q_len: int, kv_len: int, page_size: int, **more: object) -> Shape:
    return Shape(work, ((q_len, kv_len),) * rows, page_size, **more)  # type: ignore[arg-type]


def _prompts(rows: int, q_len: int, page_size: int) -> Shape:
    return _alike("prefill", rows, q_len, q_len, page_size)


_PROMPTS: Final = tuple((length, length) for length in (8192, 17, 4096, 33, 2049, 128, 1024, 700))
PREFILL: Final = (
    *(_prompts(2, 8 * _K, page) for page in (0, 16, 64, 128)),
    *(_prompts(1, length * _K, page) for length in (2, 8, 32) for page in (0, 64)),
    *(Shape("prefill", _PROMPTS, page, name="mix of 17 to 8192") for page in (0, 16, 64)),
    *(_prompts(1, length, page) for length in (512, 64 * _K) for page in (0, 64)),
)
#: One chunk of a prompt beside rows that decode.
_CHUNK: Final = ((1, 4 * _K),) * 31 + ((2 * _K, 8 * _K),)
EXTEND: Final = (
    _alike("extend", 8, 512, 8 * _K, 16),
    _alike("extend", 8, 512, 8 * _K, 64),
    _alike("extend", 1, 2 * _K, 32 * _K, 64),
    _alike("extend", 1, 512, 128 * _K, 64),
    Shape("extend", _CHUNK, 64, name="2048 of 8192 beside 31 of 1"),
)


def _decode(rows: int, kv_len: int, page_size: int = 16, **more: object) -> Shape:
    return _alike("decode", rows, 1, kv_len, page_size, **more)


_ANCHORS: Final = (
    *(_decode(64, 8 * _K, page) for page in (16, 64)),
    _decode(8, 32 * _K),
    _decode(128, _K),
    _decode(1, 8 * _K),
    _decode(1, 128 * _K),
)
_GRID: Final = tuple(
    _decode(rows, kv_len)
    for kv_len in (_K, 8 * _K, 128 * _K)
    for rows in (1, 8, 64, 256)
    if rows * kv_len <= _MOST_TOKENS
)
DECODE: Final = (
    *dict.fromkeys((*_ANCHORS, *_GRID)),
    _decode(1, 128 * _K, 64),
    _decode(64, 8 * _K, 64, kv_dtype="e4m3fn"),
)
_DRAFTS: Final = ((32, 4), (32, 8), (8, 16), (8, 32), (8, 64))
VERIFY: Final = (
    *(_alike("verify", rows, tokens, 8 * _K, 64) for rows, tokens in _DRAFTS),
    *(_alike("verify", rows, tokens, 8 * _K, 64, tree=True) for rows, tokens in _DRAFTS),
    _alike("verify", 32, 4, 8 * _K, 16),
)


def _latent(work: Work, rows: int, q_len: int, kv_len: int, heads: int = 128, **more: object) -> Shape:
    return _alike(work, rows, q_len, kv_len, 64, heads=(heads, 1), dims=(576, 512), **more)


MLA: Final = (
    _latent("mla_prefill", 1, 4 * _K, 4 * _K),
    _latent("mla_prefill", 1, _K, 32 * _K),
    _latent("mla_prefill", 8, 512, 4 * _K),
    _latent("mla_decode", 128, 1, 8 * _K),
    _latent("mla_decode", 1, 1, 8 * _K),
    _latent("mla_decode", 1, 1, 128 * _K),
    _latent("mla_decode", 8, 1, 32 * _K),
    _latent("mla_decode", 64, 1, 8 * _K),
    _latent("mla_decode", 128, 1, 8 * _K, heads=16),
)
SPARSE: Final = (
    _latent("sparse_mla_prefill", 1, 4 * _K, 32 * _K, topk=2 * _K),
    _latent("sparse_mla_prefill", 8, 256, 8 * _K, topk=2 * _K),
    _latent("sparse_mla_prefill", 1, _K, 32 * _K, topk=2 * _K, kv_dtype="fp8_ds_mla"),
    _latent("sparse_mla_decode", 128, 1, 8 * _K, topk=2 * _K),
    _latent("sparse_mla_decode", 32, 1, 32 * _K, topk=2 * _K),
    _latent("sparse_mla_decode", 1, 1, 32 * _K, topk=2 * _K),
    _latent("sparse_mla_decode", 128, 1, 8 * _K, topk=2 * _K, kv_dtype="fp8_ds_mla"),
)


def _states(work: Work, rows: int, tokens: int, heads: tuple[int, int]) -> Shape:
    return _alike(work, rows, tokens, tokens, 0, heads=heads)


GDN: Final = (16, 32)
KDA: Final = (32, 32)
LINEAR: Final = (
    _states("gdn_prefill", 4, 8 * _K, GDN),
    _states("gdn_prefill", 1, 32 * _K, GDN),
    Shape("gdn_prefill", _PROMPTS, heads=GDN, name="mix of 17 to 8192"),
    *(_states("gdn_decode", rows, 1, GDN) for rows in (128, 1, 32, 512)),
    _states("kda_prefill", 1, 32 * _K, KDA),
    _states("kda_prefill", 4, 8 * _K, KDA),
    *(_states("kda_prefill", *of, KDA)._replace(lower_bound=-5.0) for of in ((1, 32 * _K), (4, 8 * _K))),
    Shape("kda_prefill", _PROMPTS, heads=KDA, name="mix of 17 to 8192", lower_bound=-5.0),
    *(_states("kda_decode", rows, 1, KDA) for rows in (128, 1, 32, 512)),
)
SHAPES: Final = (*PREFILL, *EXTEND, *DECODE, *VERIFY, *MLA, *SPARSE, *LINEAR)

_SMALL: Final[dict[str, object]] = {"heads": (4, 2), "dims": (16, 16)}
_SPARSE: Final[dict[str, object]] = {"heads": (2, 1), "dims": (576, 512), "topk": 16}
#: One of each work and form, for a machine without a GPU: the whole way of a measurement, and no figures.
TINY: Final = (
    _alike("prefill", 2, 48, 48, 16, **_SMALL),
    Shape("prefill", ((5, 5), (33, 33)), name="mix of 5 to 33", heads=(4, 2), dims=(16, 16)),
    _alike("extend", 2, 8, 40, 16, **_SMALL),
    _alike("decode", 4, 1, 40, 16, **_SMALL),
    _alike("decode", 2, 1, 32, 16, kv_dtype="e4m3fn", **_SMALL),
    _alike("verify", 2, 4, 40, 16, **_SMALL),
    _alike("verify", 2, 4, 40, 16, tree=True, **_SMALL),
    _alike("mla_prefill", 1, 8, 32, 16, heads=(4, 1), dims=(576, 512)),
    _alike("mla_decode", 2, 1, 40, 16, heads=(4, 1), dims=(576, 512)),
    _alike("sparse_mla_prefill", 1, 4, 64, 64, **_SPARSE),
    _alike("sparse_mla_decode", 2, 1, 64, 64, **_SPARSE),
    _alike("gdn_prefill", 2, 24, 24, 0, heads=(2, 4), dims=(16, 16)),
    _alike("gdn_decode", 3, 1, 1, 0, heads=(2, 4), dims=(16, 16)),
    _alike("kda_prefill", 2, 24, 24, 0, heads=(4, 4), dims=(16, 16)),
    _alike("kda_decode", 3, 1, 1, 0, heads=(4, 4), dims=(16, 16)),
)
