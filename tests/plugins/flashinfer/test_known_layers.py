"""What a backend remembers of a layer and its cache between calls never stands in for another's."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from backstamp.attention import LayerSpec, PagedKV
from backstamp.errors import UnsupportedBatch
from backstamp.testing.batches import MadeStep
from tests.libraries.fake import FakeLibrary
from tests.plugins.flashinfer.steps import LATENT, LAYER, MIXED, build, draw, forward, held

LONG = ((200, 200), (3, 64))


def _wide_values(step: MadeStep) -> MadeStep:
    """The same cache with values of other strides than its keys."""
    values = torch.zeros(*step.kv.k.shape[:3], 128, dtype=torch.float16)
    values[..., :64] = step.kv.v
    return replace(step, kv=PagedKV(k=step.kv.k, v=values[..., :64]))


@pytest.mark.parametrize("layer", [LAYER, LATENT], ids=["mha", "mla"])
def test_a_cache_between_vectors_is_refused_after_one_that_was_not(library: FakeLibrary, layer: LayerSpec) -> None:
    """Each cache is held, whatever the layer's last one was."""
    step = draw(MIXED, layer)
    backend = build(step)
    state = backend.plan(step.batch)
    held(forward(backend, step, state), step)
    odd = torch.zeros(step.kv.k.numel() + 1, dtype=torch.float16)[1:].view(step.kv.k.shape)
    with pytest.raises(UnsupportedBatch, match=r"kv\.k"):
        forward(backend, replace(step, kv=replace(step.kv, k=odd)), state)


def test_values_apart_get_a_plan_of_their_own_after_values_that_were_not(library: FakeLibrary) -> None:
    """FA3 steps through both with one stride: the layer's next cache decides anew, either way."""
    step = draw(LONG)
    backend = build(step, hopper=True)
    state = backend.plan(step.batch)
    ran = []
    for cache in (step, _wide_values(step), step):
        held(forward(backend, cache, state), step)
        ran += [planned.route.backend for planned in state.plans.values() if planned.ran]
        for planned in state.plans.values():
            planned.ran = False
    assert ran == ["fa3", "fa2", "fa3"]


def test_a_layer_of_the_same_number_is_another_layer(library: FakeLibrary) -> None:
    """A window that came later is planned, not taken for the layer that had none."""
    step = draw(MIXED)
    backend = build(step)
    state = backend.plan(step.batch)
    for layer in (step.layer, replace(step.layer, window_left=6), step.layer):
        now = replace(step, layer=layer)
        held(forward(backend, now, state), now)


def test_a_cache_that_was_attended_is_freed(library: FakeLibrary) -> None:
    """An engine that drops its cache gets the memory back while the backend lives."""
    step = draw(MIXED)
    backend = build(step)
    kv = PagedKV(k=step.kv.k.clone(), v=step.kv.v.clone())
    forward(backend, step, backend.plan(step.batch), kv=kv)
    gone = weakref.ref(kv)
    del kv
    library.calls.clear()
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("layer", [LAYER, LATENT], ids=["mha", "mla"])
def test_an_lse_with_gaps_is_written_as_a_dense_one(library: FakeLibrary, layer: LayerSpec) -> None:
    """The library writes rows that lie densely: any other LSE is written through such a one."""
    step = draw(MIXED, layer)
    backend, tokens = build(step), step.batch.num_tokens
    state = backend.plan(step.batch)
    dense = forward(backend, step, state, lse=True)
    wide = torch.full((layer.num_qo_heads, tokens), float("nan")).T
    out = torch.empty_like(dense.out)
    backend.forward(step.q, step.kv, layer, state, out=out, lse=wide)
    held(dense, step)
    assert torch.equal(wide, dense.lse)
