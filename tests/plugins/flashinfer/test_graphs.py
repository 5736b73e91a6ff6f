"""States a CUDA graph records: the same wrapper and buffers, planned anew before every replay."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

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
