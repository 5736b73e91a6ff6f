"""What a run adds to a record of `bench/kernels.py`, what stays, and what is told of it."""

from __future__ import annotations

import pytest

from tests.bench_modules import bench_modules

LISTED = [("decode", "one"), ("decode", "two"), ("prefill", "long")]
LIMITS = {"copy_tbps": 4.0, "bf16_tflops": 600.0}
ABOUT = {"limits": LIMITS, "versions": {"torch": "2.11"}, "host": "a GPU", "device": "cuda", "arch": "9.0"}


@pytest.fixture(scope="module")
def bench():
    """The modules of records."""
    with bench_modules("records", "record_table") as modules:
        yield modules


@pytest.fixture
def merge(bench):
    """One run into a record."""

    def merged(before, results=(), not_run=(), about=ABOUT, rounds=1, join=False):
        return bench[0].merge(before, bench[0].Run(about, results, not_run, rounds, join), LISTED)

    return merged


def row(kernel: str, us: float, shape: str = "one", work: str = "decode", library: str = "") -> dict[str, object]:
    """A figure as the measuring process tells it."""
    known = {"work": work, "shape": shape, "kernel": kernel, "library": library or kernel, "direct": False}
    return known | {"us": us, "tflops": 1e3 / us, "tbps": 100 / us, "rel_error": 2e-3}


def missing(kernel: str, status: str, shape: str = "one") -> dict[str, object]:
    """A kernel without a figure."""
    return {"work": "decode", "shape": shape, "kernel": kernel, "status": status, "reason": f"{kernel} {status}"}


def figures(record) -> dict[tuple[str, str], float]:
    """Times by shape and kernel."""
    return {(at["shape"], at["kernel"]): at["us"] for at in record["results"]}


def test_a_run_replaces_its_own_rows_and_leaves_the_others(merge) -> None:
    """Checks, other shapes and other kernels stay."""
    before = merge({"checks": [1]}, [row("a", 50), row("b", 40), row("a", 90, "two")])
    after = merge(before, [row("a", 45)])
    assert figures(after) == {("one", "a"): 45, ("one", "b"): 40, ("two", "a"): 90}
    assert after["checks"] == [1]


def test_ratios_are_of_rows_of_one_run(merge) -> None:
    """A figure of another day is nothing to compare with: a kernel that ran alone has no ratio."""
    before = merge({}, [row("a", 50), row("b", 40)])
    after = merge(before, [row("a", 45)])
    ratios = {at["kernel"]: (at["ratio_to_best"], at["ratio_to_peer"]) for at in after["results"]}
    assert ratios == {"a": (None, None), "b": (None, None)}
    both = merge(after, [row("a", 30), row("b", 40)])
    assert {at["kernel"]: at["ratio_to_best"] for at in both["results"]} == {"a": 1.0, "b": 0.75}


def test_the_peer_is_the_fastest_of_another_library(merge) -> None:
    """Two kernels of one library are no peers of each other."""
    rows = [row("ours", 50, library="triton"), row("tc", 40, library="fi"), row("cc", 80, library="fi")]
    ratios = {at["kernel"]: at["ratio_to_peer"] for at in merge({}, rows)["results"]}
    assert ratios == {"ours": 0.8, "tc": 1.25, "cc": 0.625}


@pytest.mark.parametrize(
    ("tflops", "tbps", "bound", "share"), [(300.0, 1.0, "compute", 0.5), (1.0, 3.0, "memory", 0.75)]
)
def test_a_share_is_of_the_limit_that_bounds(merge, tflops: float, tbps: float, bound: str, share: float) -> None:
    """The other limit says nothing of the kernel."""
    (told,) = merge({}, [row("a", 50) | {"tflops": tflops, "tbps": tbps}])["results"]
    assert (told["bound"], told["share"]) == (bound, share)


def test_a_share_is_of_the_limits_of_its_own_run(merge) -> None:
    """A machine that is shared reaches less on another day."""
    before = merge({}, [row("a", 50)])
    slower = {**ABOUT, "limits": {"copy_tbps": 2.0, "bf16_tflops": 300.0}}
    after = merge(before, [row("b", 50)], about=slower)
    shares = {at["kernel"]: at["share"] for at in after["results"]}
    assert shares == {"a": 0.5, "b": 1.0}
    assert after["limits"] == slower["limits"]
    assert [entry["limits"] for entry in after["runs"]] == [LIMITS, slower["limits"]]


def test_a_run_may_go_on_with_the_last_one_on_the_same_machine(merge) -> None:
    """Libraries that cannot be installed beside each other are compared all the same."""
    near = {**ABOUT, "limits": {"copy_tbps": 4.1, "bf16_tflops": 590.0}, "versions": {"fa3": "1"}}
    record = merge(merge({}, [row("a", 50)]), [row("b", 40)], about=near, join=True)
    told = {at["kernel"]: (at["run"], at["ratio_to_best"]) for at in record["results"]}
    assert told == {"a": (1, 0.8), "b": (1, 1.0)}
    (entry,) = record["runs"]
    assert (entry["limits"], entry["versions"]) == (LIMITS, {"torch": "2.11", "fa3": "1"})
    assert record["limits"] == LIMITS


@pytest.mark.parametrize(
    ("changes", "rounds"),
    [({"limits": {"copy_tbps": 3.0, "bf16_tflops": 600.0}}, 1), ({"host": "another"}, 1), ({}, 5)],
    ids=["limits", "host", "rounds"],
)
def test_a_run_does_not_go_on_with_one_of_another_kind(merge, changes: dict[str, object], rounds: int) -> None:
    """Another machine, a machine that is slower now, or other medians."""
    record = merge(merge({}, [row("a", 50)]), [row("b", 40)], about={**ABOUT, **changes}, rounds=rounds, join=True)
    assert [entry["run"] for entry in record["runs"]] == [1, 2]
    assert {at["ratio_to_best"] for at in record["results"]} == {None}


@pytest.mark.parametrize(("code", "goes_on"), [(("a", False), True), (("b", False), False), (("a", True), False)])
def test_a_run_keeps_its_commit_and_goes_on_with_its_own(merge, code: tuple[str, bool], goes_on: bool) -> None:
    """Figures of two states of the code are of two runs."""
    first, then = ({**ABOUT, "commit": commit, "dirty": dirty} for commit, dirty in (("a", False), code))
    record = merge(merge({}, [row("a", 50)], about=first), [row("b", 40)], about=then, join=True)
    told = [(entry["commit"], entry["dirty"]) for entry in record["runs"]]
    assert told == ([code] if goes_on else [("a", False), code])


def test_a_shape_keeps_the_reason_of_an_earlier_run(merge) -> None:
    """Another run that did not ask for it knows no better."""
    spent = {"work": "decode", "shape": "two", "status": "refused", "reason": "the time was spent"}
    record = merge(merge({}, [], [spent]), [row("a", 50)])
    assert [at["reason"] for at in record["not_run"] if at["shape"] == "two"] == ["the time was spent"]
    later = merge(record, [row("a", 50, "two")])
    assert [at for at in later["not_run"] if at["shape"] == "two"] == []


def test_a_first_run_has_none_to_go_on_with(merge) -> None:
    """It is the first."""
    assert [entry["run"] for entry in merge({}, [row("a", 50)], join=True)["runs"]] == [1]


def test_a_run_without_rows_any_more_is_forgotten(merge) -> None:
    """But for the last, whose limits the record has."""
    before = merge(merge({}, [row("a", 50)]), [row("a", 40)])
    assert [entry["run"] for entry in before["runs"]] == [2]
    assert [entry["run"] for entry in merge(before, [], [missing("b", "refused")])["runs"]] == [2, 3]


def test_every_listed_shape_has_a_row_or_a_reason(merge) -> None:
    """Nobody has to guess whether a shape was left out."""
    record = merge({}, [row("a", 50)], [missing("b", "refused", "two")])
    told = {(at["work"], at["shape"]) for at in (*record["results"], *record["not_run"])}
    assert told == set(LISTED)
    (bare,) = (at for at in record["not_run"] if at["shape"] == "long")
    assert "no run" in bare["reason"]
    later = merge(record, [row("a", 70, "long", "prefill")])
    assert [at for at in later["not_run"] if at["shape"] == "long"] == []


def test_a_shape_that_nobody_serves_keeps_its_reason(merge) -> None:
    """Where no kernel was asked there is none to name."""
    nobody = {"work": "decode", "shape": "two", "status": "refused", "reason": "no kernel has a row"}
    record = merge({}, [row("a", 50)], [nobody])
    assert [at["reason"] for at in record["not_run"] if at["shape"] == "two"] == ["no kernel has a row"]


@pytest.mark.parametrize(("status", "stays"), [("refused", True), ("wrong", False), ("failed", False)])
def test_a_kernel_that_fails_now_loses_its_older_figure(merge, status: str, stays: bool) -> None:
    """A refusal is of what is installed now, and says nothing of the build that ran before."""
    record = merge(merge({}, [row("a", 50)]), [], [missing("a", status)])
    assert (("one", "a") in figures(record)) is stays
    assert ([at["kernel"] for at in record["not_run"] if "kernel" in at] == []) is stays


def test_a_figure_takes_the_place_of_an_older_reason(merge) -> None:
    """What runs now is no longer not run."""
    record = merge(merge({}, [], [missing("a", "failed")]), [row("a", 50)])
    assert [at for at in record["not_run"] if at.get("kernel") == "a"] == []


def test_a_record_of_before_is_taken_as_one_run(merge) -> None:
    """Its rows keep the limits they were measured beside."""
    unknown = {"work": "decode", "shape": "one", "kernel": "aiter", "reason": "needs rocm"}
    old = {**ABOUT, "results": [row("a", 50), row("b", 25)], "not_run": [unknown]}
    record = merge(old, [row("a", 10, "two")], about={**ABOUT, "limits": {"copy_tbps": 8.0, "bf16_tflops": 900.0}})
    told = {(at["shape"], at["kernel"]): (at["run"], at["share"], at["ratio_to_best"]) for at in record["results"]}
    assert told["one", "a"] == (0, 0.5, 0.5)
    assert told["one", "b"] == (0, 1.0, 1.0)
    assert told["two", "a"][0] == 1
    assert [at for at in record["not_run"] if at.get("kernel")] == []


def test_a_table_fits_80_columns_and_tells_what_was_not_run(bench, merge) -> None:
    """Long names take a line of their own."""
    slow = row("c", 500) | {"timed": "eager"}
    rows = [
        row("a", 50) | {"timed": "graph"},
        slow,
        row("a kernel with a name of many letters", 123456.0) | {"direct": True},
    ]
    reason = missing("b", "refused") | {"reason": "needs SM100, got SM90 " * 9}
    record = merge({}, rows, [reason])
    text = bench[1].table(record, record["results"], [reason])
    assert max(map(len, text.splitlines())) <= 80
    assert "not run: b: needs SM100" in text
    assert "* a kernel with a name of many letters" in text
    # the others are replays of graphs
    assert "  c (eager) " in text
    (line,) = (at for at in text.splitlines() if at.startswith("  a "))
    assert line.split() == ["a", "50", "20", "2", "0.50", "1.00", "10", "2e-03"]
