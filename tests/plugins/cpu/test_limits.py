"""What the kernels refuse: each refusal names who refuses, what is needed and what was found."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backstamp.attention import KVIndex, TreeMask
from backstamp.errors import BadInput, UnsupportedBatch
from backstamp.testing.batches import SMALL_LAYER, make_batch, split_new
from backstamp.testing.requests import request_for
from backstamp_cpu.backend import build_flex_attention, build_torch_native
from backstamp_cpu.plugin import NATIVE

FACTORIES = {"torch_native": build_torch_native, "flex_attention": build_flex_attention}
REQUEST = request_for(NATIVE, phases=("prefill", "verify"), kv_dtype="fp32")
STEP = make_batch([2, 3], [9, 30])
BOOLS = torch.ones(2, 3, 3, dtype=torch.bool)
INDPTR = torch.tensor([0, 18, 108], dtype=torch.int32)

kernels = pytest.mark.parametrize("kernel", FACTORIES)


def build(kernel, **changes):
    return FACTORIES[kernel](replace(REQUEST, kernel=kernel, **changes)).backend


def refusal(cause) -> str:
    """The message, once it names the kernel, the plugin, the role and two of the parts."""
    error = cause.value
    assert "(plugin cpu)" in error.who
    assert error.needed in error.message
    assert error.found in error.message
    return error.message


BATCHES = {
    "phase": ({"phase": "draft_decode"}, "prefill, verify", "draft_decode"),
    "page-size": ({"index": KVIndex(page_size=8, page_table=torch.zeros(2, 4))}, "page size 16", "8"),
    "no-index": ({"index": KVIndex(page_size=16)}, "page_table", "none of them"),
    "half-an-index": ({"index": KVIndex(page_size=16, kv_indptr=INDPTR)}, "kv_indices", "none of them"),
    "causal-shape": ({"causal": torch.ones(3)}, "causal [2]", "causal [3]"),
    "tree-kind": ({"tree": TreeMask(kind="dense", buffer=BOOLS)}, "full, qlen or packed", "dense"),
    "tree-too-small": ({"tree": TreeMask(kind="qlen", buffer=BOOLS[:, :2, :2])}, "at least 3 tokens", "[2, 2, 2]"),
    "tree-rows": ({"tree": TreeMask(kind="qlen", buffer=BOOLS[:1])}, "qlen tree [2, S, S]", "[1, 3, 3]"),
    "tree-without-indptr": ({"tree": TreeMask(kind="full", buffer=BOOLS.flatten())}, "indptr", "None"),
    "tree-dtype": ({"tree": TreeMask(kind="packed", buffer=BOOLS.flatten(), indptr=INDPTR)}, "uint8", "bool"),
}


@kernels
@pytest.mark.parametrize("batch", BATCHES)
def test_plan_refuses_a_step_it_was_not_built_for(kernel, batch):
    """Before any layer runs, naming needed and found."""
    changes, needed, found = BATCHES[batch]
    with pytest.raises(UnsupportedBatch) as cause:
        build(kernel).plan(replace(STEP.batch, **changes))
    message = refusal(cause)
    assert f"'{kernel}'" in message
    assert needed in cause.value.needed
    assert found in cause.value.found


@kernels
def test_plan_refuses_a_graph_capture(kernel):
    """The offer says graph=never: a capture would freeze host values."""
    with pytest.raises(UnsupportedBatch, match="graph=never"):
        build(kernel).plan(STEP.batch, capture=True)


KV, NEW = split_new(STEP)
WIDE = torch.zeros(5, 4, 40)
CALLS = {
    "q-dtype": ({"q": STEP.q.half()}, "torch.float32", "torch.float16"),
    "q-tokens": ({"q": STEP.q[:4]}, "5, 4, 32", "4, 4, 32"),
    "head-dim": ({"q": WIDE}, "4, 32)", "4, 40)"),
    "q-rope": ({"q_rope": WIDE[..., :4]}, "4, 32)", "4, 36)"),
    "out-dtype": ({"out": torch.zeros(5, 4, 32).half()}, "torch.float32", "torch.float16"),
    "out-shape": ({"out": WIDE}, "5, 4, 32", "5, 4, 40"),
    "lse-dtype": ({"lse": torch.zeros(5, 4).half()}, "torch.float32", "torch.float16"),
    "lse-shape": ({"lse": torch.zeros(4, 5)}, "5, 4)", "4, 5)"),
    "lse-with-sinks": (
        {"lse": torch.zeros(5, 4), "layer": replace(SMALL_LAYER, sinks=torch.zeros(4))},
        "no sinks",
        "sinks and lse",
    ),
    "indices": ({"indices": torch.zeros(5, 2)}, "indices None", "selection"),
    "no-keys": ({"kv": None}, "kv, new or both", "neither"),
    "layout": ({"kv": replace(STEP.kv, layout="vectorized_5d")}, "'rows'", "vectorized_5d"),
    "kv-dtype": ({"kv": replace(STEP.kv, k=STEP.kv.k.half())}, "torch.float32", "torch.float16"),
    "kv-page": ({"kv": replace(STEP.kv, k=STEP.kv.k[:, :8])}, "16, 2, 32", "8, 2, 32"),
    "kv-stride": (
        {"kv": replace(STEP.kv, k=STEP.kv.k.transpose(2, 3).contiguous().transpose(2, 3))},
        "16, 2, 32, 1",
        "16, 2, 32, 2",
    ),
    "v-heads": ({"kv": replace(STEP.kv, v=STEP.kv.v[:, :, :1])}, "V cache", "16, 1, 32"),
    "scale-factors": ({"kv": replace(STEP.kv, k_sf=torch.ones(1))}, "k_sf and v_sf None", "block scale"),
    "head-scales": ({"kv": replace(STEP.kv, k_scale=torch.ones(2))}, "k_scale as one number", "[2]"),
    "new-heads": ({"new": replace(NEW, k=NEW.k[:, :1])}, "new.k [N, 2, 32]", "[5, 1, 32]"),
    "new-rows": ({"new": replace(NEW, kv_indptr=NEW.kv_indptr[:2])}, "kv_indptr [3]", "[2]"),
    "too-few-new": ({"kv": None, "new": NEW}, "exactly 9 new tokens in row 0", "2"),
    "too-many-new": (
        {"new": replace(NEW, kv_indptr=torch.tensor([0, 10, 12]))},
        "at most 9 new tokens in row 0",
        "10",
    ),
    "causal-encoder": ({"layer": replace(SMALL_LAYER, attn_type="encoder")}, "causal False", "causal rows"),
}


@kernels
@pytest.mark.parametrize("call", CALLS)
def test_forward_refuses_what_it_would_have_to_drop(kernel, call):
    """A shape, dtype, layout or option that is not served is named, never ignored."""
    changes, needed, found = CALLS[call]
    arguments = {"q": STEP.q, "kv": STEP.kv, "layer": STEP.layer} | changes
    backend = build(kernel)
    state = backend.plan(STEP.batch)
    with pytest.raises(UnsupportedBatch) as cause:
        backend.forward(state=state, **arguments)
    refusal(cause)
    assert needed in cause.value.needed
    assert found in cause.value.found


def test_flex_attention_refuses_alibi():
    """Only torch_native declares it."""
    backend = build("flex_attention")
    layer, state = replace(SMALL_LAYER, alibi=torch.ones(4)), backend.plan(STEP.batch)
    with pytest.raises(UnsupportedBatch, match="alibi None"):
        backend.forward(STEP.q, STEP.kv, layer, state)


@kernels
@pytest.mark.parametrize(
    ("changes", "found"),
    [({"dtype": "fp64"}, "fp64"), ({"kv_dtype": "nvfp4"}, "nvfp4"), ({"layout": "fp8_ds_mla"}, "fp8_ds_mla")],
    ids=["dtype", "kv-dtype", "layout"],
)
def test_a_request_outside_the_declaration_is_not_built(kernel, changes, found):
    """A factory refuses what its rows do not declare instead of building something near it."""
    with pytest.raises(BadInput) as cause:
        build(kernel, **changes)
    assert cause.value.found == found
    assert "(plugin cpu)" in cause.value.who


@kernels
def test_fields_for_other_kernels_change_nothing(kernel):
    """Write slots are for fused writers, the decode split is for the splitter."""
    backend = build(kernel)
    batch = replace(STEP.batch, num_decode_rows=1, num_decode_tokens=2, slot_mapping=torch.full((5,), -1))
    plain = backend.forward(STEP.q, STEP.kv, STEP.layer, backend.plan(STEP.batch))
    assert torch.equal(backend.forward(STEP.q, STEP.kv, STEP.layer, backend.plan(batch)), plain)
