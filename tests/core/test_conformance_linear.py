"""The kit's numbers of the linear slot: right rows pass every case, and each kind of wrong answer fails its own."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from backstamp.errors import FactoryFailed, UnsupportedBatch
from backstamp.linear_contract import ComputedGates
from backstamp.testing.conformance import linear_attend
from backstamp.testing.conformance.linear_cases import LinearCase
from backstamp.testing.conformance.linear_numerics import linear_numeric_jobs
from backstamp.testing.conformance.linear_row_cases import linear_cases_of, ways_of
from backstamp.testing.conformance.linear_solo import LinearSolo
from backstamp.testing.conformance.subject import Job, Skipped, Subject, subjects_of
from backstamp_cpu.linear import TorchNativeLinear
from backstamp_cpu.plugin import NATIVE_GDN, NATIVE_KDA
from backstamp_linear_attn.plugin import FLASHINFER_ROWS, FLASHKDA, ROWS_GDN
from backstamp_linear_attn.rows import TritonRows

REAL_PLAN, REAL_FORWARD = TorchNativeLinear.plan, TorchNativeLinear.forward


def native(*offers) -> Subject:
    """The reference kernel's plugin, with these rows in place of its own."""
    (subject,) = subjects_of("backstamp-cpu")
    declared = replace(subject.found.declared, offers=offers or (NATIVE_GDN, replace(NATIVE_GDN, family="kda")))
    return replace(subject, found=replace(subject.found, declared=declared))


def jobs_named(subject: Subject, ending: str) -> list[Job]:
    """The jobs of one phase and case, of every row."""
    found = [job for job in linear_numeric_jobs(subject) if job.name.endswith(ending)]
    assert found, ending
    return found


def run(ending: str, *offers) -> str:
    """What the first row's job of one phase and case answers."""
    return jobs_named(native(*offers), ending)[0].run()


def test_every_case_of_the_reference_kernel_is_right() -> None:
    """Both families; its rows capture no graphs, so that nothing is skipped."""
    jobs = list(linear_numeric_jobs(native()))
    assert len({job.name for job in jobs}) == len(jobs) == 146
    assert [(job.name, told) for job in jobs if (told := job.run())] == []


TRITON = [
    ("gdn", "decode, pads"),
    ("gdn", "verify, tree"),
    ("kda", "verify, a slot for each token"),
    ("kda", "decode, views of wider tensors"),
]


@pytest.mark.parametrize(("family", "ending"), TRITON)
def test_our_own_kernel_is_right_in_the_interpreter(family: str, ending: str) -> None:
    """A row for a GPU, on a CPU."""
    (subject,) = subjects_of("backstamp-linear-attn")
    job = next(job for job in jobs_named(subject, ending) if f"({family}, cuda)" in job.name)
    assert job.run() == ""


@pytest.mark.parametrize("ending", ["decode, bf16", "decode, states in bf16"])
def test_the_interpreter_is_not_asked_for_bf16(ending: str) -> None:
    """It computes bf16 wrongly, in tokens and in states."""
    (subject,) = subjects_of("backstamp-linear-attn")
    with pytest.raises(Skipped, match="bf16 wrongly"):
        jobs_named(subject, ending)[0].run()


def outputs(call, pool, slots, out, batch, **_) -> None:
    call().mul_(1.02)


def one_token(call, pool, slots, out, batch, **_) -> None:
    call()[2] *= 0.9


def nothing_written(call, pool, slots, out, batch, **_) -> None:
    call()
    out[-1, 0, 0] = float("nan")


def pad_is_nan(call, pool, slots, out, batch, **_) -> None:
    call()
    out[1] = float("nan")


def states(call, pool, slots, out, batch, **_) -> None:
    call()
    pool.ssm[slots[0]] *= 1.1


def state_is_nan(call, pool, slots, out, batch, **_) -> None:
    call()
    pool.ssm[slots[2], 1, 0, 0] = float("nan")


def states_left(call, pool, slots, out, batch, **_) -> None:
    before = pool.ssm.clone()
    call()
    pool.ssm.copy_(before)


def slot_of_others(call, pool, slots, out, batch, **_) -> None:
    call()
    pool.ssm[next(at for at in range(pool.ssm.shape[0]) if at not in slots.tolist())] = 0.0


def last_slot_for_pads(call, pool, slots, out, batch, **_) -> None:
    call()
    # what -1 is in Python
    pool.ssm[-1] = 0.0


def place_of_a_pad(call, pool, slots, out, batch, **_) -> None:
    call()
    batch.intermediate[1, 0] = 0.0


def kept_states(call, pool, slots, out, batch, **_) -> None:
    call()
    batch.intermediate[2, 3] *= -1


def windows(call, pool, slots, out, batch, **_) -> None:
    call()
    pool.conv[0][0] = 0.0


def slots_of_the_batch(call, pool, slots, out, batch, **_) -> None:
    call(slots=batch.slots)


def other_order(call, pool, slots, out, batch, **_) -> None:
    pool.ssm.copy_(pool.ssm.mT.clone())
    call()
    pool.ssm.copy_(pool.ssm.mT.clone())


def other_tensor(call, pool, slots, out, batch, **_):
    return call().clone()


WRONG = [
    (outputs, "decode, plain", "output is off"),
    (outputs, "prefill, fp16", "output is off"),
    (one_token, "prefill, plain", "row 0, token 2 of 65"),
    (nothing_written, "decode, tokens of no row", "not finite in token 7 .*of no row"),
    (pad_is_nan, "decode, pads", "not finite in token 1 .*row 1, token 0 of 1, a pad"),
    (states, "decode, plain", "the state of row 0 in slot .* is off"),
    (states, "prefill, bf16", "the state of row 0 in slot .* is off"),
    (state_is_nan, "decode, plain", "the state of row 2 in slot .* is not finite"),
    (states_left, "prefill, rows without a state", "the state of row"),
    (slot_of_others, "decode, plain", "no row's to write, was touched"),
    (last_slot_for_pads, "decode, pads", "no row's to write, was touched"),
    (slot_of_others, "verify, states kept apart", "no row's to write, was touched"),
    (place_of_a_pad, "verify, pads", "place .*no row's to write, was touched"),
    (kept_states, "verify, states kept apart", "the state of row 2, token 3 in place .* is off"),
    (windows, "decode, plain", "the convolution's windows were written"),
    (slots_of_the_batch, "decode, slots of the layer's own", "not finite|is off"),
    (other_order, "decode, states in order kv", "output is off"),
]


@pytest.mark.parametrize(("how", "ending", "words"), WRONG, ids=lambda of: getattr(of, "__name__", None))
def test_a_wrong_answer_is_told_as_what_it_is(how: Callable, ending: str, words: str, monkeypatch) -> None:
    """Outputs, pads, states, slots of others, and what is the engine's own."""
    spoil(monkeypatch, how)
    told = run(ending)
    assert re.search(words, told), told


def spoil(monkeypatch: pytest.MonkeyPatch, how: Callable) -> None:
    """Have the reference kernel answer through `how`."""

    def forward(self, q, k, v, gates, layer, state, *, pool, slots, out=None):
        def call(slots=slots):
            return REAL_FORWARD(self, q, k, v, gates, layer, state, pool=pool, slots=slots, out=out)

        answer = how(call, pool=pool, slots=slots, out=out, batch=state.batch)
        return out if answer is None else answer

    monkeypatch.setattr(TorchNativeLinear, "forward", forward)


def test_another_tensor_than_the_one_handed_over_is_told(monkeypatch) -> None:
    """Engines read `out`."""
    spoil(monkeypatch, other_tensor)
    with pytest.raises(AssertionError, match="another tensor"):
        run("decode, plain")


def replan(monkeypatch: pytest.MonkeyPatch, change: Callable) -> None:
    """Have the reference kernel plan another batch than it was given."""

    def plan(self, batch, *, state=None, capture=False):
        return REAL_PLAN(self, change(batch), state=state, capture=capture)

    monkeypatch.setattr(TorchNativeLinear, "plan", plan)


MISREAD = [
    ("verify, tree", lambda batch: replace(batch, parents=None), "output is off"),
    (
        "prefill, rows without a state",
        lambda batch: replace(batch, has_state=torch.ones_like(batch.has_state)),
        "not finite",
    ),
    (
        "verify, a slot for each token",
        lambda batch: replace(batch, num_accepted=torch.ones_like(batch.num_accepted)),
        "not finite|is off",
    ),
    (
        "verify, rows that kept nothing",
        lambda batch: replace(batch, num_accepted=batch.num_accepted.clamp(1, 4)),
        "not finite|was touched",
    ),
    (
        "verify, a token whose state is not kept",
        lambda batch: replace(batch, slot_table=batch.slot_table.clamp(min=0)),
        "was touched|is off",
    ),
]


@pytest.mark.parametrize(("ending", "change", "words"), MISREAD, ids=[case[0] for case in MISREAD])
def test_a_part_of_the_batch_that_is_not_read_is_told(ending: str, change: Callable, words: str, monkeypatch) -> None:
    """A tree run as a chain, a fresh row that reads its slot, counts and slots taken for others."""
    replan(monkeypatch, change)
    told = run(ending)
    assert re.search(words, told), told


def refuse(monkeypatch: pytest.MonkeyPatch, when: Callable[..., bool]) -> None:
    """Have the reference kernel refuse some calls in words."""

    def how(call, **at):
        if when(**at):
            raise UnsupportedBatch("kernel", needed="another call", found="this one")
        call()

    spoil(monkeypatch, how)


def test_a_refusal_of_what_is_declared_is_a_fault(monkeypatch) -> None:
    """A row that declares 96/64 and refuses it when it is called."""
    refuse(monkeypatch, lambda out, **_: out.shape[-1] == 64 and out.shape[1] == 4)
    assert run("decode, head dims 96/64") == "refused when it was called: needs another call, got this one"


def test_a_refusal_of_what_no_declaration_can_say_is_skipped_with_its_words(monkeypatch) -> None:
    """flashinfer's verify takes no rows of unlike lengths; what it takes has to be right."""

    def change(batch):
        if len(set(batch.qo_indptr.diff().tolist())) > 1:
            raise UnsupportedBatch("kernel", needed="as many tokens in each row", found="3, 1, 4")
        return batch

    replan(monkeypatch, change)
    with pytest.raises(Skipped, match="no declaration has a word for it: needs as many tokens in each row, got 3, 1"):
        run("verify, rows of unlike lengths")
    assert run("verify, plain") == ""


def test_a_row_over_bf16_states_alone_is_run_over_them(monkeypatch) -> None:
    """Its plain step is served that way; the other way is skipped, and one of them has to be served."""
    refuse(monkeypatch, lambda pool, **_: pool.ssm.dtype is not torch.bfloat16)
    assert run("decode, plain") == ""
    with pytest.raises(Skipped, match="no declaration has a word"):
        run("decode, states in fp32")
    refuse(monkeypatch, lambda **_: True)
    assert "refused when it was called" in run("decode, plain")


def test_a_kernel_that_takes_computed_gates_alone_is_run_with_them(monkeypatch) -> None:
    """No case but the one that is about raw gates asks for them."""
    seen: list[bool] = []

    def forward(self, q, k, v, gates, layer, state, *, pool, slots, out=None):
        seen.append(isinstance(gates, ComputedGates))
        if not seen[-1]:
            raise UnsupportedBatch("kernel", needed="computed gates", found="raw ones")
        return REAL_FORWARD(self, q, k, v, gates, layer, state, pool=pool, slots=slots, out=out)

    monkeypatch.setattr(TorchNativeLinear, "forward", forward)
    assert run("prefill, pads") == ""
    assert seen == [False, True]


def test_a_tree_that_is_not_declared_has_to_be_refused(monkeypatch) -> None:
    """Run as a chain it is wrong without a word."""
    chains = replace(NATIVE_GDN, features=frozenset())
    assert run("verify, a tree, which the row does not declare", chains) == ""
    replan(monkeypatch, lambda batch: replace(batch, parents=None))
    assert "has to be refused" in run("verify, a tree, which the row does not declare", chains)


def test_a_bounded_decay_that_is_not_declared_has_to_be_refused(monkeypatch) -> None:
    """Computed as an unbounded one it is wrong without a word; a row that declares it has to serve it."""
    plain = replace(NATIVE_KDA, features=frozenset())
    assert run("prefill, a bounded decay, which the row does not declare", plain) == ""
    assert run("prefill, a bounded decay", NATIVE_KDA) == ""

    def forward(self, q, k, v, gates, layer, state, *, pool, slots, out=None):
        unbounded = replace(gates, lower_bound=None)
        return REAL_FORWARD(self, q, k, v, unbounded, layer, state, pool=pool, slots=slots, out=out)

    monkeypatch.setattr(TorchNativeLinear, "forward", forward)
    assert "has to be refused" in run("prefill, a bounded decay, which the row does not declare", plain)
    assert run("prefill, a bounded decay", NATIVE_KDA) != ""


def test_a_row_for_bounded_decays_alone_is_met_with_no_other() -> None:
    """Its kernels have no form for one without a bound."""
    assert {case.lower_bound for case in linear_cases_of(FLASHKDA)} == {-5.0}
    assert {case.lower_bound for case in linear_cases_of(NATIVE_KDA)} == {None, -5.0}


def test_every_declared_value_is_met() -> None:
    """Dtypes, head dims, state layouts, phases, graphs."""
    cases = linear_cases_of(ROWS_GDN)
    assert {case.dtype for case in cases} == ROWS_GDN.dtypes
    pairs = {dims if isinstance(dims, tuple) else (dims, dims) for dims in ROWS_GDN.head_dims}
    assert {case.dims for case in cases} == pairs
    assert {case.order for case in cases} == set(ROWS_GDN.state_layouts)
    assert {case.phase for case in cases if case.graph} == ROWS_GDN.phases
    assert {case.parents is not None for case in cases} == {True, False}


def test_what_a_row_needs_of_the_engine_is_always_handed_over() -> None:
    """flashinfer's verify reads host offsets, its decode does not."""
    without = {case.phase for case in linear_cases_of(FLASHINFER_ROWS) if not case.host_lens}
    assert without == {"decode"}


def test_a_case_is_tried_in_every_way_that_it_is_not_about() -> None:
    """Two state dtypes, two kinds of gates and, in verify, two places for states."""
    case = LinearCase(name="plain", phase="verify", q_lens=(4,))
    assert len(list(ways_of(case))) == 8
    assert len(list(ways_of(replace(case, fixed=frozenset({"states", "form"}))))) == 2
    assert next(ways_of(case)) == case


UNCHECKED = [
    (replace(NATIVE_GDN, family="mamba2"), "(mamba2, any)", "no reference for mamba2"),
    (replace(NATIVE_GDN, device="npu", archs=("ascend910b",)), "(gdn, npu)", "needs npu, got cpu"),
    (replace(NATIVE_GDN, features=frozenset({"tracked_states"})), "tracked_states", "no reference for tracked_states"),
    (replace(NATIVE_GDN, graph="any"), "decode, CUDA graph", "need a GPU"),
    (replace(NATIVE_GDN, state_layouts=("vk", "tiles")), "states tiles", "knows no states 'tiles'"),
]


@pytest.mark.parametrize(("offer", "ending", "words"), UNCHECKED, ids=[words for _, _, words in UNCHECKED])
def test_what_cannot_be_checked_is_skipped_and_says_so(offer, ending: str, words: str) -> None:
    """Never taken for right."""
    with pytest.raises(Skipped, match=words):
        run(ending, offer)


def test_what_a_row_excludes_is_not_asked_of_it() -> None:
    """As the resolver has it."""
    drafts = linear_cases_of(replace(NATIVE_GDN, excludes=frozenset({"spec"})))
    assert {case.phase for case in drafts} == {"prefill", "decode"}
    never = linear_cases_of(replace(NATIVE_GDN, graph="any", graph_under={"spec": "never"}))
    assert {case.phase for case in never if case.graph} == {"decode"}


def test_a_row_that_never_builds_is_told_once(monkeypatch) -> None:
    """Not in each of its seventy cases."""

    def broken(self, request) -> None:
        raise ImportError("libkernel.so is missing")

    monkeypatch.setattr(TorchNativeLinear, "__init__", broken)
    (job,) = linear_numeric_jobs(native(NATIVE_GDN))
    with pytest.raises(FactoryFailed, match=r"libkernel\.so is missing"):
        job.run()


def as_recorded(backend, batch, run, change, out) -> None:
    """What `replay` does, without a graph: the same calls, one after the other."""
    state = backend.plan(batch, capture=True)
    run(state)
    backend.plan(change(), state=state)
    run(state)


@pytest.mark.parametrize("phase", ["decode", "verify"])
def test_a_replayed_step_is_held_against_the_step_it_was_given(phase: str, monkeypatch) -> None:
    """Its rows lie elsewhere than those that were recorded; a kernel that keeps the old slots is told."""
    monkeypatch.setattr(linear_attend, "replay", as_recorded)
    (subject,) = subjects_of("backstamp-linear-attn")
    solo = LinearSolo(found=subject.found, offer=ROWS_GDN, host=subject.host)
    case = next(case for case in linear_cases_of(ROWS_GDN) if case.graph and case.phase == phase)

    def told() -> str:
        backend, device = solo.build(case)
        made = linear_attend.make_linear_case(case, device)
        return linear_attend.wrong_linear(linear_attend.outcome_of_graph(backend, case, made), case)

    assert told() == ""
    monkeypatch.setattr(TritonRows, "_refresh", lambda self, state, fresh: state)
    assert "not finite" in told()
