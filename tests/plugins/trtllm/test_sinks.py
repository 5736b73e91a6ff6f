"""Sinks in fp32: converted once into a buffer that stays where it is, and again when they changed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backstamp.attention import LayerSpec
from backstamp.errors import UnsupportedBatch
from backstamp.sink_buffers import SinkBuffers
from backstamp.testing.requests import request_for
from backstamp_trtllm.plugin import FMHA_V2, TRTLLM_MHA, XQA
from tests.plugins.trtllm.cases import Case, build, compare, install, make


def converted(sinks: torch.Tensor) -> tuple[SinkBuffers, torch.Tensor]:
    """Buffers of one layer, and the tensor a kernel reads."""
    layer = layer_with(sinks)
    buffers = buffers_of(layer)
    buffers.update()
    read = buffers.of(layer)
    assert read is not None
    return buffers, read


def layer_with(sinks: torch.Tensor) -> LayerSpec:
    """A layer with sinks."""
    return replace(make(Case(((1, 9),))).layer, sinks=sinks)


def buffers_of(layer: LayerSpec) -> SinkBuffers:
    """The buffers of a backend built for one layer."""
    return SinkBuffers(request_for(XQA, (layer,), dtype="bf16", page_size=16), (torch.float32,))


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
    buffers.refresh_parameters()
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


def test_another_tensor_is_read_through_the_same_buffer() -> None:
    """A reload that puts a new parameter in place: graphs read the recorded address, `plan` follows the new tensor."""
    buffers, read = converted(torch.tensor([1.0, -2.0], dtype=torch.bfloat16))
    for dtype in (torch.bfloat16, torch.float32):
        stored = torch.nn.Parameter(torch.tensor([3.0, 4.0], dtype=dtype), requires_grad=False)
        assert buffers.of(layer_with(stored)) is read
        assert read.tolist() == [3.0, 4.0]
        stored.copy_(torch.tensor([5.0, 6.0]))
        buffers.update()
        assert read.tolist() == [5.0, 6.0]


def test_a_buffer_is_there_before_the_first_step() -> None:
    """`forward` reads it: nothing is allocated or converted there."""
    stored = torch.tensor([1.0, -2.0], dtype=torch.bfloat16)
    buffers = buffers_of(layer_with(stored))
    read = buffers.of(layer_with(stored))
    assert read is not None
    buffers.update()
    assert buffers.of(layer_with(stored)) is read
    stored.add_(1.0)
    assert buffers.of(layer_with(stored)).tolist() == [1.0, -2.0], "the next `plan` converts"


def test_a_layer_without_a_buffer_is_refused_where_it_needs_one() -> None:
    """A layer the object was not built for, another number of heads, a dtype beside sinks that are read in place."""
    strange = torch.tensor([1.0, -2.0], dtype=torch.bfloat16)
    buffers, _ = converted(strange.clone())
    in_place, _ = converted(torch.tensor([1.0, -2.0]))
    for held, layer in (
        (buffers, replace(layer_with(strange), layer_id=7)),
        (buffers, layer_with(torch.zeros(3, dtype=torch.bfloat16))),
        (in_place, layer_with(strange)),
    ):
        with pytest.raises(UnsupportedBatch, match=rf"sinks of layer {layer.layer_id}: those the object was built"):
            held.of(layer)
    other = layer_with(torch.tensor([1.0, -2.0]))
    assert in_place.of(other) is other.sinks


def test_buffers_made_in_inference_mode_are_written_outside_it() -> None:
    """An engine may build in one mode and plan in another."""
    with torch.inference_mode():
        buffers, read = converted(torch.tensor([1.0, -2.0], dtype=torch.bfloat16))
    buffers.refresh_parameters()
    assert read.tolist() == [1.0, -2.0]


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
