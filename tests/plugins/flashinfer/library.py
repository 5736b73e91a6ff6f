"""FlashInfer as its wheel's signatures and documents describe it, computed with torch on the CPU.

In: a test's monkeypatch. Out: a `FakeLibrary` whose wrappers keep what they were planned with, hold shapes, dtypes,
devices and strides as the library does, and attend row by row in float32. Masks, windows and sinks follow the CUDA
sources beside the wheel, and so does what is read when: buffers given to a constructor are read in every `run`.
"""

from __future__ import annotations

import math
import sys
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.libraries.fake import FakeLibrary

__all__ = ["DECODE", "MLA", "PREFILL", "RAGGED", "SINKS", "make_library"]

PREFILL = "flashinfer.prefill:BatchPrefillWithPagedKVCacheWrapper"
RAGGED = "flashinfer.prefill:BatchPrefillWithRaggedKVCacheWrapper"
DECODE = "flashinfer.decode:BatchDecodeWithPagedKVCacheWrapper"
SINKS = "flashinfer.attention._core:BatchAttentionWithAttentionSinkWrapper"
MLA = "flashinfer.mla._batch_mla._wrapper:BatchMLAPagedAttentionWrapper"
CSR = "flashinfer.mla._batch_mla._contracts:MLAPlanMetadata.csr"


def make_library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    """Install the stand-in, with the names that the library's packages export again."""
    library = FakeLibrary("flashinfer-python", monkeypatch)
    library.on(f"{PREFILL}.__init__", _make_paged)
    library.on(f"{PREFILL}.plan", plan_paged)
    library.on(f"{PREFILL}.run", run_paged)
    library.on(f"{SINKS}.__init__", _make_paged)
    library.on(f"{SINKS}.run", run_sinks)
    library.on(f"{RAGGED}.__init__", _make_ragged)
    library.on(f"{RAGGED}.plan", plan_ragged)
    library.on(f"{RAGGED}.run", run_ragged)
    library.on(f"{DECODE}.__init__", _make_decode)
    library.on(f"{DECODE}.plan", lambda self, kwargs=None, **rest: self._plan_impl(**rest, **(kwargs or {})))
    library.on(f"{DECODE}._plan_impl", plan_decode)
    library.on(f"{DECODE}.run", run_paged)
    library.on(f"{MLA}.__init__", _make_mla)
    library.on(f"{MLA}.plan", plan_mla)
    library.on(f"{MLA}.run", run_mla)
    library.on(CSR, lambda cls, **tensors: tensors)
    core = sys.modules["flashinfer.attention._core"]
    sinks = core.BatchAttentionWithAttentionSinkWrapper
    # a subclass of the paged prefill wrapper, whose `plan` it inherits
    sinks.plan = sys.modules["flashinfer.prefill"].BatchPrefillWithPagedKVCacheWrapper.plan
    sys.modules["flashinfer.attention"].BatchAttentionWithAttentionSinkWrapper = sinks
    contracts = sys.modules["flashinfer.mla._batch_mla._contracts"]
    contracts.MLAPlanMetadata.csr = classmethod(contracts.MLAPlanMetadata.csr)
    sys.modules["flashinfer.mla"].MLAPlanMetadata = contracts.MLAPlanMetadata
    wrapper = sys.modules["flashinfer.mla._batch_mla._wrapper"].BatchMLAPagedAttentionWrapper
    sys.modules["flashinfer.mla"].BatchMLAPagedAttentionWrapper = wrapper
    return library


def _make_paged(self: Any, float_workspace_buffer: Tensor, kv_layout: str = "NHD", **given: Any) -> None:
    assert float_workspace_buffer.dtype == torch.uint8
    assert kv_layout == "NHD"
    assert given["backend"] in ("fa2", "fa3"), "'auto' may run another kernel than the stamp says"
    self.given, self.graph = given, given.get("use_cuda_graph", False)
    if self.graph:
        self.qo, self.indptr = given["qo_indptr_buf"], given["paged_kv_indptr_buf"]
        self.indices, self.last = given["paged_kv_indices_buf"], given["paged_kv_last_page_len_buf"]
        assert len(self.qo) == len(self.indptr) == len(self.last) + 1
    self.mask, self.mask_indptr = given.get("custom_mask_buf"), given.get("mask_indptr_buf")
    if self.mask is not None:
        assert given["backend"] == "fa2", "FA3 has no custom mask"
        assert self.mask.dtype == torch.uint8
        assert self.mask_indptr.dtype == torch.int32


def _make_decode(self: Any, float_workspace_buffer: Tensor, kv_layout: str = "NHD", **given: Any) -> None:
    renamed = {key.replace("_buffer", "_buf"): value for key, value in given.items()}
    if renamed.get("use_cuda_graph"):
        assert given["use_tensor_cores"] is True
        rows = len(renamed["paged_kv_last_page_len_buf"])
        renamed["qo_indptr_buf"] = torch.arange(rows + 1, dtype=torch.int32)
    _make_paged(self, float_workspace_buffer, kv_layout, **renamed)


def plan_paged(
    self: Any,
    qo_indptr: Tensor,
    paged_kv_indptr: Tensor,
    paged_kv_indices: Tensor,
    paged_kv_last_page_len: Tensor,
    page_size: int,
    **options: Any,
) -> None:
    """Hold the page lists against each other, and keep them: in the fixed buffers of a wrapper that has them."""
    for tensor in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
        assert tensor.dtype == torch.int32
        assert tensor.dim() == 1
    rows = len(qo_indptr) - 1
    assert rows > 0
    assert len(paged_kv_indptr) == rows + 1
    assert len(paged_kv_last_page_len) == rows
    counts = paged_kv_indptr[1:] - paged_kv_indptr[:-1]
    assert len(paged_kv_indices) >= int(paged_kv_indptr[-1])
    assert bool(((paged_kv_last_page_len >= 1) == (counts > 0)).all())
    assert bool((paged_kv_last_page_len <= page_size).all())
    total = int(qo_indptr[-1])
    if self.graph:
        assert rows == len(self.last), "the batch size is fixed in CUDA graph mode"
        self.most = getattr(self, "most", None) or self.given.get("max_total_num_rows") or total
        assert total <= self.most
        assert len(paged_kv_indices) <= len(self.indices)
        self.qo.copy_(qo_indptr)
        self.indptr.copy_(paged_kv_indptr)
        self.last.copy_(paged_kv_last_page_len)
        self.indices[: len(paged_kv_indices)].copy_(paged_kv_indices)
    else:
        self.qo, self.indptr, self.indices, self.last = (
            tensor.clone() for tensor in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        )
        assert self.mask is None, "without fixed buffers a plan forgets the mask"
    if self.given["backend"] == "fa3":
        assert options.get("causal") or options["window_left"] < 0, "FA3 starts a window where causal rows do"
        assert options["head_dim_qk"] in (64, 128, 256)
    self.total, self.options = total, {"page_size": page_size, "causal": False, **options}


def plan_decode(
    self: Any, indptr: Tensor, indices: Tensor, last_page_len: Tensor, head_dim: int, **options: Any
) -> None:
    """One token a row."""
    qo_indptr = torch.arange(len(last_page_len) + 1, dtype=torch.int32)
    plan_paged(self, qo_indptr, indptr, indices, last_page_len, head_dim_qk=head_dim, **options)


def run_paged(self: Any, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], args: tuple[Any, ...] = (), **given: Any):
    """Attend over pages; base-2 LSE. A module of one's own takes `args`: here the sinks and the scale."""
    k, v = paged_kv_cache
    sinks = args[0] if args else None
    options = self.options
    assert q.shape == (self.total, options["num_qo_heads"], options["head_dim_qk"])
    assert q.dtype == options["q_data_type"]
    for cache in (k, v):
        assert cache.dim() == 4
        assert cache.shape[1:3] == (options["page_size"], options["num_kv_heads"])
        assert cache.dtype == options["kv_data_type"]
    if self.given["backend"] == "fa3":
        assert k.stride()[:2] == v.stride()[:2], "FA3 steps through keys and values with one stride"
    indptr, last = self.indptr.tolist(), self.last.tolist()
    size = options["page_size"]
    rows = []
    for row, count in enumerate(last):
        pages = self.indices[indptr[row] : indptr[row + 1]].long()
        assert bool((pages >= 0).all())
        length = (len(pages) - 1) * size + count if len(pages) else 0
        rows.append((k[pages].flatten(0, 1)[:length], v[pages].flatten(0, 1)[:length]))
    return _attend_rows(self, q, rows, sinks, **given)


def run_sinks(
    self: Any, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
):
    """The module with sinks takes them and the scale as its own arguments; its window is compiled in."""
    sinks, scale = args
    assert sinks.dtype == torch.float32
    assert sinks.shape == (self.options["num_qo_heads"],)
    assert sinks.is_contiguous()
    assert scale == self.options["sm_scale"]
    assert not self.options["logits_soft_cap"]
    assert self.mask is None
    assert (self.given["window_left"] >= 0) == (self.options["window_left"] >= 0)
    assert self.given["head_dim_qk"] == self.options["head_dim_qk"]
    assert self.given["q_data_type"] == self.options["q_data_type"]
    parent = sys.modules["flashinfer.prefill"].BatchPrefillWithPagedKVCacheWrapper
    return parent.run(self, q, paged_kv_cache, *args, **kwargs)


def _make_ragged(self: Any, float_workspace_buffer: Tensor, kv_layout: str = "NHD", **given: Any) -> None:
    assert not given.get("use_cuda_graph")
    _make_paged(self, float_workspace_buffer, kv_layout, **given)


def plan_ragged(self: Any, qo_indptr: Tensor, kv_indptr: Tensor, **options: Any) -> None:
    """Offsets of queries and keys."""
    for tensor in (qo_indptr, kv_indptr):
        assert tensor.dtype == torch.int32
        assert len(tensor) == len(qo_indptr) > 1
    self.qo, self.indptr, self.total = qo_indptr, kv_indptr, int(qo_indptr[-1])
    self.options = {"causal": False, **options}


def run_ragged(self: Any, q: Tensor, k: Tensor, v: Tensor, **given: Any):
    """Attend over keys and values that lie one row after another."""
    assert q.shape == (self.total, self.options["num_qo_heads"], self.options["head_dim_qk"])
    bounds = self.indptr.tolist()
    rows = [(k[start:stop], v[start:stop]) for start, stop in pairwise(bounds)]
    assert len(k) >= bounds[-1]
    return _attend_rows(self, q, rows, None, **given)


def _attend_rows(
    self: Any,
    q: Tensor,
    rows: list[tuple[Tensor, Tensor]],
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    assert out.dtype == q.dtype
    assert out.is_contiguous(), "FA2 writes rows that lie densely"
    assert lse is None or lse.is_contiguous()
    _hold_vectors(q, out, *(part for row in rows for part in row))
    options = self.options
    heads = options["num_qo_heads"]
    bounds = self.qo.tolist()
    base2 = torch.empty(len(q), heads)
    for row, (keys, values) in enumerate(rows):
        start, stop = bounds[row], bounds[row + 1]
        visible = _visible(self, row, stop - start, len(keys))
        out[start:stop], base2[start:stop] = _attend(
            q[start:stop], keys, values, visible, options["sm_scale"], options["logits_soft_cap"] or 0.0, sinks
        )
    if not return_lse:
        return out
    assert lse is not None
    lse.copy_(base2)
    return out, lse


def _visible(self: Any, row: int, q_len: int, kv_len: int) -> Tensor:
    """Bool `[q_len, kv_len]`, as the mask functions of the CUDA variants say."""
    query, key = torch.arange(q_len)[:, None], torch.arange(kv_len)[None, :]
    visible = torch.ones(q_len, kv_len, dtype=torch.bool)
    if self.mask is not None:
        element = query * kv_len + key
        bits = self.mask[int(self.mask_indptr[row]) + element // 8] >> (element % 8)
        visible &= (bits & 1).bool()
    elif self.options["causal"]:
        visible &= key + q_len <= kv_len + query
    if self.options["window_left"] >= 0:
        visible &= key + q_len + self.options["window_left"] >= kv_len + query
    return visible


def _attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, softcap: float, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One row: the output, and the LSE in base 2."""
    share = q.shape[1] // k.shape[1]
    k, v = k.float().repeat_interleave(share, 1), v.float().repeat_interleave(share, 1)
    logits = torch.einsum("qhd,khd->qhk", q.float(), k) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~visible[:, None, :], float("-inf"))
    lse = torch.logsumexp(logits, -1)
    total = lse if sinks is None else torch.logaddexp(lse, sinks[None, :])
    weights = torch.exp(logits - total[..., None]).nan_to_num(0.0)
    return torch.einsum("qhk,khd->qhd", weights, v).to(q.dtype), lse / math.log(2.0)


def _hold_vectors(*tensors: Tensor) -> None:
    """Every vector of 16 bytes starts at a multiple of 16."""
    for tensor in tensors:
        assert tensor.stride(-1) == 1
        if tensor.numel():
            outer = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
            assert not any(size > 1 and step * tensor.element_size() % 16 for size, step in outer)
            assert tensor.data_ptr() % 16 == 0


def _make_mla(self: Any, float_workspace_buffer: Tensor, backend: str, use_cuda_graph: bool = False, **buffers: Any):
    assert float_workspace_buffer.dtype == torch.uint8
    assert backend in ("fa2", "fa3"), "'auto' may run another kernel than the stamp says"
    self.graph, self.buffers, self.backend = use_cuda_graph, buffers, backend


def plan_mla(self: Any, metadata: dict[str, Tensor], **options: Any) -> None:
    """Hold the metadata as the library's planner does."""
    for tensor in metadata.values():
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()
    qo, kv, lens = metadata["qo_indptr"], metadata["kv_indptr"], metadata["kv_len_arr"]
    assert len(qo) == len(kv) == len(lens) + 1
    assert torch.equal(kv[1:] - kv[:-1], (lens + options["page_size"] - 1) // options["page_size"])
    if self.graph:
        for name, target in self.buffers.items():
            source = metadata[name]
            assert target.shape == source.shape or (name == "kv_indices" and len(target) >= len(source))
            target[: len(source)].copy_(source)
    self.metadata = self.buffers if self.graph else metadata
    pages = metadata["kv_indices"][: int(kv[-1])]
    assert not len(pages) or int(pages.min()) >= 0
    self.options = options


def run_mla(
    self: Any,
    query: tuple[Tensor, Tensor],
    kv_cache: tuple[Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
    return_lse: bool,
    return_lse_base_on_e: bool,
) -> tuple[Tensor, Tensor]:
    """Attend over latent rows; LSE in the base asked for."""
    options, metadata = self.options, self.metadata
    assert return_lse
    assert options["lse_mode"] == ("basee" if return_lse_base_on_e else "base2")
    assert options["query_layout"] == options["kv_cache_layout"] == "split"
    widths = (options["head_dim_ckv"], options["head_dim_kpe"])
    qo, kv, lens = (metadata[name].tolist() for name in ("qo_indptr", "kv_indptr", "kv_len_arr"))
    for parts, name in ((query, "query"), (kv_cache, "cache")):
        assert type(parts) is tuple
        assert tuple(part.shape[-1] for part in parts) == widths, name
        assert all(part.dim() == 3 and part.dtype == options["q_data_type"] for part in parts), name
    assert query[0].shape[:2] == (qo[-1], options["num_heads"])
    assert lse.is_contiguous()
    _hold_vectors(*query, *kv_cache, out)
    q, cache = torch.cat(query, -1), torch.cat(kv_cache, -1)
    for row, length in enumerate(lens):
        start, stop = qo[row], qo[row + 1]
        keys = cache[metadata["kv_indices"][kv[row] : kv[row + 1]].long()].flatten(0, 1)[:length, None]
        at, key = torch.arange(stop - start)[:, None], torch.arange(length)[None, :]
        visible = torch.ones(stop - start, length, dtype=torch.bool)
        if options["causal"]:
            visible = key + (stop - start) <= length + at
        values = keys[..., : widths[0]]
        out[start:stop], base2 = _attend(q[start:stop], keys, values, visible, options["sm_scale"], 0.0, None)
        lse[start:stop] = base2 * (math.log(2.0) if return_lse_base_on_e else 1.0)
    return out, lse
