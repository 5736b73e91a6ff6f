"""`tune`: time the kernels `auto` may choose among on this machine, and keep the times where a resolve can be given
them."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from backstamp.catalogue import build_catalogue
from backstamp.cli.console import print_json, print_table, say
from backstamp.cli.options import AsJson, Flags, with_flags
from backstamp.cli.report_options import Reports, emit
from backstamp.compiled import compile_for
from backstamp.discovery import discover
from backstamp.errors import BadInput
from backstamp.host import HostFacts
from backstamp.loading import output_on_stderr
from backstamp.measurements import Machine, Measurements
from backstamp.priority_check import priority_report
from backstamp.resolution import resolve_on
from backstamp.tune import Tuned, tune
from backstamp.tune_record import Kept, TuneRecord, add_times, default_place, read_times

__all__ = ["add_to"]


def add_to(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command(name="tune")(with_flags(_tune, without=frozenset({"host", "measurements", "role", "draft_model"})))


def _tune(
    flags: Flags,
    kernel: Annotated[
        list[str] | None,
        typer.Option("--kernel", metavar="KERNEL", help="Only this one; repeatable."),
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE", help="The record; default one in this user's cache.")
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="New times replace those that are there.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Print the record; time nothing.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Exit 1 where priority disagrees with the record; time nothing.")
    ] = False,
    report: Reports = None,
    as_json: AsJson = False,
) -> None:
    """Time every kernel auto may choose here, through its built backend, and keep the times in a record.

    Exit 1 where a kernel that accepts the work could not run it or answered wrong.
    """
    if show and check:
        raise BadInput("tune", needed="--show or --check", found="both")
    if report and not check:
        raise BadInput("tune --report", needed="--check, which makes a report", found="no --check")
    if (show or check) and (kernel or replace):
        raise BadInput("tune", needed="--kernel and --replace where kernels are timed", found="--show or --check")
    host = flags.host_facts()
    place = Path(output) if output is not None else default_place(Machine.of(host))
    if show:
        _show(read_times(place), place, as_json)
        return
    if check:
        raise typer.Exit(_check(flags, host, place, report, as_json))
    if find_spec("torch") is None:
        raise BadInput("tune", needed="torch, to run kernels", found="none", fix="pip install torch")
    raise typer.Exit(_time(flags, host, place, kernel or [], replace, as_json))


def _time(flags: Flags, host: HostFacts, place: Path, kernels: list[str], replace: bool, as_json: bool) -> int:
    # what compiles says so through logging; whoever runs this command wants to read it
    logging.basicConfig(format="%(message)s")
    machine, kept = Machine.of(host), list[Kept]()
    # a record that cannot be added to is told before minutes of timing
    add_times(place, machine, ())

    def told(row: Tuned) -> None:
        added = add_times(place, machine, (row.timed,) if row.timed is not None else (), replace=replace)
        kept.extend(added)
        if not as_json:
            _tell(row, added, replace)

    launch, engine, model = flags.launch("target"), flags.engine_facts(), flags.target_model()
    workload, catalogue = flags.expected_load(), build_catalogue(discover())
    with _prints_on_stderr() if as_json else nullcontext():
        done = tune(launch, engine, model, host, catalogue, workload=workload, kernels=kernels, told=told)
    conflicts = [item for item in kept if item.conflicts(replace)]
    if as_json:
        before = {id(item.row): item.before for item in kept}
        rows = [{**row.as_json(), "before": before.get(id(row.timed))} for row in done]
        print_json({"record": str(place), "machine": machine.as_json(), "tuned": rows, "conflicts": len(conflicts)})
    else:
        say(f"{len(kept) - len(conflicts)} time(s) in {place}")
        if conflicts:
            say(f"{len(conflicts)} kept as they were before: --replace takes the new ones", "yellow")
    missing = [name for name in kernels if not any(row.kernel == name and row.timed is not None for row in done)]
    return int(bool(missing) or any(row.status in ("wrong", "failed") for row in done))


@contextmanager
def _prints_on_stderr() -> Iterator[None]:
    """What kernels print while they are built and run is not part of the JSON."""
    with output_on_stderr():
        try:
            yield
        finally:
            # what a C library holds back would come out after the JSON
            ctypes.CDLL(None).fflush(None)


def _tell(row: Tuned, added: tuple[Kept, ...], replace: bool) -> None:
    if row.timed is None:
        style = "yellow" if row.status == "skipped" else "red"
        say(f"{row.work.phase}: {row.kernel} {row.status}: {row.reason}", style)
        return
    (kept,) = added
    was = f", {kept.before:.1f} us before" if kept.before is not None else ""
    stays = "; that one stays" if kept.conflicts(replace) else ""
    say(f"{row.work.describe()}: {row.kernel} {row.timed.microseconds:.1f} us{was}{stays}", "green")


def _check(flags: Flags, host: HostFacts, place: Path, reports: list[str] | None, as_json: bool) -> int:
    record = read_times(place)
    times = Measurements(machine=record.machine, rows=record.rows, workload=flags.expected_load())
    at, launch = compile_for(build_catalogue(discover()), host), flags.launch("target")
    plan = resolve_on(at, launch, flags.engine_facts(), flags.target_model(), times)
    return emit(priority_report(plan), reports, json_flag=as_json)


def _show(record: TuneRecord, place: Path, as_json: bool) -> None:
    if as_json:
        print_json(record.as_json())
        return
    machine = record.machine
    runtimes = ", ".join(f"{name} {version}" for name, version in machine.runtimes)
    say(f"{place}: {machine.device_name or machine.arch}, torch {machine.torch or 'unknown'} {runtimes}")
    rows = [
        (row.work.describe(), row.kernel, f"{row.distribution} {row.version}", f"{row.microseconds:.1f}")
        for row in sorted(record.rows, key=lambda row: (row.work, row.microseconds))
    ]
    print_table(("work", "kernel", "plugin", "us"), rows)
