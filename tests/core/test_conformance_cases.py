"""What the kit asks of a row: every declared value once, nothing excluded, and steps that show what is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backstamp.catalogue import build_catalogue
from backstamp.declarations import Offer
from backstamp.discovery import discover
from backstamp.testing.conformance.attend import make_step, rows_of, wrong
from backstamp.testing.conformance.row_cases import UNCHECKED_FEATURES, base_case, cases_of
from backstamp.testing.reference import reference_attention

ROWS = [
    (f"{name}-{at}-{row.offer.family}-{row.offer.device}", row.offer)
    for (slot, name), rows in build_catalogue(discover()).rows.items()
    if slot == "attention"
    for at, row in enumerate(rows)
    if row.offer.family in ("mha", "mla")
]
OFFERS = pytest.mark.parametrize("offer", [offer for _, offer in ROWS], ids=[name for name, _ in ROWS])


@OFFERS
def test_every_declared_value_is_met(offer: Offer) -> None:
    """Phases, dtypes, cache dtypes, head dims, exact pages and index forms, each in a case of its own."""
    cases = cases_of(offer)
    assert {case.phase for case in cases} == offer.all_phases
    assert {case.dtype for case in cases} == offer.dtypes
    assert {case.kv_dtype for case in cases} == offer.kv_dtypes
    if "any" not in offer.head_dims:
        pairs = {dims if isinstance(dims, tuple) else (dims, dims) for dims in offer.head_dims}
        assert {case.dims for case in cases} == pairs
    if "paged" in offer.kv_forms:
        assert {*offer.page_sizes.exact, offer.page_sizes.preferred} <= {case.page_size for case in cases}
        assert {case.index_form for case in cases} == offer.index_forms


@OFFERS
def test_every_declared_feature_is_met_or_told(offer: Offer) -> None:
    """A feature without a case would be taken on trust."""
    met = {word for case in cases_of(offer) for word in case.said}
    phases = offer.all_phases
    # what only a phase the row does not have could show
    elsewhere = {
        "tree_mask": "verify" in phases,
        "topk": "draft_decode" in phases or "verify" in phases,
        "split_kv": "prefill" in phases and offer.prefix,
        "encoder": "prefill" in phases and "ragged" in offer.kv_forms,
        "cross": bool({"prefill", "decode"} & phases) and "paged" in offer.kv_forms,
    }
    expected = {feature for feature in offer.features - UNCHECKED_FEATURES if elsewhere.get(feature, True)}
    assert expected <= met, expected - met


@OFFERS
def test_names_are_unique_and_nothing_excluded_is_asked(offer: Offer) -> None:
    """A finding names one case; a combination the row rules out is no fault of it."""
    cases = cases_of(offer)
    assert len({(case.phase, case.name) for case in cases}) == len(cases)
    for words in offer.excludes:
        assert not any(set(words.split("+")) <= case.said for case in cases)
    for words in offer.needs:
        assert all(set(words.split("+")) <= case.said | {"graph"} for case in cases)


@OFFERS
def test_every_step_has_a_pad_and_rows_about_a_page_boundary(offer: Offer) -> None:
    """A single token, the last slot of a page, the first of the next, and a row without tokens."""
    for phase in offer.phases:
        case = base_case(offer, phase)
        lens = [kv for q, kv in case.rows if q]
        page = max(case.page_size, 8)
        assert (0, offer.fill_value) in case.rows
        assert any(kv % page == 0 for kv in lens)
        assert any(kv > page and kv % page for kv in lens)


def dense() -> Offer:
    """A row of torch_native."""
    return next(offer for name, offer in ROWS if name.startswith("torch_native-0-mha"))


@pytest.mark.parametrize("form", ["page_table", "csr", "indirect"])
def test_rows_in_other_company_are_the_same_rows(form: str) -> None:
    """The same queries over the same keys, whatever form says where these lie."""
    case = replace(base_case(dense(), "prefill"), index_form=form)
    step = make_step(case, "cpu")
    truth, _ = reference_attention(step.q, step.kv, step.layer, step.batch)
    rows = [6, 1, 3]
    part = rows_of(step, rows)
    answer, _ = reference_attention(part.q, part.kv, part.layer, part.batch)
    starts = step.batch.qo_indptr.tolist()
    assert torch.equal(answer, torch.cat([truth[starts[row] : starts[row + 1]] for row in rows]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda out: out.__setitem__((3, 0, 0), float("nan")), "not finite in token 3"),
        (lambda out: out.__setitem__((20, 1), out[20, 1] + 0.01), "off by 1.0e-02 at most"),
        (lambda out: out.mul_(1.0001), "of the whole"),
    ],
    ids=["nan", "one head", "all a little"],
)
def test_a_wrong_answer_is_told_with_its_row(change: object, words: str) -> None:
    """One number far off, and every number a little: both are wrong."""
    case = base_case(dense(), "prefill")
    step = make_step(case, "cpu")
    truth, true_lse = reference_attention(step.q, step.kv, step.layer, step.batch)
    assert not wrong(truth.float(), truth, case, "exact", lse=None, true_lse=true_lse)
    out = truth.float()
    change(out)
    assert words in wrong(out, truth, case, "exact", lse=None, true_lse=true_lse)


def test_an_lse_of_a_token_that_sees_nothing_is_minus_infinity() -> None:
    """And any other number there is wrong."""
    case = base_case(dense(), "decode")
    step = make_step(case, "cpu")
    truth, logs = reference_attention(step.q, step.kv, step.layer, step.batch)
    logs = logs.clone()
    logs[0] = float("-inf")
    got = logs.float()
    assert not wrong(truth.float(), truth, case, "exact", lse=got, true_lse=logs)
    got[0] = 0.0
    assert "needs -inf" in wrong(truth.float(), truth, case, "exact", lse=got, true_lse=logs)
