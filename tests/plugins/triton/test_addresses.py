"""Caches are described to the copy engine once for each place they lie at, and no description holds their memory."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import pytest
import torch
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from backstamp_triton import latent_launch, prefill_hopper, tile_launch
from backstamp_triton.addresses import MemoryAt
from backstamp_triton.backend import TritonAttention
from backstamp_triton.latent_parts import PANEL
from tests.plugins.triton.cases import Case, build_attention, build_mla, make
from tests.plugins.triton.recorders import Recorder

CASES = {
    "k_desc": Case("long", ((200, 200), (56, 500)), heads=(8, 2), dims=(128, 128), dtype="bf16"),
    "rows_desc": Case("latent", ((1, 64),) * 8, mla=True, heads=(4, 1), dims=(576, 512), dtype="bf16", phase="decode"),
}


@pytest.fixture
def launches(monkeypatch):
    """What the two kernels that take descriptors would be launched with, as on an H100."""
    monkeypatch.setattr(TritonAttention, "_find_chip", lambda self, device: ("9.0", 132))
    prefill, latent = Recorder(prefill_hopper.attend_prefill), Recorder(latent_launch.attend_latent)
    latent.launches = prefill.launches
    monkeypatch.setattr(prefill_hopper, "attend_prefill", prefill)
    monkeypatch.setattr(latent_launch, "attend_latent", latent)
    monkeypatch.setattr(tile_launch, "combine_splits", Recorder(tile_launch.combine_splits))
    return prefill.launches


def _planned(case):
    drawn = make(case)
    backend = (build_mla if case.mla else build_attention)(drawn.request).backend
    return drawn, backend, backend.plan(drawn.batch)


@pytest.mark.parametrize("name", CASES)
def test_a_cache_is_described_once_and_another_anew(name, launches):
    """A later layer, step or cache of the same numbers elsewhere has its own description."""
    drawn, backend, state = _planned(CASES[name])
    k, v = drawn.kv.k, drawn.kv.v
    moved = dataclasses.replace(drawn.kv, k=k.clone(), v=None if v is None else v.clone())
    fewer = dataclasses.replace(drawn.kv, k=k[:-1], v=None if v is None else v[:-1])
    for kv in (drawn.kv, moved, fewer, drawn.kv):
        backend.forward(drawn.q, kv, drawn.layer, state)
    first, second, third, again = (launch[name] for launch in launches)
    assert again is first
    assert (first.base.address, second.base.address) == (k.data_ptr(), moved.k.data_ptr())
    assert third.base.address == first.base.address
    assert third.shape[0] < first.shape[0]


@pytest.mark.parametrize("name", CASES)
def test_a_cache_that_was_described_is_freed(name, launches):
    """An engine that drops its cache gets the memory back while the backend lives."""
    drawn, backend, state = _planned(CASES[name])
    backend.forward(drawn.q, drawn.kv, drawn.layer, state)
    held = weakref.ref(drawn.kv.k)
    assert len(launches) == 1
    # what the recorder kept, and the case itself
    launches.clear()
    drawn.kv = None
    gc.collect()
    assert held() is None


def test_an_address_is_described_as_its_tensor_is():
    """Triton compiles the same kernel for a descriptor of an address as for one of the tensor that lies there."""
    tensor = torch.zeros(64, 576, dtype=torch.bfloat16)
    chip = CUDABackend(GPUTarget("cuda", 90, 32))
    kinds = [
        native_specialize_impl(chip, TensorDescriptor(base, [64, 576], [576, 1], [64, 64], PANEL.value), False, True, 1)
        for base in (tensor, MemoryAt(tensor.data_ptr(), tensor.dtype))
    ]
    assert kinds[0] == kinds[1]
    assert kinds[0][0].startswith("tensordesc<bf16[64, 64]")
