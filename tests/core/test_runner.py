"""Errors against float64 are kept by phase, the worst of each."""

from __future__ import annotations

import pytest
import torch

from backstamp.attention import Batch, KVIndex, LayerSpec, PagedKV
from backstamp.testing.runner import PhaseErrors

LAYER = LayerSpec(layer_id=0, num_qo_heads=1, num_kv_heads=1, head_dim=4, v_head_dim=4, scale=0.5)


def observe(errors: PhaseErrors, phase: str, answer: float) -> None:
    """One call whose right answer is 1 everywhere."""
    batch = Batch(
        phase=phase,
        num_rows=1,
        num_tokens=1,
        max_q_len=1,
        max_kv_len=1,
        qo_indptr=torch.tensor([0, 1]),
        kv_lens=torch.tensor([1]),
        index=KVIndex(page_size=4, page_table=torch.tensor([[0]])),
    )
    kv = PagedKV(k=torch.ones(1, 4, 1, 4), v=torch.ones(1, 4, 1, 4))
    errors(phase, LAYER, torch.ones(1, 1, 4), kv, batch, torch.full((1, 1, 4), answer))


def test_phase_errors_keep_the_worst_of_each_phase() -> None:
    """A phase that is a tenth too loud once is seen there and only there."""
    errors = PhaseErrors()
    for phase, answer in (("decode", 1.0), ("decode", 1.1), ("decode", 1.0), ("prefill", 1.0)):
        observe(errors, phase, answer)
    assert errors.worst == {"decode": pytest.approx(0.1, rel=1e-4), "prefill": 0.0}


def test_phase_errors_hold_on_to_nan_and_stop_after_their_sample() -> None:
    """NaN is the worst error there is; calls past the sample are not compared."""
    errors = PhaseErrors(calls_per_phase=2)
    for answer in (float("nan"), 1.0, 9.0):
        observe(errors, "decode", answer)
    assert errors.worst["decode"] != errors.worst["decode"]
    errors = PhaseErrors(calls_per_phase=1)
    for answer in (1.0, 9.0):
        observe(errors, "decode", answer)
    assert errors.worst == {"decode": 0.0}
