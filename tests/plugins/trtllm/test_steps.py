"""Steps that are planned again: after an eager one, and over another view of one storage; tables cut from others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backstamp.attention import Batch, LayerSpec, TreeMask
from backstamp.declarations import Offer
from backstamp.errors import UnsupportedBatch
from backstamp.testing.batches import MadeStep, make_batch, split_new
from backstamp_trtllm.draft_masks import fill_tree
from backstamp_trtllm.plugin import (
    CUTEDSL_MLA,
    FMHA_V2,
    TOKENSPEED_MLA,
    TOKENSPEED_MLA_RAGGED,
    TRTLLM_MHA,
    TRTLLM_MLA,
    TRTLLM_MLA_RAGGED,
    XQA,
)
from backstamp_trtllm.steps import new_mask, plan_step
from backstamp_trtllm.token_fill import TokenFill
from tests.plugins.trtllm.cases import Case, build, compare, install, make

OFFERS = (TRTLLM_MHA, XQA, TRTLLM_MLA, CUTEDSL_MLA, TOKENSPEED_MLA)


def case_of(offer: Offer, rows: tuple[tuple[int, int], ...], phase: str) -> Case:
    """A step for a row."""
    if offer.kernel.endswith("mla"):
        return Case(rows, phase=phase, page_size=64, heads=(8, 1), mla=True)
    return Case(rows, phase=phase)


def with_table(step: MadeStep, table: torch.Tensor, **changes: object) -> Batch:
    """A step's batch over another page table."""
    return replace(step.batch, index=replace(step.batch.index, page_table=table), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("offer", "q_len"),
    [(offer, q_len) for offer in OFFERS for q_len in (1, 4) if q_len == 1 or "verify" in offer.phases],
    ids=lambda value: str(value) if isinstance(value, int) else value.kernel,
)
def test_a_step_planned_for_capture_after_an_eager_one_serves_emptied_rows(
    offer: Offer, q_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warm step knows that all its rows have keys and silences none: a graph may not be recorded over that."""
    install(monkeypatch)
    phase = "decode" if q_len == 1 else "verify"
    warm = make(case_of(offer, ((q_len, 30), (q_len, 50)), phase))
    case = case_of(offer, ((q_len, 0), (q_len, 41)), phase)
    later = make(case, seed=3)
    backend = build(offer, warm)
    state = backend.plan(warm.batch, state=backend.plan(warm.batch), capture=True)
    assert backend.plan(later.batch, state=state) is state
    compare(backend, state, later, case)
    # the device half alone, as a graph replays it
    step = state if offer in (TRTLLM_MHA, TRTLLM_MLA, CUTEDSL_MLA) else state.step
    step.batch.kv_lens.copy_(later.batch.kv_lens.flip(0))
    backend.replan(state)
    assert step.dead.flatten().tolist() == [False] * q_len + [True] * q_len


@pytest.mark.parametrize("offer", OFFERS, ids=lambda offer: offer.kernel)
def test_a_table_seen_with_other_strides_at_the_planned_address_is_refused(
    offer: Offer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One storage viewed anew is not up to date, and a copy would write over what it reads."""
    install(monkeypatch)
    step = make(case_of(offer, ((1, 9), (1, 7)), "decode"))
    flat = torch.arange(16, dtype=torch.int32)
    backend = build(offer, step)
    state = backend.plan(with_table(step, flat.view(2, 8)), capture=True)
    backend.plan(with_table(step, flat.view(2, 8)[:, :5]), state=state)
    with pytest.raises(UnsupportedBatch, match=r"index\.page_table: strides \(8, 1\).*\(4, 1\)"):
        backend.plan(with_table(step, flat.view(4, 4)), state=state)
    assert torch.equal(flat, torch.arange(16, dtype=torch.int32))


@pytest.mark.parametrize("offer", OFFERS, ids=lambda offer: offer.kernel)
def test_page_ids_that_the_planned_table_cannot_hold_are_refused(offer: Offer, monkeypatch: pytest.MonkeyPatch) -> None:
    """None is cut off in silence."""
    install(monkeypatch)
    step = make(case_of(offer, ((1, 9), (1, 7)), "decode"))
    size = step.batch.index.page_size
    backend = build(offer, step)
    narrow = with_table(step, torch.zeros(2, 2, dtype=torch.int32), max_kv_len=5 * size)
    wide = with_table(step, torch.zeros(2, 5, dtype=torch.int32), max_kv_len=5 * size)
    state = backend.plan(narrow, capture=True)
    with pytest.raises(UnsupportedBatch, match=r"index\.page_table: at most 2 page ids a row, as planned.*5"):
        backend.plan(wide, state=state)


def test_a_tree_seen_with_other_strides_at_the_planned_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask of wider rows over the same bytes is another mask."""
    install(monkeypatch)
    step = make(Case(((4, 30), (4, 50)), phase="verify", tree="qlen"))
    tree = step.batch.tree
    assert tree is not None
    flat = torch.ones(128, dtype=torch.bool)
    wide, narrow = (replace(tree, buffer=flat[: 2 * size * size].view(2, size, size)) for size in (8, 4))
    backend = build(XQA, step)
    state = backend.plan(replace(step.batch, tree=wide), capture=True)
    with pytest.raises(UnsupportedBatch, match=r"tree\.buffer: strides \(64, 8, 1\).*\(16, 4, 1\)"):
        backend.plan(replace(step.batch, tree=narrow), state=state)
    full = replace(tree, kind="full", buffer=flat, indptr=torch.tensor([0, 64, 128], dtype=torch.int32))
    with pytest.raises(UnsupportedBatch, match=r"tree: qlen, as planned.*full"):
        backend.plan(replace(step.batch, tree=full), state=state)


def test_a_table_at_the_end_of_its_storage_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole rows of the wider table it was cut from would run past the last id."""
    install(monkeypatch)
    case = Case(((1, 20), (1, 50)))
    step = make(case)
    ids = step.batch.index.page_table
    assert ids is not None
    wider = torch.full((2, ids.shape[1] + 3), -1, dtype=torch.int32)
    for first, copied in ((0, False), (3, True)):
        view = wider[:, first : first + ids.shape[1]]
        view.copy_(ids)
        backend = build(TRTLLM_MHA, step)
        state = backend.plan(with_table(step, view))
        assert state.copied is copied
        compare(backend, state, step, case)


@pytest.mark.parametrize("kind", ["full", "packed"])
def test_a_token_that_sees_no_key_has_an_empty_mask(kind: str) -> None:
    """Where its bits would lie a mask of no keys has none: those there are another row's."""
    batch = make(Case(((3, 9), (3, 0), (3, 20)), phase="verify", pad_tokens=1)).batch
    starts = [0, 27, 27, 87] if kind == "full" else [0, 4, 4, 12]
    tree = TreeMask(
        kind=kind,  # type: ignore[arg-type]
        buffer=torch.full((87,), 255, dtype=torch.uint8),
        indptr=torch.tensor(starts, dtype=torch.int32),
    )
    mask = new_mask(batch.num_tokens, 8, torch.device("cpu"))
    fill_tree(mask, plan_step(replace(batch, tree=tree), TokenFill("xqa"), capture=True, every_token=True), 8)
    assert mask.flatten().tolist() == [7] * 3 + [0] * 3 + [7] * 3 + [0]


@pytest.mark.parametrize(
    "offer",
    [*OFFERS, FMHA_V2, TRTLLM_MLA_RAGGED, TOKENSPEED_MLA_RAGGED],
    ids=lambda offer: f"{offer.kernel}-{'-'.join(sorted(offer.kv_forms))}",
)
def test_tokens_of_no_row_are_zero_where_there_is_no_row(offer: Offer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A padded step of an engine that has nothing to do; nothing is launched for it."""
    libraries = install(monkeypatch)
    ragged = "ragged" in offer.kv_forms
    layer = LayerSpec(layer_id=0, num_qo_heads=8, num_kv_heads=8, head_dim=192, v_head_dim=128, scale=0.1)
    step = make_batch([3], [3], layer=layer, dtype=torch.bfloat16) if ragged else None
    step = step or make(case_of(offer, ((3, 9),), "prefill" if "prefill" in offer.phases else "decode"))
    empty, none = torch.zeros(1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    batch = replace(
        step.batch, num_rows=0, qo_indptr=empty, kv_lens=none, qo_indptr_host=empty.clone(), kv_lens_host=none.clone()
    )
    backend = build(offer, step)
    out = torch.full((3, step.layer.num_qo_heads, step.layer.v_head_dim), float("nan"), dtype=torch.bfloat16)
    lse = torch.full(out.shape[:2], float("nan")) if "lse" in offer.features else None
    kv, new = (None, split_new(step)[1]) if ragged else (step.kv, None)
    if new is not None:
        new = replace(new, kv_indptr=empty)
    assert backend.forward(step.q, kv, step.layer, backend.plan(batch), out=out, lse=lse, new=new) is out
    assert torch.equal(out, torch.zeros_like(out))
    assert lse is None or torch.equal(lse, torch.full_like(lse, float("-inf")))
    launched = [
        call.path for call in libraries.flashinfer.calls + libraries.tokenspeed.calls if "utils" not in call.path
    ]
    assert launched == []
