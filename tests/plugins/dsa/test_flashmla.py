"""Kernel `flashmla`: dense latent attention in launches of one query length, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backstamp.errors import UnsupportedBatch
from backstamp.testing.batches import make_tree
from backstamp.testing.reference import reference_attention
from backstamp.testing.requests import request_for
from backstamp_dsa import dense_steps
from backstamp_dsa.backend import build_flashmla
from backstamp_dsa.plugin import FLASHMLA
from tests.plugins.dsa.cases import check, dsa_layer, latent_step, nan_out
from tests.plugins.dsa.flash_mla import DECODING_METADATA, WITH_CACHE, install

RAGGED = ((5, 5), (1, 200), (0, 0), (5, 150), (0, 9), (70, 70))
DECODE = ((1, 1), (1, 200), (1, 64), (1, 65))
CASES = {
    "prefill": {"rows": RAGGED, "pad_tokens": 2},
    "prefill-non-causal": {"rows": RAGGED, "causal": False},
    "prefill-fp16": {"rows": RAGGED, "dtype": torch.float16},
    "decode": {"rows": DECODE, "phase": "decode"},
    "decode-empty-rows": {"rows": ((1, 30), (0, 0), (1, 3), (0, 7)), "phase": "decode", "pad_tokens": 1},
    "decode-keyless-rows": {"rows": ((1, 30), (1, 0), (1, 3)), "phase": "decode"},
    "verify-keyless-rows": {"rows": ((4, 30), (4, 0)), "phase": "verify"},
    "decode-no-host-lens": {"rows": ((1, 30), (0, 0), (1, 70)), "phase": "decode", "host_lens": False},
    "verify": {"rows": ((4, 4), (4, 140)), "phase": "verify", "host_lens": False},
    "draft-extend": {"rows": ((2, 30), (1, 1), (4, 100)), "phase": "draft_extend"},
    "draft-extend-no-host-lens": {"rows": ((2, 30), (1, 1), (0, 3), (4, 100)), "phase": "draft_extend",
                                  "host_lens": False, "pad_tokens": 3},
    "draft-decode": {"rows": DECODE, "phase": "draft_decode"},
}  # fmt: skip


@pytest.fixture
def library(monkeypatch):
    """The stand-in, and our modules imported over it."""
    monkeypatch.delitem(__import__("sys").modules, "backstamp_dsa.flashmla", raising=False)
    return install(monkeypatch)


def drawn(rows, heads=8, dtype=torch.bfloat16, **changes):
    """A step of pages of 64."""
    return latent_step(rows, dsa_layer(heads), dtype=dtype, page_size=64, **changes)


def built(step, **changes):
    """The object for a step's layer."""
    dtype = "bf16" if step.q.dtype is torch.bfloat16 else "fp16"
    return build_flashmla(request_for(FLASHMLA, (step.layer,), dtype=dtype, **changes)).backend


@pytest.mark.parametrize("case", CASES)
def test_attention_agrees_with_float64(library, case):
    """Ragged, empty and padded steps; pages past a row's end are -1 or hold NaN."""
    step = drawn(**CASES[case])
    backend, out = built(step), nan_out(step)
    lse = torch.full(out.shape[:2], float("nan"))
    state = backend.plan(step.batch)
    for _ in range(2):
        assert backend.forward(step.q, step.kv, step.layer, state, out=out, lse=lse) is out
    check(step, out, *_truths(step, lse))


def _truths(step, lse):
    truth, true_lse = reference_attention(step.q, step.kv, step.layer, step.batch)
    return truth, lse, true_lse


def test_a_query_may_come_with_its_rotary_part_apart(library):
    """The library takes one tensor."""
    step = drawn(DECODE, phase="decode")
    backend, out = built(step), nan_out(step)
    latent, rope = step.q[..., :512].contiguous(), step.q[..., 512:].contiguous()
    backend.forward(latent, step.kv, step.layer, backend.plan(step.batch), out=out, q_rope=rope)
    check(step, out, reference_attention(step.q, step.kv, step.layer, step.batch)[0])


def test_rows_of_one_length_are_one_launch_without_copies_of_the_queries(library):
    """A decode step is one call over the caller's own queries."""
    step = drawn(DECODE, phase="decode")
    batch = replace(step.batch, num_decode_rows=4, num_decode_tokens=4, decode_q_len=1)
    backend = built(step)
    backend.forward(step.q, step.kv, step.layer, backend.plan(batch), out=nan_out(step))
    (call,) = library.called(WITH_CACHE)
    assert call["q"].shape == (4, 1, 8, 576)
    assert call["q"].data_ptr() == step.q.data_ptr()


def test_a_long_prefill_is_cut_into_launches(library, monkeypatch):
    """The library keeps f32 shares of every token of a launch."""
    monkeypatch.setattr(dense_steps, "TOKEN_HEADS_PER_LAUNCH", 8 * 16)
    step = drawn(((40, 70), (9, 9), (9, 100)))
    backend, out = built(step), nan_out(step)
    backend.forward(step.q, step.kv, step.layer, backend.plan(step.batch), out=out)
    check(step, out, reference_attention(step.q, step.kv, step.layer, step.batch)[0])
    assert all(call["q"].shape[0] * call["q"].shape[1] <= 16 for call in library.called(WITH_CACHE))


def test_a_state_planned_again_gets_schedules_of_its_own_lengths(library):
    """The library takes a stale schedule in silence; the stand-in does not."""
    first, second = drawn(DECODE, phase="decode"), drawn(((1, 9), (1, 20), (1, 128), (1, 3)), phase="decode", seed=5)
    backend = built(first)
    state = backend.plan(first.batch)
    backend.forward(first.q, first.kv, first.layer, state, out=nan_out(first))
    table = torch.full_like(first.batch.index.page_table, -1)
    table[:, : second.batch.index.page_table.shape[1]] = second.batch.index.page_table
    again = replace(second.batch, index=replace(second.batch.index, page_table=table))
    # rows of one length, planned without a split: the state of an eager decode loop
    with pytest.raises(UnsupportedBatch, match="state"):
        backend.plan(again, state=state)
    state = backend.plan(first.batch, capture=True)
    out = nan_out(first)
    backend.forward(first.q, first.kv, first.layer, state, out=out)
    check(first, out, reference_attention(first.q, first.kv, first.layer, first.batch)[0])
    schedule = library.called(WITH_CACHE)[-1]["tile_scheduler_metadata"]
    address = schedule.tile_scheduler_metadata.data_ptr()
    backend.plan(again, state=state)
    out = nan_out(second)
    backend.forward(second.q, second.kv, second.layer, state, out=out)
    check(second, out, reference_attention(second.q, second.kv, second.layer, second.batch)[0])
    last = library.called(WITH_CACHE)[-1]["tile_scheduler_metadata"]
    assert last is schedule
    assert last.tile_scheduler_metadata.data_ptr() == address
    assert len(library.called(DECODING_METADATA)) == 2


def uniform(step, q_len):
    """The step's batch, told to be rows of one query length."""
    batch = step.batch
    told = {"num_decode_rows": batch.num_rows, "num_decode_tokens": batch.num_tokens, "decode_q_len": q_len}
    return replace(batch, **told)


def test_an_eager_state_planned_again_for_a_graph_is_captured(library):
    """What the library filled for the eager step is replaced by schedules that later plans write in place."""
    step = drawn(DECODE, phase="decode")
    backend, batch = built(step), uniform(step, 1)
    state = backend.plan(batch)
    backend.forward(step.q, step.kv, step.layer, state, out=nan_out(step))
    assert backend.plan(batch, state=state, capture=True) is state
    out = nan_out(step)
    backend.forward(step.q, step.kv, step.layer, state, out=out)
    eager, recorded = (call["tile_scheduler_metadata"] for call in library.called(WITH_CACHE))
    assert recorded is not eager
    address = recorded.tile_scheduler_metadata.data_ptr()
    lens = torch.tensor([1, 100, 64, 65], dtype=torch.int32)
    backend.plan(replace(batch, kv_lens=lens), state=state)
    again = replace(step, batch=replace(step.batch, kv_lens=lens))
    backend.forward(step.q, step.kv, step.layer, state, out=out)
    check(again, out, reference_attention(step.q, step.kv, step.layer, again.batch)[0])
    last = library.called(WITH_CACHE)[-1]["tile_scheduler_metadata"]
    assert last is recorded
    assert last.tile_scheduler_metadata.data_ptr() == address
    assert len(library.called(DECODING_METADATA)) == 2


def test_a_state_planned_again_keeps_its_causal_rule_and_its_query_length(library):
    """The launch was recorded with both: a step that needs another is refused, not answered by the old rule."""
    step = drawn(((4, 9), (4, 20)), phase="verify")
    backend, batch = built(step), uniform(step, 4)
    state = backend.plan(batch, capture=True)
    with pytest.raises(UnsupportedBatch, match=r"causal.*True, as planned before.*False"):
        backend.plan(replace(batch, causal=False), state=state)
    with pytest.raises(UnsupportedBatch, match=r"decode_q_len.*4, as planned before"):
        backend.plan(replace(batch, decode_q_len=None, num_decode_rows=0), state=state)


def test_a_row_of_one_query_has_no_causal_rule_to_keep(library):
    """It sees every key up to itself either way."""
    step = drawn(DECODE, phase="decode")
    backend, batch = built(step), uniform(step, 1)
    state = backend.plan(batch, capture=True)
    assert backend.plan(replace(batch, causal=False), state=state) is state


def test_padding_tokens_of_a_step_without_rows_are_zeros(library):
    """Nothing is launched, and nothing else would write them."""
    step = drawn((), phase="decode", pad_tokens=3)
    backend, out, lse = built(step), nan_out(step), torch.zeros(3, 8)
    backend.forward(step.q, step.kv, step.layer, backend.plan(step.batch), out=out, lse=lse)
    assert bool((out == 0).all())
    assert bool(torch.isneginf(lse).all())


def test_head_counts_a_captured_step_was_not_made_for_are_refused(library):
    """A schedule cannot be made inside a graph."""
    step = drawn(DECODE, phase="decode")
    backend = built(step)
    state = backend.plan(step.batch, capture=True)
    wide = drawn(DECODE, heads=16, phase="decode")
    with pytest.raises(UnsupportedBatch, match="num_qo_heads"):
        backend.forward(wide.q, wide.kv, wide.layer, state)


@pytest.mark.parametrize("rows", [(), ((0, 0),), ((0, 9), (0, 0))])
def test_a_step_without_tokens_calls_nothing(library, rows):
    """The library refuses a batch of none."""
    step = drawn(rows)
    backend = built(step)
    assert backend.forward(step.q, step.kv, step.layer, backend.plan(step.batch)).shape == (0, 8, 512)
    assert not library.called(WITH_CACHE)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("tree", lambda step: {"tree": make_tree([4, 4], [4, 140], "qlen")}),
        ("host_lens", lambda step: {"qo_indptr_host": None}),
        ("kv_starts", lambda step: {"kv_starts": torch.zeros(2, dtype=torch.int32)}),
        ("causal", lambda step: {"causal": torch.ones(2, dtype=torch.int32)}),
        ("index", lambda step: {"index": replace(step.batch.index, page_table=None)}),
        ("page_size", lambda step: {"index": replace(step.batch.index, page_size=16)}),
    ],
)
def test_a_step_it_does_not_declare_is_refused(library, field, change):
    """Before any launch, by name."""
    step = drawn(((4, 4), (4, 140)))
    backend = built(step)
    with pytest.raises(UnsupportedBatch, match=field):
        backend.plan(replace(step.batch, **change(step)))


def test_a_cache_the_library_would_fault_on_is_refused(library):
    """Its tensor map takes addresses of 16 bytes."""
    step = drawn(((1, 30),), phase="decode")
    backend = built(step)
    flat = torch.zeros(step.kv.k.numel() + 16, dtype=torch.bfloat16)
    odd = flat[4 if flat.data_ptr() % 16 == 0 else 0 :][: step.kv.k.numel()].view(step.kv.k.shape)
    with pytest.raises(UnsupportedBatch, match=r"kv\.k.*multiple of 16 bytes"):
        backend.forward(step.q, replace(step.kv, k=odd), step.layer, backend.plan(step.batch))
