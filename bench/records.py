"""The record of a machine: what a run adds to it, and what each figure is beside the others of its run.

In: the record as it is, and what one run told. Out: the record brought up to date. Rows of the shapes and kernels that
ran now replace those of other runs; everything else stays, `checks` among it. Ratios and shares are of figures of one
run alone: a machine is not the same one on another day.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

__all__ = ["NO_RUN", "Row", "Run", "is_joined", "merge", "number_of", "of_run"]

Row = dict[str, Any]
#: Why a listed shape has no figure where no run was asked for it.
NO_RUN: Final = "no run of this record was asked for it"
#: How far limits of one machine differ from one minute to the next.
_ALIKE: Final = 0.05


class Run(NamedTuple):
    """What one run told: the machine and its limits, rows, and kernels without one.

    With `join` it goes on with the record's last run, on a machine that reaches the same limits.
    """

    about: Mapping[str, Any]
    results: Sequence[Row]
    not_run: Sequence[Row]
    rounds: int = 1
    join: bool = False

    def since(self, results: int, not_run: int) -> Run:
        """The run without the first rows and reasons it told."""
        return self._replace(results=self.results[results:], not_run=self.not_run[not_run:])


def number_of(before: Mapping[str, Any], run: Run) -> int:
    """The number a run has in a record: the last one's where it goes on with it, else the next."""
    _, runs = _with_runs(before)
    last = max((entry["run"] for entry in runs), default=0)
    return last if is_joined(before, run) else last + 1


def merge(before: Mapping[str, Any], run: Run, listed: Iterable[tuple[str, str]], number: int | None = None) -> Row:
    """The record with this run in it; every listed (work, shape) has a row or a reason.

    With `number` it is more of the run that has it: other runs may have been added since it began.
    """
    old, runs = _with_runs(before)
    number = number_of(before, run) if number is None else number
    now = {_place(row): {**row, "run": number} for row in run.results}
    results = [*(row for row in old if _place(row) not in now and not _has_failed(row, run)), *now.values()]
    runs = _with_entry(runs, run, number)
    results = rated(results, {entry["run"]: entry["limits"] for entry in runs})
    told = {_place(row) for row in results}
    # a record of before runs were told apart names kernels of other devices too
    kept = (row for row in before.get("not_run", ()) if row.get("kernel") and "status" in row)
    missing = {_place(row): dict(row) for row in (*kept, *run.not_run) if row.get("kernel")}
    not_run = [row for place, row in missing.items() if place not in told]
    shapes = {(row["work"], row["shape"]) for row in (*results, *not_run)}
    order = {shape: at for at, shape in enumerate(dict.fromkeys((*listed, *shapes)))}
    reasons = {
        (row["work"], row["shape"]): row["reason"]
        for row in (*before.get("not_run", ()), *run.not_run)
        if not row.get("kernel")
    }
    not_run += [_bare(shape, reasons.get(shape, NO_RUN)) for shape in order if shape not in shapes]
    # a later run that is at work may have no rows yet
    used = {row["run"] for row in results} | {entry["run"] for entry in runs if entry["run"] >= number}
    about = {**run.about, "limits": runs[-1]["limits"]}
    return {
        **before,
        **{name: about[name] for name in ("host", "device", "arch", "limits") if name in about},
        "versions": {**before.get("versions", {}), **about["versions"]},
        "runs": [entry for entry in runs if entry["run"] in used],
        "results": _sorted(results, order),
        "not_run": _sorted(not_run, order),
    }


def is_joined(before: Mapping[str, Any], run: Run) -> bool:
    """Whether a run goes on with the last one: it was asked to; rounds, code and machine are the same."""
    _, runs = _with_runs(before)
    if not run.join or not runs or before.get("host") != run.about["host"] or runs[-1]["rounds"] != run.rounds:
        return False
    if any(runs[-1].get(name) != run.about.get(name) for name in ("commit", "dirty")):
        return False
    limits = runs[-1]["limits"]
    return all(abs(run.about["limits"][name] / limits[name] - 1) <= _ALIKE for name in limits)


def rated(results: Sequence[Row], limits: Mapping[int, Mapping[str, float]]) -> list[Row]:
    """Each row with what its run makes of it.

    - `ratio_to_best`: its speed beside the fastest of its shape, 1.0 the fastest; `ratio_to_peer`: beside the fastest
      of another library, above 1.0 where it is ahead; None where its run had no other to compare it with;
    - `bound`: whether memory or compute bounds the shape on this machine, and `share` of that limit it reaches.
    """
    best: dict[tuple[Any, ...], dict[str, float]] = {}
    count: dict[tuple[Any, ...], int] = {}
    for row in results:
        of = best.setdefault(_race(row), {})
        of[row["library"]] = min(of.get(row["library"], math.inf), row["us"])
        count[_race(row)] = count.get(_race(row), 0) + 1
    return [{**row, **_rating(row, best[_race(row)], count[_race(row)], limits[row["run"]])} for row in results]


def of_run(record: Mapping[str, Any], number: int | None = None) -> list[Row]:
    """The rows of one run, the last where none is named."""
    last = max((entry["run"] for entry in record["runs"]), default=0) if number is None else number
    return [row for row in record["results"] if row["run"] == last]


def _rating(row: Row, best: Mapping[str, float], count: int, limits: Mapping[str, float]) -> Row:
    others = [us for library, us in best.items() if library != row["library"]]
    shares = {"memory": row["tbps"] / limits["copy_tbps"], "compute": row["tflops"] / limits["bf16_tflops"]}
    bound = max(shares, key=lambda name: shares[name])
    return {
        "ratio_to_best": round(min(best.values()) / row["us"], 3) if count > 1 else None,
        "ratio_to_peer": round(min(others) / row["us"], 3) if others else None,
        "bound": bound,
        "share": float(f"{shares[bound]:.3g}"),
    }


def _with_runs(before: Mapping[str, Any]) -> tuple[list[Row], list[Row]]:
    """Rows and runs of a record; one written before runs were told apart is one run."""
    results = list(before.get("results", ()))
    if "runs" in before or not results:
        return results, list(before.get("runs", ()))
    runs = [{"run": 0, "rounds": 1, **_kept(before)}]
    return [{"direct": False, **row, "run": 0} for row in results], runs


def _with_entry(runs: Sequence[Row], run: Run, number: int) -> list[Row]:
    """The entries with that of a run, in order; the limits stay those it began with, versions are added."""
    of = {entry["run"]: entry for entry in runs}
    if number in of:
        of[number] = {**of[number], "versions": {**of[number]["versions"], **run.about["versions"]}}
    else:
        of[number] = {"run": number, "rounds": run.rounds, **_kept(run.about)}
    return [of[at] for at in sorted(of)]


def _kept(about: Mapping[str, Any]) -> Row:
    return {name: about[name] for name in ("limits", "versions", "commit", "dirty") if name in about}


def _place(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["work"], row["shape"], row["kernel"]


def _race(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["work"], row["shape"], row["run"]


def _has_failed(row: Row, run: Run) -> bool:
    """Whether an old figure is of a kernel that was wrong or failed now; a refusal is of what is installed now."""
    return any(_place(row) == _place(one) and one["status"] != "refused" for one in run.not_run if one.get("kernel"))


def _bare(shape: tuple[str, str], reason: str) -> Row:
    return {"work": shape[0], "shape": shape[1], "reason": reason}


def _sorted(rows: Iterable[Row], order: Mapping[tuple[str, str], int]) -> list[Row]:
    """In the order of the list, each shape's fastest first."""
    return sorted(rows, key=lambda row: (order[row["work"], row["shape"]], row.get("us", 0.0), row.get("kernel", "")))
