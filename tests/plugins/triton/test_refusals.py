"""Wrong shapes, types, strides and devices: the kernel addresses memory by them, so none may reach a launch."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from backstamp.attention import KVIndex, RaggedKV, TreeMask
from backstamp.errors import UnsupportedBatch
from backstamp_triton import tile_launch as module
from tests.plugins.triton.cases import Case, build_attention, build_mla, make

#: Three tokens in two rows, 4 query heads over 2 KV heads of 64, pages of 16.
CASE = Case("small", ((2, 20), (1, 3)), dtype="fp32")
LATENT = dataclasses.replace(CASE, mla=True, heads=(4, 1), dims=(576, 512), split_rope=True)


class _NoLaunch:
    """In the place of a kernel: to ask for its launch fails the test."""

    def __getitem__(self, grid):
        raise AssertionError(f"launched over {grid}")


@pytest.fixture(autouse=True)
def no_launch(monkeypatch):
    """Neither kernel runs in this module."""
    monkeypatch.setattr(module, "attend_tile", _NoLaunch())
    monkeypatch.setattr(module, "combine_splits", _NoLaunch())


def _ints(*shape):
    return torch.zeros(*shape, dtype=torch.int32)


def _gaps(size):
    """A tensor whose numbers lie two apart."""
    return _ints(2 * size)[::2]


def _away(tensor):
    """The same shape on another device."""
    return tensor.to("meta")


def _index(**fields):
    return {"index": KVIndex(page_size=16, **fields)}


def _tree(kind, buffer, indptr=None):
    return {"tree": TreeMask(kind=kind, buffer=buffer, indptr=indptr)}


BITS = torch.ones(2, 2, 2, dtype=torch.bool)
FLAT = torch.ones(64, dtype=torch.bool)

STEPS = {
    "qo_indptr-i64": ("qo_indptr", {"qo_indptr": _ints(3).long()}),
    "qo_indptr-short": ("qo_indptr", {"qo_indptr": _ints(2)}),
    "qo_indptr-gaps": ("qo_indptr", {"qo_indptr": _gaps(3)}),
    "qo_indptr-device": ("qo_indptr device", {"qo_indptr": _away(_ints(3))}),
    "kv_lens-i64": ("kv_lens", {"kv_lens": _ints(2).long()}),
    "kv_lens-short": ("kv_lens", {"kv_lens": _ints(1)}),
    "kv_lens-gaps": ("kv_lens", {"kv_lens": _gaps(2)}),
    "kv_lens-device": ("kv_lens device", {"kv_lens": _away(_ints(2))}),
    "kv_starts-float": ("kv_starts", {"kv_starts": torch.zeros(2)}),
    "kv_starts-short": ("kv_starts", {"kv_starts": _ints(1)}),
    "kv_starts-gaps": ("kv_starts", {"kv_starts": _gaps(2)}),
    "kv_starts-device": ("kv_starts device", {"kv_starts": _away(_ints(2))}),
    "causal-float": ("causal", {"causal": torch.zeros(2)}),
    "causal-short": ("causal", {"causal": _ints(1)}),
    "causal-gaps": ("causal", {"causal": _gaps(2)}),
    "causal-device": ("causal device", {"causal": _away(_ints(2))}),
    "page_table-float": ("index.page_table", _index(page_table=torch.zeros(2, 4))),
    "page_table-flat": ("index.page_table", _index(page_table=_ints(8))),
    "page_table-short": ("index.page_table", _index(page_table=_ints(1, 4))),
    "page_table-gaps": ("index.page_table", _index(page_table=_ints(4, 2).T)),
    "page_table-device": ("index.page_table device", _index(page_table=_away(_ints(2, 4)))),
    "kv_indptr-float": ("index.kv_indptr", _index(kv_indptr=torch.zeros(3), kv_indices=_ints(9))),
    "kv_indptr-short": ("index.kv_indptr", _index(kv_indptr=_ints(2), kv_indices=_ints(9))),
    "kv_indptr-gaps": ("index.kv_indptr", _index(kv_indptr=_gaps(3), kv_indices=_ints(9))),
    "kv_indptr-device": ("index.kv_indptr device", _index(kv_indptr=_away(_ints(3)), kv_indices=_ints(9))),
    "kv_indices-float": ("index.kv_indices", _index(kv_indptr=_ints(3), kv_indices=torch.zeros(9))),
    "kv_indices-gaps": ("index.kv_indices", _index(kv_indptr=_ints(3), kv_indices=_gaps(9))),
    "kv_indices-device": ("index.kv_indices device", _index(kv_indptr=_ints(3), kv_indices=_away(_ints(9)))),
    "table-float": ("index.table", _index(table=torch.zeros(5, 4), row_ids=_ints(2))),
    "table-gaps": ("index.table", _index(table=_ints(4, 5).T, row_ids=_ints(2))),
    "row_ids-float": ("index.row_ids", _index(table=_ints(5, 4), row_ids=torch.zeros(2))),
    "row_ids-short": ("index.row_ids", _index(table=_ints(5, 4), row_ids=_ints(1))),
    "row_ids-gaps": ("index.row_ids", _index(table=_ints(5, 4), row_ids=_gaps(2))),
    "row_ids-device": ("index.row_ids device", _index(table=_ints(5, 4), row_ids=_away(_ints(2)))),
    "tree-small": ("tree.buffer", _tree("qlen", BITS[:, :1, :1])),
    "tree-of-few-rows": ("tree.buffer", _tree("qlen", BITS[:1])),
    "tree-gaps": ("tree.buffer", _tree("qlen", torch.ones(2, 2, 4, dtype=torch.bool)[:, :, ::2])),
    "tree-device": ("tree.buffer device", _tree("qlen", _away(BITS))),
    "flat-tree-of-rows": ("tree.buffer", _tree("full", FLAT.view(2, 32), _ints(2))),
    "flat-tree-gaps": ("tree.buffer", _tree("packed", FLAT.byte()[::2], _ints(2))),
    "flat-tree-device": ("tree.buffer device", _tree("full", _away(FLAT), _ints(2))),
    "tree-indptr-float": ("tree.indptr", _tree("full", FLAT, torch.zeros(2))),
    "tree-indptr-short": ("tree.indptr", _tree("full", FLAT, _ints(1))),
    "tree-indptr-gaps": ("tree.indptr", _tree("packed", FLAT.byte(), _gaps(2))),
    "tree-indptr-device": ("tree.indptr device", _tree("full", FLAT, _away(_ints(2)))),
}


@pytest.mark.parametrize(("field", "changes"), STEPS.values(), ids=STEPS)
def test_plan_refuses_a_tensor_the_kernel_would_misread(field, changes):
    """Too few numbers, another type, gaps between numbers, or another device."""
    drawn = make(CASE)
    backend = build_attention(drawn.request).backend
    with pytest.raises(UnsupportedBatch) as refusal:
        backend.plan(dataclasses.replace(drawn.batch, **changes))
    assert refusal.value.needed.startswith(f"{field}:")


@pytest.mark.parametrize(
    ("limit", "field"), [("max_rows", "num_rows"), ("max_tokens", "num_tokens"), ("max_kv_len", "max_kv_len")]
)
def test_plan_refuses_a_step_above_the_limits_it_was_built_for(limit, field):
    """Workspaces were sized by them."""
    drawn = make(CASE)
    backend = build_attention(dataclasses.replace(drawn.request, **{limit: 1})).backend
    with pytest.raises(UnsupportedBatch, match=f"{field}: at most 1, as built"):
        backend.plan(drawn.batch)


def _cache(d, **changes):
    return {"kv": dataclasses.replace(d.kv, **changes)}


def _padded(tensor):
    """The same numbers, with gaps between them."""
    return torch.stack([tensor, tensor], -1)[..., 0]


CALLS = {
    "q-tokens": ("q", lambda d: {"q": d.q[:2]}),
    "q-heads": ("q", lambda d: {"q": d.q[:, :2]}),
    "q-dim": ("q", lambda d: {"q": d.q[..., :32]}),
    "q-dtype": ("q", lambda d: {"q": d.q.half()}),
    "q-gaps": ("q", lambda d: {"q": _padded(d.q)}),
    "q-device": ("q device", lambda d: {"q": _away(d.q)}),
    "k-heads": ("kv.k", lambda d: _cache(d, k=d.kv.k[:, :, :1])),
    "k-dim": ("kv.k", lambda d: _cache(d, k=d.kv.k[..., :32])),
    "k-page": ("kv.k", lambda d: _cache(d, k=d.kv.k[:, :8])),
    "k-dtype": ("kv.k", lambda d: _cache(d, k=d.kv.k.half())),
    "k-gaps": ("kv.k", lambda d: _cache(d, k=_padded(d.kv.k))),
    "k-device": ("kv.k device", lambda d: _cache(d, k=_away(d.kv.k))),
    "v-heads": ("kv.v", lambda d: _cache(d, v=d.kv.v[:, :, :1])),
    "v-dim": ("kv.v", lambda d: _cache(d, v=d.kv.v[..., :32])),
    "v-page": ("kv.v", lambda d: _cache(d, v=d.kv.v[:, :8])),
    "v-dtype": ("kv.v", lambda d: _cache(d, v=d.kv.v.half())),
    "v-gaps": ("kv.v", lambda d: _cache(d, v=_padded(d.kv.v))),
    "v-device": ("kv.v device", lambda d: _cache(d, v=_away(d.kv.v))),
    "v-fewer-pages": ("kv.v", lambda d: _cache(d, v=d.kv.v[:1])),
    "out-tokens": ("out", lambda d: {"out": torch.empty(2, 4, 64)}),
    "out-heads": ("out", lambda d: {"out": torch.empty(3, 2, 64)}),
    "out-dim": ("out", lambda d: {"out": torch.empty(3, 4, 32)}),
    "out-dtype": ("out", lambda d: {"out": torch.empty(3, 4, 64, dtype=torch.float16)}),
    "out-gaps": ("out", lambda d: {"out": torch.empty(3, 4, 128)[..., ::2]}),
    "out-device": ("out device", lambda d: {"out": _away(torch.empty(3, 4, 64))}),
    "lse-tokens": ("lse", lambda d: {"lse": torch.empty(2, 4)}),
    "lse-heads": ("lse", lambda d: {"lse": torch.empty(3, 2)}),
    "lse-dtype": ("lse", lambda d: {"lse": torch.empty(3, 4, dtype=torch.float16)}),
    "lse-device": ("lse device", lambda d: {"lse": _away(torch.empty(3, 4))}),
    "sinks-short": ("sinks", lambda d: {"layer": dataclasses.replace(d.layer, sinks=torch.zeros(1))}),
    "sinks-gaps": ("sinks", lambda d: {"layer": dataclasses.replace(d.layer, sinks=torch.zeros(8)[::2])}),
    "sinks-device": ("sinks device", lambda d: {"layer": dataclasses.replace(d.layer, sinks=_away(torch.zeros(4)))}),
    "layer-dim": ("head_dim of layer 0", lambda d: {"layer": dataclasses.replace(d.layer, v_head_dim=512)}),
    "both-ways": ("causal", lambda d: {"layer": dataclasses.replace(d.layer, attn_type="encoder")}),
    "no-keys": ("kv", lambda d: {"kv": None}),
}


@pytest.mark.parametrize(("field", "changes"), CALLS.values(), ids=CALLS)
def test_forward_refuses_a_tensor_the_kernel_would_misread(field, changes):
    """Each as it is, beside others that are right."""
    drawn = make(CASE)
    backend = build_attention(drawn.request).backend
    call = {"q": drawn.q, "kv": drawn.kv, "layer": drawn.layer, "state": backend.plan(drawn.batch)}
    with pytest.raises(UnsupportedBatch) as refusal:
        backend.forward(**call | changes(drawn))
    assert refusal.value.needed.startswith(f"{field}:")


RAGGED = {
    "k-heads": ("new.k", {"k": torch.zeros(23, 1, 64)}),
    "k-dim": ("new.k", {"k": torch.zeros(23, 2, 32)}),
    "k-dtype": ("new.k", {"k": torch.zeros(23, 2, 64, dtype=torch.float16)}),
    "k-gaps": ("new.k", {"k": torch.zeros(23, 2, 128)[..., ::2]}),
    "k-device": ("new.k device", {"k": _away(torch.zeros(23, 2, 64))}),
    "v-heads": ("new.v", {"v": torch.zeros(23, 1, 64)}),
    "v-dim": ("new.v", {"v": torch.zeros(23, 2, 32)}),
    "v-dtype": ("new.v", {"v": torch.zeros(23, 2, 64, dtype=torch.float16)}),
    "v-gaps": ("new.v", {"v": torch.zeros(23, 2, 128)[..., ::2]}),
    "v-device": ("new.v device", {"v": _away(torch.zeros(23, 2, 64))}),
    "v-fewer": ("new.v", {"v": torch.zeros(20, 2, 64)}),
    "indptr-short": ("new.kv_indptr", {"kv_indptr": _ints(2)}),
    "indptr-float": ("new.kv_indptr", {"kv_indptr": torch.zeros(3)}),
    "indptr-gaps": ("new.kv_indptr", {"kv_indptr": _gaps(3)}),
    "indptr-device": ("new.kv_indptr device", {"kv_indptr": _away(_ints(3))}),
}


@pytest.mark.parametrize(("field", "changes"), RAGGED.values(), ids=RAGGED)
def test_forward_refuses_ragged_keys_the_kernel_would_misread(field, changes):
    """They lie in no cache, and their offsets are a tensor of the call."""
    drawn = make(CASE)
    backend = build_attention(drawn.request).backend
    new = RaggedKV(k=torch.zeros(23, 2, 64), v=torch.zeros(23, 2, 64), kv_indptr=_ints(3))
    state = backend.plan(dataclasses.replace(drawn.batch, index=KVIndex(page_size=16)))
    with pytest.raises(UnsupportedBatch) as refusal:
        backend.forward(drawn.q, None, drawn.layer, state, new=dataclasses.replace(new, **changes))
    assert refusal.value.needed.startswith(f"{field}:")


LATENT_CALLS = {
    "ragged-keys": ("kv", lambda d: {"kv": None, "new": RaggedKV(k=d.q, v=d.q, kv_indptr=d.batch.qo_indptr)}),
    "values-beside-keys": ("kv.v", lambda d: _cache(d, v=d.kv.k[..., :512])),
    "parts-swapped": ("q", lambda d: {"q": d.q_rope, "q_rope": d.q}),
    "q_rope-dtype": ("q_rope", lambda d: {"q_rope": d.q_rope.half()}),
    "q_rope-gaps": ("q_rope", lambda d: {"q_rope": _padded(d.q_rope)}),
    "q_rope-device": ("q_rope device", lambda d: {"q_rope": _away(d.q_rope)}),
}


@pytest.mark.parametrize(("field", "changes"), LATENT_CALLS.values(), ids=LATENT_CALLS)
def test_forward_refuses_a_latent_call_the_kernel_would_misread(field, changes):
    """Values lie inside the keys of the cache; the rotary part of a query may come apart."""
    drawn = make(LATENT)
    backend = build_mla(drawn.request).backend
    call = {"q": drawn.q, "kv": drawn.kv, "layer": drawn.layer, "state": backend.plan(drawn.batch)}
    with pytest.raises(UnsupportedBatch) as refusal:
        backend.forward(**call | {"q_rope": drawn.q_rope} | changes(drawn))
    assert refusal.value.needed.startswith(f"{field}:")


def test_the_right_tensors_do_reach_the_launch():
    """Or every refusal above could be of something else."""
    for case, build in ((CASE, build_attention), (LATENT, build_mla)):
        drawn = make(case)
        backend = build(drawn.request).backend
        state = backend.plan(drawn.batch)
        with pytest.raises(AssertionError, match="launched over"):
            backend.forward(drawn.q, drawn.kv, drawn.layer, state, q_rope=drawn.q_rope)
