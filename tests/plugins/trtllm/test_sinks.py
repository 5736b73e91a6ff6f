"""Sinks in fp32: converted once into a buffer that stays where it is, and again when they changed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backstamp_trtllm.plugin import FMHA_V2, TRTLLM_MHA, XQA
from backstamp_trtllm.sinks import SinkBuffers
from tests.plugins.trtllm.cases import Case, build, compare, install, make


def converted(sinks: torch.Tensor) -> tuple[SinkBuffers, torch.Tensor]:
    """Buffers of one layer, and the tensor a kernel reads."""
    layer = replace(make(Case(((1, 9),))).layer, sinks=sinks)
    buffers = SinkBuffers([layer])
    buffers.update()
    read = buffers.of(layer)
    assert read is not None
    return buffers, read


def test_an_in_place_write_is_seen_and_the_address_stays() -> None:
    """`copy_` ticks the counter the cache leans on."""
    stored = torch.tensor([1.0, -2.0], dtype=torch.bfloat16)
    buffers, read = converted(stored)
    address = read.data_ptr()
    assert read.dtype is torch.float32
    stored.copy_(torch.tensor([3.0, 4.0]))
    buffers.update()
    assert read.tolist() == [3.0, 4.0]
    assert read.data_ptr() == address


def test_an_unchanged_tensor_is_not_converted_again() -> None:
    """The buffer is left alone while counter and address stand still."""
    buffers, read = converted(torch.tensor([1.0, -2.0], dtype=torch.bfloat16))
    read.fill_(9.0)
    buffers.update()
    assert read.tolist() == [9.0, 9.0]


def test_a_write_through_data_is_stale_until_the_reload_says_so() -> None:
    """`param.data.copy_()` ticks nothing: whoever reloads weights calls `refresh_parameters()`."""
    stored = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.bfloat16))
    buffers, read = converted(stored)
    stored.data.copy_(torch.tensor([3.0, 4.0]))
    buffers.update()
    assert read.tolist() == [1.0, -2.0]
    buffers.refresh()
    assert read.tolist() == [3.0, 4.0]


def test_a_tensor_of_inference_mode_is_converted_each_step() -> None:
    """It has no counter to ask."""
    with torch.inference_mode():
        stored = torch.tensor([1.0, -2.0], dtype=torch.bfloat16)
        buffers, read = converted(stored)
        stored.copy_(torch.tensor([3.0, 4.0]))
        buffers.update()
        assert read.tolist() == [3.0, 4.0]


def test_fp32_sinks_are_read_where_they_are() -> None:
    """Nothing to convert, nothing to copy."""
    stored = torch.tensor([1.0, -2.0])
    _, read = converted(stored)
    assert read is stored


@pytest.mark.parametrize("offer", [XQA, FMHA_V2, TRTLLM_MHA], ids=lambda offer: offer.kernel)
def test_a_backend_refreshes_on_request_and_before_each_step(offer, monkeypatch: pytest.MonkeyPatch) -> None:
    """`plan` sees an in-place write; `refresh_parameters` what no counter saw."""
    install(monkeypatch)
    case = Case(((1, 9), (1, 33)), phase="prefill" if offer is FMHA_V2 else "decode", sinks="bf16")
    step = make(case)
    backend = build(offer, step)
    compare(backend, backend.plan(step.batch), step, case)
    assert step.layer.sinks is not None
    step.layer.sinks.add_(1.5)
    compare(backend, backend.plan(step.batch), step, case)
    step.layer.sinks.data.sub_(2.5)
    backend.refresh_parameters()
    compare(backend, backend.plan(step.batch), step, case)
