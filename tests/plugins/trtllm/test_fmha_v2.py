"""FMHA v2 prefill against float64, over the library's recorded signature and a stand-in that reads whole pages."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backstamp.errors import UnsupportedBatch
from backstamp_trtllm.plugin import FMHA_V2
from tests.plugins.trtllm.cases import Case, build, check, compare, install, make

PATH = "flashinfer.prefill:trtllm_fmha_v2_prefill"
ROWS = ((65, 65), (1, 40), (0, 17), (30, 129), (3, 64))
EMPTY = ((5, 0), (0, 0), (7, 7), (2, 0))

CASES = (
    Case(ROWS),
    Case(ROWS, page_size=64, heads=(8, 2)),
    Case(ROWS, page_size=128, dim=128, heads=(2, 2)),
    Case(ROWS, window=0),
    Case(ROWS, window=37, sinks="fp32"),
    Case(ROWS, window=500),
    Case(ROWS, softcap=5.0),
    Case(ROWS, softcap=5.0, window=20, sinks="bf16"),
    Case(ROWS, cache="hnd"),
    Case(ROWS, cache="interleaved"),
    Case(ROWS, pad_tokens=4, strided_out=True),
    Case(EMPTY),
    Case(EMPTY, page_size=64, pad_tokens=1),
    Case(((16, 16), (32, 32))),
)


@pytest.mark.parametrize("case", [replace(case, phase="prefill") for case in CASES], ids=str)
def test_prefill_is_right_though_unused_slots_hold_nan(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel multiplies the tail of a last page by zero; the engine's cache keeps its own."""
    libraries = install(monkeypatch)
    step = make(case)
    before = step.kv.k.clone()
    backend = build(FMHA_V2, step)
    compare(backend, backend.plan(step.batch), step, case)
    assert len(libraries.flashinfer.called(PATH)) == 1
    torch.testing.assert_close(step.kv.k, before, equal_nan=True)


def test_no_id_of_the_table_lies_past_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past a short last row too: K's blocks are the pool's first half, V's its second."""
    install(monkeypatch)
    step = make(Case(ROWS, phase="prefill"))
    state = build(FMHA_V2, step).plan(step.batch)
    blocks = len(state.page_ids)
    assert int(state.table[:, 0].max()) == blocks - 1
    assert int(state.table[:, 1].max()) == 2 * blocks - 1


@pytest.mark.parametrize("rows", [(), ((0, 0), (0, 12)), ((3, 0),)], ids=["no rows", "no tokens", "no keys"])
def test_a_step_without_work_launches_nothing(
    rows: tuple[tuple[int, int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output comes back at once; tokens that see nothing get zeros."""
    libraries = install(monkeypatch)
    check_zero(Case(rows, phase="prefill"))
    assert libraries.flashinfer.called(PATH) == []


def check_zero(case: Case) -> None:
    """Plan and run a step whose tokens see no key."""
    step = make(case)
    backend = build(FMHA_V2, step)
    out = backend.forward(step.q, step.kv, step.layer, backend.plan(step.batch))
    assert out.shape == step.q.shape
    assert not out.any()


def test_a_window_of_no_key_before_self_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """`window_left` 0 alone is taken for none, so the mask's own name says it."""
    libraries = install(monkeypatch)
    check(FMHA_V2, Case(ROWS, phase="prefill", window=0))
    (call,) = libraries.flashinfer.called(PATH)
    assert (call["mask_mode"], call["window_left"]) == ("sliding_window", 0)


def test_host_lengths_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which pages are gathered is told on the host."""
    install(monkeypatch)
    step = make(Case(ROWS, phase="prefill", host_lens=False))
    with pytest.raises(UnsupportedBatch, match="host_lens"):
        build(FMHA_V2, step).plan(step.batch)


def test_lse_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The paged layout writes no statistics."""
    install(monkeypatch)
    step = make(Case(ROWS, phase="prefill"))
    backend = build(FMHA_V2, step)
    with pytest.raises(UnsupportedBatch, match="lse"):
        backend.forward(step.q, step.kv, step.layer, backend.plan(step.batch), lse=torch.empty(step.q.shape[:2]))
