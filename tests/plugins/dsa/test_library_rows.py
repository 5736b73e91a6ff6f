"""Kernel `dsa` through sgl-flash-mla: what is handed over, and the answers, against the reference."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from backstamp.errors import UnsupportedBatch
from backstamp.testing.packed_latent import pack, unpack
from backstamp.testing.requests import request_for
from backstamp.testing.sparse_reference import reference_sparse
from backstamp_dsa import queries, steps
from backstamp_dsa.backend import build_dsa, build_dsa_packed
from backstamp_dsa.plugin import DSA_PACKED, DSA_ROWS
from tests.plugins.dsa.cases import RAGGED, check, chosen_keys, dsa_layer, latent_step, nan_out
from tests.plugins.dsa.flash_mla import SPARSE, WITH_CACHE, install

DECODE = ((1, 1), (1, 40), (0, 0), (1, 200))
CASES = {
    "prefill": {"rows": RAGGED, "heads": 16},
    "prefill-64-heads-page1-csr": {"rows": ((3, 9), (0, 2)), "heads": 64, "page_size": 1, "index_form": "csr"},
    "prefill-65-heads-indirect": {"rows": ((2, 30),), "heads": 65, "page_size": 64, "index_form": "indirect"},
    "decode": {"rows": DECODE, "phase": "decode", "heads": 16, "pad_tokens": 2, "topk": 150},
    "verify": {"rows": ((4, 4), (4, 40)), "phase": "verify", "heads": 16},
    "draft-extend": {"rows": ((2, 30), (1, 1)), "phase": "draft_extend", "heads": 8, "topk": 1},
}


@pytest.fixture
def library(monkeypatch):
    """The stand-in, and our modules imported over it."""
    for name in ("dsa_library", "csa_cuda", "flashmla"):
        monkeypatch.delitem(__import__("sys").modules, f"backstamp_dsa.{name}", raising=False)
    return install(monkeypatch)


def drawn(rows, heads, topk=40, **changes):
    """A bf16 step and its choices."""
    step = latent_step(rows, dsa_layer(heads), dtype=torch.bfloat16, **changes)
    return step, chosen_keys(step, topk)


def built(step, **changes):
    """The object over plain rows."""
    return build_dsa(request_for(DSA_ROWS, (step.layer,), page_size=step.batch.index.page_size, **changes)).backend


def packed(step, **changes):
    """The same step over a packed cache, with what its bytes mean, and the object that reads it."""
    bytes_ = pack(step.kv.k, "fp8_ds_mla")
    read = replace(step.kv, k=unpack(bytes_, "fp8_ds_mla"))
    request = request_for(DSA_PACKED, (step.layer,), kv_dtype="fp8_ds_mla", **changes)
    backend = build_dsa_packed(request).backend
    return replace(step, kv=replace(step.kv, k=bytes_, layout="fp8_ds_mla")), read, backend


@pytest.mark.parametrize("case", CASES)
def test_rows_agree_with_the_reference(library, case):
    """Heads are padded to what the library is built for; tokens that see nothing get zeros and -inf."""
    step, indices = drawn(**CASES[case])
    backend, out = built(step), nan_out(step)
    lse = torch.full(out.shape[:2], float("nan"))
    state = backend.plan(step.batch)
    assert backend.forward(step.q, step.kv, step.layer, state, out=out, lse=lse, indices=indices) is out
    truth, true_lse = reference_sparse(step.q, step.kv, step.layer, step.batch, indices)
    check(step, out, truth, lse, true_lse)
    (call,) = library.called(SPARSE)
    assert call["q"].shape[1] == (64 if step.layer.num_qo_heads <= 64 else 128)
    assert call["use_legacy"] is True
    assert call["sm_scale"] == step.layer.scale


@pytest.mark.parametrize("case", ["decode", "prefill", "verify"])
def test_a_packed_cache_agrees_with_what_its_bytes_mean(library, case):
    """Each token is a row of one query; its slots count pages of 64 tokens."""
    step, indices = drawn(**CASES[case] | {"page_size": 64})
    step, read, backend = packed(step)
    out = nan_out(step)
    lse = torch.full(out.shape[:2], float("nan"))
    state = backend.plan(step.batch)
    backend.forward(step.q, step.kv, step.layer, state, out=out, lse=lse, indices=indices)
    truth, true_lse = reference_sparse(step.q, read, step.layer, step.batch, indices)
    check(step, out, truth, lse, true_lse)
    (call,) = library.called(WITH_CACHE)
    assert call["is_fp8_kvcache"] is True
    assert call["block_table"] is None
    assert call["cache_seqlens"] is None


def test_a_long_packed_step_is_cut_into_launches(library, monkeypatch):
    """The library keeps f32 shares of every token of a launch."""
    monkeypatch.setattr(queries, "TOKEN_HEADS_PER_LAUNCH", 4 * 64)
    step, indices = drawn(((10, 60),), 16, page_size=64)
    step, read, backend = packed(step)
    out, state = nan_out(step), backend.plan(step.batch)
    for _ in range(2):
        backend.forward(step.q, step.kv, step.layer, state, out=out, indices=indices)
    check(step, out, reference_sparse(step.q, read, step.layer, step.batch, indices)[0])
    assert [call["q"].shape[0] for call in library.called(WITH_CACHE)] == [4, 4, 2] * 2
    # one schedule for launches of one shape, whatever the layer
    assert len({id(call["tile_scheduler_metadata"]) for call in library.called(WITH_CACHE)}) == 2


def test_what_a_graph_reads_of_a_schedule_outlives_a_plan(library):
    """The library's first call fills it; a graph recorded after that reads the same memory at each replay."""
    step, indices = drawn(((1, 60), (1, 9)), 16, page_size=64, phase="decode")
    step, _, backend = packed(step)
    state = backend.plan(step.batch, capture=True)
    backend.forward(step.q, step.kv, step.layer, state, out=nan_out(step), indices=indices)
    (schedule,) = state.schedules.values()
    filled = weakref.ref(schedule.tile_scheduler_metadata), weakref.ref(schedule.num_splits)
    del schedule
    library.calls.clear()
    backend.plan(step.batch, state=state)
    gc.collect()
    assert all(tensor() is not None for tensor in filled)
    backend.forward(step.q, step.kv, step.layer, state, out=nan_out(step), indices=indices)
    assert library.called(WITH_CACHE)[0]["tile_scheduler_metadata"].num_splits is filled[1]()


def test_a_schedule_filled_inside_a_graph_is_handed_to_nobody_else(library, monkeypatch):
    """Recorded work has not been done yet: another call would read what nothing has written."""
    step, indices = drawn(((1, 60), (1, 9)), 16, page_size=64, phase="decode")
    step, _, backend = packed(step)
    state = backend.plan(step.batch, capture=True)
    for graph in (True, False, True):
        monkeypatch.setattr(steps, "recording", lambda graph=graph: graph)
        backend.forward(step.q, step.kv, step.layer, state, out=nan_out(step), indices=indices)
    recorded, eager, warmed = (call["tile_scheduler_metadata"] for call in library.called(WITH_CACHE))
    assert recorded is not eager
    assert warmed is eager


def test_no_slot_of_a_stale_page_is_ever_formed(library):
    """Whatever the choices hold, each slot handed over belongs to a page its row may read."""
    step, indices = drawn(RAGGED, 16)
    indices[:, 0] = 2**31 - 1
    indices[:, 1] = 10_000
    backend = built(step)
    backend.forward(step.q, step.kv, step.layer, backend.plan(step.batch), out=nan_out(step), indices=indices)
    slots = library.called(SPARSE)[0]["indices"]
    owned = {page * 16 + at for row in step.pages for page in row for at in range(16)}
    assert set(slots.flatten().tolist()) <= owned | {-1}


@pytest.mark.parametrize("heads", [129, 192])
def test_more_heads_than_the_library_has_kernels_for_are_refused(library, heads):
    """64 or 128, and fewer are padded; more is an error that says so."""
    step, indices = drawn(((1, 9),), heads)
    backend = built(step)
    with pytest.raises(UnsupportedBatch, match=f"num_qo_heads.*at most 128.*{heads}"):
        backend.forward(step.q, step.kv, step.layer, backend.plan(step.batch), indices=indices)


def test_a_packed_cache_of_another_form_is_refused(library):
    """528 bytes a token is another model's cache."""
    step, indices = drawn(((1, 9),), 16, page_size=64)
    step, _, backend = packed(step)
    narrow = replace(step.kv, k=step.kv.k[..., :528])
    with pytest.raises(UnsupportedBatch, match=r"kv\.k.*656"):
        backend.forward(step.q, narrow, step.layer, backend.plan(step.batch), indices=indices)


def test_a_cache_whose_pages_are_no_whole_rows_apart_is_refused(library):
    """Slots count rows from the start of the cache."""
    step, indices = drawn(((1, 9),), 16)
    pages = step.kv.k.shape[0]
    odd = torch.zeros(pages * (16 * 576 + 8), dtype=torch.bfloat16)
    cache = odd.as_strided((pages, 16, 1, 576), (16 * 576 + 8, 576, 576, 1))
    backend = built(step)
    with pytest.raises(UnsupportedBatch, match=r"kv\.k.*whole number of token rows"):
        backend.forward(step.q, replace(step.kv, k=cache), step.layer, backend.plan(step.batch), indices=indices)


def test_a_dense_call_of_a_sparse_layer_is_refused(library):
    """No choices is no reason to read every key."""
    step, _ = drawn(((1, 9),), 16)
    backend = built(step)
    with pytest.raises(UnsupportedBatch, match="indices"):
        backend.forward(step.q, step.kv, step.layer, backend.plan(step.batch))


def test_a_cache_the_library_would_fault_on_is_refused(library):
    """It loads 16 bytes at a time: an odd start, an odd row, pages that are not multiples apart."""
    step, indices = drawn(((1, 9),), 16)
    backend, pages = built(step), step.kv.k.shape[0]
    flat = torch.zeros(pages * 16 * 580 + 4, dtype=torch.bfloat16)
    start = flat[4 if flat.data_ptr() % 16 == 0 else 0 :].as_strided((pages, 16, 1, 576), (16 * 576, 576, 576, 1))
    rows = flat.as_strided((pages, 16, 1, 576), (16 * 580, 580, 580, 1))
    for cache in (start, rows):
        with pytest.raises(UnsupportedBatch, match=r"kv\.k.*multiple of 16 bytes"):
            backend.forward(step.q, replace(step.kv, k=cache), step.layer, backend.plan(step.batch), indices=indices)
    step, indices = drawn(((1, 9),), 16, page_size=64)
    step, _, backend = packed(step)
    flat = torch.zeros(step.kv.k.shape[0] * (64 * 656 + 8), dtype=torch.uint8)
    apart = flat.as_strided(step.kv.k.shape, (64 * 656 + 8, 656, 656, 1))
    with pytest.raises(UnsupportedBatch, match=r"kv\.k.*16 bytes apart"):
        backend.forward(step.q, replace(step.kv, k=apart), step.layer, backend.plan(step.batch), indices=indices)


def test_packed_pages_of_blackwell_lie_whole_token_rows_apart(library, monkeypatch):
    """Its tensor map has rows of 656 bytes: a multiple of 16 is not enough there."""
    import backstamp_dsa.dsa_library as bound

    step, indices = drawn(((1, 9),), 16, page_size=64)
    flat = torch.zeros(step.kv.k.shape[0] * (64 * 656 + 16), dtype=torch.uint8)
    step, read, hopper = packed(step)
    apart = flat.as_strided(step.kv.k.shape, (64 * 656 + 16, 656, 656, 1))
    apart.copy_(step.kv.k)
    spread = replace(step.kv, k=apart)
    out = nan_out(step)
    hopper.forward(step.q, spread, step.layer, hopper.plan(step.batch), out=out, indices=indices)
    check(step, out, reference_sparse(step.q, read, step.layer, step.batch, indices)[0])
    for arch in ("10.0", "10.3"):
        monkeypatch.setattr(bound, "chip_of", lambda request, arch=arch: (arch, 148))
        request = request_for(DSA_PACKED, (step.layer,), kv_dtype="fp8_ds_mla")
        backend = build_dsa_packed(request).backend
        with pytest.raises(UnsupportedBatch, match=r"kv\.k.*multiple of 656 bytes apart"):
            backend.forward(step.q, spread, step.layer, backend.plan(step.batch), indices=indices)
