"""What the kernels refuse: each refusal names who refuses, what is needed and what was found."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backstamp.attention import KVIndex, TreeMask
from backstamp.errors import UnsupportedBatch
from backstamp.testing.batches import SMALL_LAYER, make_batch, split_new
from backstamp.testing.requests import request_for
from backstamp_cpu.backend import build_flex_attention, build_torch_native, build_torch_native_rows_alone
from backstamp_cpu.plugin import FLEX_CPU, FLEX_CUDA, NATIVE

FACTORIES = {"torch_native": build_torch_native, "flex_attention": build_flex_attention}
ROWS = {"torch_native": NATIVE, "flex_attention": FLEX_CPU}
STEP = make_batch([2, 3], [9, 30])
BOOLS = torch.ones(2, 3, 3, dtype=torch.bool)
LENS = torch.zeros(2, dtype=torch.int32)
TABLE = STEP.batch.index.page_table
INDPTR = torch.tensor([0, 18, 108], dtype=torch.int32)

kernels = pytest.mark.parametrize("kernel", FACTORIES)


def build(kernel, **changes):
    name = kernel.removesuffix("-rows-alone")
    factory = FACTORIES[name] if name == kernel else build_torch_native_rows_alone
    return factory(request_for(ROWS[name], **({"phases": ("prefill", "verify"), "kv_dtype": "fp32"} | changes))).backend


BATCHES = {
    "phase": ({"phase": "draft_decode"}, "phase: one of prefill, verify", "draft_decode"),
    "page-size": ({"index": KVIndex(page_size=8, page_table=TABLE)}, "page_size: 16 tokens", "8"),
    "float-lens": ({"kv_lens": STEP.batch.kv_lens.float()}, "kv_lens: [2] torch.int32", "float32"),
    "causal-shape": ({"causal": LENS[:1]}, "causal: [2]", "[1]"),
    "kv-starts": ({"kv_starts": LENS[:1]}, "kv_starts: [2]", "[1]"),
    "tree-kind": ({"tree": TreeMask(kind="dense", buffer=BOOLS)}, "tree.kind: full, qlen, packed", "dense"),
    "tree-too-small": ({"tree": TreeMask(kind="qlen", buffer=BOOLS[:, :2, :2])}, "S of at least 3", "[2, 2, 2]"),
    "tree-rows": ({"tree": TreeMask(kind="qlen", buffer=BOOLS[:1])}, "tree.buffer: [2, S, S]", "[1, 3, 3]"),
    "tree-without-indptr": ({"tree": TreeMask(kind="full", buffer=BOOLS.flatten())}, "tree.indptr", "None"),
    "tree-dtype": ({"tree": TreeMask(kind="packed", buffer=BOOLS.flatten(), indptr=INDPTR)}, "uint8", "bool"),
}


@kernels
@pytest.mark.parametrize("batch", BATCHES)
def test_plan_refuses_a_step_it_was_not_built_for(kernel, batch):
    """Before any layer runs, naming needed and found."""
    changes, needed, found = BATCHES[batch]
    with pytest.raises(UnsupportedBatch) as cause:
        build(kernel).plan(replace(STEP.batch, **changes))
    assert f"'{kernel}'" in cause.value.who
    assert needed in cause.value.needed
    assert found in cause.value.found


@kernels
def test_plan_refuses_a_graph_capture(kernel):
    """The offer says graph=never: a capture would freeze host values."""
    with pytest.raises(UnsupportedBatch, match="capture: no CUDA graph"):
        build(kernel).plan(STEP.batch, capture=True)


KV, NEW = split_new(STEP)
WIDE = torch.zeros(5, 4, 40)
CALLS = {
    "q-dtype": ({"q": STEP.q.half()}, "q: fp32", "fp16"),
    "q-tokens": ({"q": STEP.q[:4]}, "q: [5, 4, 32]", "[4, 4, 32]"),
    "head-dim": ({"q": WIDE}, "q: [5, 4, 32]", "[5, 4, 40]"),
    "q-rope": ({"q_rope": WIDE[..., :4]}, "q_rope: None", "[5, 4, 4]"),
    "out-dtype": ({"out": torch.zeros(5, 4, 32).half()}, "torch.float32", "torch.float16"),
    "out-shape": ({"out": WIDE}, "out: [5, 4, 32]", "[5, 4, 40]"),
    "out-device": ({"out": WIDE[..., :32].to("meta")}, "out device: cpu", "meta"),
    "lse-dtype": ({"lse": torch.zeros(5, 4).half()}, "torch.float32", "torch.float16"),
    "lse-shape": ({"lse": torch.zeros(4, 5)}, "lse: [5, 4]", "[4, 5]"),
    "lse-device": ({"lse": torch.zeros(5, 4, device="meta")}, "lse device: cpu", "meta"),
    "lse-with-sinks": (
        {"lse": torch.zeros(5, 4), "layer": replace(SMALL_LAYER, sinks=torch.zeros(4))},
        "without sinks",
        "with sinks",
    ),
    "indices": ({"indices": torch.zeros(5, 2)}, "indices: None", "[5, 2]"),
    "no-keys": ({"kv": None}, "kv: a cache, or `new`", "neither"),
    "layout": ({"kv": replace(STEP.kv, layout="vectorized_5d")}, "'rows'", "vectorized_5d"),
    "kv-dtype": ({"kv": replace(STEP.kv, k=STEP.kv.k.half())}, "kv.k: fp32", "fp16"),
    "kv-page": ({"kv": replace(STEP.kv, k=STEP.kv.k[:, :8])}, "kv.k: [P, 16, 2, 32]", "8, 2, 32]"),
    "kv-stride": (
        {"kv": replace(STEP.kv, k=STEP.kv.k.transpose(2, 3).contiguous().transpose(2, 3))},
        "a last stride of 1",
        "1, 2]",
    ),
    "v-heads": ({"kv": replace(STEP.kv, v=STEP.kv.v[:, :, :1])}, "kv.v: [P, 16, 2, 32]", "16, 1, 32"),
    "scale-factors": ({"kv": replace(STEP.kv, k_sf=torch.ones(1))}, "kv.k_sf and kv.v_sf: None", "block scale"),
    "scale-of-a-plain-cache": ({"kv": replace(STEP.kv, k_scale=0.5)}, "kv.k_scale: None or 1.0", "a scale"),
    "new-heads": ({"new": replace(NEW, k=NEW.k[:, :1])}, "new.k: [N, 2, 32]", "[5, 1, 32]"),
    "new-dtype": ({"new": replace(NEW, k=NEW.k.half())}, "new.k: fp32", "fp16"),
    "new-rows": ({"new": replace(NEW, kv_indptr=NEW.kv_indptr[:2])}, "new.kv_indptr: [3]", "[2]"),
    "too-few-new": ({"kv": None, "new": NEW}, "exactly 9 new tokens in row 0", "2"),
    "too-many-new": (
        {"new": replace(NEW, kv_indptr=torch.tensor([0, 10, 12], dtype=torch.int32))},
        "at most 9 new tokens in row 0",
        "10",
    ),
    "causal-encoder": ({"layer": replace(SMALL_LAYER, attn_type="encoder")}, "causal: False", "a causal step"),
}


@kernels
@pytest.mark.parametrize("call", CALLS)
def test_forward_refuses_what_it_would_have_to_drop(kernel, call):
    """A shape, dtype, layout or option that is not served is named, never ignored."""
    changes, needed, found = CALLS[call]
    backend = build(kernel)
    refused(backend, STEP, changes, needed, found)


def refused(backend, step, changes, needed, found):
    """A layer's call, changed, is refused by this message."""
    arguments = {"q": step.q, "kv": step.kv, "layer": step.layer} | changes
    state = backend.plan(step.batch)
    with pytest.raises(UnsupportedBatch) as cause:
        backend.forward(state=state, **arguments)
    assert needed in cause.value.needed
    assert found in cause.value.found


@kernels
@pytest.mark.parametrize("index", [{}, {"kv_indptr": INDPTR}], ids=["none", "half"])
def test_a_cache_without_an_index_is_refused(kernel, index):
    """The same step with all its keys in `new` needs none."""
    step = replace(STEP, batch=replace(STEP.batch, index=KVIndex(page_size=16, **index)))
    refused(build(kernel), step, {}, "index: one of csr, indirect, page_table", "none of them")


@kernels
@pytest.mark.parametrize("field", ["k_scale", "v_scale"])
def test_a_scale_a_head_is_refused(kernel, field):
    """The gather multiplies a cache by one number."""
    step = make_batch([2], [9], kv_dtype=torch.float8_e4m3fn)
    changes = {"kv": replace(step.kv, **{field: torch.ones(2)})}
    refused(build(kernel, kv_dtype="e4m3fn"), step, changes, f"kv.{field}: one number", "[2]")


def test_flex_attention_refuses_alibi():
    """Only torch_native declares it."""
    changes = {"layer": replace(SMALL_LAYER, alibi=torch.ones(4))}
    refused(build("flex_attention"), STEP, changes, "alibi: ", "with alibi")


@pytest.mark.parametrize("kernel", [*FACTORIES, "torch_native-rows-alone"])
@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"dtype": "fp64"}, "fp64"),
        ({"dtype": "e4m3fn"}, "e4m3fn"),
        ({"kv_dtype": "nvfp4"}, "nvfp4"),
        ({"layout": "fp8_ds_mla"}, "fp8_ds_mla"),
        ({"layers": (replace(SMALL_LAYER, num_qo_heads=5),)}, "5"),
    ],
    ids=["dtype", "fp8-queries", "kv-dtype", "layout", "heads"],
)
def test_a_request_outside_the_declaration_is_not_built(kernel, changes, found):
    """A factory refuses what its rows do not declare instead of building something near it."""
    with pytest.raises(UnsupportedBatch) as cause:
        build(kernel, **changes)
    assert found in cause.value.found
    assert f"'{kernel.removesuffix('-rows-alone')}'" in cause.value.who


def test_compiled_flex_attention_is_not_built_for_another_head_dim():
    """Its CUDA rows say which tiles there are."""
    request = request_for(FLEX_CUDA, (replace(SMALL_LAYER, head_dim=24, v_head_dim=24),), device="cuda:0")
    with pytest.raises(UnsupportedBatch, match="head_dim of layer 0: 16, 32"):
        build_flex_attention(request)


@kernels
def test_fields_for_other_kernels_change_nothing(kernel):
    """Write slots are for fused writers, the decode split is for the splitter."""
    backend = build(kernel)
    batch = replace(STEP.batch, num_decode_rows=1, num_decode_tokens=2, slot_mapping=torch.full((5,), -1))
    plain = backend.forward(STEP.q, STEP.kv, STEP.layer, backend.plan(STEP.batch))
    assert torch.equal(backend.forward(STEP.q, STEP.kv, STEP.layer, backend.plan(batch)), plain)
