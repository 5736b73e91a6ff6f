"""Absorbed MLA through torch-npu's fused attention, held against its schema, its documented rules and float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backstamp.attention import LayerSpec, PagedKV
from backstamp.declarations import PHASES
from backstamp.errors import UnsupportedBatch
from backstamp.testing.batches import make_batch
from backstamp.testing.reference import reference_attention, relative_error
from backstamp.testing.requests import request_for
from backstamp_ascend import latent
from backstamp_ascend.backend import build_latent
from backstamp_ascend.plugin import LATENT
from tests.libraries.fake import FakeLibrary
from tests.plugins.ascend.behave import fused_attention

PATH = "torch_npu:npu_fused_infer_attention_score_v2"
LAYER = LayerSpec(layer_id=0, num_qo_heads=8, num_kv_heads=1, head_dim=576, v_head_dim=512, scale=192**-0.5)
BF16 = torch.bfloat16
BOUND = 5e-3


@pytest.fixture
def library(monkeypatch):
    """torch-npu's recorded functions, computing with torch."""
    library = FakeLibrary("torch-npu", monkeypatch)
    library.on(PATH, fused_attention)
    return library


def build(**changes):
    return build_latent(request_for(LATENT, **({"dtype": "bf16", "layout": "rows", "page_size": 16} | changes))).backend


def step(q_lens, kv_lens, phase="decode", page_size=16, **more):
    return make_batch(
        q_lens, kv_lens, phase=phase, page_size=page_size, **({"dtype": BF16} | more), layer=LAYER, cache_form="latent"
    )


def apart(made):
    """The same cache in the layout the library takes."""
    k = made.kv.k
    return PagedKV(k=k[..., :512].contiguous(), v=k[..., 512:].contiguous(), layout="latent_rope")


def run(backend, made, **options):
    return backend.forward(made.q, made.kv, LAYER, backend.plan(made.batch), **options)


STEPS = {
    "decode": ([1, 1, 1], [37, 1, 170], {}),
    "holes": ([1, 0, 1, 1], [9, 0, 0, 33], {}),
    "pads": ([1, 1, 0], [20, 5, 0], {"pad_tokens": 2}),
    "verify": ([4, 4], [9, 150], {"phase": "verify"}),
    "prefill": ([40, 1, 16, 0, 17], [40, 33, 150, 0, 90], {"phase": "prefill"}),
    "indirect": ([3, 0, 2], [140, 0, 9], {"phase": "prefill", "index_form": "indirect"}),
}


@pytest.mark.parametrize("layout", ["rows", "latent_rope"])
@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("kind", STEPS)
def test_every_step_equals_the_reference_in_both_layouts(kind, page_size, layout, library):
    """Long rows are cut; stale pages are never handed over as live ones."""
    q_lens, kv_lens, more = STEPS[kind]
    made = step(q_lens, kv_lens, page_size=page_size, **more)
    truth, _ = reference_attention(made.q, made.kv, LAYER, made.batch)
    if layout == "latent_rope":
        made = replace(made, kv=apart(made))
    out = torch.full((made.q.shape[0], 8, 512), float("nan"), dtype=BF16)
    assert run(build(page_size=page_size, layout=layout), made, out=out) is out
    assert relative_error(out, truth) < BOUND
    assert len(library.called(PATH)) == 1


@pytest.mark.parametrize("phase", PHASES)
def test_every_phase_takes_its_rotary_part_apart_in_fp16_too(phase, library):
    """`q_rope` beside a latent query."""
    made = step([2, 1], [9, 33], phase=phase, dtype=torch.float16)
    truth, _ = reference_attention(made.q, made.kv, LAYER, made.batch)
    backend = build(dtype="fp16")
    out = backend.forward(made.q[..., :512], made.kv, LAYER, backend.plan(made.batch), q_rope=made.q[..., 512:])
    assert relative_error(out, truth) < BOUND


def test_a_long_row_is_cut_into_pieces_that_end_at_their_own_token(library):
    """At most 16 queries a piece; each sees the keys up to its last query."""
    made = step([40, 1], [50, 9], phase="prefill")
    run(build(), made)
    (call,) = library.called(PATH)
    assert call["actual_seq_qlen"] == [16, 32, 40, 41]
    assert call["actual_seq_kvlen"] == [26, 42, 50, 9]
    assert torch.equal(call["block_table"][0], call["block_table"][2])


def test_a_cache_in_the_librarys_layout_is_handed_over_as_it_lies(library):
    """No copy of either part."""
    made = step([1, 1], [9, 33])
    kv = apart(made)
    run(build(layout="latent_rope"), replace(made, kv=kv))
    (call,) = library.called(PATH)
    assert call["key"] is call["value"]
    assert (call["key"].data_ptr(), call["key_rope"].data_ptr()) == (kv.k.data_ptr(), kv.v.data_ptr())


def test_a_step_without_live_rows_calls_nothing(library):
    """Zero rows, and rows that are all pads."""
    for made in (step([], []), step([1, 0], [0, 7])):
        out = run(build(), made)
        assert torch.equal(out, torch.zeros_like(out))
    assert library.calls == []


def test_parts_of_other_shapes_or_dtypes_are_refused(library):
    """A latent cache that is not what the layout says."""
    made = step([1], [9])
    kv, backend = apart(made), build(layout="latent_rope")
    for named, wrong in {
        r"kv\.v: \[P, 16, 1, 64\]": replace(kv, v=None),
        r"kv\.k: \[P, 16, 1, 512\]": replace(kv, k=made.kv.k),
        r"kv\.v: \[P, 16, 1, 64\] bf16": replace(kv, v=kv.v.half()),
        r"kv\.k: a contiguous cache": replace(kv, k=made.kv.k[..., :512]),
        r"kv\.layout": made.kv,
    }.items():
        with pytest.raises(UnsupportedBatch, match=f"needs {named}"):
            run(backend, replace(made, kv=wrong))
    with pytest.raises(UnsupportedBatch, match=r"needs q: \[1, 8, 512\], got \[1, 8, 500\]"):
        run(build(), replace(made, q=made.q[..., :500]), q_rope=made.q[..., 500:])
    assert library.calls == []


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layers": (replace(LAYER, num_qo_heads=12),)}, "num_qo_heads: one of 1, 2, 4"),
        ({"layers": (replace(LAYER, num_kv_heads=2),)}, "num_kv_heads: 1"),
        ({"layers": (replace(LAYER, window_left=64),)}, "window"),
        ({"layers": (replace(LAYER, softcap=30.0),)}, "softcap"),
        ({"page_size": 64}, "page_size"),
        ({"dtype": "fp32"}, "dtype"),
    ],
)
def test_a_build_that_is_not_declared_is_refused_without_the_library(changes, named):
    """The library is imported last: there is none here."""
    with pytest.raises(UnsupportedBatch, match=f"needs {named}"):
        build(**changes)


def test_steps_that_are_not_declared_are_refused_in_plan(library, monkeypatch):
    """Without the causal rule a row of several queries has no mask in the library; too many pieces have no call."""
    with pytest.raises(UnsupportedBatch, match="needs causal"):
        build().plan(step([3], [9], phase="prefill", causal=False).batch)
    monkeypatch.setattr(latent, "MOST_ROWS", 2)
    with pytest.raises(UnsupportedBatch, match="at most 2 pieces of 16 queries, got 3"):
        build().plan(step([33], [40], phase="prefill").batch)
    assert library.calls == []
