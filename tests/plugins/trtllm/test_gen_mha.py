"""trtllm-gen for MHA and GQA against float64: the context function for prefill, the decode function for the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backstamp.errors import UnsupportedBatch
from backstamp_trtllm.plugin import TRTLLM_MHA, TRTLLM_MHA_FP8
from tests.plugins.trtllm.cases import Case, build, check, compare, install, make

DECODE = "flashinfer.decode:trtllm_batch_decode_with_kv_cache"
CONTEXT = "flashinfer.prefill:trtllm_batch_context_with_kv_cache"
PREFILL = ((65, 65), (1, 40), (0, 17), (30, 129), (4, 0))
ONE = ((1, 1), (1, 17), (1, 300))
CHAIN = ((4, 4), (4, 40), (4, 300))
RAGGED = ((1, 20), (3, 3), (0, 9), (7, 300), (2, 0))

CASES = (
    Case(PREFILL, phase="prefill", lse=True),
    Case(PREFILL, phase="prefill", window=37, sinks="bf16", page_size=64),
    Case(PREFILL, phase="prefill", dim=128, heads=(8, 2), page_size=32, pad_tokens=2, lse=True, strided_out=True),
    Case(PREFILL, phase="prefill", dtype="fp16", cache="hnd"),
    Case(ONE, lse=True, q_len=1),
    Case(ONE, window=37, sinks="fp32", host_lens=False),
    Case(ONE, cache="interleaved", strided_out=True, lse=True),
    Case(((1, 5), (0, 0), (1, 0), (1, 30)), lse=True, pad_tokens=1),
    Case(CHAIN, phase="verify", lse=True),
    Case(RAGGED, phase="verify", lse=True, host_lens=False),
    Case(ONE, phase="draft_decode"),
    Case(RAGGED, phase="draft_extend", window=37),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_phase_is_right(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs, and natural-log LSE where the kernel writes base 2."""
    libraries = install(monkeypatch)
    check(TRTLLM_MHA, case)
    assert len(libraries.flashinfer.called(CONTEXT)) == int(case.phase == "prefill")
    assert len(libraries.flashinfer.called(DECODE)) == int(case.phase != "prefill")


def test_equal_rows_go_in_by_their_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged arguments are read only where `q_len_per_req` is None, and its default is 1."""
    libraries = install(monkeypatch)
    check(TRTLLM_MHA, Case(CHAIN, phase="verify"))
    check(TRTLLM_MHA, Case(RAGGED, phase="verify"))
    equal, ragged = libraries.flashinfer.called(DECODE)
    assert (equal["q_len_per_req"], equal["max_q_len"]) == (4, None)
    assert (ragged["q_len_per_req"], ragged["max_q_len"]) == (None, 7)


def test_a_captured_step_serves_later_lengths_at_the_same_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths, pages, counters and workspace stay where a graph recorded them."""
    libraries = install(monkeypatch)
    case = Case(((1, 30), (1, 50)), q_len=1)
    first, second = make(case), make(replace(case, rows=((1, 9), (1, 0))), seed=3)
    backend = build(TRTLLM_MHA, first)
    state = backend.plan(first.batch, capture=True)
    compare(backend, state, first, case)
    assert backend.plan(second.batch, state=state) is state
    compare(backend, state, second, case)
    backend.replan(state)
    compare(backend, state, second, case)
    calls = libraries.flashinfer.called(DECODE)
    for name in ("block_tables", "seq_lens", "workspace_buffer", "multi_ctas_kv_counter_buffer"):
        assert calls[0][name].data_ptr() == calls[1][name].data_ptr(), name


def test_keys_and_values_of_unlike_strides_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes V's strides for K's."""
    install(monkeypatch)
    step, other = make(Case(ONE)), make(Case(ONE, cache="hnd"))
    backend = build(TRTLLM_MHA, step)
    with pytest.raises(UnsupportedBatch, match="kv strides"):
        backend.forward(step.q, replace(step.kv, v=other.kv.v), step.layer, backend.plan(step.batch))


def test_an_fp8_cache_serves_no_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """The context function does not widen keys, so the row does not have the phase."""
    install(monkeypatch)
    step = make(Case(PREFILL, phase="prefill"))
    with pytest.raises(UnsupportedBatch, match="phase"):
        build(TRTLLM_MHA_FP8, step, kv_dtype="e4m3fn").plan(step.batch)


def test_lse_beside_sinks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever merges parts adds the sink once."""
    install(monkeypatch)
    step = make(Case(ONE, sinks="fp32"))
    backend = build(TRTLLM_MHA, step)
    with pytest.raises(UnsupportedBatch, match="lse"):
        backend.forward(step.q, step.kv, step.layer, backend.plan(step.batch), lse=torch.empty(step.q.shape[:2]))
