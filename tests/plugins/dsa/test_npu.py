"""Kernel `dsv4` on an Ascend NPU: the operators as their caller shows them, computed with torch.

From a caller, not from the library: SGLang 0.5.23, hardware_backend/npu/attention/ascend_dsv4_backend.py:54-55,
:1972-2026, :2105-2134, :2177-2214. They are registered as real operators, so a wrong name or type is torch's own error.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from backstamp.errors import NotInstalled, UnsupportedBatch
from backstamp.testing.requests import request_for
from backstamp.testing.sparse_reference import reference_compressed
from backstamp_dsa.plugin import DSV4_NPU
from tests.plugins.dsa.cases import check, nan_out
from tests.plugins.dsa.test_dsv4 import drawn

METADATA = (
    "npu_sparse_attn_sharedkv_metadata(*, Tensor cu_seqlens_q, Tensor seqused_kv, int cmp_ratio, int ori_mask_mode,"
    " int cmp_mask_mode, int ori_win_left, int ori_win_right, str layout_q, str layout_kv, int batch_size,"
    " int num_heads_q, int num_heads_kv, int head_dim, bool has_ori_kv, bool has_cmp_kv, int cmp_topk=0) -> Tensor"
)
ATTEND = (
    "npu_sparse_attn_sharedkv(Tensor q, *, Tensor cu_seqlens_q, Tensor seqused_kv, int ori_mask_mode,"
    " int ori_win_left, int ori_win_right, str layout_q, str layout_kv, Tensor ori_kv, Tensor ori_block_table,"
    " Tensor? sinks, Tensor metadata, float softmax_scale, int cmp_ratio, int cmp_mask_mode=0, Tensor? cmp_kv=None,"
    " Tensor? cmp_block_table=None, Tensor? cmp_sparse_indices=None) -> (Tensor, Tensor)"
)
CASES = {
    "window-alone": {"rate": None, "rows": ((5, 5), (1, 300), (0, 0), (3, 150), (0, 9)), "pad_tokens": 2},
    "rate-4-chosen": {"rate": 4, "topk": 20, "rows": ((5, 5), (1, 300), (0, 0), (3, 150))},
    "rate-128-all-sinks": {"rate": 128, "rows": ((2, 300), (1, 127), (1, 128), (1, 1)), "sinks": True},
}  # fmt: skip
PAGE = 2048


def metadata(*, cmp_ratio, batch_size, num_heads_q, has_cmp_kv, cmp_topk=0, **common):
    """What it was made for, as numbers."""
    assert common["has_ori_kv"] is True
    assert (common["layout_q"], common["layout_kv"], common["num_heads_kv"]) == ("TND", "PA_ND", 1)
    return torch.tensor([batch_size, num_heads_q, cmp_ratio, int(has_cmp_kv), cmp_topk, common["ori_win_left"]])


def attend(
    q, *, cu_seqlens_q, seqused_kv, ori_win_left, ori_kv, ori_block_table, sinks, metadata, softmax_scale, cmp_ratio,
    cmp_kv=None, cmp_block_table=None, cmp_sparse_indices=None, **modes,
):  # fmt: skip
    """Windows and compressed entries by page table, one softmax with the sink; padding tokens are left as they are."""
    assert modes["ori_mask_mode"] == 4
    assert modes["ori_win_right"] == 0
    assert cmp_kv is None or modes["cmp_mask_mode"] == 3
    topk = 0 if cmp_sparse_indices is None else cmp_sparse_indices.shape[-1]
    rows = cu_seqlens_q.shape[0] - 1
    assert seqused_kv.shape == (rows,)
    assert all(table is None or table.shape[0] == rows for table in (ori_block_table, cmp_block_table))
    assert metadata.tolist() == [rows, q.shape[1], cmp_ratio, int(cmp_kv is not None), topk, ori_win_left]
    out = torch.full(q.shape, float("nan"), dtype=q.dtype)
    for row in range(rows):
        start, stop, length = int(cu_seqlens_q[row]), int(cu_seqlens_q[row + 1]), int(seqused_kv[row])
        for token in range(start, stop if length else start):
            seen = length - (stop - start) + (token - start) + 1
            pages = ori_block_table[row, : -(-length // ori_kv.shape[1])].long()
            keys = [ori_kv[pages].flatten(0, 1)[max(0, seen - ori_win_left - 1) : seen, 0]]
            if cmp_kv is not None:
                far = cmp_kv[cmp_block_table[row, : len(pages)].long()].flatten(0, 1)[: seen // cmp_ratio, 0]
                chosen = range(len(far)) if cmp_sparse_indices is None else cmp_sparse_indices[token, 0].tolist()
                assert all(-1 <= at < len(far) for at in chosen), "no bounds are checked"
                keys.append(far[[at for at in chosen if at >= 0]])
            logits = q[token].double() @ torch.cat(keys).double().T * softmax_scale
            total = torch.logsumexp(logits, -1)
            if sinks is not None:
                total = torch.logaddexp(total, sinks.double())
            out[token] = (torch.exp(logits - total[:, None]) @ torch.cat(keys).double()).to(q.dtype)
    return out, out.new_zeros(())


@pytest.fixture(scope="module")
def operators():
    """The custom operators, for as long as this module's tests run."""
    library = torch.library.Library("custom", "DEF")
    for schema, function in ((METADATA, metadata), (ATTEND, attend)):
        library.define(schema)
        library.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")
    yield
    library._destroy()


@pytest.fixture
def npu(operators, monkeypatch):
    """The packages that are imported to register the device and the operators, and our module over them."""
    for module in ("torch_npu", "custom_ops"):
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    monkeypatch.delitem(sys.modules, "backstamp_dsa.csa_npu", raising=False)
    from backstamp_dsa.backend import build_dsv4_npu

    return lambda step: build_dsv4_npu(request_for(DSV4_NPU, (step.layer,), page_size=PAGE)).backend


@pytest.mark.parametrize("case", CASES)
def test_the_operators_are_handed_what_their_caller_hands_them(npu, case):
    """Answers of a page-table walk agree with the reference; padding tokens are zeros."""
    step, indices = drawn(**CASES[case], page=PAGE)
    backend, out = npu(step), nan_out(step)
    state = backend.plan(step.batch)
    for _ in range(2):
        backend.forward(step.q, step.kv, step.layer, state, out=out, indices=indices)
    check(step, out, reference_compressed(step.q, step.kv, step.layer, step.batch, indices)[0])
    assert len(state.metadata) == 1


def test_a_csr_index_is_refused(npu):
    """The operators walk page tables."""
    step, _ = drawn(rate=None, rows=((1, 9),), page=PAGE, index_form="csr")
    with pytest.raises(UnsupportedBatch, match="index"):
        npu(step).plan(step.batch)


def test_a_layer_without_a_window_is_refused(npu):
    """The operators take one always."""
    step, _ = drawn(rate=None, rows=((1, 9),), page=PAGE)
    backend = npu(step)
    with pytest.raises(UnsupportedBatch, match="a window"):
        backend.forward(step.q, step.kv, replace(step.layer, window_left=-1), backend.plan(step.batch))


def test_a_step_without_tokens_calls_nothing(npu):
    """No operator runs."""
    step, _ = drawn((), None, page=PAGE)
    backend = npu(step)
    assert backend.forward(step.q, step.kv, step.layer, backend.plan(step.batch)).shape == (0, 16, 512)


def test_without_the_package_of_the_operators_nothing_is_built(npu, monkeypatch):
    """The reason is the package, not the first call."""
    monkeypatch.setitem(sys.modules, "custom_ops", None)
    step, _ = drawn(**CASES["window-alone"], page=PAGE)
    with pytest.raises(NotInstalled, match=r"needs the operators torch\.ops\.custom\..*custom_ops does not import"):
        npu(step)


def test_buffers_longer_than_the_step_are_cut(npu):
    """The operators count rows by the tensors that they are handed."""
    step, _ = drawn(rate=4, rows=((5, 5), (1, 30)), page=PAGE)
    batch, pad = step.batch, torch.zeros(2, dtype=torch.int32)
    table = torch.cat([batch.index.page_table, torch.full_like(batch.index.page_table, -1)])
    long = replace(
        batch,
        qo_indptr=torch.cat([batch.qo_indptr, pad + 6]),
        kv_lens=torch.cat([batch.kv_lens, pad + 9]),
        index=replace(batch.index, page_table=table),
    )
    backend, out = npu(step), nan_out(step)
    backend.forward(step.q, step.kv, step.layer, backend.plan(long), out=out)
    check(step, out, reference_compressed(step.q, step.kv, step.layer, batch, None)[0])


def test_choices_past_what_a_token_may_see_are_masked(npu):
    """Past the row, ahead of the token, or no position at all: -1 before the operator sees it."""
    step, indices = drawn(rate=4, topk=20, rows=((5, 41), (0, 9), (1, 300)), page=PAGE, pad_tokens=2)
    # the first tokens see nine whole entries, the row has ten
    indices[:, 0], indices[:, 1], indices[:, 2], indices[:3, 3] = 2**31 - 1, 75, -7, 9
    backend, out = npu(step), nan_out(step)
    backend.forward(step.q, step.kv, step.layer, backend.plan(step.batch), out=out, indices=indices)
    check(step, out, reference_compressed(step.q, step.kv, step.layer, step.batch, indices)[0])


def test_padding_tokens_of_a_step_without_rows_are_zeros(npu):
    """Nothing is launched, and nothing else would write them."""
    step, _ = drawn((), None, page=PAGE, pad_tokens=3)
    backend, out = npu(step), nan_out(step)
    backend.forward(step.q, step.kv, step.layer, backend.plan(step.batch), out=out)
    assert bool((out == 0).all())
