"""Absorbed MLA through AITER's `mla_decode_fwd` and `mla_prefill_fwd`, held against both signatures and float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backstamp.attention import LayerSpec
from backstamp.errors import UnsupportedBatch
from backstamp.testing.batches import make_batch
from backstamp.testing.reference import reference_attention, relative_error
from backstamp.testing.requests import request_for
from backstamp_aiter.backend import build_latent_decode, build_latent_prefill
from backstamp_aiter.plugin import LATENT_DECODE, LATENT_PREFILL
from tests.announced import catch_announcements
from tests.libraries.fake import FakeLibrary
from tests.plugins.aiter.behave import mla_forward

DECODE, PREFILL = "aiter.mla:mla_decode_fwd", "aiter.mla:mla_prefill_fwd"
LAYER = LayerSpec(layer_id=0, num_qo_heads=16, num_kv_heads=1, head_dim=576, v_head_dim=512, scale=192**-0.5)
BF16 = torch.bfloat16
BOUND = 5e-3


@pytest.fixture
def library(monkeypatch):
    """AITER's recorded functions, computing with torch."""
    library = FakeLibrary("amd-aiter", monkeypatch)
    library.on(DECODE, mla_forward)
    library.on(PREFILL, mla_forward)
    return library


def build(offer=LATENT_DECODE, **changes):
    factory = build_latent_decode if offer is LATENT_DECODE else build_latent_prefill
    return factory(request_for(offer, **changes)).backend


def step(q_lens, kv_lens, phase="decode", **more):
    return make_batch(q_lens, kv_lens, layer=LAYER, cache_form="latent", dtype=BF16, phase=phase, **more)


def run(backend, made, **options):
    return backend.forward(made.q, made.kv, LAYER, backend.plan(made.batch), **options)


@pytest.mark.parametrize("index_form", ["page_table", "csr", "indirect"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "pads"),
    [([1, 1, 1], [37, 1, 70], 0), ([1, 0, 1, 1], [9, 0, 0, 33], 0), ([1, 1, 0], [20, 5, 0], 2)],
    ids=["ragged", "holes", "pads"],
)
def test_decode_equals_the_reference(q_lens, kv_lens, pads, page_size, index_form, library):
    """Slots are counted out of pages, rows without queries or keys are left out, stale ids are never handed over."""
    made = step(q_lens, kv_lens, page_size=page_size, index_form=index_form, pad_tokens=pads)
    truth, _ = reference_attention(made.q, made.kv, LAYER, made.batch)
    out = torch.full((made.q.shape[0], 16, 512), float("nan"), dtype=BF16)
    assert run(build(page_size=page_size), made, out=out) is out
    assert relative_error(out, truth) < BOUND
    assert len(library.called(DECODE)) == 1


@pytest.mark.parametrize("query", ["joined", "q-rope-apart"])
def test_prefill_over_a_prefix_equals_the_reference(query, library):
    """Ragged rows, with and without a cached prefix; draft extend follows prefill."""
    made = step([3, 1, 4, 0], [9, 33, 4, 0], phase="draft_extend", page_size=16)
    truth, _ = reference_attention(made.q, made.kv, LAYER, made.batch)
    backend = build(LATENT_PREFILL, page_size=16)
    q, q_rope = (made.q, None) if query == "joined" else (made.q[..., :512], made.q[..., 512:])
    out = backend.forward(q, made.kv, LAYER, backend.plan(made.batch), q_rope=q_rope)
    assert relative_error(out, truth) < BOUND
    (call,) = library.called(PREFILL)
    assert call["max_seqlen_q"] == 4
    assert call["sm_scale"] == LAYER.scale


def test_a_step_that_fills_its_output_writes_it_in_place(library):
    """No copy where every token belongs to a row."""
    made = step([1, 1], [9, 20], page_size=1)
    out = torch.empty(2, 16, 512, dtype=BF16)
    run(build(), made, out=out)
    assert library.called(DECODE)[0]["o"].data_ptr() == out.data_ptr()


def test_a_step_without_live_rows_calls_nothing(library):
    """Zero rows, and rows that are all pads."""
    backend = build()
    for made in (step([], [], page_size=1), step([1, 0], [0, 7], page_size=1)):
        out = run(backend, made)
        assert torch.equal(out, torch.zeros_like(out))
    assert library.calls == []


def test_states_are_brought_up_to_date_in_place(library):
    """Whoever kept a state sees the new step."""
    backend = build()
    state = backend.plan(step([1], [9], page_size=1).batch)
    second = step([1, 1], [9, 3], page_size=1)
    assert backend.plan(second.batch, state=state) is state
    assert state.batch is second.batch
    assert state.rows.kv_indptr.tolist() == [0, 9, 12]


def test_host_lengths_are_needed_and_upper_bounds_are_none(library):
    """AITER takes a row's length from its slice of the slots, which the host counts out."""
    made = step([1], [9], page_size=1, host_lens=False)
    with pytest.raises(UnsupportedBatch, match="needs host_lens"):
        build().plan(made.batch)
    with pytest.raises(UnsupportedBatch, match=r"needs host_lens.*upper bounds"):
        build().plan(replace(step([1], [9], page_size=1).batch, host_exact=False))


def test_a_cache_that_is_not_contiguous_is_refused(library):
    """Its rows are counted as slots of one buffer."""
    made = step([1], [9], page_size=16)
    wide = torch.zeros(made.kv.k.shape[0], 16, 1, 640, dtype=BF16)[..., :576]
    with pytest.raises(UnsupportedBatch, match=r"needs kv\.k: a contiguous cache"):
        run(build(page_size=16), replace(made, kv=replace(made.kv, k=wide)))


@pytest.mark.parametrize("heads", [8, 32, 64])
def test_heads_the_library_has_no_kernel_for_are_refused(heads):
    """Before the library is imported."""
    with pytest.raises(UnsupportedBatch, match="needs num_qo_heads: 16 or 128"):
        build(layers=(replace(LAYER, num_qo_heads=heads),))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dtype": "fp16"}, "dtype"),
        ({"layers": (replace(LAYER, softcap=30.0),)}, "softcap"),
        ({"layers": (replace(LAYER, window_left=64),)}, "window"),
        ({"layers": (replace(LAYER, head_dim=320, v_head_dim=256),)}, "head_dim"),
    ],
)
def test_a_build_that_is_not_declared_is_refused(changes, named):
    """The library has no softcap and no window in MLA."""
    with pytest.raises(UnsupportedBatch, match=f"needs {named}"):
        build(**changes)


def test_the_modules_the_library_builds_are_announced_once(library, monkeypatch):
    """AITER builds a module when a function of it is first called."""
    announced = catch_announcements(monkeypatch)
    for backend, phase in ((build(), "decode"), (build(LATENT_PREFILL), "prefill")):
        for kv_len in (9, 33):
            run(backend, step([1], [kv_len], phase, page_size=1))
    assert announced == [("aiter", f"latent {phase} bf16 16 heads") for phase in ("decode", "prefill")]
