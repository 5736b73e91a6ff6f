"""What an operator may ask of dsa's insides: which implementation serves which half, and seeded drafts."""

from __future__ import annotations

import re
import sys
from dataclasses import replace

import pytest
import torch

from backstamp.errors import BadInput, ConflictingRequest, UnsupportedBatch
from backstamp.testing.requests import request_for
from backstamp.testing.sparse_reference import reference_sparse
from backstamp_dsa.backend import build_dsa, build_dsa_packed, build_dsa_triton
from backstamp_dsa.plugin import DSA_PACKED, DSA_ROWS, DSA_TRITON
from tests.plugins.dsa.cases import DSA, check, chosen_keys, latent_step, nan_out
from tests.plugins.dsa.flash_mla import SPARSE, install

SEED = {"seed_dsa_topk_from_draft_extend": "true"}
DECODING = ("decode", "verify", "draft_decode", "draft_extend")


@pytest.fixture
def library(monkeypatch):
    """The stand-in, and our module imported over it."""
    monkeypatch.delitem(sys.modules, "backstamp_dsa.dsa_library", raising=False)
    return install(monkeypatch)


def built(offer=DSA_ROWS, factory=build_dsa, **changes):
    """An object with what was asked of its insides."""
    return factory(request_for(offer, (DSA,), **changes)).backend


def test_unset_halves_are_the_librarys(library):
    """Where the library serves the host, nothing asked is its kernels in every phase."""
    assert set(built().by_phase.values()) == {"library"}


@pytest.mark.parametrize(
    ("asked", "prefill", "decoding"),
    [
        ({"dsa_prefill_backend": "triton"}, "triton", "library"),
        ({"dsa_decode_backend": "triton"}, "library", "triton"),
        ({"dsa_prefill_backend": "flashmla_sparse", "dsa_decode_backend": "triton"}, "library", "triton"),
        ({"dsa_prefill_backend": "triton", "dsa_decode_backend": "flashmla_auto"}, "triton", "library"),
    ],
)
def test_each_half_is_what_was_asked(library, asked, prefill, decoding):
    """Verify and the draft phases follow the decode half."""
    by_phase = built(sub_settings=asked).by_phase
    assert by_phase["prefill"] == prefill
    assert {by_phase[phase] for phase in DECODING} == {decoding}


def test_a_half_that_was_asked_for_is_what_runs(library):
    """A decode step calls the library, a prefill of ours does not."""
    # fp32 and fp16 are our own kernels' in the interpreter, bf16 the library's: only which one is called counts here
    backend = built(sub_settings={"dsa_prefill_backend": "triton"})
    for phase, calls in (("prefill", 0), ("decode", 1)):
        step = latent_step(((1, 20),), phase=phase, dtype=torch.bfloat16, page_size=64)
        backend.forward(step.q, step.kv, DSA, backend.plan(step.batch), indices=chosen_keys(step, 8))
        assert len(library.called(SPARSE)) == calls


@pytest.mark.parametrize(
    ("offer", "factory", "value", "known"),
    [
        (DSA_ROWS, build_dsa, "flashmla_kv", "flashmla_auto, flashmla_sparse, triton"),
        (DSA_PACKED, build_dsa_packed, "triton", "flashmla_auto, flashmla_kv"),
        (DSA_TRITON, build_dsa_triton, "flashmla_sparse", "triton"),
    ],
)
def test_a_value_the_row_does_not_know_is_refused_with_those_it_does(library, offer, factory, value, known):
    """The packed cache has one reader, plain rows two, and our own row itself."""
    with pytest.raises(BadInput) as caught:
        built(offer, factory, sub_settings={"dsa_decode_backend": value})
    assert "--dsa-decode-backend" in caught.value.who
    assert known in caught.value.message
    assert repr(value) in caught.value.message


def test_a_setting_nobody_knows_is_refused(library):
    """Nothing that was asked is ignored."""
    with pytest.raises(BadInput, match="dsa_verify_backend"):
        built(sub_settings={"dsa_verify_backend": "triton"})


def seeded(**changes):
    """A seeded draft over our own kernels."""
    return built(DSA_TRITON, build_dsa_triton, dtype="fp16", page_size=16, role="draft", sub_settings=SEED, **changes)


def test_a_seeded_draft_attends_over_the_keys_of_draft_extend():
    """The last accepted token's choice is carried into every step of the loop, and an engine hands none over."""
    backend = seeded()
    extend = latent_step(((3, 30), (2, 40)), phase="draft_extend", dtype=torch.float16)
    indices = chosen_keys(extend, 12)
    seed = backend.seed_of(indices, torch.tensor([1, 4]))
    assert torch.equal(seed, indices[[1, 4]])
    for step_index in range(2):
        step = latent_step(((1, 31 + step_index), (1, 41 + step_index)), phase="draft_decode", dtype=torch.float16)
        state = backend.plan(step.batch)
        backend.use_seed(state, seed)
        out = nan_out(step)
        backend.forward(step.q, step.kv, DSA, state, out=out)
        check(step, out, reference_sparse(step.q, step.kv, DSA, step.batch, seed)[0])


def test_a_state_planned_again_has_no_seed():
    """A seed is of one round of drafts."""
    backend = seeded()
    step = latent_step(((1, 31),), phase="draft_decode", dtype=torch.float16)
    state = backend.plan(step.batch)
    backend.use_seed(state, torch.zeros(1, 4, dtype=torch.int32))
    backend.plan(step.batch, state=state)
    with pytest.raises(UnsupportedBatch, match="indices"):
        backend.forward(step.q, step.kv, DSA, state)


def test_choices_that_are_handed_over_win_over_the_seed():
    """An engine that chose anew is believed."""
    backend = seeded()
    step = latent_step(((1, 31),), phase="draft_decode", dtype=torch.float16)
    state = backend.plan(step.batch)
    backend.use_seed(state, torch.zeros(1, 4, dtype=torch.int32))
    indices, out = chosen_keys(step, 9), nan_out(step)
    backend.forward(step.q, step.kv, DSA, state, out=out, indices=indices)
    check(step, out, reference_sparse(step.q, step.kv, DSA, step.batch, indices)[0])


def test_nobody_is_seeded_who_did_not_ask():
    """Both halves of the door are shut, and say which flag opens it."""
    backend = built(DSA_TRITON, build_dsa_triton, dtype="fp16", page_size=16)
    step = latent_step(((1, 31),), phase="draft_decode", dtype=torch.float16)
    with pytest.raises(UnsupportedBatch, match="--seed-dsa-topk-from-draft-extend"):
        backend.seed_of(torch.zeros(1, 4, dtype=torch.int32), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(UnsupportedBatch, match="--seed-dsa-topk-from-draft-extend"):
        backend.use_seed(backend.plan(step.batch), torch.zeros(1, 4, dtype=torch.int32))


@pytest.mark.parametrize(
    ("phase", "seed", "needed"),
    [
        ("decode", torch.zeros(1, 4, dtype=torch.int32), "a draft_decode step"),
        ("draft_decode", torch.zeros(2, 4, dtype=torch.int32), "[1, topk] torch.int32"),
        ("draft_decode", torch.zeros(1, 4, dtype=torch.int64), "[1, topk] torch.int32"),
        ("draft_decode", torch.zeros(4, dtype=torch.int32), "[1, topk] torch.int32"),
    ],
)
def test_a_seed_of_another_shape_or_phase_is_refused(phase, seed, needed):
    """One row of choices a token, of a draft decode step."""
    backend = seeded()
    step = latent_step(((1, 31),), phase=phase, dtype=torch.float16)
    with pytest.raises(UnsupportedBatch, match=re.escape(needed)):
        backend.use_seed(backend.plan(step.batch), seed)


def test_a_seed_with_branches_is_refused():
    """Choosing among branches reorders the rows the seed lies in."""
    with pytest.raises(ConflictingRequest, match="4 branches"):
        seeded(topk=4)


def test_a_seed_that_is_neither_true_nor_false_is_refused():
    """A word that is no answer."""
    with pytest.raises(BadInput, match="true or false"):
        built(DSA_TRITON, build_dsa_triton, sub_settings={"seed_dsa_topk_from_draft_extend": "1"})


def test_a_seed_switched_off_is_none():
    """`false` is as unset."""
    off = {"seed_dsa_topk_from_draft_extend": "false"}
    assert built(DSA_TRITON, build_dsa_triton, topk=4, sub_settings=off).seeded is False


def test_the_row_and_its_factory_agree_on_the_values(library):
    """Every declared value builds."""
    for offer, factory in ((DSA_ROWS, build_dsa), (DSA_PACKED, build_dsa_packed), (DSA_TRITON, build_dsa_triton)):
        kv_dtype = min(offer.kv_dtypes)
        for name, values in offer.sub_settings.items():
            for value in values:
                changes = {"kv_dtype": kv_dtype, "sub_settings": {name: value}}
                assert factory(replace(request_for(offer, (DSA,)), **changes)).kernel == "dsa"
