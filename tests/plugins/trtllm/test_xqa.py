"""XQA: decode and drafts under masks, against float64, over the library's recorded signature."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backstamp.attention import TreeMask
from backstamp.errors import UnsupportedBatch
from backstamp.testing.batches import make_tree
from backstamp_trtllm.plugin import XQA, XQA_FP8, XQA_WINDOW
from tests.plugins.trtllm.cases import Case, build, check, compare, install, make

PATH = "flashinfer.decode:xqa_batch_decode_with_kv_cache"
ONE = ((1, 1), (1, 17), (1, 300), (1, 64))
SOME = ((1, 1), (0, 0), (1, 17), (1, 0), (0, 33), (1, 300))
CHAIN = ((4, 4), (4, 40), (4, 300), (4, 129))
RAGGED = ((1, 20), (3, 3), (0, 9), (7, 300), (2, 0))

PLAIN = (
    Case(ONE),
    Case(ONE, page_size=64, heads=(8, 2)),
    Case(ONE, page_size=128, heads=(4, 4), dim=128),
    Case(ONE, page_size=32, dtype="fp16"),
    Case(ONE, window=0),
    Case(ONE, window=37),
    Case(ONE, sinks="fp32"),
    Case(ONE, sinks="bf16", window=20),
    Case(ONE, cache="hnd"),
    Case(ONE, cache="interleaved"),
    Case(ONE, strided_out=True),
    Case(ONE, pad_tokens=2),
    Case(SOME),
    Case(SOME, window=37, sinks="fp32", pad_tokens=2),
    Case(SOME, host_lens=False, phase="draft_decode"),
    Case(ONE, phase="draft_decode"),
)
DRAFTS = (
    Case(CHAIN, phase="verify"),
    Case(CHAIN, phase="verify", page_size=64, sinks="bf16"),
    Case(CHAIN, phase="verify", window=37),
    Case(CHAIN, phase="verify", window=1, sinks="fp32"),
    Case(CHAIN, phase="verify", tree="qlen"),
    Case(CHAIN, phase="verify", tree="full"),
    Case(CHAIN, phase="verify", tree="packed", sinks="fp32"),
    Case(RAGGED, phase="verify", host_lens=False),
    Case(((20, 90), (35, 35), (1, 7)), phase="verify", tree="qlen"),
    Case(((20, 90), (35, 35), (1, 7)), phase="verify", tree="packed"),
    Case(RAGGED, phase="draft_extend", pad_tokens=3),
    Case(RAGGED, phase="draft_extend", page_size=64, strided_out=True),
    Case(((100, 130), (2, 2)), phase="draft_extend"),
)


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_steps_of_one_token_a_row_take_the_plain_kernel(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever rows are empty: a row without a token costs no draft kernel."""
    libraries = install(monkeypatch)
    check(XQA if case.window < 0 else XQA_WINDOW, case)
    (call,) = libraries.flashinfer.called(PATH)
    assert call["q_len_per_req"] == 1
    assert call["q_cu_seq_lens"] is None
    assert call["block_tables"].shape[0] == call["query"].shape[0]


@pytest.mark.parametrize("case", DRAFTS, ids=str)
def test_longer_rows_take_the_ragged_kernel_under_a_mask(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains and trees, on the lowest rung that holds the longest row."""
    libraries = install(monkeypatch)
    check(XQA if case.window < 0 else XQA_WINDOW, case)
    (call,) = libraries.flashinfer.called(PATH)
    longest = max(q_len for q_len, _ in case.rows)
    assert call["q_len_per_req"] == next(rung for rung in (8, 32, 128) if rung >= longest)


def test_a_step_without_rows_or_tokens_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The output comes back at once."""
    libraries = install(monkeypatch)
    for rows in ((), ((0, 0), (0, 12))):
        step = make(Case(rows))
        backend = build(XQA, step)
        out = backend.forward(step.q, step.kv, step.layer, backend.plan(step.batch))
        assert tuple(out.shape) == (0, 4, 64)
    assert libraries.flashinfer.called(PATH) == []


@pytest.mark.parametrize("rows", [((1, 30), (1, 5), (1, 64)), ((4, 30), (4, 5), (4, 64))], ids=["decode", "verify"])
def test_a_captured_step_serves_later_lengths_at_the_same_addresses(
    rows: tuple[tuple[int, int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`plan` with a state keeps every tensor of the launch where a graph recorded it."""
    libraries = install(monkeypatch)
    phase = "decode" if rows[0][0] == 1 else "verify"
    case = Case(rows, phase=phase)
    step = make(case)
    backend = build(XQA, step)
    state = backend.plan(step.batch, capture=True)
    compare(backend, state, step, case)
    shorter = step.batch.kv_lens - 1
    step.batch.kv_lens.copy_(shorter)
    step = replace(step, batch=replace(step.batch, kv_lens_host=shorter))
    assert backend.plan(step.batch, state=state) is state
    backend.replan(state)
    compare(backend, state, step, case)
    first, second = libraries.flashinfer.called(PATH)
    for name in ("block_tables", "seq_lens", "workspace_buffer"):
        assert first[name].data_ptr() == second[name].data_ptr(), name


def test_other_lengths_at_other_addresses_are_copied_into_the_captured_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine may hand the next step in tensors of its own."""
    install(monkeypatch)
    case = Case(((4, 30), (4, 50)), phase="verify")
    first, second = make(case), make(replace(case, rows=((4, 9), (4, 41))), seed=3)
    backend = build(XQA, first)
    state = backend.plan(first.batch, capture=True)
    assert backend.plan(second.batch, state=state) is state
    compare(backend, state, second, case)


def test_pages_written_after_planning_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph records `replan`: each of its replays takes the pages that lie in the engine's table then."""
    install(monkeypatch)
    step = make(Case(((1, 30), (0, 5), (1, 64))))
    backend = build(XQA, step)
    state = backend.plan(step.batch, capture=True)
    table = step.batch.index.page_table
    assert state.table.tolist() == table[[0, 2]].tolist()
    table.copy_(table.flip(0))
    backend.replan(state)
    assert state.table.tolist() == table[[0, 2]].tolist()


def test_a_tree_filled_after_planning_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's tree kernel writes the buffer between `plan` and the first layer."""
    install(monkeypatch)
    case = Case(CHAIN, phase="verify", tree="qlen")
    step = make(case)
    assert step.batch.tree is not None
    filled = step.batch.tree.buffer.clone()
    step.batch.tree.buffer.zero_()
    backend = build(XQA, step)
    state = backend.plan(step.batch)
    step.batch.tree.buffer.copy_(filled)
    compare(backend, state, step, case)


def test_each_step_reads_its_own_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that is planned again forgets the mask of the step before."""
    install(monkeypatch)
    case = Case(CHAIN, phase="verify", tree="qlen")
    step = make(case)
    backend = build(XQA, step)
    state = backend.plan(step.batch)
    compare(backend, state, step, case)
    q_lens, kv_lens = zip(*CHAIN, strict=True)
    again = replace(step, batch=replace(step.batch, tree=make_tree(q_lens, kv_lens, "qlen", seed=7)))
    backend.plan(again.batch, state=state)
    compare(backend, state, again, case)


def test_the_scales_of_an_fp8_cache_are_folded_into_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """K's scale into the first product, V's into the second."""
    libraries = install(monkeypatch)
    step = make(Case(ONE))
    kv = replace(step.kv, k=step.kv.k.to(torch.float8_e4m3fn), v=step.kv.v.to(torch.float8_e4m3fn))
    backend = build(XQA_FP8, step, kv_dtype="e4m3fn")
    libraries.flashinfer.on(PATH, lambda **arguments: arguments["out"].zero_())
    state = backend.plan(step.batch)
    backend.forward(step.q, replace(kv, k_scale=0.5, v_scale=2.0), step.layer, state)
    backend.forward(step.q, replace(kv, k_scale=torch.tensor(0.5), v_scale=torch.tensor(2.0)), step.layer, state)
    plain, tensors = libraries.flashinfer.called(PATH)
    assert (plain["bmm1_scale"], plain["bmm2_scale"]) == (0.17 * 0.5, 2.0)
    assert float(tensors["bmm1_scale"]) == pytest.approx(0.17 * 0.5)


def test_rows_longer_than_the_ladder_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """XQA is no prefill kernel."""
    install(monkeypatch)
    step = make(Case(((129, 129),), phase="draft_extend"))
    with pytest.raises(UnsupportedBatch, match=r"max_q_len.*128.*129"):
        build(XQA, step).plan(step.batch)


def test_more_query_heads_than_a_tile_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """At build time, before a compile that would fail."""
    install(monkeypatch)
    with pytest.raises(UnsupportedBatch, match=r"num_qo_heads of layer 0.*32.*64"):
        build(XQA, make(Case(ONE, heads=(64, 1))))


def test_a_tree_over_a_window_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel counts windows by row, which no branch of a tree does: no row declares both."""
    install(monkeypatch)
    step = make(Case(CHAIN, phase="verify", tree="qlen", window=37))
    with pytest.raises(UnsupportedBatch, match="window"):
        build(XQA, step)
    with pytest.raises(UnsupportedBatch, match="tree"):
        build(XQA_WINDOW, step).plan(step.batch)


def test_keys_and_values_of_unlike_strides_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel walks both with K's."""
    install(monkeypatch)
    step, other = make(Case(ONE)), make(Case(ONE, cache="hnd"))
    backend = build(XQA, step)
    with pytest.raises(UnsupportedBatch, match="kv strides"):
        backend.forward(step.q, replace(step.kv, v=other.kv.v), step.layer, backend.plan(step.batch))


@pytest.mark.parametrize("change", ["rows", "tokens", "longer", "tree", "empty"])
def test_a_planned_state_refuses_a_step_its_launch_cannot_serve(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grids, masks and silenced rows were fixed by the first plan."""
    install(monkeypatch)
    step = make(Case(((4, 30), (4, 50)), phase="verify"))
    backend = build(XQA, step)
    state = backend.plan(step.batch)
    others = {
        "rows": make(Case(((8, 30),), phase="verify")).batch,
        "tokens": make(Case(((4, 30), (3, 50)), phase="verify")).batch,
        "longer": make(Case(((4, 30), (4, 51)), phase="verify")).batch,
        "tree": replace(step.batch, tree=TreeMask(kind="qlen", buffer=torch.ones(2, 4, 4, dtype=torch.bool))),
        "empty": make(Case(((4, 50), (4, 0)), phase="verify")).batch,
    }
    with pytest.raises(UnsupportedBatch, match="as planned"):
        backend.plan(others[change], state=state)


@pytest.mark.parametrize("known", ["by the engine", "by the mirrors", "by nobody"])
def test_a_captured_launch_of_equal_rows_refuses_rows_of_other_lengths(
    known: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of one token were recorded as rows of the grid; unknown lengths are no yes."""
    install(monkeypatch)
    step = make(Case(((1, 30), (1, 50)), q_len=1))
    backend = build(XQA, step)
    state = backend.plan(step.batch, capture=True)
    backend.plan(replace(step.batch, qo_indptr_host=None, kv_lens_host=None), state=state)
    later = {
        "by the engine": replace(step.batch, decode_q_len=2),
        "by the mirrors": make(Case(((2, 30), (0, 50)))).batch,
        "by nobody": make(Case(((2, 30), (0, 50)), host_lens=False)).batch,
    }[known]
    with pytest.raises(UnsupportedBatch, match="equal q_len: 1, as planned"):
        backend.plan(replace(later, max_q_len=1), state=state)
