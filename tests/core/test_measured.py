"""What a record of times says of a phase: which class a launch's work is in, and what the plan shows of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backstamp.compiled import compile_for
from backstamp.engine import EngineFacts
from backstamp.errors import BadInput
from backstamp.facts import gather
from backstamp.findings import Report
from backstamp.launch import Launch, Requests, make_launch
from backstamp.measured import rank_layer, work_of
from backstamp.measurements import DEFAULT_WORKLOAD, Load, Machine, Measurements, WorkClass, bucket_of, workload_of
from backstamp.plan import Plan
from backstamp.plan_rows import Timing
from backstamp.policy import Policy
from backstamp.priority_check import priority_report
from backstamp.testing.fakes import catalogue_of, fake_plugin
from backstamp.testing.hosts import described_host
from tests.resolving import kernel, plan_of, times_of
from tests.scenes import DENSE, model_with, texts_of

OFFERS = [kernel("high", priority=90), kernel("low", priority=10)]
WINDOWED = replace(DENSE, window_left=1023)
MIXED = model_with((3, DENSE), (1, WINDOWED), name="mixed")


def class_of(phase: str, load: Load, launch: Launch | None = None, engine: EngineFacts | None = None) -> WorkClass:
    """The class of a dense layer's work."""
    at = compile_for(catalogue_of(fake_plugin("p", OFFERS)), described_host("h100"))
    facts = gather(at, launch or make_launch(Requests()), engine or EngineFacts(), model_with((1, DENSE)))
    work = work_of(facts, "attention", phase, DENSE, load)
    assert work is not None
    return work


def test_loads_of_one_bucket_are_one_class() -> None:
    """The next power of two of rows and of tokens."""
    assert [bucket_of(number) for number in (1, 2, 3, 4, 5, 4096, 4097)] == [1, 2, 4, 4, 8, 4096, 8192]
    assert class_of("decode", Load(33, 5000)) == class_of("decode", Load(64, 8192))
    assert class_of("decode", Load(64, 8192)) != class_of("decode", Load(65, 8192))
    assert class_of("decode", Load(64, 8192)) != class_of("decode", Load(64, 8193))


@pytest.mark.parametrize(
    ("launch", "engine"),
    [
        (Requests(tp_size=2), EngineFacts()),
        (Requests(page_size=64), EngineFacts()),
        (Requests(), EngineFacts(page_size=32)),
        (Requests(kv_cache_dtype="fp8_e4m3"), EngineFacts()),
    ],
    ids=["tp", "page", "engine-page", "fp8"],
)
def test_what_the_launch_is_makes_another_class(launch: Requests, engine: EngineFacts) -> None:
    """Heads of a rank, pages and the cache's dtype are exact."""
    assert class_of("decode", Load(1, 64), make_launch(launch), engine) != class_of("decode", Load(1, 64))


def test_a_rank_has_one_head_where_there_are_more_ranks_than_heads() -> None:
    """KV heads are repeated over ranks, never divided away."""
    few = replace(DENSE, num_qo_heads=16, num_kv_heads=2)
    halved = [rank_layer(few, make_launch(Requests(tp_size=ranks))) for ranks in (2, 4, 32)]
    assert [(layer.num_qo_heads, layer.num_kv_heads) for layer in halved] == [(8, 1), (4, 1), (1, 1)]


def test_a_verify_asks_for_every_drafted_token_and_the_one_before() -> None:
    """A tree of as many branches a step is a class of its own."""
    chain = make_launch(Requests(speculative_algorithm="EAGLE", speculative_num_steps=3))
    tree = make_launch(Requests(speculative_algorithm="EAGLE", speculative_num_steps=3, speculative_topk=2))
    found = [class_of("verify", Load(8, 64), launch) for launch in (chain, tree)]
    assert [(work.q_len, work.tree) for work in found] == [(4, False), (7, True)]


def test_a_phase_of_unlike_layers_counts_each_by_its_layers() -> None:
    """Three layers at 10 us and one at 50 are 20 us a layer; one kind without a time leaves the kernel without one."""
    record = times_of(OFFERS, {("decode", "high"): 10.0, ("decode", "low"): 20.5}, model=MIXED)
    dear = tuple(
        row._replace(microseconds=50.0) if row.kernel == "high" and "window" in row.work.layer else row
        for row in record.rows
    )
    offers = [replace(offer, features=offer.features | {"window"}) for offer in OFFERS]
    plan = plan_of(offers, model=MIXED, measurements=replace(record, rows=dear))
    assert plan.timings == (Timing("attention", "decode", "main", "high", 20.0, "high", 20.0),)
    some = tuple(row for row in dear if row.kernel == "low" or "window" not in row.work.layer)
    plan = plan_of(offers, model=MIXED, measurements=replace(record, rows=some))
    assert plan.timings == (Timing("attention", "decode", "main", "low", 20.5, "high", None),)


def test_another_workload_is_another_class_and_priority_decides() -> None:
    """Nothing is guessed from the time of another shape, and the plan says what is missing."""
    record = times_of(OFFERS, {("decode", "high"): 10.0, ("decode", "low"): 5.0})
    elsewhere = replace(record, workload=workload_of({"decode": "1x131072"}))
    plan = plan_of(OFFERS, measurements=elsewhere)
    assert (plan.phase("decode").kernel, plan.phase("decode").source, plan.timings) == ("high", "auto", ())
    assert "decode: no time of high, low for 1 x 131072 tokens; priority decides" in texts_of(plan, "unmeasured")


def test_a_kernel_without_a_time_ranks_last_and_the_plan_names_it() -> None:
    """A new kernel is not preferred unseen, nor passed over in silence."""
    plan = plan_of(OFFERS, measurements=times_of(OFFERS, {("decode", "low"): 5.0}))
    assert plan.phase("decode").kernel == "low"
    assert "decode: no time of high for 32 x 4096 tokens; they rank last" in texts_of(plan, "unmeasured")
    assert plan.timings == (Timing("attention", "decode", "main", "low", 5.0, "high", None),)


@pytest.mark.parametrize("field", ["version", "distribution", "library", "row", "kernel"])
def test_a_time_of_another_version_is_no_time(field: str) -> None:
    """A plugin or a library that was upgraded since is measured anew."""
    offers = [kernel("high", priority=90, requires=("triton>=3.2",)), *OFFERS[1:]]
    record = times_of(offers, {("decode", "high"): 10.0, ("decode", "low"): 5.0})
    other = {"version": "9.9", "distribution": "other", "library": None, "row": 7, "kernel": "another"}
    rows = tuple(row._replace(**{field: other[field]}) if row.kernel == "high" else row for row in record.rows)
    assert plan_of(offers, measurements=record).timings[0].by_priority_microseconds == 10.0
    assert plan_of(offers, measurements=replace(record, rows=rows)).timings[0].by_priority_microseconds is None


@pytest.mark.parametrize("field", Machine._fields)
def test_a_record_of_a_machine_that_differs_in_anything_is_ignored(field: str) -> None:
    """The driver and torch are part of the machine; the plan names what differs."""
    record = times_of(OFFERS, {("decode", "high"): 10.0, ("decode", "low"): 5.0})
    value = (("driver", "1.0"),) if field == "runtimes" else "another"
    plan = plan_of(OFFERS, measurements=replace(record, machine=record.machine._replace(**{field: value})))
    assert plan.phase("decode").kernel == "high"
    (text,) = texts_of(plan, "unmeasured")
    assert text.startswith(f"the times are another machine's, and ignored: {field} ")


def test_the_digest_covers_no_time() -> None:
    """Two ranks that run the same kernels agree whatever each measured."""
    times = [times_of(OFFERS, {("decode", "low"): time, ("decode", "high"): 9.0}) for time in (1.0, 2.0)]
    first, second = (plan_of(OFFERS, measurements=record) for record in times)
    assert first.timings != second.timings
    assert first.digest == second.digest


def test_an_operator_outranks_a_record() -> None:
    """A record ranks what nobody asked for; what was asked for and is slower is priced, as ever."""
    record = times_of(OFFERS, {("decode", "high"): 10.0, ("decode", "low"): 5.0})
    plan = plan_of(OFFERS, Requests(attention_backend="high"), measurements=record)
    assert plan.phase("decode").source == "operator"
    assert plan.timings == ()
    assert [(loss.code, loss.alternative) for loss in plan.losses] == [("time", "low")]


def test_an_allow_list_outranks_a_record() -> None:
    """Trust comes before speed; priority's own choice is the one inside the list too."""
    record = times_of(OFFERS, {("decode", "high"): 10.0, ("decode", "low"): 5.0})
    plan = plan_of(OFFERS, measurements=record, policy=Policy(allow=frozenset({"fake-p"})))
    assert plan.phase("decode").kernel == "low"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ({"decode": "64"}, "decode"),
        ({"decode": "0x64"}, "decode"),
        ({"decode": "64x99999999"}, "decode"),
        ({"decode": "-1x64"}, "decode"),
        ({"draft_decode": "1x1"}, "draft_decode"),
    ],
    ids=["one", "zero", "many", "negative", "phase"],
)
def test_a_workload_that_is_none_is_refused(words: dict[str, str], named: str) -> None:
    """The phase is named, and how a load is written."""
    with pytest.raises(BadInput, match=named):
        workload_of(words, "--workload")
    assert workload_of({"decode": "64x16777216"}).decode == Load(64, 1 << 24)
    assert workload_of({"decode": "64x8192"}) == DEFAULT_WORKLOAD._replace(decode=Load(64, 8192))


@pytest.mark.parametrize("words", ["99999999x1", "1x16777217"])
def test_a_load_above_the_bound_is_told_the_bound(words: str) -> None:
    """It is written as a load is, so how one is written says nothing."""
    with pytest.raises(BadInput, match="whole numbers from 1 to 16777216"):
        workload_of({"decode": words}, "--workload")


def report_of(high: float, low: float) -> tuple[Report, Plan]:
    """The check over two decode times."""
    plan = plan_of(OFFERS, measurements=times_of(OFFERS, {("decode", "high"): high, ("decode", "low"): low}))
    return priority_report(plan), plan


def test_priority_that_disagrees_with_the_times_is_a_fault() -> None:
    """It names both kernels, both figures and the ratio."""
    report, _ = report_of(30.0, 20.0)
    (finding,) = report.findings
    assert (finding.level, finding.rule, finding.subject, report.passed) == ("fault", "priority-order", "high", False)
    assert finding.text == (
        "decode: needs the fastest kernel first, low at 20.0 us a layer, got high by priority, 30.0 us, 1.50 times that"
    )


@pytest.mark.parametrize("low", [20.0, 21.0, 40.0], ids=["noise", "equal", "agrees"])
def test_priority_that_agrees_within_the_noise_passes(low: float) -> None:
    """A kernel that is faster by less than two runs differ is no reason to declare anything."""
    report, _ = report_of(21.0, low)
    assert report.passed
    assert report.findings == ()


def test_a_check_of_a_plan_no_time_decided_does_not_pass() -> None:
    """What was not measured cannot agree."""
    report = priority_report(plan_of(OFFERS))
    assert not report.passed
    assert report.count("skipped") == 2


def test_a_check_notes_a_first_kernel_without_a_time() -> None:
    """Nobody knows that it is slower: no fault, and no silence either."""
    report = priority_report(plan_of(OFFERS, measurements=times_of(OFFERS, {("decode", "low"): 5.0})))
    (note,) = report.findings
    assert (note.level, note.subject) == ("note", "high")
    assert note.text == "decode: high has the highest priority, and no time"


def test_a_check_says_of_each_phase_what_was_not_measured() -> None:
    """The source of a phase says only that no time decided it."""
    elsewhere = times_of(OFFERS, {("decode", "high"): 10.0, ("decode", "low"): 5.0})
    report = priority_report(plan_of(OFFERS, measurements=replace(elsewhere, workload=workload_of({"decode": "1x1"}))))
    reasons = {outcome.name: outcome.reason for outcome in report.outcomes}
    for phase, load in (("prefill", "1 x 2048"), ("decode", "1 x 1")):
        missing = f"{phase}: no time of high, low for {load} tokens; priority decides"
        assert reasons[f"attention {phase}"].endswith(f"its source is auto, not auto (measured); {missing}")


def test_a_phase_of_one_kernel_has_nothing_to_measure() -> None:
    """No time could change what runs, so that none is there is no warning."""
    only = [kernel("only")]
    plan = plan_of(only, measurements=times_of(only, {}))
    assert plan.phase("decode").kernel == "only"
    assert texts_of(plan, "unmeasured") == []


def test_a_record_may_be_empty() -> None:
    """Then priority decides everywhere."""
    empty = Measurements(machine=Machine.of(described_host("h100")))
    assert plan_of(OFFERS, measurements=empty).phase("decode").source == "auto"
