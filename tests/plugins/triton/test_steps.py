"""What `plan` and `forward` refuse, and how a recorded step gets new values: no kernel runs for a refusal."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from backstamp.attention import KVIndex, RaggedKV, TreeMask
from backstamp.errors import UnsupportedBatch
from tests.plugins.triton.cases import Case, build_attention, build_mla, check, make, run

CASE = Case("small", ((2, 20), (1, 3)), dtype="fp32")


def _zeros(*shape):
    return torch.zeros(*shape, dtype=torch.int32)


def _planned(**changes):
    drawn = make(CASE)
    return build_attention(drawn.request).backend, dataclasses.replace(drawn.batch, **changes)


def _refused_fields():
    table = torch.zeros(2, 4, dtype=torch.int32)
    bits = torch.ones(2, 2, 2, dtype=torch.bool)
    return {
        "page-size": ({"index": KVIndex(page_size=8, page_table=table)}, "page_size", "8"),
        "csr-without-offsets": ({"index": KVIndex(page_size=16, kv_indices=table[0])}, "index", "only kv_indices"),
        "indirect-without-rows": ({"index": KVIndex(page_size=16, table=table)}, "index", "only table"),
        "tree-without-starts": ({"tree": TreeMask(kind="full", buffer=bits.flatten())}, "tree.indptr", "None"),
        "tree-of-floats": ({"tree": TreeMask(kind="qlen", buffer=bits.float())}, "tree.buffer", "torch.float32"),
        "flat-qlen-tree": ({"tree": TreeMask(kind="qlen", buffer=bits.flatten())}, "tree.buffer", "[8]"),
        "short-causal": ({"causal": torch.ones(1, dtype=torch.int32)}, "causal", "[1]"),
    }


@pytest.mark.parametrize(("changes", "field", "found"), _refused_fields().values(), ids=_refused_fields())
def test_plan_refuses_what_the_kernel_cannot_read(changes, field, found):
    """The refusal names the field and what was found, before anything is launched."""
    backend, batch = _planned(**changes)
    with pytest.raises(UnsupportedBatch) as refusal:
        backend.plan(batch)
    assert refusal.value.needed.startswith(f"{field}:")
    assert found in refusal.value.found


def test_plan_refuses_a_phase_the_object_was_not_built_for():
    """An object built for decode does not prefill."""
    drawn = make(CASE)
    backend = build_attention(dataclasses.replace(drawn.request, phases=("decode",))).backend
    with pytest.raises(UnsupportedBatch, match="phase: one of decode, got prefill"):
        backend.plan(drawn.batch)


def test_plan_refuses_an_unknown_tree_kind():
    """A new kind of mask is not guessed at."""
    tree = TreeMask(kind="ring", buffer=torch.ones(2, 2, 2, dtype=torch.bool))  # type: ignore[arg-type]
    backend, batch = _planned(tree=tree)
    with pytest.raises(UnsupportedBatch, match=r"tree\.kind: full, qlen, packed, got 'ring'"):
        backend.plan(batch)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"dtype": "fp8"}, "dtype: bf16 or fp16 or fp32, got fp8"),
        ({"kv_dtype": "e4m3fn"}, "kv_dtype: same, got e4m3fn"),
        ({"layout": "vectorized_5d"}, "layout: rows, got vectorized_5d"),
        ({"page_size": 0}, "page_size: at least 1, got 0"),
    ],
    ids=["dtype", "kv-dtype", "layout", "page-size"],
)
def test_a_build_the_kernel_cannot_serve_is_refused(changes, match):
    """A request beyond the declaration is refused when the object is built."""
    with pytest.raises(UnsupportedBatch, match=match):
        build_attention(dataclasses.replace(make(CASE).request, **changes))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"alibi": torch.ones(4)}, "alibi: a kernel that declares 'alibi'"),
        ({"scale": 0.0}, "scale of layer 0: a positive number, got 0.0"),
        ({"softcap": -1.0}, "softcap of layer 0: 0.0 or more, got -1.0"),
        ({"num_qo_heads": 5}, "num_qo_heads of layer 0: a multiple of 2 KV heads, got 5"),
        ({"head_dim": 112}, "head_dim of layer 0: .*, got 112 and 64"),
        ({"v_head_dim": 72}, "head_dim of layer 0: .*, got 64 and 72"),
    ],
    ids=["alibi", "scale", "softcap", "heads", "head-dim", "v-head-dim"],
)
def test_a_layer_the_kernel_cannot_serve_is_refused_when_built(changes, match):
    """Nothing a layer asks for is dropped in silence."""
    request = make(CASE).request
    layer = dataclasses.replace(request.layers[0], **changes)
    with pytest.raises(UnsupportedBatch, match=match):
        build_attention(dataclasses.replace(request, layers=(layer,)))


def test_an_mla_layer_of_another_latent_split_is_refused():
    """Values of a latent cache are its first part, 512 of 576."""
    request = make(dataclasses.replace(CASE, mla=True, heads=(4, 1), dims=(576, 512))).request
    layer = dataclasses.replace(request.layers[0], v_head_dim=64)
    with pytest.raises(UnsupportedBatch, match=r"head_dim of layer 0: \(576, 512\), got 576 and 64"):
        build_mla(dataclasses.replace(request, layers=(layer,)))


def _new(drawn):
    return RaggedKV(k=drawn.q[:, :2], v=drawn.q[:, :2], kv_indptr=drawn.batch.qo_indptr)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (lambda d: {"indices": d.batch.kv_lens}, "indices: None: the row reads every key"),
        (lambda d: {"new": _new(d)}, "new: keys in the cache, or all of them in `new`, got both"),
        (lambda d: {"kv": None}, "kv: a cache, or `new` keys and values, got neither"),
        (lambda d: {"q": d.q.half()}, "q: fp32, as built, got fp16"),
        (lambda d: {"q": d.q[..., :32]}, r"q: \[3, 4, 64\], got \[3, 4, 32\]"),
        (lambda d: {"q_rope": d.q}, "q_rope: None: only a latent cache"),
        (lambda d: {"q": d.q.transpose(1, 2).contiguous().transpose(1, 2)}, "q: a last stride of 1"),
        (lambda d: {"kv": dataclasses.replace(d.kv, layout="5d")}, "kv.layout: 'rows', as built, got '5d'"),
        (lambda d: {"kv": dataclasses.replace(d.kv, k_scale=0.5)}, "kv.k_scale: None or 1.0 .* got a scale"),
        (lambda d: {"kv": dataclasses.replace(d.kv, v_scale=torch.ones(1))}, "kv.v_scale: None or 1.0 .* got a scale"),
        (lambda d: {"kv": dataclasses.replace(d.kv, k_sf=d.q)}, "kv.k_sf and kv.v_sf: None, got block"),
        (lambda d: {"kv": dataclasses.replace(d.kv, k=d.kv.k[:, :8])}, r"kv.k: \[P, 16, 2, 64\] .*, 8, 2, 64\]"),
        (lambda d: {"kv": dataclasses.replace(d.kv, v=None)}, "kv.v: a tensor, got None"),
    ],
    ids=[
        "indices", "split-kv", "no-keys", "dtype", "head-dim", "q-rope", "strides", "layout", "k-scale",
        "v-scale-tensor", "k-sf", "page-rows", "values-in-keys",
    ],
)  # fmt: skip
def test_forward_refuses_what_only_tensors_show(arguments, match):
    """What `plan` cannot see is refused before the launch."""
    drawn = make(CASE)
    backend = build_attention(drawn.request).backend
    call = {"q": drawn.q, "kv": drawn.kv, "layer": drawn.layer, "state": backend.plan(drawn.batch)}
    with pytest.raises(UnsupportedBatch, match=match):
        backend.forward(**call | arguments(drawn))


def test_lse_of_a_layer_with_sinks_is_refused():
    """Whoever merges parts adds the sink once, so a part with a sink has no LSE."""
    drawn = make(dataclasses.replace(CASE, sinks=True))
    backend = build_attention(drawn.request).backend
    with pytest.raises(UnsupportedBatch, match="lse: a layer without sinks"):
        backend.forward(drawn.q, drawn.kv, drawn.layer, backend.plan(drawn.batch), lse=torch.empty(3, 4))


def test_a_cache_without_an_index_is_refused():
    """A batch that names no pages serves ragged keys only."""
    backend, batch = _planned(index=KVIndex(page_size=16))
    drawn = make(CASE)
    with pytest.raises(UnsupportedBatch, match=r"index: .* beside a cache, got none of them"):
        backend.forward(drawn.q, drawn.kv, drawn.layer, backend.plan(batch))


@pytest.mark.parametrize("case", [
    dataclasses.replace(CASE, starts=(1, 0), lse=True),
    dataclasses.replace(CASE, index="csr", causal=(1, 0)),
    dataclasses.replace(CASE, index="indirect", tree="full", phase="verify", rows=((2, 20), (2, 3))),
], ids=["page-table-starts", "csr-causal-rows", "indirect-tree"])  # fmt: skip
def test_a_recorded_step_takes_new_values_at_its_addresses(case):
    """After `plan(state=)` with tensors elsewhere, the tensors the step was planned with hold the new values."""
    recorded, fresh = make(case, seed=1), make(case, seed=2)
    if case.tree is None:
        fresh.batch.kv_lens.copy_(torch.tensor([17, 2]))
    backend = build_attention(recorded.request).backend
    state = backend.plan(recorded.batch, capture=True)
    pointers = [tensor.data_ptr() for tensor in _tensors(recorded.batch)]
    assert backend.plan(fresh.batch, state=state) is state
    backend.replan(state)
    out = torch.empty(state.batch.num_tokens, 4, 64)
    lse = torch.empty(state.batch.num_tokens, 4) if case.lse else None
    backend.forward(fresh.q, fresh.kv, recorded.layer, state, out=out, lse=lse)
    check(case, fresh, out, lse)
    assert [tensor.data_ptr() for tensor in _tensors(state.batch)] == pointers


def _tensors(batch):
    parts = [batch.qo_indptr, batch.kv_lens, batch.kv_starts, batch.causal]
    parts += [getattr(batch.index, name) for name in ("page_table", "kv_indptr", "kv_indices", "table", "row_ids")]
    parts += [batch.tree.buffer, batch.tree.indptr] if batch.tree else []
    return [part for part in parts if isinstance(part, torch.Tensor)]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_rows": 1}, "num_rows"),
        ({"num_tokens": 2}, "num_tokens"),
        ({"max_q_len": 5}, "max_q_len"),
        ({"causal": False}, "causal"),
        ({"kv_starts": torch.zeros(2, dtype=torch.int32)}, "kv_starts"),
        ({"index": KVIndex(page_size=16, kv_indptr=_zeros(3), kv_indices=_zeros(9))}, "index"),
        ({"index": KVIndex(page_size=16, page_table=torch.zeros(2, 99, dtype=torch.int32))}, "state"),
    ],
    ids=["rows", "tokens", "query-length", "causal", "starts", "index-form", "wider-table"],
)
def test_a_recorded_step_refuses_another_launch(changes, field):
    """What a graph recorded cannot be changed by a replay: the next batch must fit it."""
    backend, batch = _planned()
    state = backend.plan(batch, capture=True)
    with pytest.raises(UnsupportedBatch) as refusal:
        backend.plan(dataclasses.replace(batch, **changes), state=state)
    assert refusal.value.needed.startswith(f"{field}:")


def test_a_recorded_step_refuses_its_own_memory_under_other_strides():
    """An engine that views one buffer at another width would have the old stride walk over the new rows."""
    backend, batch = _planned()
    state = backend.plan(batch, capture=True)
    table = batch.index.page_table
    narrower = table.view(-1)[: 2 * (table.shape[1] - 1)].view(2, -1)
    before = table.clone()
    with pytest.raises(UnsupportedBatch, match="batch: strides"):
        backend.plan(dataclasses.replace(batch, index=KVIndex(page_size=16, page_table=narrower)), state=state)
    assert torch.equal(table, before)


def test_one_object_serves_every_phase_between_two_plans():
    """A backend holds no current batch: two planned steps alternate without disturbing each other."""
    prefill, decode = make(CASE), make(dataclasses.replace(CASE, rows=((1, 20),), phase="decode"))
    backend = build_attention(prefill.request).backend
    states = [backend.plan(drawn.batch) for drawn in (prefill, decode)]
    answers = []
    for drawn, state in [(prefill, states[0]), (decode, states[1])] * 2:
        answers.append(backend.forward(drawn.q, drawn.kv, prefill.layer, state))
    assert torch.equal(answers[0], answers[2])
    assert torch.equal(answers[1], answers[3])
    assert torch.equal(answers[0], run(CASE, prefill)[0])
