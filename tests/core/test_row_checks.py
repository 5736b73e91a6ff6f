"""Where a tensor lies and how a vector is laid, held against what an object was built for, the same at every asking."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

from backstamp.row_checks import device_fault, dtype_name, vector_faults
from backstamp.testing.requests import request_for
from tests.resolving import kernel

OFFER = kernel("plain", dtypes=frozenset({"fp32"}))
I32 = "torch.int32"


def on(device: str, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """A tensor of a device that need not be here: it has no numbers."""
    with FakeTensorMode():
        return torch.empty(shape or (2,), dtype=dtype, device=device)


#: The device that was asked for, a tensor's, and whether it is that one.
DEVICES = [
    ("cuda:1", "cuda:0", False),
    ("cuda:1", "cuda:1", True),
    ("cuda:0", "cuda:1", False),
    ("cuda:0", "cuda:0", True),
    ("cuda", "cuda:0", True),
    ("cuda", "cuda:1", True),
    ("cuda:1", "cpu", False),
    ("cuda", "cpu", False),
    ("cpu", "cuda:0", False),
    ("cpu", "cpu", True),
    ("cpu", "meta", False),
    # without a number of its own
    ("meta:1", "meta", True),
    ("cuda:10", "cuda:1", False),
]


@pytest.mark.parametrize(("asked", "found", "is_on"), DEVICES)
def test_a_tensor_lies_on_the_device_an_object_was_built_for(asked: str, found: str, is_on: bool) -> None:
    """Of its number where it has one, of any where it has none; a vector is held to it too."""
    request, tensor = request_for(OFFER, device=asked), on(found)
    faults = () if is_on else (("kv_lens device", asked, found),)
    for _ in range(2):
        assert tuple(device_fault(request, "kv_lens", tensor)) == faults
        assert tuple(vector_faults(request, "kv_lens", tensor, 2, I32)) == faults


def test_no_answer_for_a_device_is_given_for_another() -> None:
    """Answers are kept: each pair of devices has its own, in whatever order they are asked."""
    for asked, found, is_on in (*DEVICES, *reversed(DEVICES)):
        assert (not device_fault(request_for(OFFER, device=asked), "q", on(found))) is is_on


@pytest.mark.parametrize(("found", "is_on"), [("cpu", True), ("cuda:1", False), ("meta", False)])
def test_a_host_vector_lies_on_the_cpu(found: str, is_on: bool) -> None:
    """Whatever device the object was built for."""
    faults = [] if is_on else [("kv_lens_host device", "cpu", found)]
    for device in ("cuda:1", "cuda", "cpu", "meta"):
        request = request_for(OFFER, device=device)
        assert vector_faults(request, "kv_lens_host", on(found), 2, I32, host=True) == faults


def test_a_vector_has_a_stride_of_1_where_it_has_a_second_number() -> None:
    """One number lies nowhere apart; of two, the second would be read elsewhere."""
    request, numbers = request_for(OFFER), torch.zeros(8, dtype=torch.int32)
    assert vector_faults(request, "kv_lens", numbers[::8], 1, I32) == []
    assert vector_faults(request, "kv_lens", numbers[:2], 2, I32) == []
    apart = ("kv_lens", "[2] with a stride of 1", "a stride of 4")
    assert vector_faults(request, "kv_lens", numbers[::4], 2, I32) == [apart]
    elsewhere = ("kv_lens device", "cpu", "meta")
    assert vector_faults(request, "kv_lens", numbers[::4].to("meta").as_strided((2,), (4,)), 2, I32) == [
        apart,
        elsewhere,
    ]


@pytest.mark.parametrize(
    ("tensor", "found"),
    [
        (torch.zeros(2, dtype=torch.int64), "[2] torch.int64"),
        (torch.zeros(2), "[2] torch.float32"),
        (torch.zeros(1, dtype=torch.int32), "[1] torch.int32"),
        (torch.zeros(2, 1, dtype=torch.int32), "[2, 1] torch.int32"),
        (torch.zeros((), dtype=torch.int32), "[] torch.int32"),
    ],
)
def test_a_vector_has_its_size_and_its_dtype(tensor: torch.Tensor, found: str) -> None:
    """One fault names both, and each dtype that would do."""
    request = request_for(OFFER)
    assert vector_faults(request, "starts", tensor, 2, I32) == [("starts", "[2] torch.int32", found)]
    if tensor.dtype is torch.int64:
        assert vector_faults(request, "starts", tensor, 2, I32, "torch.int64") == []
        needed = "[3] torch.int32 or torch.int64"
        assert vector_faults(request, "starts", tensor, 3, I32, "torch.int64") == [("starts", needed, found)]


def test_a_dtype_has_the_name_declarations_have_for_it() -> None:
    """Torch's own where they have none; asked again, the same."""
    for _ in range(2):
        names = [dtype_name(torch.zeros(1, dtype=dtype)) for dtype in (torch.bfloat16, torch.float16, torch.int32)]
        assert names == ["bf16", "fp16", I32]
