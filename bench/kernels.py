"""Attention kernels on this machine, side by side: every kernel through its built backend, libraries beside them.

    python bench/kernels.py --only decode --output FILE            one group of work, under ten minutes
    python bench/kernels.py --only decode --kernels triton fa3 --shapes b1 --rounds 5 --output FILE
    python bench/kernels.py --list                                 the shapes of every group
    python bench/kernels.py --plot DIR --output FILE               plots of a record, on any machine
    python bench/kernels.py --check [KERNEL ...] [--jobs N] [--seconds S] [--output FILE]

Each kernel is held against float64 before it is timed; what is wrong is told and not timed. A run is added to the
record of this machine: rows of the shapes and kernels that ran now take the place of older ones, everything else stays.
Read ratios: the times are one machine's. `--tiny` runs small shapes on the CPU, which are no figures, into a record of
its own.

`--check` holds every kernel against float64, case by case, and times nothing; what a declaration refuses is refused
with its reason. Exit 1 where a kernel was wrong or failed, 2 where nothing was begun.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from backstamp.catalogue import build_catalogue
from backstamp.discovery import discover
from backstamp.errors import BackstampError, BadInput
from backstamp.host import HostFacts, this_host
from check_runs import KERNEL_SECONDS as CHECK_SECONDS
from check_runs import check_all, check_table, merge_lines
from measure_runs import KERNEL_SECONDS, measure_all
from plots import plot
from record_file import Owner, read, update
from record_table import shapes_table, table
from recording import Recording
from records import Run, of_run
from shape_list import SHAPES, TINY
from shapes import WORKS, Shape
from timing import versions


def main() -> int:
    """Measure, check, list or plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=WORKS, nargs="+", help="groups of work, in this order; all without")
    parser.add_argument("--shapes", nargs="+", metavar="TEXT", help="only shapes with one of these texts in their name")
    parser.add_argument("--kernels", nargs="+", default=[], metavar="NAME", help="only these; libraries by their names")
    parser.add_argument("--skip", nargs="+", default=[], metavar="NAME", help="all but these, named likewise")
    parser.add_argument("--rounds", type=int, default=1, help="time the kernels of a shape in turn, so many times over")
    parser.add_argument("--join", action="store_true", help="go on with the record's last run, on the same machine")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which nothing more is begun")
    parser.add_argument("--eager", action="store_true", help="record nothing in CUDA graphs: launches are timed too")
    parser.add_argument("--untuned", action="store_true", help="let Triton's autotuners take their first configuration")
    parser.add_argument("--tiny", action="store_true", help="small shapes on the CPU: the whole way, and no figures")
    parser.add_argument("--output", type=Path, help="bring this record up to date")
    parser.add_argument(
        "--json", action="store_true", help="print the record; with --check its lines, with --list the shapes"
    )
    parser.add_argument("--plot", type=Path, metavar="DIR", help="draw the record of --output, as SVG and PNG")
    parser.add_argument("--list", action="store_true", help="print the shapes and measure nothing")
    parser.add_argument("--check", nargs="*", metavar="KERNEL", help="check these kernels, or all, and time nothing")
    parser.add_argument("--jobs", type=int, default=4, help="processes that check at a time")
    parser.add_argument("--seconds", type=float, help="most seconds a kernel's checks take, or one kernel at one shape")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds: needs a number of at least 1")
    if options.seconds is not None and not options.seconds > 0:
        parser.error("--seconds: needs a number above 0")
    try:
        return run_of(options, parser)
    except BackstampError as refused:
        print(f"bench/kernels.py: {refused.message}", file=sys.stderr)
        return 2


def run_of(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Do what was asked for."""
    shapes = TINY if options.tiny else SHAPES
    if options.list:
        return list_shapes([shapes[at] for at in chosen(shapes, options.only, options.shapes)], options.json)
    if options.plot is not None and not any((options.only, options.shapes, options.kernels, options.tiny)):
        return draw(options.plot, options.output, parser)
    if options.check is not None:
        return check(options, this_host())
    if not torch.cuda.is_available() and not options.tiny:
        print(
            "bench/kernels.py: needs a CUDA or ROCm GPU to time, got none; --check and --tiny run here", file=sys.stderr
        )
        return 2
    return time_all(shapes, options)


def chosen(shapes: Sequence[Shape], works: Sequence[str] | None, texts: Sequence[str] | None) -> list[int]:
    """Which of the listed shapes: those of some works, in their order, with one of some texts in their name."""
    named = [at for at, shape in enumerate(shapes) if not texts or any(text in shape.label for text in texts)]
    return [at for work in works or WORKS for at in named if shapes[at].work == work]


def list_shapes(shapes: Sequence[Shape], as_json: bool) -> int:
    """What is listed, and how much work each shape is at least."""
    rows = [{"work": of.work, "shape": of.label, "flops": of.flops, "bytes": of.bytes} for of in shapes]
    print(json.dumps(rows, indent=1) if as_json else shapes_table(shapes))
    return 0


def time_all(shapes: Sequence[Shape], options: argparse.Namespace) -> int:
    """Time what was asked for; the record is written after every figure."""
    host = this_host("cpu" if options.tiny else None)
    recording = Recording(options.output, Owner.of(host, options.tiny), [(shape.work, shape.label) for shape in shapes])
    run = None
    runs = measure_all(
        shapes,
        chosen(shapes, options.only, options.shapes),
        kernels=options.kernels,
        skip=options.skip,
        rounds=options.rounds,
        tiny=options.tiny,
        untuned=options.untuned,
        eager=options.eager,
        seconds=options.seconds or KERNEL_SECONDS,
        budget=options.budget,
        join=options.join,
    )
    try:
        for run in runs:
            # a run of names that nobody has is no run
            if any_begun(run):
                recording.add(run)
    except KeyboardInterrupt:
        print("stopped; what was measured is in the record", file=sys.stderr)
    if run is None:
        print("bench/kernels.py: no listed shape has such a name; see --list", file=sys.stderr)
        return 2
    if recording.number is None:
        reason = run.not_run[0]["reason"] if run.not_run else "stopped before a kernel began"
        print(f"bench/kernels.py: nothing was begun: {reason}", file=sys.stderr)
        return 2
    record = recording.record
    if options.join and not recording.joined:
        print(
            "bench/kernels.py: a run of its own: the last had another machine, commit, limits or rounds",
            file=sys.stderr,
        )
    rows = of_run(record, recording.number)
    print(json.dumps(record, indent=1) if options.json else table(record, rows, run.not_run))
    if options.plot is not None:
        plot(record, options.plot)
    return int(any(row["status"] != "refused" for row in run.not_run))


def any_begun(run: Run) -> bool:
    """Whether a kernel was timed, refused or lost: not only shapes passed by for want of one."""
    return bool(run.results) or any(row.get("kernel") or row["status"] != "refused" for row in run.not_run)


def draw(folder: Path, output: Path | None, parser: argparse.ArgumentParser) -> int:
    """Plot a record as it is."""
    record = read(output)
    if not record.get("results"):
        parser.error(f"--plot: needs --output, a record with results; got {output}")
    for path in plot(record, folder):
        print(path)
    return 0


def check(options: argparse.Namespace, host: HostFacts) -> int:
    """Hold kernels against float64 and put the lines beside what was timed, kernel by kernel as they end."""
    known = [kernel for slot, kernel in build_catalogue(discover()).rows if slot == "attention"]
    unknown = sorted(set(options.check) - set(known))
    if unknown:
        needed = f"kernels of the catalogue: {', '.join(sorted(set(known)))}"
        raise BadInput("--check", needed=needed, found=", ".join(unknown))
    output, owner = options.output, Owner.of(host)
    if output is not None:
        update(output, owner)
    told: list[dict[str, object]] = []
    for lines in check_all(options.check or known, options.jobs, options.seconds or CHECK_SECONDS):
        told += lines
        if output is not None:
            update(output, owner, partial(with_checks, lines))
    print(json.dumps(told, indent=1) if options.json else check_table(told))
    return int(any(line["status"] not in ("ok", "refused") for line in told))


def with_checks(lines: Sequence[dict[str, object]], before: dict[str, Any]) -> dict[str, Any]:
    """A record with what was found of a kernel now."""
    found = before.get("versions", {}) | versions()
    return before | {"versions": found, "checks": merge_lines(before.get("checks", []), lines)}


if __name__ == "__main__":
    raise SystemExit(main())
