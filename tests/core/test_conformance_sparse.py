"""The kit's numbers of sparse rows: right rows pass every case, and each kind of wrong answer fails its own."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from backstamp.errors import FactoryFailed, UnsupportedBatch
from backstamp.testing.conformance import sparse_attend
from backstamp.testing.conformance.sparse_cases import sparse_cases_of
from backstamp.testing.conformance.sparse_numerics import sparse_numeric_jobs
from backstamp.testing.conformance.subject import Job, Skipped, subjects_of
from backstamp.testing.sparse_reference import reference_compressed, reference_sparse
from backstamp_dsa.plugin import DSA_ROWS, DSV4_CUDA
from tests.sparse_rows import COMPRESSED, PACKED, SPARSE, ReferenceIndexer, ReferenceKernel, subject_of

REAL_ATTEND, REAL_FORWARD, REAL_PLAN = ReferenceKernel.attend, ReferenceKernel.forward, ReferenceKernel.plan


def job_named(offer, ending: str) -> Job:
    """The job of one phase and case."""
    return next(job for job in sparse_numeric_jobs(subject_of(offer)) if job.name.endswith(ending))


def run(offer, ending: str) -> str:
    """What it answers."""
    return job_named(offer, ending).run()


ROWS = [pytest.param(SPARSE, id="sparse_mla"), pytest.param(COMPRESSED, id="csa"), pytest.param(PACKED, id="packed")]


@pytest.mark.parametrize("offer", ROWS)
def test_every_case_of_a_right_row_is_right(offer) -> None:
    """The reference through its own row; nothing is skipped."""
    offer = replace(offer, phases=frozenset({"prefill", "decode"})) if offer is PACKED else offer
    jobs = list(sparse_numeric_jobs(subject_of(offer)))
    assert len({job.name for job in jobs}) == len(jobs) > 40
    assert [(job.name, told) for job in jobs if (told := job.run())] == []


@pytest.mark.parametrize(
    "ending", ["decode, choices of -1", "decode, asked for triton", "decode, chosen by the indexer"]
)
def test_our_own_kernel_is_right_in_the_interpreter(ending: str) -> None:
    """A row for a GPU, on a CPU."""
    (subject,) = subjects_of("backstamp-dsa")
    job = next(job for job in sparse_numeric_jobs(subject) if re.search(rf"row 3 .*{ending}$", job.name))
    assert job.run() == ""


def outputs(self, q, kv, layer, batch, indices, q_rope):
    truth, lse = REAL_ATTEND(self, q, kv, layer, batch, indices, q_rope)
    return truth * 1.02, lse


def minus_one_is_key_zero(self, q, kv, layer, batch, indices, q_rope):
    return REAL_ATTEND(self, q, kv, layer, batch, indices.clamp(min=0), q_rope)


def past_is_the_last_key(self, q, kv, layer, batch, indices, q_rope):
    last = torch.repeat_interleave(batch.kv_lens, batch.qo_indptr.diff()) - 1
    return REAL_ATTEND(self, q, kv, layer, batch, torch.minimum(indices, last[:, None].int()), q_rope)


def ahead_is_seen(self, q, kv, layer, batch, indices, q_rope):
    return REAL_ATTEND(self, q, kv, layer, replace(batch, causal=False), indices, q_rope)


def nothing_is_nan(self, q, kv, layer, batch, indices, q_rope):
    truth, lse = REAL_ATTEND(self, q, kv, layer, batch, indices, q_rope)
    return truth.masked_fill(torch.isneginf(lse)[..., None], float("nan")), lse


def nothing_has_an_lse_of_zero(self, q, kv, layer, batch, indices, q_rope):
    truth, lse = REAL_ATTEND(self, q, kv, layer, batch, indices, q_rope)
    return truth, lse.masked_fill(torch.isneginf(lse), 0.0)


def lse_to_the_base_two(self, q, kv, layer, batch, indices, q_rope):
    truth, lse = REAL_ATTEND(self, q, kv, layer, batch, indices, q_rope)
    return truth, lse * 1.4427


def last_choices_dropped(self, q, kv, layer, batch, indices, q_rope):
    return REAL_ATTEND(self, q, kv, layer, batch, indices[:, : max(1, indices.shape[1] // 32 * 32)], q_rope)


def tokens_of_no_row_are_nan(self, q, kv, layer, batch, indices, q_rope):
    truth, lse = REAL_ATTEND(self, q, kv, layer, batch, indices, q_rope)
    truth[int(batch.qo_indptr[-1]) :] = float("nan")
    return truth, lse


def rotary_part_dropped(self, q, kv, layer, batch, indices, q_rope):
    return REAL_ATTEND(self, q, kv, layer, batch, indices, None if q_rope is None else torch.zeros_like(q_rope))


def window_of_one_less(self, q, kv, layer, batch, indices, q_rope):
    return reference_compressed(q, kv, replace(layer, window_left=layer.window_left - 1), batch, indices)


def sinks_dropped(self, q, kv, layer, batch, indices, q_rope):
    return reference_compressed(q, kv, replace(layer, sinks=None), batch, indices)


def entries_dropped(self, q, kv, layer, batch, indices, q_rope):
    return reference_compressed(q, replace(kv, v=None), layer, batch, None)


def choice_is_all(self, q, kv, layer, batch, indices, q_rope):
    return reference_compressed(q, kv, layer, batch, None)


WRONG = [
    (SPARSE, outputs, "decode, plain", "output is off"),
    (SPARSE, outputs, "draft_decode, plain", "step 0: output is off"),
    (SPARSE, minus_one_is_key_zero, "decode, choices of -1", "output is off"),
    (SPARSE, past_is_the_last_key, "prefill, choices past the row", "output is off"),
    (SPARSE, ahead_is_seen, "prefill, choices ahead of the token", "output is off"),
    (SPARSE, ahead_is_seen, "verify, choices ahead of the token", "output is off"),
    (SPARSE, nothing_is_nan, "decode, nothing chosen", "not finite in token 0"),
    (SPARSE, nothing_has_an_lse_of_zero, "decode, nothing chosen", "LSE needs -inf"),
    (SPARSE, lse_to_the_base_two, "decode, lse", "LSE is off"),
    (SPARSE, last_choices_dropped, "decode, 40 of the keys", "output is off"),
    (SPARSE, tokens_of_no_row_are_nan, "decode, tokens of no row", "not finite .*of no row"),
    (SPARSE, rotary_part_dropped, "decode, rotary part apart", "output is off"),
    (COMPRESSED, window_of_one_less, "prefill, plain", "output is off"),
    (COMPRESSED, sinks_dropped, "decode, sinks in fp32", "output is off"),
    (COMPRESSED, entries_dropped, "decode, one compressed entry for 128 tokens", "output is off"),
    (COMPRESSED, choice_is_all, "decode, choices of -1", "output is off"),
]


@pytest.mark.parametrize(("offer", "how", "ending", "words"), WRONG, ids=[f"{of[2]}-{of[1].__name__}" for of in WRONG])
def test_a_wrong_answer_is_told_as_what_it_is(offer, how: Callable, ending: str, words: str, monkeypatch) -> None:
    """Outputs, choices that are no keys, LSE, windows, sinks and compressed entries."""
    monkeypatch.setattr(ReferenceKernel, "attend", how)
    told = run(offer, ending)
    assert re.search(words, told), told


def test_packed_bytes_read_without_their_scales_are_told(monkeypatch) -> None:
    """The truth is what the bytes mean."""
    real = ReferenceKernel.read

    def read(self, kv):
        meant = real(self, kv)
        return replace(meant, k=torch.cat([meant.k[..., :512] * 2, meant.k[..., 512:]], dim=-1))

    monkeypatch.setattr(ReferenceKernel, "read", read)
    assert "output is off" in run(PACKED, "decode, plain")


def test_a_later_step_of_a_draft_loop_is_told_by_its_number(monkeypatch) -> None:
    """A container that hands every step the first one's batch."""
    first = []

    def plan(self, batch, *, state=None, capture=False):
        first.append(REAL_PLAN(self, batch, state=state, capture=capture))
        return first[0]

    monkeypatch.setattr(ReferenceKernel, "plan", plan)
    assert run(SPARSE, "draft_decode, plain").startswith("step 1: ")


def the_worst(real, q, weights, keys, state, topk):
    return real(q, -weights, keys, state, topk)


def one_fewer(real, q, weights, keys, state, topk):
    return real(q, weights, keys, state, topk).masked_fill(torch.arange(topk) == 0, -1)


INDEXERS = [(the_worst, "of the reference's keys"), (one_fewer, "0 keys for token 0, where it may see 1 of its best")]


@pytest.mark.parametrize(("how", "words"), INDEXERS, ids=["the worst", "one fewer"])
def test_an_indexer_that_chooses_other_keys_is_told(how: Callable, words: str, monkeypatch) -> None:
    """Other keys than the best, and fewer than there are."""
    real = ReferenceIndexer.select
    monkeypatch.setattr(ReferenceIndexer, "select", lambda self, *given: how(partial(real, self), *given))
    assert words in run(SPARSE, "decode, chosen by the indexer")


def refuse(monkeypatch: pytest.MonkeyPatch, when: Callable[..., bool]) -> None:
    """Have the kernel refuse some calls in words."""

    def attend(self, q, kv, layer, batch, indices, q_rope):
        if when(q, kv, indices):
            raise UnsupportedBatch("kernel", needed="another call", found="this one")
        return REAL_ATTEND(self, q, kv, layer, batch, indices, q_rope)

    monkeypatch.setattr(ReferenceKernel, "attend", attend)


def test_a_refusal_of_what_is_declared_is_a_fault(monkeypatch) -> None:
    """Four heads of sixteen that the row says it takes."""
    refuse(monkeypatch, lambda q, kv, indices: q.shape[1] == 16)
    assert run(SPARSE, "decode, plain") == "refused when it was called: needs another call, got this one"


def test_widths_and_rates_that_no_declaration_can_say_are_skipped_with_the_kernels_words(monkeypatch) -> None:
    """One of each has to be served: the plain step takes it."""
    refuse(monkeypatch, lambda q, kv, indices: indices.shape[1] != 2048)
    assert run(SPARSE, "decode, plain") == ""
    with pytest.raises(Skipped, match="no declaration has a word for it: needs another call"):
        run(SPARSE, "decode, 40 of the keys")
    refuse(monkeypatch, lambda q, kv, indices: kv.v is None or kv.v.shape[1] != 1)
    assert run(COMPRESSED, "decode, plain") == ""
    with pytest.raises(Skipped, match="no declaration has a word for it"):
        run(COMPRESSED, "decode, one compressed entry for 4 tokens")


UNCHECKED = [
    (replace(SPARSE, features=SPARSE.features | {"softcap"}), "softcap", "no reference for softcap of sparse"),
    (replace(SPARSE, layouts=("tiles",)), "decode, plain", "cannot write a cache of layout 'tiles'"),
    (replace(SPARSE, graph="any"), "decode, CUDA graph", "need a GPU"),
    (replace(SPARSE, device="npu", archs=("ascend910b",)), "(sparse_mla, npu)", "needs npu, got cpu"),
]


@pytest.mark.parametrize(("offer", "ending", "words"), UNCHECKED, ids=[words for _, _, words in UNCHECKED])
def test_what_cannot_be_checked_is_skipped_and_says_so(offer, ending: str, words: str) -> None:
    """Never taken for right."""
    with pytest.raises(Skipped, match=re.escape(words)):
        run(offer, ending)


def test_a_kernel_without_an_indexer_is_told_so(monkeypatch) -> None:
    """The engine chooses, and the rest is checked all the same."""
    init = ReferenceKernel.__init__

    def without(self, request) -> None:
        init(self, request)
        del self.indexer

    monkeypatch.setattr(ReferenceKernel, "__init__", without)
    with pytest.raises(Skipped, match="no indexer"):
        run(SPARSE, "decode, chosen by the indexer")


def test_every_declared_value_is_met() -> None:
    """Heads, pages, index forms, graphs, insides; every kind of choice and, in csa, every rate."""
    cases = sparse_cases_of(DSA_ROWS)
    assert {case.index_form for case in cases} == DSA_ROWS.index_forms
    assert {case.phase for case in cases} == DSA_ROWS.all_phases
    assert {value for case in cases for _, value in case.asks} == {"flashmla_sparse", "flashmla_auto", "triton"}
    assert {case.choices for case in cases} == {"seen", "holes", "past", "ahead", "mixed", "none"}
    assert {case.heads[0] for case in cases} >= {16, 64, 128}
    compressed = sparse_cases_of(DSV4_CUDA)
    assert {case.rate for case in compressed} == {4, 128, 0}
    assert all(case.window >= 0 for case in compressed)
    assert {(case.rate == 4) is bool(case.topk) for case in compressed} == {True}


def test_a_row_of_an_installed_wheel_is_built_alone() -> None:
    """Its backstamp.json holds more rows than the one that is resolved."""
    subject = subject_of(SPARSE)
    wheel = replace(subject, found=replace(subject.found, origin="data backstamp.json"))
    job = next(job for job in sparse_numeric_jobs(wheel) if job.name.endswith("decode, plain"))
    assert job.run() == ""


def test_a_dense_answer_is_no_sparse_one(monkeypatch) -> None:
    """Rows longer than the choice show who attends over all keys."""

    def attend(self, q, kv, layer, batch, indices, q_rope):
        every = torch.arange(int(batch.max_kv_len), dtype=torch.int32).expand(q.shape[0], -1)
        return reference_sparse(q, kv, layer, batch, every)

    monkeypatch.setattr(ReferenceKernel, "attend", attend)
    assert "output is off" in run(SPARSE, "decode, 1 of the keys")


def test_a_row_that_never_builds_is_told_once(monkeypatch) -> None:
    """Not in each of its cases."""

    def broken(self, request) -> None:
        raise ImportError("libkernel.so is missing")

    monkeypatch.setattr(ReferenceKernel, "__init__", broken)
    (job,) = sparse_numeric_jobs(subject_of(SPARSE))
    with pytest.raises(FactoryFailed, match=r"libkernel\.so is missing"):
        job.run()


def as_recorded(backend, batch, run, change, out) -> None:
    """What `replay` does, without a graph: the same calls, one after the other."""
    state = backend.plan(batch, capture=True)
    run(state)
    backend.plan(change(), state=state)
    run(state)


def test_a_replayed_step_is_held_against_the_step_it_was_given(monkeypatch) -> None:
    """Other numbers, pages and choices in shorter rows; a kernel that keeps the recorded lengths is told."""
    monkeypatch.setattr(sparse_attend, "replay", as_recorded)
    offer = replace(SPARSE, graph="any", plan="device")
    case = next(case for case in sparse_cases_of(offer) if case.graph and case.phase == "decode")
    ((_, solo),) = subject_of(offer).solos

    def told() -> str:
        made = sparse_attend.make_sparse_step(case, "cpu")
        built = solo.build(case, solo.plan(case), made.step.layer, made.step.kv.k.shape[0])
        return sparse_attend.faults_of_sparse(built.serving_attention_backend("decode"), case, made)

    assert told() == ""
    keep = lambda batch: replace(batch, kv_lens=batch.kv_lens.clone())  # noqa: E731
    monkeypatch.setattr(ReferenceKernel, "plan", lambda *given, **named: keep(REAL_PLAN(*given, **named)))
    assert told() != ""
