"""States a CUDA graph records: the same wrapper and buffers, planned anew before every replay."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backstamp.errors import UnsupportedBatch
from tests.libraries.fake import FakeLibrary
from tests.plugins.flashinfer.steps import CHAIN, LAYER, ONE, SINK, build, draw, forward, held, with_lens


@pytest.mark.parametrize("layer", [LAYER, replace(SINK, window_left=6)], ids=["plain", "window-sinks"])
@pytest.mark.parametrize("rows", [ONE, ((3, 30), (3, 17), (3, 3))], ids=["decode", "chain"])
def test_a_recorded_step_replays_with_other_lengths(
    library: FakeLibrary, rows: tuple[tuple[int, int], ...], layer: object
) -> None:
    """The same wrapper and buffers, planned anew; rows without queries own pad tokens that see nothing."""
    step = draw(rows, layer, phase="decode" if rows == ONE else "verify")  # type: ignore[arg-type]
    step = replace(step, batch=replace(step.batch, max_kv_len=512))
    backend = build(step)
    backend.init_graphs(len(rows), step.batch.num_tokens)
    state = backend.plan(step.batch, capture=True)
    held(forward(backend, step, state), step)
    made = [call.path for call in library.calls if call.path.endswith("__init__")]
    size = step.batch.max_q_len
    again = with_lens(step, [max(size, kv - 9) for _, kv in rows])
    assert backend.plan(again.batch, state=state) is state
    backend.replan(state)
    held(forward(backend, again, state), again)
    assert [call.path for call in library.calls if call.path.endswith("__init__")] == made
    # the last row has keys and asks for nothing: its tokens belong to no row
    starts = step.batch.qo_indptr.clone()
    starts[-1] = starts[-2]
    fewer = replace(step.batch, qo_indptr=starts, qo_indptr_host=starts)
    backend.plan(fewer, state=state)
    held(forward(backend, replace(step, batch=fewer), state), replace(step, batch=fewer))


def test_a_shorter_bound_does_not_become_the_recorded_one(library: FakeLibrary) -> None:
    """An engine may bound each replay by its own longest row; the recorded buffers hold the first bound."""
    step = draw(ONE, phase="decode")
    recorded = replace(step, batch=replace(step.batch, max_kv_len=512))
    backend = build(step)
    state = backend.plan(recorded.batch, capture=True)
    for made in (step, recorded):
        backend.plan(made.batch, state=state)
        held(forward(backend, made, state), made)


def test_a_recorded_tree_replays_with_another_tree(library: FakeLibrary) -> None:
    """The recorded buffer gets the new values."""
    step = draw(CHAIN, tree="qlen", phase="verify")
    step = replace(step, batch=replace(step.batch, max_kv_len=512))
    backend = build(step)
    state = backend.plan(step.batch, capture=True)
    held(forward(backend, step, state), step)
    other = draw(CHAIN, tree="qlen", phase="verify", seed=3)
    tree = other.batch.tree
    assert tree is not None
    tree.buffer.copy_(torch.eye(4, dtype=torch.bool))
    backend.plan(other.batch, state=state)
    held(forward(backend, other, state), other)


def test_another_tree_is_read_whichever_layer_comes_first(library: FakeLibrary) -> None:
    """The mask is written once a pass, by the layer that runs first after a plan."""
    step, other = draw(CHAIN, tree="qlen", phase="verify"), draw(CHAIN, tree="qlen", phase="verify", seed=3)
    second = replace(LAYER, layer_id=1)
    backend = build(step, layers=(LAYER, second))
    state = backend.plan(step.batch, capture=True)
    held(forward(backend, step, state), step)
    tree = other.batch.tree
    assert tree is not None
    tree.buffer.copy_(torch.eye(4, dtype=torch.bool))
    backend.plan(other.batch, state=state)
    held(forward(backend, replace(other, layer=second), state), other)


def test_a_kind_that_did_not_run_before_the_next_plan_is_refused(library: FakeLibrary) -> None:
    """Its wrapper holds the first lengths: the captured step drops it, and plans nothing more."""
    step = draw(ONE, phase="decode")
    step = replace(step, batch=replace(step.batch, max_kv_len=512))
    other = replace(step, layer=replace(LAYER, layer_id=1, window_left=6))
    backend = build(step, layers=(LAYER, other.layer))
    state = backend.plan(step.batch, capture=True)
    held(forward(backend, step, state), step)
    lens = [max(1, kv - 9) for _, kv in ONE]
    again = with_lens(step, lens)
    backend.plan(again.batch, state=state)
    held(forward(backend, again, state), again)
    with pytest.raises(UnsupportedBatch, match=r"a kind that ran before the step was planned again.*layer 1"):
        forward(backend, replace(again, layer=other.layer), state)


@pytest.mark.parametrize("runs", [0, 2], ids=["none-ran", "both-ran"])
def test_kinds_that_ran_alike_are_all_planned_again(library: FakeLibrary, runs: int) -> None:
    """Both of them, or none: a capture may follow the second plan."""
    step = draw(ONE, phase="decode")
    step = replace(step, batch=replace(step.batch, max_kv_len=512))
    layers = (LAYER, replace(LAYER, layer_id=1, window_left=6))
    backend = build(step, layers=layers)
    state = backend.plan(step.batch, capture=True)
    for layer in layers[:runs]:
        held(forward(backend, replace(step, layer=layer), state), replace(step, layer=layer))
    again = with_lens(step, [max(1, kv - 9) for _, kv in ONE])
    backend.plan(again.batch, state=state)
    for layer in layers:
        held(forward(backend, replace(again, layer=layer), state), replace(again, layer=layer))


def test_what_a_graph_records_is_never_handed_to_another_step(library: FakeLibrary) -> None:
    """An eager state that is planned for capture stays what it was: a dropped one gives its wrappers back."""
    step = draw(ONE, phase="decode")
    step = replace(step, batch=replace(step.batch, max_kv_len=512))
    backend = build(step)
    eager = backend.plan(step.batch)
    recorded = backend.plan(step.batch, state=eager, capture=True)
    assert recorded is not eager
    (wrapper,) = [planned.wrapper for planned in recorded.plans.values()]
    del eager, recorded
    (again,) = [planned.wrapper for planned in backend.plan(step.batch, capture=True).plans.values()]
    assert again is not wrapper


def test_a_step_that_is_refused_leaves_the_recorded_tree_alone(library: FakeLibrary) -> None:
    """What may be refused is looked at first: the graph still replays the step before."""
    step, other = draw(CHAIN, tree="qlen", phase="verify"), draw(CHAIN, tree="qlen", phase="verify", seed=3)
    assert step.batch.tree is not None
    assert other.batch.tree is not None
    backend = build(step)
    state = backend.plan(step.batch, capture=True)
    before = step.batch.tree.buffer.clone()
    other.batch.tree.buffer.copy_(torch.eye(4, dtype=torch.bool))
    narrow = replace(other.batch.index, page_table=other.batch.index.page_table[:, :1])
    with pytest.raises(UnsupportedBatch, match=r"index\.page_table"):
        backend.plan(replace(other.batch, index=narrow), state=state)
    assert torch.equal(step.batch.tree.buffer, before)


def test_a_tree_seen_with_other_strides_at_the_recorded_address_is_refused(library: FakeLibrary) -> None:
    """A mask of wider rows over the same bytes is another mask, and a longer one was not recorded."""
    step = draw(CHAIN, tree="qlen", phase="verify")
    tree = step.batch.tree
    assert tree is not None
    flat = torch.ones(3 * 64, dtype=torch.bool)
    wide, narrow = (replace(tree, buffer=flat[: 3 * size * size].view(3, size, size)) for size in (8, 4))
    backend = build(step)
    state = backend.plan(replace(step.batch, tree=wide), capture=True)
    backend.plan(replace(step.batch, tree=replace(wide, buffer=wide.buffer[:, :4, :4])), state=state)
    with pytest.raises(UnsupportedBatch, match=r"tree\.buffer: strides \(64, 8, 1\).*\(16, 4, 1\)"):
        backend.plan(replace(step.batch, tree=narrow), state=state)
    longer = replace(tree, buffer=torch.ones(3, 9, 9, dtype=torch.bool))
    with pytest.raises(UnsupportedBatch, match=r"tree\.buffer: at most \[3, 8, 8\], as recorded.*9, 9"):
        backend.plan(replace(step.batch, tree=longer), state=state)
