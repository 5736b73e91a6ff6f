"""Numbers: the tile kernel in Triton's interpreter against float64 reference attention, feature by feature.

Sizes are small, but cross tile, page, block and split borders (the interpreter's launch table has tiles of 16 by 16 and
8 processors); settings are paired by hand so that each two meet somewhere. The interpreter multiplies bf16 wrongly:
fp16 and fp32 only.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from backstamp.attention import KVIndex, LayerSpec, PagedKV, RaggedKV, TreeMask
from backstamp.testing.reference import reference_attention, relative_error
from tests.plugins.triton.cases import NAN, Case, build_attention, check, make, run

RAGGED = ((5, 5), (1, 20), (0, 0), (19, 37), (3, 3), (0, 9))
DECODE = ((1, 1), (1, 40), (0, 0), (1, 96), (1, 16))
VERIFY = ((6, 6), (6, 40), (6, 23))

CASES = [
    Case("ragged", RAGGED, lse=True),
    Case("ragged-fp32-page1-csr", RAGGED, dtype="fp32", page_size=1, index="csr", heads=(6, 1), dims=(80, 80)),
    Case("ragged-page3-indirect-hnd", RAGGED, page_size=3, index="indirect", cache="heads_first", dims=(96, 96)),
    Case("ragged-page64-interleaved-window", RAGGED, page_size=64, cache="interleaved", window_left=7, lse=True),
    Case("mha-page-border-qk-v", ((16, 32), (17, 33)), heads=(3, 3), dims=(192, 128), cache="interleaved"),
    Case("mqa-24-heads", ((3, 18), (1, 1)), heads=(24, 1), dims=(64, 80), dtype="fp32", page_size=3, lse=True),
    Case("head-dim-128", ((18, 18),), dims=(128, 128), heads=(2, 1), softcap=5.0, page_size=64),
    Case("head-dim-256-softcap-window", ((9, 30),), dims=(256, 256), heads=(2, 1), softcap=3.0, window_left=4,
         index="csr64", page_size=3),
    Case("non-causal-window-softcap-fp32", ((5, 40), (0, 0), (20, 21)), causal=False, window_left=9, softcap=2.0,
         dtype="fp32", cache="heads_first"),
    Case("causal-per-row-sinks", ((5, 30), (18, 18), (2, 2)), causal=(1, 0, 1), sinks=True, index="indirect"),
    Case("causal-per-row-window-page1", ((5, 30), (18, 18), (2, 2)), causal=(0, 1, 0), window_left=3, page_size=1,
         lse=True, dtype="fp32"),
    Case("left-padding-window-sinks", ((4, 20), (2, 40)), starts=(5, 17), window_left=12, sinks=True, page_size=3),
    Case("left-padding-fp32-lse", ((40, 40), (8, 8)), starts=(18, 0), dtype="fp32", lse=True, index="csr"),
    Case("sinks-softcap-fp32-page64", RAGGED, sinks=True, softcap=4.0, dtype="fp32", page_size=64, index="indirect"),
    Case("pad-tokens", ((3, 9), (0, 0), (0, 0)), pad_tokens=20, lse=True),
    Case("draft-extend", ((2, 30), (3, 3), (1, 17)), phase="draft_extend", heads=(8, 2), lse=True, page_size=1),
    Case("verify-qlen", VERIFY, phase="verify", tree="qlen", lse=True),
    Case("verify-full-window-fp32", VERIFY, phase="verify", tree="full", window_left=3, dtype="fp32", page_size=3),
    Case("verify-full-dead-slots", VERIFY, phase="verify", tree="full", dead_slots=2, lse=True),
    Case("verify-qlen-dead-slots-window", VERIFY, phase="verify", tree="qlen", dead_slots=3, window_left=4,
         dtype="fp32"),
    Case("verify-packed-sinks", VERIFY, phase="verify", tree="packed", sinks=True, cache="interleaved"),
    Case("verify-qlen-window-softcap", ((20, 50), (20, 20)), phase="verify", tree="qlen", window_left=2, softcap=3.0,
         index="csr", page_size=1, lse=True),
    Case("verify-full-ragged-padding", ((4, 9), (0, 0), (17, 30)), phase="verify", tree="full", starts=(2, 0, 6),
         dtype="fp32", index="indirect", heads=(6, 2), pad_tokens=2),
    Case("verify-packed-window-mqa", VERIFY, phase="verify", tree="packed", window_left=5, heads=(20, 1), lse=True),
    Case("decode", DECODE, phase="decode", heads=(8, 2), lse=True),
    Case("decode-fp32-split", ((1, 200), (1, 3)), phase="decode", heads=(2, 1), dtype="fp32", page_size=3, lse=True),
    Case("decode-split-sinks-window", ((1, 300), (0, 0)), phase="decode", heads=(4, 1), sinks=True, window_left=150,
         page_size=1, index="csr", pad_tokens=3),
    Case("decode-softcap-page64-hnd", DECODE, phase="decode", softcap=2.0, page_size=64, cache="heads_first",
         dims=(192, 128), pad_tokens=1),
    Case("draft-decode-topk-indirect", ((1, 8), (1, 8), (1, 33), (1, 33)), phase="draft_decode", index="indirect",
         dims=(80, 80), heads=(5, 1), starts=(1, 2, 3, 20), dtype="fp32", lse=True),
    Case("decode-many-pad-tokens", ((0, 0), (1, 5), (0, 7)), phase="decode", pad_tokens=6, lse=True, causal=False),
    Case("mla-decode", ((1, 70), (0, 0), (1, 2)), mla=True, heads=(4, 1), dims=(576, 512), phase="decode", lse=True),
    Case("mla-decode-fp32-split-rope", ((1, 40),), mla=True, heads=(20, 1), dims=(576, 512), phase="decode",
         split_rope=True, dtype="fp32", page_size=1, index="csr", pad_tokens=1),
    Case("mla-prefill", ((5, 5), (3, 20)), mla=True, heads=(2, 1), dims=(576, 512), page_size=64, index="indirect",
         split_rope=True),
    Case("mla-window-softcap-sinks", ((2, 30), (1, 5)), mla=True, heads=(4, 1), dims=(576, 512), window_left=6,
         softcap=4.0, sinks=True, causal=(1, 0)),
    Case("mla-verify-tree", ((4, 19), (4, 4)), mla=True, heads=(3, 1), dims=(576, 512), page_size=3, phase="verify",
         tree="qlen", dtype="fp32", lse=True),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_agrees_with_float64_reference(case):
    """Every feature, alone and paired, with NaN wherever nothing may be read."""
    drawn = make(case)
    out, lse = run(case, drawn)
    check(case, drawn, out, lse)


def test_a_prefill_takes_any_mask_among_its_tokens():
    """What an engine's caller may bring is no tree of drafts: tokens that see later ones, and some that see few."""
    case = Case("prefill-qlen", ((20, 20), (20, 50)), tree="qlen", dtype="fp32", page_size=1)
    drawn = make(case)
    seen = torch.rand(drawn.batch.tree.buffer.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    drawn = dataclasses.replace(drawn, batch=dataclasses.replace(drawn.batch, tree=TreeMask(kind="qlen", buffer=seen)))
    assert drawn.batch.phase == "prefill"
    check(case, drawn, *run(case, drawn))


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_index_forms_give_equal_bits(phase):
    """A page table, CSR of either width and an indirect table name the same keys: the same bits come out."""
    rows = ((3, 20), (0, 0), (17, 40)) if phase == "prefill" else ((1, 20), (0, 0), (1, 140))
    answers = []
    for form in ("page_table", "csr", "csr64", "indirect"):
        case = Case(form, rows, phase=phase, index=form, page_size=3)
        answers.append(run(case, make(case))[0])
    assert all(torch.equal(answers[0], answer) for answer in answers[1:])


def test_cache_strides_give_equal_bits():
    """Interleaved and heads-first caches hold the same numbers at other addresses."""
    cases = [Case(cache, RAGGED, cache=cache) for cache in ("rows", "interleaved", "heads_first")]
    answers = [run(case, make(case))[0] for case in cases]
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])


def test_a_row_with_one_token_agrees_between_prefill_and_decode():
    """Each row answers alike whether the step is all decode (split) or ragged."""
    together = Case("ragged", ((1, 90), (4, 4)), phase="prefill", dtype="fp32")
    alone = dataclasses.replace(together, rows=((1, 90),), phase="decode")
    left, right = run(together, make(together))[0][:1], run(alone, make(alone))[0]
    truth = reference_attention(*_reference_arguments(make(together)))[0][:1]
    assert relative_error(left, truth) < 1e-5
    truth = reference_attention(*_reference_arguments(make(alone)))[0]
    assert relative_error(right, truth) < 1e-5


def test_decode_of_few_rows_splits_their_keys():
    """One long row is shared by several programs, and the check of splits is not vacuous."""
    case = Case("split", ((1, 300),), heads=(2, 1), phase="decode", dtype="fp32")
    drawn = make(case)
    backend = build_attention(drawn.request).backend
    state = backend.plan(drawn.batch)
    backend.forward(drawn.q, drawn.kv, drawn.layer, state)
    (launch,) = state.launches.values()
    assert launch.splits > 1


@pytest.mark.parametrize(("causal", "q_lens"), [(True, [5, 0, 18]), (False, [5, 2, 18]), (False, [9, 30, 1])])
def test_ragged_keys_need_no_cache(causal, q_lens):
    """`new` alone: encoder and prefill layers; not causal, queries may outnumber keys (cross attention)."""
    kv_lens = [5, 0, 18] if causal else [20, 3, 18]
    case = Case("ragged-kv", tuple(zip(q_lens, kv_lens, strict=True)), dims=(96, 64), causal=causal, dtype="fp32")
    drawn = make(case)
    g = torch.Generator().manual_seed(1)
    total = sum(kv_lens)
    new = RaggedKV(
        k=torch.randn(total, 2, 96, generator=g),
        v=torch.randn(total, 2, 64, generator=g),
        kv_indptr=torch.tensor([0, *torch.tensor(kv_lens).cumsum(0).tolist()], dtype=torch.int32),
    )
    batch = dataclasses.replace(drawn.batch, index=KVIndex(page_size=1))
    backend = build_attention(drawn.request).backend
    out = torch.full((sum(q_lens), 4, 64), NAN)
    lse = torch.full((sum(q_lens), 4), NAN)
    backend.forward(drawn.q, None, drawn.layer, backend.plan(batch), out=out, lse=lse, new=new)
    truth, true_lse = reference_attention(drawn.q, None, drawn.layer, batch, new=new)
    assert relative_error(out, truth) < 1e-5
    assert torch.allclose(lse.double(), true_lse, atol=1e-5)


def test_a_cache_of_more_than_two_to_the_31_elements_is_addressed(tmp_path):
    """Page 2 lies over 2**31 elements in, at a stride that itself fits 32 bits; all but two pages are a hole."""
    stride = 2**30 + 64
    case = Case("far", ((3, 32),), heads=(2, 1))
    drawn = make(case)
    flat = torch.from_file(str(tmp_path / "cache"), shared=True, size=2 * stride + 16 * 128, dtype=torch.float16)
    k, v = (flat.as_strided((3, 16, 1, 64), (stride, 128, 128, 1), offset) for offset in (0, 64))
    table = drawn.batch.index.page_table
    pages = table[0, :2].long()
    k[::2] = drawn.kv.k[pages]
    v[::2] = drawn.kv.v[pages]
    near, _ = run(case, drawn)
    table[0, :2] = torch.tensor([0, 2])
    far, _ = run(case, dataclasses.replace(drawn, kv=PagedKV(k=k, v=v)))
    assert torch.equal(near, far)


@pytest.mark.parametrize("rows", [(), ((0, 0), (0, 5))], ids=["no-rows", "no-tokens"])
def test_an_empty_step_returns_at_once(rows):
    """Nothing to do is no error, and what was passed as `out` comes back."""
    drawn = make(Case("empty", ((1, 1), (1, 5))))
    lens = torch.tensor([n for _, n in rows], dtype=torch.int32)
    batch = dataclasses.replace(
        drawn.batch,
        num_rows=len(rows),
        num_tokens=0,
        max_q_len=0,
        kv_lens=lens,
        qo_indptr=torch.zeros(len(rows) + 1, dtype=torch.int32),
    )
    backend = build_attention(drawn.request).backend
    out = torch.empty(0, 4, 64, dtype=torch.float16)
    assert backend.forward(drawn.q[:0], drawn.kv, drawn.layer, backend.plan(batch), out=out) is out


def test_a_layer_of_equal_id_and_other_window_is_not_mistaken():
    """Constants are kept by layer id; another spec under the same id is prepared anew."""
    case = Case("window", ((6, 40),), dtype="fp32")
    drawn = make(case)
    backend = build_attention(drawn.request).backend
    narrow: LayerSpec = dataclasses.replace(drawn.layer, window_left=2)
    state = backend.plan(drawn.batch)
    for layer in (drawn.layer, narrow):
        out = backend.forward(drawn.q, drawn.kv, layer, state)
        truth, _ = reference_attention(drawn.q, drawn.kv, layer, drawn.batch)
        assert relative_error(out, truth) < 1e-5


def _reference_arguments(drawn):
    return drawn.q, drawn.kv, drawn.layer, drawn.batch
