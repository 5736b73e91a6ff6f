"""What the rows refuse, naming what was needed and what came; and what a replayed step may change."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backstamp.attention import KVIndex, LayerSpec, RaggedKV, TreeMask
from backstamp.errors import UnsupportedBatch
from backstamp.testing.batches import make_batch, split_new
from backstamp.testing.reference import reference_attention, relative_error
from backstamp.testing.requests import request_for
from tests.plugins.fa3.kernels import ROWS, built, factory_of

LAYER = LayerSpec(layer_id=0, num_qo_heads=4, num_kv_heads=2, head_dim=128, v_head_dim=128, scale=128**-0.5)
SINKS = torch.zeros(4, dtype=torch.bfloat16)
STEP = make_batch([2, 3], [9, 30], layer=LAYER, dtype=torch.bfloat16)

BUILDS = {
    "dtype": ("tokenspeed-fa3", {"dtype": "fp32"}, {}, "dtype", "fp32"),
    "fp16-fa3-fwd": ("fa3-fwd", {"dtype": "fp16"}, {}, "dtype", "fp16"),
    "kv-dtype": ("sglang-kernel", {"kv_dtype": "e4m3fn"}, {}, "kv_dtype", "e4m3fn"),
    "layout": ("flash-attn-3", {"layout": "nhd_packed"}, {}, "layout", "nhd_packed"),
    "head-dim": ("tokenspeed-fa3", {}, {"head_dim": 100, "v_head_dim": 100}, "head_dim", "100 and 100"),
    "unlike-dims-tokenspeed": ("tokenspeed-fa3", {}, {"head_dim": 192}, "head_dim", "192 and 128"),
    "head-dim-96-fa4": ("tokenspeed-fa4", {}, {"head_dim": 96, "v_head_dim": 96}, "head_dim", "96 and 96"),
    "head-dim-fa4": ("tokenspeed-fa4-blackwell", {}, {"head_dim": 256, "v_head_dim": 256}, "head_dim", "256 and 256"),
    "softcap-tokenspeed": ("tokenspeed-fa3", {}, {"softcap": 30.0}, "softcap", "layer 0 with softcap"),
    "window-fa3-fwd": ("fa3-fwd", {}, {"window_left": 8}, "window", "layer 0 with window"),
    "sinks-flash-attn-3": ("flash-attn-3", {}, {"sinks": SINKS}, "sinks", "layer 0 with sinks"),
    "alibi": ("sglang-kernel", {}, {"alibi": torch.zeros(4)}, "alibi", "layer 0 with alibi"),
    "page-128-fa4": ("tokenspeed-fa4", {"page_size": 128}, {}, "page_size", "128"),
    "page-16-musa": ("mate", {"page_size": 16}, {}, "page_size", "16"),
}
BATCHES = {
    "tree": ({"tree": TreeMask(kind="qlen", buffer=torch.ones(2, 3, 3, dtype=torch.bool))}, "tree", "qlen"),
    "row-causal": ({"causal": torch.ones(2, dtype=torch.int32)}, "causal", "[2]"),
    "left-padding": ({"kv_starts": torch.zeros(2, dtype=torch.int32)}, "kv_starts", "kv_starts"),
    "page-size": ({"index": KVIndex(page_size=8, page_table=STEP.batch.index.page_table)}, "page_size", "8"),
    "i64-table": ({"index": KVIndex(page_size=16, page_table=STEP.batch.index.page_table.long())}, "int32", "int64"),
    "table-with-gaps": (
        {"index": KVIndex(page_size=16, page_table=STEP.batch.index.page_table.t().contiguous().t())}, "stride", "2",
    ),
    "kv-lens-with-gaps": ({"kv_lens": torch.tensor([9, 0, 30, 0], dtype=torch.int32)[::2]}, "kv_lens", "2"),
    "i64-lens": ({"kv_lens": STEP.batch.kv_lens.long()}, "kv_lens", "int64"),
    "phase": ({"phase": "verify"}, "phase", "verify"),
    "rows": ({"num_rows": 65}, "num_rows", "65"),
}  # fmt: skip


def request(row="sglang-kernel", layer=LAYER, **changes):
    return request_for(ROWS[row], (layer,), **{"dtype": "bf16", "page_size": 16, "phases": ("prefill",), **changes})


@pytest.mark.parametrize("case", BUILDS)
def test_a_factory_refuses_what_its_row_does_not_declare(case):
    """Before the library is imported."""
    row, changes, of_layer, field, found = BUILDS[case]
    page = {"page_size": 64} if row == "mate" else {}
    asked = request(row, replace(LAYER, **of_layer), **{**page, **changes})
    with pytest.raises(UnsupportedBatch) as cause:
        factory_of(ROWS[row])(asked)
    assert field in cause.value.needed
    assert found in cause.value.found


@pytest.mark.parametrize("case", BATCHES)
@pytest.mark.parametrize("row", ["sglang-kernel", "tokenspeed-fa4"])
def test_plan_refuses_a_step_the_row_does_not_declare(case, row, monkeypatch):
    """Before any layer, and nothing is called."""
    changes, needed, found = BATCHES[case]
    with built(row, request(row), monkeypatch) as (backend, calls):
        with pytest.raises(UnsupportedBatch) as cause:
            backend.plan(replace(STEP.batch, **changes))
        assert needed in cause.value.needed
        assert found in cause.value.found
        assert ROWS[row].kernel in cause.value.who
        assert not calls


def test_a_cache_needs_an_index_the_row_reads(monkeypatch):
    """A row that also reads ragged keys plans a step without a page table; its layers may then hand it no cache."""
    index = KVIndex(page_size=16, kv_indptr=STEP.batch.qo_indptr, kv_indices=STEP.batch.kv_lens)
    with built("sglang-kernel", request(), monkeypatch) as (backend, calls):
        state = backend.plan(replace(STEP.batch, index=index))
        with pytest.raises(UnsupportedBatch, match="index: one of page_table"):
            backend.forward(STEP.q, STEP.kv, LAYER, state)
        assert not calls


def test_forward_refuses_what_a_layer_may_not_ask(monkeypatch):
    """An LSE beside sinks, keys in two places, a cache for a build without pages, another dtype."""
    layer = replace(LAYER, sinks=SINKS)
    lse = torch.empty(STEP.q.shape[:2])
    cache, new = split_new(STEP)
    with built("sglang-kernel", request(layer=layer), monkeypatch) as (backend, calls):
        state = backend.plan(STEP.batch)
        for named, call in {
            "lse": lambda: backend.forward(STEP.q, STEP.kv, layer, state, lse=lse),
            "new": lambda: backend.forward(STEP.q, cache, LAYER, state, new=new),
            "kv": lambda: backend.forward(STEP.q, None, LAYER, state),
            "q": lambda: backend.forward(STEP.q.half(), STEP.kv, LAYER, state),
            "q_rope": lambda: backend.forward(STEP.q, STEP.kv, LAYER, state, q_rope=STEP.q[..., :0]),
            "indices": lambda: backend.forward(
                STEP.q, STEP.kv, LAYER, state, indices=torch.zeros(5, 8, dtype=torch.int32)
            ),
            "new.k": lambda: backend.forward(
                STEP.q, None, LAYER, state,
                new=RaggedKV(k=new.k.mT.contiguous().mT, v=new.v, kv_indptr=new.kv_indptr),
            ),
        }.items():  # fmt: skip
            with pytest.raises(UnsupportedBatch) as cause:
                call()
            assert cause.value.needed.startswith(named), cause.value.message
    assert not calls


def test_fa3_fwd_takes_no_cache(monkeypatch):
    """The build has no code for pages."""
    with built("fa3-fwd", request("fa3-fwd"), monkeypatch) as (backend, calls):
        state = backend.plan(STEP.batch)
        with pytest.raises(UnsupportedBatch, match="the row reads no paged cache"):
            backend.forward(STEP.q, STEP.kv, LAYER, state)
    assert not calls


@pytest.mark.parametrize(("page_size", "told"), [(16, False), (32, False), (64, True), (128, True)])
def test_fa3_is_kept_from_loading_whole_pages(page_size, told, monkeypatch):
    """Zeros of left padding: unused slots of a page may hold NaN, and a page of a tile's length is loaded whole."""
    step = make_batch([2, 3], [9, 30], layer=LAYER, dtype=torch.bfloat16, page_size=page_size)
    with built("sglang-kernel", request(page_size=page_size), monkeypatch) as (backend, calls):
        backend.forward(step.q, step.kv, LAYER, backend.plan(step.batch))
    assert (calls[0]["leftpad_k"] is not None) is told
    assert not told or calls[0]["leftpad_k"].tolist() == [0, 0]


def test_the_table_is_cut_to_the_longest_row(monkeypatch):
    """FA3 takes its width for the longest row when it chooses a split: ids past the end are never read either way."""
    with built("sglang-kernel", request(), monkeypatch) as (backend, calls):
        backend.forward(STEP.q, STEP.kv, LAYER, backend.plan(STEP.batch))
    assert calls[0]["page_table"].shape == (2, 2)
    assert STEP.batch.index.page_table.shape == (2, 4)


@pytest.mark.parametrize("row", ["sglang-kernel", "tokenspeed-fa4"])
def test_a_replayed_step_keeps_its_addresses_and_takes_new_values(row, monkeypatch):
    """Copies where the engine's tensors moved; padding tokens are marked on the device, in `plan` and in `replan`."""
    step = make_batch([2, 3], [9, 30], layer=LAYER, dtype=torch.bfloat16, pad_tokens=2)
    other = make_batch([3, 1], [20, 12], layer=LAYER, dtype=torch.bfloat16, pad_tokens=3, seed=1)
    with built(row, request(row), monkeypatch) as (backend, calls):
        state = backend.plan(step.batch, capture=True)
        table = state.page_table.data_ptr()
        assert state.unseen.marks.tolist() == [False] * 5 + [True] * 2
        again = backend.plan(other.batch, state=state)
        assert again is state
        assert state.page_table.data_ptr() == table
        assert state.unseen.marks.tolist() == [False] * 4 + [True] * 3
        out = torch.full((7, 4, 128), float("nan"), dtype=torch.bfloat16)
        lse = torch.full((7, 4), float("nan"))
        backend.forward(other.q, other.kv, LAYER, state, out=out, lse=lse)
        state.batch.qo_indptr.copy_(torch.tensor([0, 1, 2]))
        backend.replan(state)
        assert state.unseen.marks.tolist() == [False] * 2 + [True] * 5
    truth, sums = reference_attention(other.q, other.kv, LAYER, other.batch)
    assert relative_error(out, truth) < 4e-3
    torch.testing.assert_close(lse.double(), sums, atol=2e-3, rtol=2e-3)
    assert calls


@pytest.mark.parametrize("row", ["sglang-kernel", "tokenspeed-fa4"])
def test_a_step_planned_for_capture_after_an_eager_one_marks_anew_at_every_replay(row, monkeypatch):
    """A graph records the marks of the state that was captured: a replay fills those, whatever was planned before."""
    step = make_batch([4, 4], [30, 12], layer=LAYER, dtype=torch.bfloat16)
    starts, lens = torch.tensor([0, 4, 4], dtype=torch.int32), torch.tensor([30, 0], dtype=torch.int32)
    pad = replace(step.batch, qo_indptr=starts, kv_lens=lens, qo_indptr_host=starts.clone(), kv_lens_host=lens.clone())
    with built(row, request(row), monkeypatch) as (backend, _):
        mine = replace(pad, qo_indptr=starts.clone(), kv_lens=lens.clone())
        state = backend.plan(mine, state=backend.plan(mine), capture=True)
        recorded = state.unseen.marks
        assert recorded.tolist() == [False] * 4 + [True] * 4
        assert backend.plan(step.batch, state=state) is state
        assert state.unseen.marks is recorded
        assert recorded.tolist() == [False] * 8
        assert backend.plan(pad, state=state, capture=True) is state
        assert recorded.tolist() == [False] * 4 + [True] * 4


def test_a_table_seen_with_other_strides_at_the_planned_address_is_refused(monkeypatch):
    """One storage viewed anew is not up to date, and a copy would write over what it reads; another address is fine."""
    flat = torch.arange(16, dtype=torch.int32)
    with built("sglang-kernel", request(), monkeypatch) as (backend, _):
        for capture in (True, False):
            state = backend.plan(with_table(flat.view(2, 8)), capture=capture)
            backend.plan(with_table(flat.view(2, 8)[:, :5]), state=state)
            planned = flat.clone()
            with pytest.raises(UnsupportedBatch, match=r"index\.page_table: strides \(8, 1\).*\(4, 1\)"):
                backend.plan(with_table(flat.view(4, 4)), state=state)
            assert torch.equal(flat, planned)
            narrow = backend.plan(with_table(flat.view(2, 8)[:, :2]), capture=capture)
            with pytest.raises(UnsupportedBatch, match=r"index\.page_table: at most 2 page ids"):
                backend.plan(with_table(flat.view(2, 8).clone()), state=narrow)


def with_table(table):
    """A step whose rows may have 64 keys, over a page table."""
    return replace(STEP.batch, max_kv_len=64, index=KVIndex(page_size=16, page_table=table))


def test_a_replayed_step_refuses_another_launch(monkeypatch):
    """Sizes are the graph's."""
    with built("sglang-kernel", request(), monkeypatch) as (backend, _):
        state = backend.plan(STEP.batch, capture=True)
        for changes, named in (
            ({"max_q_len": 4}, "max_q_len"),
            ({"max_kv_len": 31}, "max_kv_len"),
            ({"causal": False}, "causal"),
            ({"num_rows": 1}, "num_rows"),
            ({"index": KVIndex(page_size=16)}, "index"),
        ):
            with pytest.raises(UnsupportedBatch) as cause:
                backend.plan(replace(STEP.batch, **changes), state=state)
            assert cause.value.needed.startswith(named)


def test_musa_captures_nothing(monkeypatch):
    """Its schedule is made outside any graph, anew for each step, and once for layers of one shape."""
    step = make_batch([1, 1], [9, 30], layer=LAYER, dtype=torch.bfloat16, page_size=64, phase="decode")
    asked = request("mate", page_size=64, phases=("decode",))
    with built("mate", asked, monkeypatch) as (backend, calls):
        with pytest.raises(UnsupportedBatch, match="capture"):
            backend.plan(step.batch, capture=True)
        state = backend.plan(step.batch)
        backend.forward(step.q, step.kv, LAYER, state)
        backend.forward(step.q, step.kv, replace(LAYER, layer_id=1), state)
        assert [call.path.partition(":")[2] for call in calls] == [
            "get_scheduler_metadata", "flash_attn_with_kvcache", "flash_attn_with_kvcache",
        ]  # fmt: skip
        backend.forward(step.q, step.kv, LAYER, backend.plan(step.batch, state=state))
    assert len(calls) == 5


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("row", ["sglang-kernel", "tokenspeed-fa4", "mate"])
def test_a_window_is_told_in_the_words_of_the_library(row, causal, monkeypatch):
    """Nothing after self where the causal rule holds; FA4 says None for a side without a bound, the others -1."""
    layer = replace(LAYER, window_left=3)
    page_size = ROWS[row].page_sizes.preferred
    step = make_batch([2, 3], [9, 30], layer=layer, dtype=torch.bfloat16, page_size=page_size, causal=causal)
    with built(row, request(row, layer, page_size=page_size), monkeypatch) as (backend, calls):
        backend.forward(step.q, step.kv, layer, backend.plan(step.batch))
    last = calls[-1] if isinstance(calls[-1], dict) else calls[-1].arguments
    told = last["window_size"] if "window_size" in last else (last["window_size_left"], last["window_size_right"])
    assert told == (3, 0 if causal else None if row == "tokenspeed-fa4" else -1)


def test_fa4_splits_on_blackwell_only(monkeypatch):
    """On Hopper the library refuses more than one pass over the keys."""
    for row, splits in (("tokenspeed-fa4", 1), ("tokenspeed-fa4-blackwell", 0)):
        with built(row, request(row), monkeypatch) as (backend, calls):
            backend.forward(STEP.q, STEP.kv, LAYER, backend.plan(STEP.batch))
            assert calls[0].arguments["num_splits"] == splits


def test_fa4_does_not_split_unlike_head_dims(monkeypatch):
    """It would load pages of 64 whole there, and unused slots may hold NaN."""
    row, layer = "tokenspeed-fa4-blackwell", replace(LAYER, head_dim=192)
    step = make_batch([2, 3], [9, 30], layer=layer, dtype=torch.bfloat16)
    with built(row, request(row, layer), monkeypatch) as (backend, calls):
        backend.forward(step.q, step.kv, layer, backend.plan(step.batch))
    assert calls[0].arguments["num_splits"] == 1


def test_fa4_announces_each_kind_once(monkeypatch, caplog):
    """What is compiled follows the layer and the shape of the batch."""
    told = []
    with built("tokenspeed-fa4", request("tokenspeed-fa4"), monkeypatch) as (backend, _):
        from backstamp_fa3 import cute

        real = cute.compiling
        monkeypatch.setattr(cute, "compiling", lambda *words: told.append(words) or real(*words))
        state = backend.plan(STEP.batch)
        for layer in (LAYER, LAYER, replace(LAYER, window_left=4), LAYER):
            backend.forward(STEP.q, STEP.kv, layer, state)
    assert told == [
        ("fa4", "d128x128 2 heads a KV head paged causal up to 128 query rows"),
        ("fa4", "d128x128 2 heads a KV head paged causal up to 128 query rows window"),
    ]
