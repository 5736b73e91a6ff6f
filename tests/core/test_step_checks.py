"""What a declared row does not take is refused before a launch, by a message that names the field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from backstamp.attention import KVIndex, LayerSpec
from backstamp.declarations import Offer, PageSizes
from backstamp.errors import UnsupportedBatch
from backstamp.factories import BuildRequest
from backstamp.step_checks import check_batch, check_build, check_call
from backstamp.testing.batches import SMALL_LAYER, MadeStep, make_batch, make_tree, split_new
from backstamp.testing.requests import request_for

PLAIN = Offer(
    kernel="plain",
    factory="acme.backend:build",
    family="mha",
    device="any",
    archs=("any",),
    phases=frozenset({"prefill", "decode", "verify"}),
    dtypes=frozenset({"fp32"}),
    head_dims=(32,),
    page_sizes=PageSizes(preferred=16, exact=(16,)),
    index_forms=frozenset({"page_table"}),
    mask_format="internal_causal",
)
ABLE = replace(
    PLAIN,
    features=frozenset(
        {"window", "softcap", "sinks", "alibi", "tree_mask", "non_causal", "lse", "split_kv", "encoder", "cross"}
    ),
    kv_forms=frozenset({"paged", "ragged"}),
    index_forms=frozenset({"csr", "page_table", "indirect"}),
    kv_dtypes=frozenset({"same", "e4m3fn"}),
    graph="any",
    sink_dtypes=frozenset({"fp32"}),
)
HOST = replace(PLAIN, inputs=frozenset({"host_lens"}))
LATENT = replace(PLAIN, family="mla", head_dims=((32, 16), (48, 16)))
FLOAT8 = replace(ABLE, kv_dtypes=frozenset({"e4m3fn"}))
#: What only some kernels read: rows of tokens, and slots to write.
READING = replace(PLAIN, inputs=frozenset({"token_rows"}))
WRITING = replace(PLAIN, features=frozenset({"fused_write"}))
SPARSE = replace(LATENT, family="sparse_mla")
COMPRESSED = replace(PLAIN, family="csa", features=frozenset({"window", "indices"}))
STEP = make_batch([2, 3], [9, 30])
SINKS = torch.zeros(4)


def layer(**changes: object) -> LayerSpec:
    """The small layer with changes."""
    return replace(SMALL_LAYER, **changes)


def planned(offer: Offer, step: MadeStep = STEP, *, request: dict[str, object] | None = None, **options: bool) -> str:
    """Check a step against a row."""
    return check_batch(request_for(offer, **(request or {})), step.batch, **options)


def called(offer: Offer, step: MadeStep = STEP, **tensors: object) -> None:
    """Check a layer call against a row; `tensors` replace the step's own."""
    kv, q, spec = tensors.pop("kv", step.kv), tensors.pop("q", step.q), tensors.pop("layer", step.layer)
    stored = "e4m3fn" if offer is FLOAT8 else "same"
    check_call(request_for(offer, kv_dtype=stored), q, kv, spec, step.batch, **tensors)


def test_what_a_row_declares_passes() -> None:
    """A plain step, its build and its call; the answer is the index form to read."""
    check_build(request_for(PLAIN, (SMALL_LAYER,)))
    assert planned(PLAIN) == "page_table"
    called(PLAIN, out=torch.empty(5, 4, 32))


@pytest.mark.parametrize("form", ["page_table", "csr", "indirect"])
def test_the_declared_index_form_is_found(form: str) -> None:
    """An adapter builds the forms that are declared; a kernel reads the one there."""
    step = make_batch([2], [9], index_form=form)
    assert planned(ABLE, step) == form
    if form != "page_table":
        with pytest.raises(UnsupportedBatch, match="index: one of page_table"):
            planned(PLAIN, step)


def test_a_step_without_a_cache_is_for_rows_that_read_ragged_keys() -> None:
    """No index at all: `new` carries every key."""
    step = replace(STEP, batch=replace(STEP.batch, index=KVIndex(page_size=16)))
    assert planned(ABLE, step) == "none"
    with pytest.raises(UnsupportedBatch, match="index"):
        planned(PLAIN, step)


#: Numbers a head that are none: too few, one more dimension, of another kind, apart in memory, somewhere else.
BAD_HEADS = (SINKS[:3], SINKS[None], SINKS.int(), torch.zeros(8)[::2], SINKS.to("meta"))
BUILDS: list[tuple[str, Offer, Callable[[Offer], BuildRequest]]] = [
    ("dtype", PLAIN, lambda offer: request_for(offer, dtype="bf16")),
    ("kv_dtype", PLAIN, lambda offer: request_for(offer, kv_dtype="e4m3fn")),
    ("page_size", PLAIN, lambda offer: request_for(offer, page_size=64)),
    ("layout", PLAIN, lambda offer: request_for(offer, layout="vectorized_5d")),
    ("head_dim", PLAIN, lambda offer: request_for(offer, (layer(head_dim=64),))),
    ("num_qo_heads", PLAIN, lambda offer: request_for(offer, (layer(num_qo_heads=5),))),
    ("window", PLAIN, lambda offer: request_for(offer, (layer(window_left=4),))),
    ("softcap", PLAIN, lambda offer: request_for(offer, (layer(softcap=30.0),))),
    ("sinks", PLAIN, lambda offer: request_for(offer, (layer(sinks=SINKS),))),
    ("alibi", PLAIN, lambda offer: request_for(offer, (layer(alibi=SINKS),))),
    ("encoder", PLAIN, lambda offer: request_for(offer, (layer(attn_type="encoder"),))),
    ("cross", PLAIN, lambda offer: request_for(offer, (layer(attn_type="cross"),))),
    ("sinks", ABLE, lambda offer: request_for(offer, (layer(sinks=SINKS.half()),))),
    *(
        (field, ABLE, lambda offer, changes={field: tensor}: request_for(offer, (layer(**changes),)))
        for field in ("sinks", "alibi")
        for tensor in BAD_HEADS
    ),
    ("alibi", ABLE, lambda offer: request_for(offer, (layer(alibi=SINKS.half()),))),
]


@pytest.mark.parametrize(("field", "offer", "made"), BUILDS, ids=[f"{n}-{item[0]}" for n, item in enumerate(BUILDS)])
def test_a_build_the_row_does_not_serve_is_refused_by_name(
    field: str, offer: Offer, made: Callable[[Offer], BuildRequest]
) -> None:
    """Before anything is allocated."""
    with pytest.raises(UnsupportedBatch, match=field) as caught:
        check_build(made(offer))
    assert "'plain'" in caught.value.who


def test_a_build_names_all_its_faults() -> None:
    """One error, not one a try."""
    with pytest.raises(UnsupportedBatch) as caught:
        check_build(request_for(PLAIN, (layer(window_left=4, softcap=1.0),), dtype="bf16", page_size=3))
    assert all(word in caught.value.needed for word in ("dtype", "page_size", "window", "softcap"))


def changed(**changes: object) -> MadeStep:
    """The plain step with another batch."""
    return replace(STEP, batch=replace(STEP.batch, **changes))


TREE = make_tree([2, 3], [9, 30], "qlen")
META = torch.empty(3, dtype=torch.int32, device="meta")
ONES = torch.ones(2, dtype=torch.int32)
FLAT = make_tree([2, 3], [9, 30], "full")
TABLE = STEP.batch.index.page_table
CSR = replace(ABLE, index_forms=frozenset({"csr"}))
CSR_INDEX = make_batch([2, 3], [9, 30], index_form="csr").batch.index
INDIRECT = replace(ABLE, index_forms=frozenset({"indirect"}))
INDIRECT_INDEX = make_batch([2, 3], [9, 30], index_form="indirect").batch.index
BATCHES: list[tuple[str, Offer, MadeStep, dict[str, bool]]] = [
    ("phase", PLAIN, changed(phase="encode"), {}),
    ("capture", PLAIN, STEP, {"capture": True}),
    ("causal", PLAIN, changed(causal=False), {}),
    ("causal", PLAIN, changed(causal=torch.ones(2)), {"row_causal": True}),
    ("causal", ABLE, changed(causal=torch.ones(2)), {}),
    ("causal", ABLE, changed(causal=torch.ones(1)), {"row_causal": True}),
    ("kv_starts", ABLE, changed(kv_starts=torch.zeros(2)), {}),
    ("host_lens", HOST, changed(kv_lens_host=None), {}),
    ("host_lens", HOST, changed(host_exact=False), {}),
    ("tree", PLAIN, changed(tree=TREE), {}),
    ("tree.kind", ABLE, changed(tree=replace(TREE, kind="binary")), {}),
    ("tree.indptr", ABLE, changed(tree=replace(TREE, kind="full")), {}),
    ("tree.buffer", ABLE, changed(tree=replace(TREE, buffer=TREE.buffer.float())), {}),
    ("tree.buffer", ABLE, changed(tree=replace(TREE, buffer=TREE.buffer[:, :2, :2])), {}),
    ("qo_indptr", PLAIN, changed(qo_indptr=STEP.batch.qo_indptr.long()), {}),
    ("qo_indptr", PLAIN, changed(qo_indptr=STEP.batch.qo_indptr[:2]), {}),
    ("kv_lens", PLAIN, changed(kv_lens=STEP.batch.kv_lens[:1]), {}),
    ("qo_indptr device", PLAIN, changed(qo_indptr=META), {}),
    ("page_size", PLAIN, changed(index=replace(STEP.batch.index, page_size=8)), {}),
    ("index.page_table", PLAIN, changed(index=replace(STEP.batch.index, page_table=torch.zeros(2, 2))), {}),
    ("index.page_table", PLAIN, changed(index=replace(STEP.batch.index, page_table=META)), {}),
    ("num_rows", PLAIN, changed(num_rows=65), {}),
    ("num_tokens", PLAIN, changed(num_tokens=4097), {}),
    ("max_kv_len", PLAIN, changed(max_kv_len=4097), {}),
    ("causal: [2] torch.int32", ABLE, changed(causal=ONES.long()), {"row_causal": True}),
    ("causal device", ABLE, changed(causal=META), {"row_causal": True}),
    ("kv_starts", ABLE, changed(kv_starts=ONES.float()), {"left_padding": True}),
    ("kv_starts", ABLE, changed(kv_starts=ONES[:1]), {"left_padding": True}),
    ("kv_starts device", ABLE, changed(kv_starts=META), {"left_padding": True}),
    ("kv_lens: [2] with a stride", PLAIN, changed(kv_lens=torch.ones(4, dtype=torch.int32)[::2]), {}),
    ("qo_indptr_host", PLAIN, changed(qo_indptr_host=ONES), {}),
    ("qo_indptr_host", PLAIN, changed(qo_indptr_host=torch.zeros(3)), {}),
    ("qo_indptr_host device: cpu", PLAIN, changed(qo_indptr_host=META), {}),
    ("kv_lens_host", PLAIN, changed(kv_lens_host=ONES[:1]), {}),
    ("kv_lens_host", PLAIN, changed(kv_lens_host=ONES.long()), {}),
    ("token_rows", READING, STEP, {}),
    ("token_rows", READING, changed(token_rows=ONES), {}),
    ("slot_mapping", WRITING, changed(slot_mapping=ONES), {}),
    ("tree.buffer: [2,", ABLE, changed(tree=replace(TREE, buffer=TREE.buffer[:1])), {}),
    ("tree.buffer: [2,", ABLE, changed(tree=replace(TREE, buffer=TREE.buffer.byte())), {}),
    ("tree.buffer device", ABLE, changed(tree=replace(TREE, buffer=TREE.buffer.to("meta"))), {}),
    ("tree.buffer: [0] torch.uint8", ABLE, changed(tree=replace(FLAT, kind="packed")), {}),
    ("tree.buffer: [0] torch.bool", ABLE, changed(tree=replace(FLAT, buffer=FLAT.buffer.byte())), {}),
    ("tree.buffer: [0] torch.bool", ABLE, changed(tree=replace(FLAT, buffer=FLAT.buffer[None])), {}),
    ("tree.buffer device", ABLE, changed(tree=replace(FLAT, buffer=FLAT.buffer.to("meta"))), {}),
    ("tree.indptr", ABLE, changed(tree=replace(FLAT, indptr=ONES[:1])), {}),
    ("tree.indptr", ABLE, changed(tree=replace(FLAT, indptr=ONES.float())), {}),
    ("tree.indptr device", ABLE, changed(tree=replace(FLAT, indptr=META)), {}),
    (
        "index.page_table: a last",
        PLAIN,
        changed(index=replace(STEP.batch.index, page_table=TABLE.mT.contiguous().mT)),
        {},
    ),
    (
        "index.page_table device",
        PLAIN,
        changed(index=replace(STEP.batch.index, page_table=TABLE.to("meta"))),
        {},
    ),
    ("index.kv_indptr", CSR, changed(index=replace(CSR_INDEX, kv_indptr=ONES)), {}),
    ("index.kv_indices", CSR, changed(index=replace(CSR_INDEX, kv_indices=CSR_INDEX.kv_indices.float())), {}),
    ("index.kv_indices device", CSR, changed(index=replace(CSR_INDEX, kv_indices=META)), {}),
    ("index.table", INDIRECT, changed(index=replace(INDIRECT_INDEX, table=ONES)), {}),
    ("index.table device", INDIRECT, changed(index=replace(INDIRECT_INDEX, table=TABLE.to("meta"))), {}),
    ("index.row_ids: [2]", INDIRECT, changed(index=replace(INDIRECT_INDEX, row_ids=ONES[:1])), {}),
    ("index.row_ids: [2]", INDIRECT, changed(index=replace(INDIRECT_INDEX, row_ids=ONES.float())), {}),
]


@pytest.mark.parametrize(
    ("field", "offer", "step", "options"), BATCHES, ids=[f"{n}-{item[0]}" for n, item in enumerate(BATCHES)]
)
def test_a_step_the_row_does_not_serve_is_refused_by_name(
    field: str, offer: Offer, step: MadeStep, options: dict[str, bool]
) -> None:
    """In `plan`: no launch was made."""
    with pytest.raises(UnsupportedBatch) as caught:
        planned(offer, step, **options)
    assert caught.value.needed.startswith(field)
    assert "'plain'" in caught.value.who


@pytest.mark.parametrize("options", [{"capture": True}, {}], ids=["captured", "eager"])
def test_what_the_row_declares_of_a_step_passes(options: dict[str, bool]) -> None:
    """Trees, per-row causal flags and left padding, where the kernel says that it reads them."""
    step = changed(tree=TREE, causal=torch.ones(2, dtype=torch.int32), kv_starts=torch.zeros(2, dtype=torch.int32))
    assert planned(ABLE, step, row_causal=True, left_padding=True, **options) == "page_table"


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
