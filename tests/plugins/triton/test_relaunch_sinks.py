"""Layers of one group may keep their sinks in different dtypes, and each runs code that reads its own."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from backstamp_triton import launches
from tests.plugins.triton.test_relaunch import CASES, _planned, kernels

__all__ = ["kernels"]


@pytest.mark.parametrize("reads", ["the kernel", "merge"])
@pytest.mark.parametrize("name", ["decode", "prefill", "latent"])
def test_sinks_of_another_dtype_are_other_code(name: str, reads: str, kernels, monkeypatch) -> None:
    """Of the attention kernel or, where its programs leave shares, of the merge that adds them."""
    if reads == "the kernel":
        monkeypatch.setattr(launches, "split_count", lambda *sizes: 1)
    drawn, backend, state = _planned(CASES[name])
    out = torch.empty(*drawn.q.shape[:2], drawn.layer.v_head_dim, dtype=drawn.q.dtype)
    for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.float32)):
        sinks = torch.zeros(drawn.layer.num_qo_heads, dtype=dtype)
        layer = dataclasses.replace(drawn.layer, layer_id=number, sinks=sinks)
        backend.forward(drawn.q, drawn.kv, layer, state, out=out)
    assert bool(kernels["merge"].first) is (reads == "merge")
    reading = kernels[name if reads == "the kernel" else reads]
    assert (len(reading.first), len(reading.again)) == (2, 1)
