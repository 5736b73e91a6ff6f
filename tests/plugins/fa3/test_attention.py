"""Every row's numbers against float64, over fakes that hold calls to the recorded signatures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from backstamp.attention import LayerSpec, RaggedKV
from backstamp.errors import UnsupportedBatch
from backstamp.testing.batches import MadeStep, make_batch
from backstamp.testing.reference import reference_attention, relative_error
from backstamp.testing.requests import request_for
from tests.plugins.fa3.kernels import ROWS, built

#: bf16 outputs: half a unit in the last place is 2e-3.
BOUND = 4e-3
LAYER = LayerSpec(layer_id=3, num_qo_heads=4, num_kv_heads=2, head_dim=128, v_head_dim=128, scale=128**-0.5)
LATENT = replace(LAYER, num_qo_heads=8, num_kv_heads=1, head_dim=576, v_head_dim=512, scale=192**-0.5)


@dataclass(frozen=True)
class Case:
    """One step and layer; `needs` are the features a row must declare."""

    q_lens: Sequence[int] = (5, 1, 7)
    kv_lens: Sequence[int] = (40, 1, 70)
    page_size: int = 16
    needs: frozenset[str] = frozenset()
    layer: LayerSpec = LAYER
    causal: bool = True
    phase: str = "prefill"
    cache_form: str = "nhd"
    pad_tokens: int = 0
    host_lens: bool = True


CASES = {
    "chunk": Case(),
    "decode": Case(q_lens=(1, 1, 1), phase="decode"),
    "chain": Case(q_lens=(4, 4), kv_lens=(30, 5), phase="verify"),
    "page-1": Case(page_size=1),
    "page-64": Case(page_size=64, kv_lens=(40, 1, 130)),
    "page-128": Case(page_size=128, kv_lens=(40, 1, 130)),
    "heads-first": Case(cache_form="hnd"),
    "one-row-of-both": Case(cache_form="interleaved"),
    "empty-rows": Case(q_lens=(0, 3, 0, 2), kv_lens=(0, 20, 33, 0)),
    "empty-rows-unknown": Case(q_lens=(0, 3, 2, 0), kv_lens=(0, 20, 0, 33), host_lens=False, pad_tokens=2),
    "pads": Case(pad_tokens=3),
    "pads-unknown": Case(pad_tokens=3, host_lens=False),
    "non-causal": Case(causal=False, needs=frozenset({"non_causal"})),
    "window": Case(layer=replace(LAYER, window_left=3), needs=frozenset({"window"})),
    "window-0": Case(layer=replace(LAYER, window_left=0), needs=frozenset({"window"})),
    "window-non-causal": Case(
        layer=replace(LAYER, window_left=3), causal=False, needs=frozenset({"window", "non_causal"})
    ),
    "softcap": Case(layer=replace(LAYER, softcap=0.7), needs=frozenset({"softcap"})),
    "sinks": Case(
        layer=replace(LAYER, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.bfloat16)),
        needs=frozenset({"sinks"}),
    ),
    "sinks-fp32": Case(layer=replace(LAYER, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])), needs=frozenset({"sinks"})),
    "cross": Case(layer=replace(LAYER, attn_type="cross"), causal=False, needs=frozenset({"cross", "non_causal"})),
}


def fits(row: str, case: Case) -> bool:
    offer = ROWS[row]
    dims = {dim if isinstance(dim, tuple) else (dim, dim) for dim in offer.head_dims}
    return (
        case.needs <= offer.features
        and offer.page_sizes.accepts(case.page_size)
        and case.phase in offer.phases
        and (case.layer.head_dim, case.layer.v_head_dim) in dims
    )


def latent(case: Case) -> Case:
    """The same over a latent cache."""
    layer = replace(LATENT, softcap=case.layer.softcap, window_left=case.layer.window_left, sinks=case.layer.sinks)
    return replace(case, layer=layer, cache_form="latent")


def of_row(row: str, case: Case) -> Case:
    """A case over the cache and the pages a row has: pages of 16 stand for any."""
    pages = ROWS[row].page_sizes
    if case.page_size == 16 and not pages.accepts(16):
        case = replace(case, page_size=pages.preferred)
    return latent(case) if row.endswith("mla") and "cross" not in case.needs else case


PAGED = [
    (row, name, of_row(row, case))
    for row, offer in ROWS.items()
    if "paged" in offer.kv_forms
    for name, case in CASES.items()
    if fits(row, of_row(row, case))
]
RAGGED = [
    (row, name, case)
    for row, offer in ROWS.items()
    if "ragged" in offer.kv_forms
    for name, case in CASES.items()
    if case.page_size == 16 and case.phase == "prefill" and fits(row, case)
]
ids = [f"{name}-{row}" for row, name, _ in PAGED]


def make(case: Case) -> MadeStep:
    return make_batch(
        case.q_lens, case.kv_lens, layer=case.layer, phase=case.phase, page_size=case.page_size, dtype=torch.bfloat16,
        cache_form=case.cache_form, causal=case.causal, pad_tokens=case.pad_tokens, host_lens=case.host_lens,
    )  # fmt: skip


def request(row: str, case: Case) -> Any:
    return request_for(ROWS[row], (case.layer,), page_size=case.page_size, dtype="bf16")


def check(out: torch.Tensor, lse: torch.Tensor | None, truth: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert relative_error(out, truth[0]) < BOUND
    if lse is not None:
        torch.testing.assert_close(lse.double(), truth[1], atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(("row", "name", "case"), PAGED, ids=ids)
def test_pages_give_what_float64_gives(row, name, case, monkeypatch):
    """Outputs in place and the natural LSE; what no row may read is NaN, and padding tokens come out as zeros."""
    step = make(case)
    out = torch.full((*step.q.shape[:2], case.layer.v_head_dim), float("nan"), dtype=torch.bfloat16)
    lse = torch.full(step.q.shape[:2], float("nan")) if case.layer.sinks is None else None
    with built(row, request(row, case), monkeypatch) as (backend, calls):
        state = backend.plan(step.batch)
        answer = backend.forward(step.q, step.kv, case.layer, state, out=out, lse=lse)
    assert answer is out
    assert calls
    check(out, lse, reference_attention(step.q, step.kv, case.layer, step.batch))


@pytest.mark.parametrize(("row", "name", "case"), RAGGED, ids=[f"{name}-{row}" for row, name, _ in RAGGED])
def test_ragged_keys_give_what_float64_gives(row, name, case, monkeypatch):
    """Keys in no cache, as many as each row has."""
    step = make(case)
    indptr = torch.tensor([0, *case.kv_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    shape = (int(indptr[-1]), case.layer.num_kv_heads)
    k, v = (torch.randn(*shape, dim, dtype=torch.bfloat16) for dim in (case.layer.head_dim, case.layer.v_head_dim))
    new = RaggedKV(k=k, v=v, kv_indptr=indptr)
    out = torch.full((*step.q.shape[:2], case.layer.v_head_dim), float("nan"), dtype=torch.bfloat16)
    lse = torch.full(step.q.shape[:2], float("nan")) if case.layer.sinks is None else None
    batch = replace(step.batch, index=replace(step.batch.index, page_table=None))
    with built(row, request(row, case), monkeypatch) as (backend, calls):
        backend.forward(step.q, None, case.layer, backend.plan(batch), out=out, lse=lse, new=new)
    assert calls
    check(out, lse, reference_attention(step.q, None, case.layer, batch, new=new))


@pytest.mark.parametrize("row", [row for row in ROWS if row.endswith("mla")])
def test_a_rotary_part_passed_apart_is_the_same(row, monkeypatch):
    """`q [T, H, 512]` and `q_rope [T, H, 64]` or both in one: the library gets views, never copies."""
    case = latent(CASES["chunk"])
    step = make(case)
    with built(row, request(row, case), monkeypatch) as (backend, calls):
        state = backend.plan(step.batch)
        whole = backend.forward(step.q, step.kv, case.layer, state)
        apart = backend.forward(
            step.q[..., :512].contiguous(), step.kv, case.layer, state, q_rope=step.q[..., 512:].contiguous()
        )
    assert torch.equal(whole, apart)
    assert calls[0]["q"].data_ptr() == step.q[..., 512:].data_ptr()
    assert calls[0]["q_v"].data_ptr() == step.q.data_ptr()
    assert calls[0]["v"].data_ptr() == step.kv.k.data_ptr()
    assert calls[0]["k"].shape[-1] == 64


@pytest.mark.parametrize("row", ["flash-attn-3", "sglang-kernel", "fa3-fwd"])
def test_unlike_head_dims_run_where_the_build_has_them(row, monkeypatch):
    """The prefill of an MLA model, up-projected: 192 and 128."""
    layer = replace(LAYER, head_dim=192, v_head_dim=128)
    indptr = torch.tensor([0, 4, 9], dtype=torch.int32)
    k, v = torch.randn(9, 2, 192, dtype=torch.bfloat16), torch.randn(9, 2, 128, dtype=torch.bfloat16)
    step = make_batch([4, 5], [4, 5], layer=layer, dtype=torch.bfloat16)
    new = RaggedKV(k=k, v=v, kv_indptr=indptr)
    with built(row, request_for(ROWS[row], (layer,), dtype="bf16", page_size=16), monkeypatch) as (backend, _):
        out = backend.forward(step.q, None, layer, backend.plan(step.batch), new=new)
    check(out, None, reference_attention(step.q, None, layer, step.batch, new=new))


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize(
    "lens", [((), ()), ((0, 0), (0, 0)), ((2, 3), (0, 0))], ids=["no-rows", "no-tokens", "no-keys"]
)
def test_nothing_to_attend_launches_nothing(row, lens, monkeypatch):
    """The libraries' own answer to no keys is an LSE of +inf, which a merge would take for everything."""
    layer = LATENT if row.endswith("mla") else LAYER
    form = "latent" if layer is LATENT else "nhd"
    case = Case(layer=layer, page_size=ROWS[row].page_sizes.preferred, cache_form=form)
    step = make(replace(case, q_lens=lens[0], kv_lens=lens[1]))
    lse = torch.full(step.q.shape[:2], float("nan"))
    ragged = "paged" not in ROWS[row].kv_forms
    empty = torch.empty(0, layer.num_kv_heads, layer.head_dim, dtype=torch.bfloat16)
    new = RaggedKV(k=empty, v=empty, kv_indptr=torch.zeros(len(lens[0]) + 1, dtype=torch.int32))
    with built(row, request(row, case), monkeypatch) as (backend, calls):
        state = backend.plan(step.batch)
        kv, keys = (None, new) if ragged else (step.kv, None)
        out = backend.forward(step.q, kv, layer, state, lse=lse, new=keys)
    assert not calls
    assert out.shape == (*step.q.shape[:2], layer.v_head_dim)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, float("-inf")))


@pytest.mark.parametrize("row", [row for row, offer in ROWS.items() if "ragged" in offer.kv_forms])
def test_no_ragged_keys_launch_nothing_though_the_step_may_have_some(row, monkeypatch):
    """`max_kv_len` is an upper bound: a layer that brings no key attends nothing, whatever it says."""
    case = Case(page_size=ROWS[row].page_sizes.preferred, q_lens=(2, 3), kv_lens=(0, 0), host_lens=False)
    step = make(case)
    empty = torch.empty(0, LAYER.num_kv_heads, LAYER.head_dim, dtype=torch.bfloat16)
    new = RaggedKV(k=empty, v=empty, kv_indptr=torch.zeros(3, dtype=torch.int32))
    lse = torch.full(step.q.shape[:2], float("nan"))
    with built(row, request(row, case), monkeypatch) as (backend, calls):
        state = backend.plan(replace(step.batch, max_kv_len=16))
        out = backend.forward(step.q, None, LAYER, state, lse=lse, new=new)
    assert not calls
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, float("-inf")))


@pytest.mark.parametrize("row", ["tokenspeed-fa3", "sglang-kernel", "mate"])
def test_sinks_stored_elsewhere_are_read_through_one_buffer(row, monkeypatch):
    """Its address never changes; a copy ticks the counter, `.data` does not: `refresh_parameters` is the way out."""
    stored = torch.nn.Parameter(torch.tensor([0.5, -1.0, 2.0, 0.0]), requires_grad=False)
    case = replace(CASES["sinks"], layer=replace(LAYER, sinks=stored), page_size=ROWS[row].page_sizes.preferred)
    step = make(case)
    with built(row, request(row, case), monkeypatch) as (backend, calls):
        seen = []

        def run():
            backend.forward(step.q, step.kv, case.layer, backend.plan(step.batch))
            last = calls[-1] if isinstance(calls[-1], dict) else calls[-1].arguments
            sinks = last["sinks"]
            seen.append(sinks.data_ptr())
            return sinks.tolist()

        assert run() == [0.5, -1.0, 2.0, 0.0]
        stored.copy_(torch.tensor([1.0, 1.0, 1.0, 1.0]))
        assert run() == [1.0, 1.0, 1.0, 1.0]
        stored.data.copy_(torch.tensor([3.0, 3.0, 3.0, 3.0]))
        assert run() == [1.0, 1.0, 1.0, 1.0], "stale: nothing ticked"
        backend.refresh_parameters()
        assert run() == [3.0, 3.0, 3.0, 3.0]
    assert len(set(seen)) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fa4_reads_sinks_where_they_are_stored(dtype, monkeypatch):
    """No copy, and no rounding of fp32 ones."""
    layer = replace(LAYER, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=dtype))
    case = replace(CASES["sinks"], layer=layer)
    step = make(case)
    with built("tokenspeed-fa4", request("tokenspeed-fa4", case), monkeypatch) as (backend, calls):
        backend.forward(step.q, step.kv, layer, backend.plan(step.batch))
    assert calls[0].arguments["learnable_sink"] is layer.sinks


def test_sinks_without_a_counter_are_converted_each_step(monkeypatch):
    """A tensor made in inference mode has none: nothing is taken for unchanged."""
    with torch.inference_mode():
        stored = torch.tensor([0.5, -1.0, 2.0, 0.0])
    case = replace(CASES["sinks"], layer=replace(LAYER, sinks=stored))
    step = make(case)
    with built("tokenspeed-fa3", request("tokenspeed-fa3", case), monkeypatch) as (backend, calls):
        for value in (0.25, 0.75):
            with torch.inference_mode():
                stored.fill_(value)
            backend.forward(step.q, step.kv, case.layer, backend.plan(step.batch))
            assert calls[-1]["sinks"].tolist() == [value] * 4


def test_another_stored_tensor_is_read_through_the_same_buffer(monkeypatch):
    """A reload that puts a new parameter in place: graphs read the recorded address, `plan` follows the new tensor."""
    case = CASES["sinks-fp32"]
    step = make(case)
    with built("tokenspeed-fa3", request("tokenspeed-fa3", case), monkeypatch) as (backend, calls):
        backend.forward(step.q, step.kv, case.layer, backend.plan(step.batch))
        for dtype in (torch.float32, torch.bfloat16):
            stored = torch.nn.Parameter(torch.tensor([0.25] * 4, dtype=dtype), requires_grad=False)
            layer = replace(case.layer, sinks=stored)
            for value in (0.25, 0.75):
                stored.fill_(value)
                state = backend.plan(step.batch)
                # the first of a tensor's values comes with the first layer that brings it
                assert value == 0.25 or calls[-1]["sinks"].tolist() == [value] * 4
                backend.forward(step.q, step.kv, layer, state)
                assert calls[-1]["sinks"].tolist() == [value] * 4
    assert len({call["sinks"].data_ptr() for call in calls}) == 1


def test_sinks_are_converted_in_plan_alone(monkeypatch):
    """`forward` may be recorded: it allocates nothing, and refuses a layer that has no buffer and needs one."""
    case = replace(CASES["sinks-fp32"], layer=replace(LAYER, sinks=CASES["sinks-fp32"].layer.sinks.clone()))
    step = make(case)
    with built("tokenspeed-fa3", request("tokenspeed-fa3", case), monkeypatch) as (backend, calls):
        state = backend.plan(step.batch)
        case.layer.sinks.fill_(9.0)
        backend.forward(step.q, step.kv, case.layer, state)
        assert calls[-1]["sinks"].tolist() == [0.5, -1.0, 2.0, 0.0]
        with pytest.raises(UnsupportedBatch, match="sinks of layer 8: those the object was built with, or bfloat16"):
            backend.forward(step.q, step.kv, replace(case.layer, layer_id=8), state)
        ready = replace(LAYER, layer_id=8, sinks=torch.zeros(4, dtype=torch.bfloat16))
        backend.forward(step.q, step.kv, ready, state)
        assert calls[-1]["sinks"] is ready.sinks
