"""Kernel `dsv4` on CUDA and ROCm: a window and compressed entries, one softmax, one sink, against the reference."""

from __future__ import annotations

import gc
import sys
import weakref
from dataclasses import replace

import pytest
import torch

from backstamp.attention import PagedKV
from backstamp.errors import UnsupportedBatch
from backstamp.testing.packed_latent import pack, unpack
from backstamp.testing.requests import request_for
from backstamp.testing.sparse_reference import reference_compressed
from backstamp_dsa.backend import build_dsv4, build_dsv4_packed, build_dsv4_rocm
from backstamp_dsa.plugin import DSV4_CUDA, DSV4_CUDA_PACKED, DSV4_ROCM, DSV4_ROCM_PACKED
from tests.libraries.fake import FakeLibrary
from tests.plugins.dsa.cases import check, chosen_keys, dsa_layer, latent_step, nan_out
from tests.plugins.dsa.flash_mla import SPARSE, WITH_CACHE, attend, install, packed_keys

AITER = "aiter.ops.triton.attention.pa_decode_sparse:pa_decode_sparse"
PAGE = 128
#: Entries a page of compressed ones: rate 4 is chosen from, rate 128 read whole, None has none.
CASES = {
    "window-alone": {"rate": None, "rows": ((5, 5), (1, 300), (0, 0), (3, 150), (0, 9))},
    "rate-4-chosen": {"rate": 4, "topk": 20, "rows": ((5, 5), (1, 300), (0, 0), (3, 150))},
    "rate-128-all": {"rate": 128, "rows": ((2, 300), (1, 127), (1, 128), (1, 1))},
    "decode-sinks": {"rate": 4, "topk": 9, "rows": ((1, 1), (1, 257), (0, 0)), "phase": "decode", "sinks": True},
    "window-alone-sinks": {"rate": None, "rows": ((1, 40), (2, 2)), "sinks": True, "pad_tokens": 2},
    "rate-4-csr": {"rate": 4, "topk": 150, "rows": ((2, 300), (1, 3)), "index_form": "csr", "sinks": True},
}  # fmt: skip


@pytest.fixture
def library(monkeypatch):
    """The stand-in of sgl-flash-mla, and our module imported over it."""
    monkeypatch.delitem(sys.modules, "backstamp_dsa.csa_cuda", raising=False)
    return install(monkeypatch)


@pytest.fixture
def aiter(monkeypatch):
    """What the caller shows of aiter's kernel, computed with torch."""
    monkeypatch.delitem(sys.modules, "backstamp_dsa.csa_rocm", raising=False)
    library = FakeLibrary("amd-aiter-dsv4", monkeypatch)
    library.on(AITER, pa_decode_sparse)
    return library


def pa_decode_sparse(
    q,
    unified_kv,
    kv_indices,
    kv_indptr,
    attn_sink,
    softmax_scale,
    extra_cache=None,
    extra_indices=None,
    extra_indptr=None,
):
    """hip_flash_mla.py: q [n, h, d], caches [P, entries, D or bytes], flat slots by i32 offsets; only -1 is nothing."""
    assert q.is_contiguous()
    assert attn_sink.dtype is torch.float32
    assert attn_sink.shape == q.shape[1:2]
    out = torch.full(q.shape, float("nan"), dtype=q.dtype)
    lse = torch.full(q.shape[:2], float("nan"))
    for token in range(q.shape[0]):
        keys = []
        for cache, slots, ends in ((unified_kv, kv_indices, kv_indptr), (extra_cache, extra_indices, extra_indptr)):
            if cache is None:
                continue
            assert slots.dim() == 1
            assert slots.dtype is ends.dtype is torch.int32
            assert ends.shape == (q.shape[0] + 1,)
            own = slots[int(ends[token]) : int(ends[token + 1])]
            if cache.dtype is torch.uint8:
                keys.append(packed_keys(cache[:, :, None], own, "fp8_dsv4"))
            else:
                own = own[own != -1].long()
                keys.append(cache[own // cache.shape[1], own % cache.shape[1]].float())
        attend(q[token], torch.cat(keys), softmax_scale, attn_sink, out, lse, token)
    return out


def drawn(rows, rate, topk=None, sinks=False, heads=16, window=127, page=PAGE, **changes):
    """A step over both caches, and choices of compressed entries where a layer has an indexer."""
    sink = torch.randn(heads, generator=torch.Generator().manual_seed(3)) if sinks else None
    layer = dsa_layer(heads, head_dim=512, v_head_dim=512, window_left=window, sinks=sink)
    step = latent_step(rows, layer, dtype=torch.bfloat16, page_size=page, **changes)
    if rate is None:
        return step, None
    entries = torch.full((step.kv.k.shape[0], page // rate, 1, 512), float("nan"), dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(4)
    for pages, kv_len in zip(step.pages, step.batch.kv_lens.tolist(), strict=True):
        for at in range(kv_len // rate):
            entries[pages[at * rate // page], at % (page // rate), 0] = torch.randn(512, generator=generator)
    step = replace(step, kv=replace(step.kv, v=entries))
    return step, None if topk is None else chosen_keys(step, topk)


def packed(step):
    """The same caches as bytes, and what those mean."""
    caches = (step.kv.k, step.kv.v)
    bytes_ = [None if cache is None else pack(cache, "fp8_dsv4") for cache in caches]
    read = [None if cache is None else unpack(cache, "fp8_dsv4") for cache in bytes_]
    return PagedKV(k=bytes_[0], v=bytes_[1], layout="fp8_dsv4"), PagedKV(k=read[0], v=read[1])


def plain_object(offer, factory, step):
    """The object over plain rows."""
    return factory(request_for(offer, (step.layer,), page_size=PAGE)).backend


def packed_object(offer, factory, step):
    """The object over packed caches."""
    return factory(request_for(offer, (step.layer,), page_size=PAGE, kv_dtype="fp8_dsv4")).backend


def run(backend, step, kv, indices):
    """Plan and attend once into NaN."""
    out = nan_out(step)
    assert backend.forward(step.q, kv, step.layer, backend.plan(step.batch), out=out, indices=indices) is out
    return out


@pytest.mark.parametrize("case", CASES)
def test_plain_rows_through_flash_mla_agree_with_the_reference(library, case):
    """Two calls without a sink, merged with it once, where a layer has compressed entries; else one call with it."""
    step, indices = drawn(**CASES[case])
    out = run(plain_object(DSV4_CUDA, build_dsv4, step), step, step.kv, indices)
    check(step, out, reference_compressed(step.q, step.kv, step.layer, step.batch, indices)[0])
    calls = library.called(SPARSE)
    assert len(calls) == (1 if step.kv.v is None else 2)
    assert (calls[0]["attn_sink"] is not None) is (step.kv.v is None and step.layer.sinks is not None)


@pytest.mark.parametrize("case", CASES)
def test_packed_caches_through_flash_mla_agree_with_what_their_bytes_mean(library, case):
    """One call reads both caches."""
    step, indices = drawn(**CASES[case])
    kv, read = packed(step)
    out = run(packed_object(DSV4_CUDA_PACKED, build_dsv4_packed, step), step, kv, indices)
    check(step, out, reference_compressed(step.q, read, step.layer, step.batch, indices)[0])
    assert len(library.called(WITH_CACHE)) == 1


def test_layers_of_unlike_rates_share_no_schedule(library):
    """A schedule holds the library to the size of the other cache's pages too."""
    rows = ((1, 300), (1, 130))
    first, chosen = drawn(rows, 4, topk=20, phase="decode")
    second, _ = drawn(rows, 128, phase="decode")
    backend = packed_object(DSV4_CUDA_PACKED, build_dsv4_packed, first)
    state = backend.plan(first.batch)
    for step, indices in ((first, chosen), (second, None), (first, chosen)):
        kv, read = packed(step)
        out = nan_out(step)
        backend.forward(step.q, kv, step.layer, state, out=out, indices=indices)
        check(step, out, reference_compressed(step.q, read, step.layer, step.batch, indices)[0])
    assert len({id(call["tile_scheduler_metadata"]) for call in library.called(WITH_CACHE)}) == 2


def test_what_a_graph_reads_of_a_schedule_outlives_a_plan(library):
    """A plan before a replay must not free the memory that the recorded call reads."""
    step, indices = drawn(((1, 300), (1, 130)), 4, topk=20, phase="decode")
    kv, _ = packed(step)
    backend = packed_object(DSV4_CUDA_PACKED, build_dsv4_packed, step)
    state = backend.plan(step.batch, capture=True)
    backend.forward(step.q, kv, step.layer, state, out=nan_out(step), indices=indices)
    (schedule,) = state.schedules.values()
    filled = weakref.ref(schedule.tile_scheduler_metadata)
    del schedule
    library.calls.clear()
    backend.plan(step.batch, state=state)
    gc.collect()
    assert filled() is not None


@pytest.mark.parametrize("case", CASES)
def test_plain_rows_through_aiter_agree_with_the_reference(aiter, case):
    """The kernel folds the sink; a layer without one hands over -inf."""
    step, indices = drawn(**CASES[case])
    out = run(plain_object(DSV4_ROCM, build_dsv4_rocm, step), step, step.kv, indices)
    check(step, out, reference_compressed(step.q, step.kv, step.layer, step.batch, indices)[0])
    assert len(aiter.called(AITER)) == 1


@pytest.mark.parametrize("case", ["window-alone", "rate-4-chosen", "decode-sinks"])
def test_packed_caches_through_aiter_agree_with_what_their_bytes_mean(aiter, case):
    """The same call over bytes."""
    step, indices = drawn(**CASES[case])
    kv, read = packed(step)
    out = run(packed_object(DSV4_ROCM_PACKED, build_dsv4_rocm, step), step, kv, indices)
    check(step, out, reference_compressed(step.q, read, step.layer, step.batch, indices)[0])


@pytest.mark.parametrize("rows", [(), ((0, 0),), ((0, 9), (0, 0))])
def test_a_step_without_tokens_calls_nothing(library, rows):
    """Nothing is launched."""
    step, _ = drawn(rows, None)
    backend = plain_object(DSV4_CUDA, build_dsv4, step)
    assert backend.forward(step.q, step.kv, step.layer, backend.plan(step.batch)).shape == (0, 16, 512)
    assert not library.calls


def test_padding_tokens_of_a_step_without_rows_are_zeros(library):
    """Nothing is launched, and nothing else would write them."""
    step, _ = drawn((), None, pad_tokens=3)
    backend, out = plain_object(DSV4_CUDA, build_dsv4, step), nan_out(step)
    assert out.shape[0] == 3
    backend.forward(step.q, step.kv, step.layer, backend.plan(step.batch), out=out)
    assert bool((out == 0).all())
    assert not library.calls


def _refused(backend, step, match, kv=None, layer=None, **given):
    with pytest.raises(UnsupportedBatch, match=match):
        backend.forward(step.q, kv or step.kv, layer or step.layer, backend.plan(step.batch), **given)


def test_what_a_layer_or_a_cache_cannot_be_is_refused(library):
    """A layer without a window, choices where nothing is compressed, a page of no whole fraction, an LSE."""
    step, indices = drawn(rate=4, topk=20, rows=((2, 300),))
    backend = plain_object(DSV4_CUDA, build_dsv4, step)
    _refused(backend, step, "a window", layer=replace(step.layer, window_left=-1), indices=indices)
    _refused(backend, step, "without compressed entries", kv=replace(step.kv, v=None), indices=indices)
    _refused(backend, step, r"kv\.v.*/ rate", kv=replace(step.kv, v=step.kv.v[:, :31]), indices=indices)
    _refused(backend, step, r"kv\.v", kv=replace(step.kv, v=step.kv.v.float()), indices=indices)
    _refused(backend, step, "lse", indices=indices, lse=torch.empty(2, 16))
    wide, _ = drawn(rate=None, rows=((1, 9),), heads=130)
    _refused(backend, wide, "num_qo_heads.*at most 128")


def test_compressed_bytes_of_another_dtype_are_refused(library):
    """Both caches of a packed layer are bytes: the core leaves what packed pages hold to their kernel."""
    step, _ = drawn(rate=128, rows=((1, 300),))
    kv, _ = packed(step)
    backend = packed_object(DSV4_CUDA_PACKED, build_dsv4_packed, step)
    _refused(backend, step, r"kv\.v.*/ rate.*torch\.uint8.*torch\.int8", kv=replace(kv, v=kv.v.view(torch.int8)))


def test_sinks_that_are_not_fp32_are_refused(library):
    """The library reads them as float."""
    step, _ = drawn(rate=None, rows=((1, 9),), sinks=True)
    backend = plain_object(DSV4_CUDA, build_dsv4, step)
    _refused(backend, step, "sink", layer=replace(step.layer, sinks=step.layer.sinks.bfloat16()))


def test_a_packed_page_of_another_width_is_refused(library):
    """584 bytes a token, the page contiguous."""
    step, _ = drawn(rate=None, rows=((1, 9),))
    kv, _ = packed(step)
    backend = packed_object(DSV4_CUDA_PACKED, build_dsv4_packed, step)
    _refused(backend, step, r"kv\.k.*584", kv=replace(kv, k=kv.k[..., :528]))


def test_packed_pages_that_do_not_begin_at_a_load_are_refused(library):
    """Pages of one entry without padding lie 584 bytes apart: every other one would fault a 16-byte load."""
    step, _ = drawn(rate=128, rows=((1, 300),))
    kv, _ = packed(step)
    backend = packed_object(DSV4_CUDA_PACKED, build_dsv4_packed, step)
    assert kv.v.stride(0) == 2 * 576
    _refused(backend, step, r"kv\.v.*16 bytes apart", kv=replace(kv, v=kv.v.contiguous()))


def test_a_cache_with_gaps_between_tokens_is_refused_by_aiter(aiter):
    """Its kernel steps from token to token densely."""
    step, _ = drawn(rate=None, rows=((1, 9),))
    wide = torch.zeros(*step.kv.k.shape[:3], 576, dtype=torch.bfloat16)[..., :512]
    backend = plain_object(DSV4_ROCM, build_dsv4_rocm, step)
    _refused(backend, step, r"kv\.k.*contiguous pages", kv=replace(step.kv, k=wide))
