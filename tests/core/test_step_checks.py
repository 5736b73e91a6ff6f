"""What a declared row does not take is refused before a launch, by a message that names the field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from backstamp.attention import KVIndex
from backstamp.declarations import Offer
from backstamp.errors import UnsupportedBatch
from backstamp.factories import BuildRequest
from backstamp.step_checks import check_build
from backstamp.testing.batches import SMALL_LAYER, MadeStep, make_batch, make_tree
from backstamp.testing.requests import request_for
from tests.core.declared_rows import (
    ABLE,
    BAD_HEADS,
    HOST,
    META,
    ONES,
    PLAIN,
    READING,
    SINKS,
    STEP,
    WRITING,
    called,
    changed,
    layer,
    planned,
)


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


TREE = make_tree([2, 3], [9, 30], "qlen")
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


def test_what_a_row_does_not_read_is_not_looked_at() -> None:
    """An engine hands one batch to all its kernels: rows of tokens and slots to write are some kernels' alone."""
    assert planned(PLAIN, changed(token_rows=META, slot_mapping=META)) == "page_table"
