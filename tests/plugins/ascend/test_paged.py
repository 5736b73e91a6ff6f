"""Paged MHA through torch-npu's fused attention, held against its schema, its documented rules and float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backstamp.attention import LayerSpec
from backstamp.declarations import PHASES
from backstamp.errors import UnsupportedBatch
from backstamp.testing.batches import make_batch, make_tree, split_new
from backstamp.testing.reference import reference_attention, relative_error
from backstamp.testing.requests import request_for
from backstamp_ascend import paged
from backstamp_ascend.backend import build_packed, build_rows
from backstamp_ascend.plugin import PACKED, PACKED_192, ROWS
from tests.libraries.fake import FakeLibrary
from tests.plugins.ascend.behave import fused_attention

PATH = "torch_npu:npu_fused_infer_attention_score_v2"
BOUND = 5e-3
BF16 = torch.bfloat16


def layer(head_dim=128, **changed):
    return LayerSpec(
        layer_id=0,
        **({"num_qo_heads": 4, "num_kv_heads": 2, "scale": head_dim**-0.5} | changed),
        head_dim=head_dim,
        v_head_dim=head_dim,
    )


LAYER = layer()


@pytest.fixture
def library(monkeypatch):
    """torch-npu's recorded functions, computing with torch."""
    library = FakeLibrary("torch-npu", monkeypatch)
    library.on(PATH, fused_attention)
    return library


def build(offer=PACKED, **changes):
    factory = build_rows if offer is ROWS else build_packed
    return factory(request_for(offer, **({"dtype": "bf16"} | changes))).backend


def run(backend, made, **options):
    return backend.forward(made.q, made.kv, made.layer, backend.plan(made.batch), **options)


STEPS = {
    "prefill": {"q_lens": [5, 1, 3, 17], "kv_lens": [37, 264, 3, 17]},
    "decode": {"q_lens": [1, 1, 1], "kv_lens": [37, 1, 300], "phase": "decode"},
    "empty-rows": {"q_lens": [0, 4, 1, 0], "kv_lens": [0, 20, 17, 9]},
    "decode-with-a-hole": {"q_lens": [1, 0, 1], "kv_lens": [30, 0, 141], "phase": "decode"},
    "pad-tokens": {"q_lens": [2, 2], "kv_lens": [18, 133], "pad_tokens": 3, "phase": "verify"},
    "indirect": {"q_lens": [3, 0, 1], "kv_lens": [140, 0, 9], "index_form": "indirect"},
    "non-causal": {"q_lens": [3, 1, 2], "kv_lens": [140, 9, 2], "causal": False},
}
LAYERS = {
    "plain": {},
    "window": {"window_left": 7},
    "window-of-self": {"window_left": 0},
    "sinks": {"sinks": torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=BF16)},
    "window-and-sinks": {"window_left": 7, "sinks": torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=BF16)},
    "mqa": {"num_kv_heads": 1},
}


@pytest.mark.parametrize("page_size", [128, 256])
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("step", STEPS)
def test_every_step_of_every_layer_in_one_call_equals_the_reference(step, kind, page_size, library):
    """Holes, pads and one-token rows travel in one packed call."""
    made = make_batch(**STEPS[step], layer=layer(**LAYERS[kind]), page_size=page_size, dtype=BF16)
    truth, _ = reference_attention(made.q, made.kv, made.layer, made.batch)
    out = torch.full_like(made.q, float("nan"))
    assert run(build(page_size=page_size), made, out=out) is out
    assert relative_error(out, truth) < BOUND
    assert len(library.called(PATH)) == 1


@pytest.mark.parametrize("offer", [PACKED, ROWS], ids=["packed", "rows"])
@pytest.mark.parametrize("step", STEPS)
def test_the_lse_is_natural_and_minus_infinity_where_nothing_is_seen(step, offer, library):
    """Both layouts return it in a shape of their own."""
    made = make_batch(**STEPS[step], layer=LAYER, page_size=128, dtype=BF16)
    truth, true_lse = reference_attention(made.q, made.kv, made.layer, made.batch)
    lse = torch.full(made.q.shape[:2], float("nan"))
    assert relative_error(run(build(offer), made, lse=lse), truth) < BOUND
    seen = torch.isfinite(true_lse)
    assert torch.equal(lse[~seen], torch.full_like(lse[~seen], float("-inf")))
    assert relative_error(lse[seen], true_lse[seen]) < 1e-4
    assert all(call["return_softmax_lse"] is True for call in library.called(PATH))


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("head_dim", [64, 80, 256])
@pytest.mark.parametrize("step", STEPS)
def test_every_step_row_by_row_equals_the_reference(step, head_dim, dtype, library):
    """Other head dims, and fp16."""
    torch_dtype = {"fp16": torch.float16, "bf16": BF16}[dtype]
    made = make_batch(**STEPS[step], layer=layer(head_dim), page_size=128, dtype=torch_dtype)
    truth, _ = reference_attention(made.q, made.kv, made.layer, made.batch)
    assert relative_error(run(build(ROWS, dtype=dtype), made), truth) < BOUND


def test_rows_of_one_query_share_a_call_and_others_have_their_own(library):
    """A decode step is one call, whatever its rows."""
    backend = build(ROWS)
    run(backend, make_batch([1, 0, 1, 1], [9, 0, 140, 33], layer=LAYER, phase="decode", page_size=128, dtype=BF16))
    run(backend, make_batch([3, 1, 2], [9, 140, 33], layer=LAYER, page_size=128, dtype=BF16))
    assert [call["actual_seq_qlen"] for call in library.called(PATH)] == [[1, 1, 1], [3], [1], [2]]
    assert [call["actual_seq_kvlen"] for call in library.called(PATH)] == [[9, 140, 33], [9], [140], [33]]


@pytest.mark.parametrize("phase", PHASES)
def test_every_phase_is_served_at_192_too(phase, library):
    """Draft phases follow their halves."""
    made = make_batch([1, 1], [8, 190], layer=layer(192), phase=phase, page_size=128, dtype=BF16)
    truth, _ = reference_attention(made.q, made.kv, made.layer, made.batch)
    assert relative_error(run(build(PACKED_192), made), truth) < BOUND


def test_the_caches_are_handed_over_as_they_lie(library):
    """No copy of a cache, and none of a table without holes."""
    made = make_batch([2, 1], [20, 140], layer=LAYER, page_size=128, dtype=BF16)
    run(build(), made)
    (call,) = library.called(PATH)
    assert call["key"].data_ptr() == made.kv.k.data_ptr()
    assert call["value"].data_ptr() == made.kv.v.data_ptr()
    assert call["block_table"].data_ptr() == made.batch.index.page_table.data_ptr()
    assert (call["actual_seq_qlen"], call["actual_seq_kvlen"]) == ([2, 3], [20, 140])


@pytest.mark.parametrize("blocks", [2**31 // (128 * 256), 2**31 // (128 * 256) - 1], ids=["2**31", "fewer"])
def test_a_cache_the_library_cannot_count_is_refused(blocks):
    """It counts numbers of a layer in i32; a cache of as many takes no memory where nothing is stored."""
    cache = torch.empty(blocks, 128, 2, 128, dtype=BF16, device="meta")
    request = request_for(PACKED, dtype="bf16")
    if cache.numel() < 2**31:
        assert paged.flat_cache(request, "kv.k", cache).shape == (blocks, 128, 256)
        return
    with pytest.raises(UnsupportedBatch, match=r"needs kv\.k: fewer than 2\*\*31 numbers a layer, got 2147483648"):
        paged.flat_cache(request, "kv.k", cache)


def test_a_window_without_the_causal_rule_bounds_one_side(library):
    """A band, since the mode without a mask reads no bound."""
    made = make_batch([3], [40], layer=layer(window_left=4), page_size=128, dtype=BF16, causal=False)
    run(build(), made)
    (call,) = library.called(PATH)
    assert (call["sparse_mode"], call["pre_tokens"], call["next_tokens"]) == (4, 4, 2147483647)


def test_a_step_without_live_rows_calls_nothing(library):
    """Zero rows, and rows that are all pads."""
    backend = build()
    for q_lens, kv_lens in (([], []), ([0, 0], [0, 0])):
        made = make_batch(q_lens, kv_lens, layer=LAYER, page_size=128, dtype=BF16, pad_tokens=2)
        out, lse = torch.full_like(made.q, float("nan")), torch.zeros(2, 4)
        assert torch.equal(run(backend, made, out=out, lse=lse), torch.zeros_like(out))
        assert bool((lse == float("-inf")).all())
    assert library.calls == []


def test_a_state_is_brought_up_to_date_in_place(library):
    """Whoever kept a state sees the new step."""
    backend = build()
    state = backend.plan(make_batch([1], [9], layer=LAYER, page_size=128, dtype=BF16).batch)
    second = make_batch([1, 2], [9, 30], layer=LAYER, page_size=128, dtype=BF16).batch
    assert backend.plan(second, state=state) is state
    assert (state.batch, state.rows.kv_lens) == (second, [9, 30])


REFUSED = {
    "per_row": ({"causal": [True]}, "causal"),
    "left_padding": ({"kv_starts": [2]}, "kv_starts"),
    "csr": ({"index_form": "csr"}, "index"),
    "tree": ({"tree": make_tree([3], [9], "qlen"), "phase": "verify"}, "tree"),
    "page_size": ({"page_size": 256}, "page_size"),
    "no-host-lens": ({"host_lens": False}, "host_lens"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_step_that_is_not_declared_is_refused_in_plan(case, library):
    """Nothing is dropped, and the library is not asked."""
    fields, named = REFUSED[case]
    made = make_batch(**{"q_lens": [3], "kv_lens": [9], "page_size": 128} | fields, layer=LAYER, dtype=BF16)
    with pytest.raises(UnsupportedBatch, match=f"needs {named}"):
        build().plan(made.batch)
    with pytest.raises(UnsupportedBatch, match="needs capture"):
        build().plan(make_batch([3], [9], layer=LAYER, page_size=128, dtype=BF16).batch, capture=True)
    assert library.calls == []


def test_more_rows_than_one_call_takes_are_refused(library, monkeypatch):
    """The library bounds its lists of lengths."""
    assert paged.MOST_ROWS == 4096
    monkeypatch.setattr(paged, "MOST_ROWS", 2)
    made = make_batch([1] * 3, [1] * 3, layer=LAYER, phase="decode", page_size=128, dtype=BF16)
    with pytest.raises(UnsupportedBatch, match="needs num_rows: at most 2, got 3 with queries"):
        build().plan(made.batch)


def test_a_call_that_is_not_declared_is_refused_in_forward(library):
    """Caches in other orders, new tokens beside the cache, a rotary part, a selection, a mask the row does not have."""
    made = make_batch([3], [9], layer=LAYER, page_size=128, dtype=BF16)
    _kv, new = split_new(made)
    for named, options in {
        "new": {"new": new},
        "q_rope: None": {"q_rope": made.q},
        "indices": {"indices": torch.zeros(3, 2, dtype=torch.int32)},
    }.items():
        with pytest.raises(UnsupportedBatch, match=f"needs {named}"):
            run(build(), made, **options)
    for form in ("hnd", "interleaved"):
        other = make_batch([3], [9], layer=LAYER, page_size=128, dtype=BF16, cache_form=form)
        with pytest.raises(UnsupportedBatch, match=r"needs kv\.k: a contiguous cache"):
            run(build(), other)
    with pytest.raises(UnsupportedBatch, match="needs softcap"):
        run(build(), replace(made, layer=layer(softcap=30.0)))
    with pytest.raises(UnsupportedBatch, match="needs window"):
        run(build(ROWS), replace(made, layer=layer(window_left=4)))
    assert library.calls == []


@pytest.mark.parametrize(
    ("offer", "changes", "named"),
    [
        (PACKED, {"dtype": "fp16"}, "dtype"),
        (PACKED, {"kv_dtype": "e4m3fn"}, "kv_dtype"),
        (PACKED, {"page_size": 64}, "page_size"),
        (PACKED, {"layers": (layer(64),)}, "head_dim"),
        (PACKED, {"layers": (layer(alibi=torch.ones(4)),)}, "alibi"),
        (PACKED, {"layers": (layer(sinks=torch.ones(4)),)}, "sinks"),
        (PACKED_192, {"layers": (layer(192, sinks=torch.ones(4, dtype=BF16)),)}, "sinks"),
        (ROWS, {"layers": (layer(sinks=torch.ones(4, dtype=BF16)),)}, "sinks"),
        (ROWS, {"layers": (layer(window_left=4),)}, "window"),
        (PACKED, {"layers": (layer(num_qo_heads=264, num_kv_heads=8),)}, "num_qo_heads: at most 256"),
        (PACKED, {"layers": (layer(num_qo_heads=65, num_kv_heads=1),)}, "query heads a KV head: at most 64"),
        (ROWS, {"layers": (layer(256, num_qo_heads=256, num_kv_heads=256),)}, "num_kv_heads"),
    ],
)
def test_a_build_that_is_not_declared_is_refused_without_the_library(offer, changes, named):
    """The library is imported last: there is none here."""
    with pytest.raises(UnsupportedBatch, match=f"needs {named}"):
        build(offer, **changes)
