"""The tensors around a FlashMLA call: queries in the head counts it is built for, caches as flat rows, answers back.

In: the contract's `q`, `q_rope`, `kv.k`, `out` and `lse`. Out: what the library takes, and its answer in the caller's
own tensors. Nothing here reads a value, and no answer of a token that saw nothing is taken over.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from backstamp.factories import BuildRequest
from backstamp.step_checks import refusal

__all__ = [
    "LIBRARY_HEADS",
    "check_aligned",
    "chunks_of",
    "flat_rows",
    "library_heads",
    "nothing_seen",
    "rows_per_page",
    "store_answer",
    "whole_query",
]

#: Query heads of the library's sparse kernels. Source: sgl-flash-mla 1.0.0, flash_mla_interface.py, the arguments of
#: `flash_mla_with_kvcache` and `flash_mla_sparse_fwd`.
LIBRARY_HEADS = (64, 128)
#: Tokens times heads of one launch: its f32 shares, 2 KiB a token and head, stay at 256 MiB.
TOKEN_HEADS_PER_LAUNCH = 128 * 1024


def library_heads(request: BuildRequest, num_qo_heads: int) -> int:
    """The head count a layer's queries are padded to.

    Raises:
        UnsupportedBatch: more heads than any of the library's kernels has.
    """
    for heads in LIBRARY_HEADS:
        if num_qo_heads <= heads:
            return heads
    raise refusal(request, "num_qo_heads", f"at most {LIBRARY_HEADS[-1]}", str(num_qo_heads))


def whole_query(q: Tensor, q_rope: Tensor | None, heads: int) -> Tensor:
    """`q` and its rotary part as one contiguous `[T, heads, Dk]`, zeros in the heads that are padding."""
    parts = (q,) if q_rope is None else (q, q_rope)
    if len(parts) == 1 and q.shape[1] == heads:
        return q.contiguous()
    width = sum(part.shape[-1] for part in parts)
    whole = q.new_zeros(q.shape[0], heads, width)
    at = 0
    for part in parts:
        whole[:, : q.shape[1], at : at + part.shape[-1]] = part
        at += part.shape[-1]
    return whole


def rows_per_page(request: BuildRequest, field: str, cache: Tensor) -> int:
    """How many rows lie between the starts of two pages of a cache `[P, page_size, 1, D]`.

    Raises:
        UnsupportedBatch: tokens or pages whose distance is no whole number of rows.
    """
    (pages, page_size, _, width), (page, row, _, last) = cache.shape, cache.stride()
    between = page if pages > 1 else page_size * row
    if last != 1 or row < width or between % row:
        found = f"strides {list(cache.stride())}"
        raise refusal(request, field, "pages a whole number of token rows apart, a last stride of 1", found)
    return between // row


def flat_rows(request: BuildRequest, field: str, cache: Tensor) -> tuple[Tensor, int]:
    """A cache `[P, page_size, 1, D]` as rows `[N, 1, D]`, and how many rows lie between the starts of two pages.

    Raises:
        UnsupportedBatch: tokens or pages whose distance is no whole number of rows.
    """
    between = rows_per_page(request, field, cache)
    pages, page_size, _, width = cache.shape
    row = cache.stride(1)
    rows = (max(pages, 1) - 1) * between + page_size
    return cache.as_strided((rows, 1, width), (row, row, 1)), between


def check_aligned(request: BuildRequest, field: str, cache: Tensor, page_bytes: int = 16) -> None:
    """Hold a cache to 16-byte loads: rows and the first of them, and pages a multiple of `page_bytes` apart.

    Raises:
        UnsupportedBatch: an address the library would fault on.
    """
    size = cache.element_size()
    page, row = (stride * size for stride in cache.stride()[:2])
    # within a page of packed tokens the format says what lies where
    odd_row = size > 1 and row % 16
    if odd_row or cache.data_ptr() % 16 or (cache.shape[0] > 1 and page % page_bytes):
        needed = f"an address a multiple of 16 bytes, pages a multiple of {page_bytes} bytes apart"
        found = f"{cache.data_ptr() % 16} bytes past one, rows of {row} bytes, pages {page} bytes apart"
        raise refusal(request, field, needed, found)


def chunks_of(num_tokens: int, heads: int) -> Iterator[slice]:
    """Runs of tokens of one launch each."""
    step = max(1, TOKEN_HEADS_PER_LAUNCH // heads)
    for start in range(0, num_tokens, step):
        yield slice(start, min(start + step, num_tokens))


def nothing_seen(out: Tensor, lse: Tensor | None) -> Tensor:
    """Answer a step without rows: its tokens, if any, are padding and see nothing."""
    if lse is not None:
        lse.fill_(float("-inf"))
    return out.zero_()


def store_answer(
    found: Tensor, found_lse: Tensor | None, seen: Tensor, zero: Tensor, out: Tensor, lse: Tensor | None
) -> None:
    """Take over `[T, H, Dv]` and `[T, H]` of the real heads; zeros and -inf for tokens that saw nothing."""
    heads = out.shape[1]
    found = found if found.shape[1] == heads else found[:, :heads]
    torch.where(seen.view(-1, 1, 1), found, zero, out=out)
    if lse is not None and found_lse is not None:
        lse.copy_(found_lse[:, :heads].masked_fill(~seen[:, None], float("-inf")))
