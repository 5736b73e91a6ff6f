"""What the binding refuses, by name, before any launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from backstamp.attention import LayerSpec, PagedKV
from backstamp.errors import UnsupportedBatch
from backstamp.testing.batches import MadeStep, split_new
from backstamp_flashinfer.plugin import MHA, MHA_SINKS
from tests.libraries.fake import FakeLibrary
from tests.plugins.flashinfer.steps import LATENT, LAYER, MIXED, ONE, SINK, build, draw, forward, with_lens

NARROW = replace(LAYER, head_dim=96, v_head_dim=96)


@pytest.mark.parametrize(
    ("layer", "changes", "said"),
    [
        (LAYER, {"dtype": "fp32"}, "dtype: bf16 or fp16"),
        (LAYER, {"kv_dtype": "e4m3fn"}, "kv_dtype: same"),
        (LAYER, {"layout": "vectorized_5d"}, "layout: rows"),
        (NARROW, {}, "head_dim of layer 0: 64, 128, 256"),
        (replace(LAYER, alibi=torch.zeros(4)), {}, "alibi: "),
        (replace(LAYER, attn_type="cross"), {}, "cross: "),
        (SINK, {"offer": MHA}, "sinks: "),
        (replace(SINK, softcap=5.0), {"offer": MHA_SINKS}, "softcap: "),
        (replace(LATENT, window_left=5), {}, "window: "),
        (replace(LATENT, softcap=5.0), {}, "softcap: "),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_the_row_does_not_declare_is_not_built(
    library: FakeLibrary, layer: LayerSpec, changes: dict[str, Any], said: str
) -> None:
    """A dtype, a layout, a head dim or a feature."""
    with pytest.raises(UnsupportedBatch) as caught:
        build(draw(MIXED, layer), **changes)
    assert said in caught.value.message
    assert "flashinfer" in caught.value.message


def batch_of(step: MadeStep, **changes: Any) -> MadeStep:
    return replace(step, batch=replace(step.batch, **changes))


STEPS: dict[str, tuple[Callable[[], MadeStep], str]] = {
    "bounds": (lambda: batch_of(draw(MIXED), host_exact=False), "host_lens"),
    "no-host": (lambda: draw(MIXED, host_lens=False), "host_lens"),
    "row-causal": (lambda: draw(((2, 9), (2, 9)), causal=[True, False]), "causal"),
    "left-padding": (lambda: draw(((2, 9),), kv_starts=[1]), "kv_starts"),
    "page-size": (
        lambda: batch_of(draw(MIXED), index=replace(draw(MIXED).batch.index, page_size=32)),
        "page_size: 16",
    ),
    "sinks-tree": (lambda: draw(((2, 9),), SINK, tree="qlen", phase="verify"), "tree: "),
    "mla-tree": (lambda: draw(((2, 9),), LATENT, tree="qlen", phase="verify"), "tree: "),
    "phase": (lambda: batch_of(draw(MIXED), phase="verify"), "phase"),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_the_row_does_not_take_is_refused_at_plan(library: FakeLibrary, name: str) -> None:
    """Nothing is launched, and nothing is dropped."""
    make, said = STEPS[name]
    step = make()
    backend = build(step, page_size=16, **({"phases": ("prefill",)} if name == "phase" else {}))
    library.calls.clear()
    with pytest.raises(UnsupportedBatch) as caught:
        backend.plan(step.batch)
    assert said in caught.value.message
    assert not library.calls


def test_an_uneven_step_is_not_recorded(library: FakeLibrary) -> None:
    """A graph holds rows of one length."""
    step = draw(MIXED)
    with pytest.raises(UnsupportedBatch, match="qo_indptr_host"):
        build(step).plan(step.batch, capture=True)


def test_a_recorded_step_keeps_its_shape(library: FakeLibrary) -> None:
    """Other rows, longer rows and another tree need a state of their own."""
    step = batch_of(draw(ONE), max_kv_len=256)
    backend = build(step)
    state = backend.plan(step.batch, capture=True)
    for other in (batch_of(draw(ONE[:3]), max_kv_len=256), draw(ONE, tree="qlen", phase="verify")):
        with pytest.raises(UnsupportedBatch, match="as recorded"):
            backend.plan(other.batch, state=state)
    with pytest.raises(UnsupportedBatch, match="max_kv_len: at most 256"):
        backend.plan(batch_of(draw(((1, 300), *ONE[1:])), max_kv_len=300).batch, state=state)


@pytest.mark.parametrize("layer", [LAYER, LATENT], ids=["mha", "mla"])
def test_a_row_longer_than_its_pages_is_refused(library: FakeLibrary, layer: LayerSpec) -> None:
    """The longest one alone: the others' pages are all there."""
    step = draw(ONE, layer)
    width = step.batch.index.page_table.shape[1]
    lens = [step.batch.index.page_size * width + 1, 17, 64, 150]
    longer = batch_of(with_lens(step, lens), max_kv_len=max(lens)).batch
    with pytest.raises(
        UnsupportedBatch, match=f"index.page_table: the {width + 1} pages of the longest row, got {width}"
    ):
        build(step).plan(longer)


def test_a_layer_nobody_recorded_is_refused(library: FakeLibrary) -> None:
    """Its plan would come too late for the graph."""
    step = batch_of(draw(ONE), max_kv_len=256)
    backend = build(step)
    state = backend.plan(step.batch, capture=True)
    with pytest.raises(UnsupportedBatch, match="layer 0"):
        forward(backend, replace(step, layer=replace(LAYER, window_left=3)), state)


@pytest.mark.parametrize("layer", [LAYER, LATENT], ids=["mha", "mla"])
def test_a_cache_between_vectors_is_refused(library: FakeLibrary, layer: LayerSpec) -> None:
    """The kernels load vectors of 16 bytes, and a cache is never copied."""
    step = draw(MIXED, layer)
    wide = torch.zeros(*step.kv.k.shape[:3], layer.head_dim + 1, dtype=torch.float16)
    kv = PagedKV(k=wide[..., 1:], v=step.kv.v)
    with pytest.raises(UnsupportedBatch, match=r"kv\.k: an address and strides"):
        forward(build(step), step, kv=kv)


def test_keys_without_a_cache_are_refused_where_there_is_a_tree(library: FakeLibrary) -> None:
    """Its mask is laid out for a cache, and no graph records ragged keys."""
    step = draw(((2, 2), (3, 3)), tree="qlen", phase="verify")
    _, new = split_new(step)
    with pytest.raises(UnsupportedBatch, match="kv: a cache"):
        forward(build(step), step, kv=None, new=new)
    plain = draw(ONE)
    backend = build(plain)
    state = backend.plan(plain.batch, capture=True)
    with pytest.raises(UnsupportedBatch, match="kv: a cache"):
        forward(backend, plain, state, kv=None, new=split_new(plain)[1])
    bare = batch_of(step, index=replace(step.batch.index, page_table=None))
    with pytest.raises(UnsupportedBatch, match="index: the pages"):
        build(step).plan(bare.batch)


def test_a_cache_without_an_index_is_refused(library: FakeLibrary) -> None:
    """Nobody said where its tokens lie."""
    step = batch_of(draw(MIXED), index=replace(draw(MIXED).batch.index, page_table=None))
    with pytest.raises(UnsupportedBatch, match="index: one of csr, indirect, page_table"):
        forward(build(step), step)


def test_tensors_of_a_call_are_held_against_the_row(library: FakeLibrary) -> None:
    """A dtype, a device, scales, new keys beside a cache, an LSE with sinks."""
    step = draw(MIXED)
    backend = build(step)
    state = backend.plan(step.batch)
    _, new = split_new(step)
    for changed, said in (
        ({"q": step.q.float()}, "q: fp16"),
        ({"q": step.q[:, :2]}, "q: ["),
        ({"kv": replace(step.kv, k_scale=2.0)}, "kv.k_scale"),
        ({"kv": PagedKV(k=step.kv.k, v=None)}, "kv.v"),
        ({"q": step.q.to("meta")}, "device"),
    ):
        with pytest.raises(UnsupportedBatch) as caught:
            forward(backend, replace(step, **changed), state)
        assert said in caught.value.message
    with pytest.raises(UnsupportedBatch, match="new: "):
        forward(backend, step, state, new=new)
    sinks = draw(MIXED, SINK)
    with pytest.raises(UnsupportedBatch, match="lse: "):
        forward(build(sinks), sinks, lse=True)
