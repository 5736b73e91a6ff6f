"""Random steps for tests: a paged pool with scattered pages, a `Batch` over it, and queries, from two lists of lengths.

In: query and KV lengths a row, and what shape the step has. Out: a `MadeStep` for `reference_attention` and for any
backend. Every cache slot that no row may read holds NaN, so a kernel that reads one shows it; unused index entries
are -1 or name such pages. The same arguments give the same numbers on every device.

.. versionadded:: 0.1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from backstamp.attention import Batch, KVIndex, LayerSpec, PagedKV, RaggedKV, TreeMask
from backstamp.declarations import Phase

__all__ = ["SMALL_LAYER", "CacheForm", "IndexForm", "MadeStep", "TreeKind", "make_batch", "make_tree", "split_new"]

IndexForm: TypeAlias = Literal["page_table", "csr", "indirect"]
#: Strides of the cache: tokens first, heads first, K and V of a token in one row, every layer's share of a page side by
#: side, K and V each in an order of its own, or V inside K (MLA).
CacheForm: TypeAlias = Literal["nhd", "hnd", "interleaved", "layers", "unlike", "latent"]
TreeKind: TypeAlias = Literal["full", "qlen", "packed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeStep:
    """One step: `q [T, Hq, Dk]`, the batch, the cache, the layer, and each row's page ids in order."""

    q: Tensor
    batch: Batch
    kv: PagedKV
    layer: LayerSpec
    pages: tuple[tuple[int, ...], ...]


#: A small grouped-query layer; tests change it with `dataclasses.replace`.
SMALL_LAYER = LayerSpec(layer_id=0, num_qo_heads=4, num_kv_heads=2, head_dim=32, v_head_dim=32, scale=32**-0.5)


def make_batch(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    layer: LayerSpec = SMALL_LAYER,
    phase: Phase = "prefill",
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    index_form: IndexForm = "page_table",
    cache_form: CacheForm = "nhd",
    causal: bool | Sequence[bool] = True,
    kv_starts: Sequence[int] | None = None,
    tree: TreeMask | None = None,
    pad_tokens: int = 0,
    host_lens: bool = True,
    device: str = "cpu",
    seed: int = 0,
) -> MadeStep:
    """Build a step of `len(q_lens)` rows; `kv_lens` counts this step's tokens, as in `Batch`.

    `kv_starts` makes positions left of it NaN too. `pad_tokens` query tokens belong to no row. `kv_dtype` may be a
    float8 dtype; it defaults to `dtype`. With `host_lens` the batch carries exact host mirrors.
    """
    generator = torch.Generator().manual_seed(seed)
    starts = [0] * len(kv_lens) if kv_starts is None else list(kv_starts)
    counts = [-(-length // page_size) for length in kv_lens]
    # twice the pages that are used, in random order: neighbours in a row are no neighbours in the pool
    num_pages = 2 * sum(counts) + 3
    order = torch.randperm(num_pages, generator=generator).tolist()
    pages = [tuple(order[sum(counts[:row]) : sum(counts[: row + 1])]) for row in range(len(counts))]
    kv = _cache(num_pages, page_size, layer, cache_form, dtype if kv_dtype is None else kv_dtype, device)
    for row, (start, length) in enumerate(zip(starts, kv_lens, strict=True)):
        slots = _slots(pages[row], start, length, page_size)
        for cache in (kv.k, kv.v):
            if cache is not None:
                numbers = torch.randn(max(0, length - start), *cache.shape[2:], generator=generator)
                cache[slots] = numbers.to(device, cache.dtype)
    q = torch.randn(sum(q_lens) + pad_tokens, layer.num_qo_heads, layer.head_dim, generator=generator).to(dtype)
    qo_indptr, kv_lens_host = _indptr(q_lens), torch.tensor(kv_lens, dtype=torch.int32)
    batch = Batch(
        phase=phase,
        num_rows=len(q_lens),
        num_tokens=q.shape[0],
        max_q_len=max(q_lens, default=0),
        max_kv_len=max(kv_lens, default=0),
        qo_indptr=qo_indptr.to(device),
        kv_lens=kv_lens_host.to(device),
        index=_index(pages, order[-1], page_size, index_form, device, generator),
        causal=causal if isinstance(causal, bool) else torch.tensor(causal, dtype=torch.int32, device=device),
        kv_starts=None if kv_starts is None else torch.tensor(starts, dtype=torch.int32, device=device),
        qo_indptr_host=qo_indptr if host_lens else None,
        kv_lens_host=kv_lens_host if host_lens else None,
        tree=tree,
    )
    return MadeStep(q=q.to(device), batch=batch, kv=kv, layer=layer, pages=tuple(pages))


def make_tree(
    q_lens: Sequence[int], kv_lens: Sequence[int], kind: TreeKind, *, device: str = "cpu", seed: int = 0
) -> TreeMask:
    """A random tree a row: token i hangs below a random earlier token and sees its ancestors and itself.

    The same seed gives the same trees in every kind. The prefix columns of `full` and `packed` are random, because
    the contract makes the prefix visible whatever they say.
    """
    generator = torch.Generator().manual_seed(seed)
    size = max(q_lens, default=0)
    qlen = torch.zeros(len(q_lens), size, size, dtype=torch.bool)
    for row, q_len in enumerate(q_lens):
        for token in range(q_len):
            if token:
                parent = int(torch.randint(token, (1,), generator=generator))
                qlen[row, token] = qlen[row, parent]
            qlen[row, token, token] = True
    if kind == "qlen":
        return TreeMask(kind="qlen", buffer=qlen.to(device))
    rows = []
    for row, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        prefix = torch.rand(q_len, kv_len - q_len, generator=generator) > 0.5
        rows.append(torch.cat([prefix, qlen[row, :q_len, :q_len]], dim=1).flatten())
    if kind == "packed":
        # eight bits a byte, little-endian within it
        bits = [torch.nn.functional.pad(row.to(torch.uint8), (0, -row.numel() % 8)).view(-1, 8) for row in rows]
        rows = [(row << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8) for row in bits]
    indptr = _indptr([row.numel() for row in rows]).to(device)
    return TreeMask(kind=kind, buffer=torch.cat(rows).to(device), indptr=indptr)


def split_new(step: MadeStep) -> tuple[PagedKV, RaggedKV]:
    """The same step with this step's tokens taken out of the cache (NaN is left there) and handed over as `new`."""
    k, v = step.kv.k.clone(), None if step.kv.v is None else step.kv.v.clone()
    q_starts, kv_lens = step.batch.qo_indptr.tolist(), step.batch.kv_lens.tolist()
    keys, values = [k[:0, 0]], [(k[..., : step.layer.v_head_dim] if v is None else v)[:0, 0]]
    for row, kv_len in enumerate(kv_lens):
        prefix = max(0, kv_len - (q_starts[row + 1] - q_starts[row]))
        slots = _slots(step.pages[row], prefix, kv_len, k.shape[1])
        keys.append(k[slots])
        values.append(k[slots][..., : step.layer.v_head_dim] if v is None else v[slots])
        for cache in (k, v):
            if cache is not None:
                cache[slots] = float("nan")
    return replace(step.kv, k=k, v=v), RaggedKV(k=torch.cat(keys), v=torch.cat(values), kv_indptr=step.batch.qo_indptr)


def _slots(pages: Sequence[int], start: int, stop: int, page_size: int) -> tuple[Tensor, Tensor]:
    """Page and offset of one row's positions `start` to `stop`."""
    positions = torch.arange(start, max(start, stop))
    return torch.tensor(pages, dtype=torch.long)[positions // page_size], positions % page_size


def _indptr(lens: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def _cache(
    num_pages: int, page_size: int, layer: LayerSpec, form: CacheForm, dtype: torch.dtype, device: str
) -> PagedKV:
    """A pool of NaN in one of the physical orders engines use."""
    heads, dk, dv = layer.num_kv_heads, layer.head_dim, layer.v_head_dim

    def pool(*shape: int) -> Tensor:
        return torch.full(shape, float("nan"), device=device).to(dtype)

    if form == "latent":
        return PagedKV(k=pool(num_pages, page_size, heads, dk), v=None)
    if form == "hnd":
        k, v = pool(num_pages, heads, page_size, dk), pool(num_pages, heads, page_size, dv)
        return PagedKV(k=k.transpose(1, 2), v=v.transpose(1, 2))
    if form == "interleaved":
        both = pool(num_pages, page_size, heads, dk + dv)
        return PagedKV(k=both[..., :dk], v=both[..., dk:])
    if form == "unlike":
        v = pool(num_pages, heads, page_size, dv)
        return PagedKV(k=pool(num_pages, page_size, heads, dk), v=v.transpose(1, 2))
    if form == "layers":
        # vLLM's cross-layer order: this layer's keys and values are one slice of each page, others lie around it
        whole = pool(num_pages, 3, page_size, heads, dk + dv)
        return PagedKV(k=whole[:, 1, ..., :dk], v=whole[:, 1, ..., dk:])
    return PagedKV(k=pool(num_pages, page_size, heads, dk), v=pool(num_pages, page_size, heads, dv))


def _index(
    pages: Sequence[Sequence[int]], stale: int, page_size: int, form: IndexForm, device: str, generator: torch.Generator
) -> KVIndex:
    """The pages in one form; entries no row may read are -1 and the id of a page of NaN."""
    width = max((len(row) for row in pages), default=0) + 2
    entries = [[*row, stale] + [-1] * (width - len(row) - 1) for row in pages]
    table = torch.tensor(entries, dtype=torch.int32).view(len(pages), width)
    if form == "page_table":
        return KVIndex(page_size=page_size, page_table=table.to(device))
    if form == "csr":
        # each row's slice ends with a stale id: only `kv_lens` says how many count
        ids = torch.tensor([page for row in pages for page in (*row, stale)] + [-1], dtype=torch.int32)
        indptr = _indptr([len(row) + 1 for row in pages])
        return KVIndex(page_size=page_size, kv_indptr=indptr.to(device), kv_indices=ids.to(device))
    row_ids = torch.randperm(len(pages) + 3, generator=generator)[: len(pages)]
    whole = torch.full((len(pages) + 3, width), -1, dtype=torch.int32)
    whole[row_ids] = table
    return KVIndex(page_size=page_size, table=whole.to(device), row_ids=row_ids.to(device))
