"""What a declared row does not take of a layer's call is refused before a launch, by a message that names the field."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backstamp.attention import KVIndex
from backstamp.declarations import Offer
from backstamp.errors import UnsupportedBatch
from backstamp.step_checks import check_call
from backstamp.testing.batches import MadeStep, make_batch, split_new
from backstamp.testing.requests import request_for
from tests.core.declared_rows import (
    ABLE,
    BAD_HEADS,
    COMPRESSED,
    FLOAT8,
    LATENT,
    META,
    ONES,
    PLAIN,
    SINKS,
    SPARSE,
    STEP,
    called,
    changed,
    layer,
    planned,
)

KV = STEP.kv
NEW = split_new(STEP)
LSE = torch.empty(5, 4)
WIDE = torch.zeros(5, 4, 64)
#: A step of ragged keys alone.
UNCACHED = changed(index=KVIndex(page_size=16))
FP8_KV = replace(KV, k=KV.k.to(torch.float8_e4m3fn), v=KV.v.to(torch.float8_e4m3fn))
INDICES = torch.zeros(5, 8, dtype=torch.int32)
MLA_LAYER = layer(num_kv_heads=1, v_head_dim=16)
#: Parts of 16 and 32: a swap is another shape.
WIDER_STEP = make_batch([2, 3], [9, 30], layer=replace(MLA_LAYER, head_dim=48), cache_form="latent")
MLA_STEP = make_batch([2, 3], [9, 30], layer=MLA_LAYER, cache_form="latent")
#: Layers of family csa: plain entries, and compressed ones in a cache of shorter pages.
CSA_LAYER = layer(num_kv_heads=1, window_left=7)
CSA_STEP = make_batch([2, 3], [9, 30], layer=CSA_LAYER, cache_form="latent")
CSA_KV = replace(CSA_STEP.kv, v=CSA_STEP.kv.k[:, :4])
CALLS: list[tuple[str, Offer, MadeStep, dict[str, object]]] = [
    ("q:", PLAIN, STEP, {"q": STEP.q[:4]}),
    ("q:", PLAIN, STEP, {"q": STEP.q[..., :16]}),
    ("q:", PLAIN, STEP, {"q": STEP.q.bfloat16()}),
    ("q:", PLAIN, STEP, {"q": STEP.q.transpose(1, 2).contiguous().transpose(1, 2)}),
    ("q device", PLAIN, STEP, {"q": STEP.q.to("meta")}),
    ("q_rope", PLAIN, STEP, {"q": STEP.q[..., :16], "q_rope": STEP.q[..., 16:]}),
    ("window", PLAIN, STEP, {"layer": layer(window_left=3)}),
    ("softcap", PLAIN, STEP, {"layer": layer(softcap=3.0)}),
    ("sinks", PLAIN, STEP, {"layer": layer(sinks=SINKS)}),
    ("out", PLAIN, STEP, {"out": torch.empty(5, 4, 16)}),
    ("out", PLAIN, STEP, {"out": torch.empty(5, 4, 32).half()}),
    ("lse", PLAIN, STEP, {"lse": LSE}),
    ("lse", ABLE, STEP, {"lse": LSE.half()}),
    ("lse", ABLE, STEP, {"lse": LSE, "layer": layer(sinks=SINKS)}),
    ("kv:", PLAIN, STEP, {"kv": None}),
    ("kv:", PLAIN, STEP, {"kv": None, "new": NEW[1]}),
    ("new:", PLAIN, STEP, {"new": NEW[1]}),
    ("new.k", ABLE, STEP, {"new": replace(NEW[1], k=NEW[1].k.half())}),
    ("new.v", ABLE, STEP, {"new": replace(NEW[1], v=NEW[1].v[..., :8])}),
    ("kv.layout", PLAIN, STEP, {"kv": replace(KV, layout="vectorized_5d")}),
    ("kv.k", PLAIN, STEP, {"kv": replace(KV, k=KV.k[:, :8])}),
    ("kv.k", PLAIN, STEP, {"kv": replace(KV, k=KV.k.half())}),
    ("kv.v", PLAIN, STEP, {"kv": replace(KV, v=None)}),
    ("kv.v", LATENT, MLA_STEP, {"kv": replace(MLA_STEP.kv, v=MLA_STEP.kv.k[..., :16])}),
    ("kv.k device", PLAIN, STEP, {"kv": replace(KV, k=KV.k.to("meta"))}),
    ("kv.k_sf", ABLE, STEP, {"kv": replace(KV, k_sf=SINKS)}),
    ("kv.k_scale", ABLE, STEP, {"kv": replace(KV, k_scale=0.5)}),
    ("kv.v_scale", ABLE, STEP, {"kv": replace(KV, v_scale=SINKS)}),
    ("indices", PLAIN, STEP, {"indices": INDICES}),
    ("indices", SPARSE, MLA_STEP, {}),
    ("indices", SPARSE, MLA_STEP, {"indices": INDICES.long()}),
    ("indices", COMPRESSED, CSA_STEP, {"kv": CSA_KV, "indices": INDICES[:4]}),
    ("kv.v", COMPRESSED, CSA_STEP, {"kv": replace(CSA_KV, v=CSA_KV.v[..., :16])}),
    ("kv.v", COMPRESSED, CSA_STEP, {"kv": replace(CSA_KV, v=CSA_KV.v.half())}),
    ("kv.k", COMPRESSED, CSA_STEP, {"kv": replace(CSA_KV, k=CSA_KV.k[:, :4])}),
    ("q: [5, 4, 16]", LATENT, WIDER_STEP, {"q": WIDER_STEP.q[..., 16:], "q_rope": WIDER_STEP.q[..., :16]}),
    ("q: [5, 4, 16]", LATENT, WIDER_STEP, {"q": WIDER_STEP.q[..., :24], "q_rope": WIDER_STEP.q[..., 24:]}),
    ("q_rope: [5, 4, 32]", LATENT, WIDER_STEP, {"q": WIDER_STEP.q[..., :16], "q_rope": WIDER_STEP.q[..., 24:]}),
    ("q_rope: [5, 4, 32]", LATENT, WIDER_STEP, {"q": WIDER_STEP.q[..., :16], "q_rope": WIDER_STEP.q[:4, :, 16:]}),
    ("q_rope: [5, 4, 32]", LATENT, WIDER_STEP, {"q": WIDER_STEP.q[..., :16], "q_rope": WIDER_STEP.q[:, :2, 16:]}),
    ("q_rope: fp32", LATENT, WIDER_STEP, {"q": WIDER_STEP.q[..., :16], "q_rope": WIDER_STEP.q[..., 16:].half()}),
    ("q_rope device", LATENT, WIDER_STEP, {"q": WIDER_STEP.q[..., :16], "q_rope": WIDER_STEP.q[..., 16:].to("meta")}),
    ("causal: False for encoder", ABLE, STEP, {"layer": layer(attn_type="encoder")}),
    ("causal: False for cross", ABLE, STEP, {"layer": layer(attn_type="cross")}),
    ("causal: False for cross", ABLE, changed(causal=ONES), {"layer": layer(attn_type="cross")}),
    *((field, ABLE, STEP, {"layer": layer(**{field: tensor})}) for field in ("sinks", "alibi") for tensor in BAD_HEADS),
    ("out: a last stride", PLAIN, STEP, {"out": WIDE[..., ::2]}),
    ("out device", PLAIN, STEP, {"out": WIDE[..., :32].to("meta")}),
    ("lse", ABLE, STEP, {"lse": LSE[:4]}),
    ("lse device", ABLE, STEP, {"lse": LSE.to("meta")}),
    ("new.k: [N, 2, 32]", ABLE, STEP, {"new": replace(NEW[1], k=NEW[1].k.mT.contiguous().mT)}),
    ("new.v: 5 tokens", ABLE, STEP, {"new": replace(NEW[1], v=NEW[1].v[:4])}),
    ("new.v: fp32", ABLE, STEP, {"new": replace(NEW[1], v=NEW[1].v.half())}),
    ("new.v device", ABLE, STEP, {"new": replace(NEW[1], v=NEW[1].v.to("meta"))}),
    ("new.kv_indptr: [3]", ABLE, STEP, {"new": replace(NEW[1], kv_indptr=ONES)}),
    ("new.kv_indptr: [3]", ABLE, STEP, {"new": replace(NEW[1], kv_indptr=torch.zeros(3, dtype=torch.int64))}),
    ("new.kv_indptr device", ABLE, STEP, {"new": replace(NEW[1], kv_indptr=META)}),
    ("kv.k: [P, 16, 2, 32]", PLAIN, STEP, {"kv": replace(KV, k=KV.k[:, :, :1])}),
    ("kv.v: [P, 16, 2, 32]", PLAIN, STEP, {"kv": replace(KV, v=KV.v[:, :, :1])}),
    ("kv.v: [P, 16, 2, 32]", PLAIN, STEP, {"kv": replace(KV, v=KV.v[..., :16])}),
    ("kv.v: 9 pages", PLAIN, STEP, {"kv": replace(KV, v=KV.v[1:])}),
    ("kv.v device", PLAIN, STEP, {"kv": replace(KV, v=KV.v.to("meta"))}),
    ("index: one of csr", ABLE, UNCACHED, {}),
    ("kv.k_scale: a float", FLOAT8, STEP, {"kv": replace(FP8_KV, k_scale=torch.ones(1).int())}),
    ("kv.v_scale device", FLOAT8, STEP, {"kv": replace(FP8_KV, v_scale=torch.ones(1).to("meta"))}),
]


@pytest.mark.parametrize(
    ("field", "offer", "step", "tensors"), CALLS, ids=[f"{n}-{item[0]}" for n, item in enumerate(CALLS)]
)
def test_a_call_the_row_does_not_serve_is_refused_by_name(
    field: str, offer: Offer, step: MadeStep, tensors: dict[str, object]
) -> None:
    """A mask, a sink or a softcap is never dropped, and a wrong tensor never reaches a launch."""
    with pytest.raises(UnsupportedBatch) as caught:
        called(offer, step, **dict(tensors))
    assert caught.value.needed.startswith(field)
    assert "layer 0" in caught.value.who


def test_sinks_that_changed_since_the_build_are_held_again() -> None:
    """A layer is held to its row when it is built for; what its tensors became is held at each call."""
    sinks = torch.zeros(4)
    spec = layer(sinks=sinks)
    request = request_for(ABLE, (spec,))
    check_call(request, STEP.q, STEP.kv, spec, STEP.batch)
    sinks.resize_(1)
    with pytest.raises(UnsupportedBatch, match="sinks"):
        check_call(request, STEP.q, STEP.kv, spec, STEP.batch)


def test_latent_and_sparse_calls_pass_with_what_they_need() -> None:
    """A rotary part apart, and a selection of keys."""
    called(LATENT, MLA_STEP, q=MLA_STEP.q[..., :16], q_rope=MLA_STEP.q[..., 16:])
    called(SPARSE, MLA_STEP, indices=INDICES)


@pytest.mark.parametrize("attn_type", ["encoder", "cross"])
def test_a_layer_that_looks_both_ways_passes_where_no_key_is_lost(attn_type: str) -> None:
    """A step without the causal rule, or one query a row, which sees every key up to itself."""
    called(ABLE, changed(causal=False), layer=layer(attn_type=attn_type))
    one = make_batch([1, 1], [9, 30], phase="decode")
    called(ABLE, one, layer=layer(attn_type=attn_type))


def test_buffers_longer_than_the_step_pass() -> None:
    """What an adapter keeps for its largest step is read as far as this one goes."""
    longer = torch.zeros(8, dtype=torch.int32)
    step = changed(qo_indptr=longer, kv_lens=longer, qo_indptr_host=longer, kv_lens_host=longer, kv_starts=longer)
    assert planned(ABLE, step, left_padding=True) == "page_table"
    called(ABLE, step, new=replace(NEW[1], kv_indptr=longer), layer=layer(sinks=SINKS, alibi=SINKS))


@pytest.mark.parametrize("cache", ["both", "plain-alone"])
def test_a_compressed_layer_has_a_second_cache_or_none(cache: str) -> None:
    """Its pages hold fewer entries than tokens, and only some layers choose among them."""
    kv = CSA_KV if cache == "both" else CSA_STEP.kv
    called(COMPRESSED, CSA_STEP, kv=kv)
    called(COMPRESSED, CSA_STEP, kv=kv, indices=INDICES)


def test_a_scaled_cache_passes_where_its_dtype_has_scales() -> None:
    """A float8 cache is read with its scales."""
    step = make_batch([2], [9], kv_dtype=torch.float8_e4m3fn)
    request = request_for(ABLE, kv_dtype="e4m3fn")
    check_call(request, step.q, replace(step.kv, k_scale=0.5, v_scale=2.0), step.layer, step.batch)
