"""Random paged batches for the Triton kernels, and the check of an answer against float64 reference attention.

In: a `Case`, a few numbers. Out: its tensors, in which every element no query may read is NaN and every page id past
a row's last page is -1. Importing this module asks Triton for its interpreter, unless the environment says otherwise.
"""

from __future__ import annotations

import os

__all__ = ["BOUNDS", "NAN", "Case", "Drawn", "build_attention", "build_mla", "check", "make", "run"]

# Triton reads this when kernels are decorated, and its own library is decorated at import
os.environ.setdefault("TRITON_INTERPRET", "1")

import dataclasses

import torch

from backstamp.attention import Batch, KVIndex, LayerSpec, PagedKV, TreeMask
from backstamp.factories import BuildRequest
from backstamp.testing.reference import reference_attention, relative_error
from backstamp.testing.requests import request_for
from backstamp_triton.backend import build_attention, build_mla
from backstamp_triton.plugin import MHA_CUDA, MLA_CUDA

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
BOUNDS = {"fp16": 2e-3, "bf16": 1e-2, "fp32": 1e-5}
NAN = float("nan")


@dataclasses.dataclass(frozen=True)
class Case:
    """One check: `rows` holds (q_len, kv_len) pairs, `heads` (Hq, Hk), `dims` (Dk, Dv).

    `dead_slots` of a tree hold no token: NaN keys that no token sees.
    """

    name: str
    rows: tuple[tuple[int, int], ...]
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (64, 64)
    phase: str = "prefill"
    dtype: str = "fp16"
    page_size: int = 16
    index: str = "page_table"
    cache: str = "rows"
    causal: bool | tuple[int, ...] = True
    window_left: int = -1
    softcap: float = 0.0
    sinks: bool = False
    lse: bool = False
    tree: str | None = None
    dead_slots: int = 0
    starts: tuple[int, ...] | None = None
    pad_tokens: int = 0
    split_rope: bool = False
    mla: bool = False

    def __str__(self) -> str:
        return self.name


@dataclasses.dataclass
class Drawn:
    """A case made of tensors: what `plan` and `forward` take."""

    request: BuildRequest
    batch: Batch
    layer: LayerSpec
    q: torch.Tensor
    q_rope: torch.Tensor | None
    kv: PagedKV


def make(case: Case, device: str = "cpu", seed: int = 0) -> Drawn:
    """Draw a case's tensors; whatever no query may read is NaN or -1."""
    g = torch.Generator().manual_seed(seed)
    dtype = DTYPES[case.dtype]
    (hq, hk), (dk, dv) = case.heads, case.dims
    q_lens = [q for q, _ in case.rows]
    kv_lens = [n for _, n in case.rows]
    total, page = sum(q_lens), case.page_size
    counts = [-(-n // page) for n in kv_lens]
    order = torch.randperm(sum(counts) + 3, generator=g)
    pages = [ids.tolist() for ids in order[: sum(counts)].split(counts)]
    starts = case.starts or (0,) * len(case.rows)
    k, v = _caches(case, len(order), page, hk, dk, dv, dtype, device)
    for ids, n, start in zip(pages, kv_lens, starts, strict=True):
        keys = torch.randn(n, hk, dk, generator=g).to(dtype)
        values = torch.randn(n, hk, dv, generator=g).to(dtype)
        keys[:start] = values[:start] = NAN
        dead = max(n - case.dead_slots, 0) if case.dead_slots else n
        keys[dead:] = values[dead:] = NAN
        for at, page_id in enumerate(ids):
            part = slice(at * page, min((at + 1) * page, n))
            k[page_id, : part.stop - part.start] = keys[part].to(device)
            if v is not None:
                v[page_id, : part.stop - part.start] = values[part].to(device)
    q = torch.randn(total + case.pad_tokens, hq, dk, generator=g).to(dtype).to(device)
    if case.pad_tokens:
        q[total:] = NAN
    sinks = torch.randn(hq, generator=g).to(device) if case.sinks else None
    layer = LayerSpec(
        layer_id=0, num_qo_heads=hq, num_kv_heads=hk, head_dim=dk, v_head_dim=dv, scale=dk**-0.5,
        window_left=case.window_left, softcap=case.softcap, sinks=sinks,
    )  # fmt: skip
    i32 = {"dtype": torch.int32, "device": device}
    causal = case.causal if isinstance(case.causal, bool) else torch.tensor(case.causal, **i32)
    batch = Batch(
        phase=case.phase,
        num_rows=len(case.rows),
        num_tokens=total + case.pad_tokens,
        max_q_len=max(q_lens),
        max_kv_len=max(kv_lens),
        qo_indptr=torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], **i32),
        kv_lens=torch.tensor(kv_lens, **i32),
        index=_index(case.index, pages, page, device),
        causal=causal,
        kv_starts=torch.tensor(case.starts, **i32) if case.starts else None,
        tree=_tree(case, q_lens, kv_lens, g, device),
    )
    request = request_for(
        MLA_CUDA if case.mla else MHA_CUDA,
        (layer,),
        dtype=case.dtype,
        page_size=page,
        device=device,
        max_pages=len(order),
        max_kv_len=max(kv_lens),
    )
    if not case.split_rope:
        return Drawn(request, batch, layer, q, None, PagedKV(k=k, v=v))
    return Drawn(request, batch, layer, q[..., :dv].contiguous(), q[..., dv:].contiguous(), PagedKV(k=k, v=v))


def _caches(case, num_pages, page, hk, dk, dv, dtype, device):
    if case.mla:
        return torch.full((num_pages, page, 1, dk), NAN, dtype=dtype, device=device), None
    if case.cache == "interleaved":
        both = torch.full((num_pages, page, hk, dk + dv), NAN, dtype=dtype, device=device)
        return both[..., :dk], both[..., dk:]
    if case.cache == "heads_first":
        return tuple(
            torch.full((num_pages, hk, page, d), NAN, dtype=dtype, device=device).transpose(1, 2) for d in (dk, dv)
        )
    return tuple(torch.full((num_pages, page, hk, d), NAN, dtype=dtype, device=device) for d in (dk, dv))


def _index(form, pages, page, device):
    width = max(map(len, pages)) + 2
    table = torch.tensor([ids + [-1] * (width - len(ids)) for ids in pages], dtype=torch.int32, device=device)
    if form == "page_table":
        return KVIndex(page_size=page, page_table=table)
    if form == "indirect":
        order = torch.randperm(len(pages) + 2)[: len(pages)]
        wide = torch.full((len(pages) + 2, width), -1, dtype=torch.int32, device=device)
        wide[order.to(device)] = table
        return KVIndex(page_size=page, table=wide, row_ids=order.to(device))
    ids = [page_id for row in pages for page_id in row]
    ends = torch.tensor([0, *map(len, pages)]).cumsum(0)
    dtype = torch.int64 if form == "csr64" else torch.int32
    return KVIndex(
        page_size=page,
        kv_indptr=ends.to(torch.int32).to(device),
        kv_indices=torch.tensor(ids or [-1], dtype=dtype, device=device),
    )


def _tree(case, q_lens, kv_lens, g, device):
    """Random ancestries: each token sees itself and the ancestors of a random earlier token."""
    if case.tree is None:
        return None
    width = max(q_lens)
    seen = torch.zeros(len(q_lens), width, width, dtype=torch.bool)
    for row in range(len(q_lens)):
        for token in range(width):
            if token:
                seen[row, token] = seen[row, int(torch.randint(token, (), generator=g))]
            seen[row, token, token] = True
        # slots a tree does not fill: they see no token, and none sees them
        last = q_lens[row] - case.dead_slots
        seen[row, last:] = seen[row, :, last:] = False
    if case.tree == "qlen":
        return TreeMask(kind="qlen", buffer=seen.to(device))
    parts, at, indptr = [], 0, []
    for row, (q, n) in enumerate(zip(q_lens, kv_lens, strict=True)):
        flat = torch.cat([torch.ones(q, n - q, dtype=torch.bool), seen[row, :q, :q]], 1).flatten()
        if case.tree == "packed":
            flat = torch.cat([flat, torch.zeros(-len(flat) % 8, dtype=torch.bool)]).reshape(-1, 8)
            flat = (flat * (2 ** torch.arange(8))).sum(1).to(torch.uint8)
        parts.append(flat)
        indptr.append(at)
        at += len(flat)
    return TreeMask(kind=case.tree, buffer=torch.cat(parts).to(device), indptr=torch.tensor(indptr).to(device))


def run(case: Case, drawn: Drawn, backend=None):
    """Plan and attend once into poisoned outputs."""
    if backend is None:
        backend = (build_mla if case.mla else build_attention)(drawn.request).backend
    tokens, (hq, _) = drawn.batch.num_tokens, case.heads
    out = torch.full((tokens, hq, case.dims[1]), NAN, dtype=drawn.q.dtype, device=drawn.q.device)
    lse = torch.full((hq, tokens), NAN, device=drawn.q.device).T if case.lse else None
    state = backend.plan(drawn.batch)
    answer = backend.forward(drawn.q, drawn.kv, drawn.layer, state, out=out, lse=lse, q_rope=drawn.q_rope)
    assert answer is out
    return out, lse


def check(case: Case, drawn: Drawn, out, lse) -> float:
    """Hold outputs and LSE to the reference; the relative error of the outputs."""
    truth, true_lse = reference_attention(drawn.q, drawn.kv, drawn.layer, drawn.batch, q_rope=drawn.q_rope)
    error = relative_error(out, truth)
    assert error <= BOUNDS[case.dtype], f"{case}: relative error {error:.2e}"
    scale = truth.abs().max().item() or 1.0
    worst = (out.double().cpu() - truth).abs().max().item() if truth.numel() else 0.0
    assert worst <= 8 * BOUNDS[case.dtype] * scale, f"{case}: greatest error {worst:.2e}"
    if lse is not None:
        nothing = torch.isinf(true_lse)
        assert torch.equal(torch.isneginf(lse.cpu()), nothing)
        near = (lse.double().cpu() - true_lse)[~nothing].abs()
        assert near.numel() == 0 or near.max().item() <= 2 * BOUNDS[case.dtype]
    return error
