"""`demo`: the whole flow on a small model, on this machine, with what it proves."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from backstamp.catalogue import build_catalogue
from backstamp.cli.console import print_json, print_plan, print_table, say
from backstamp.cli.options import AsJson, Flags, with_flags
from backstamp.construction import RunnerBackends
from backstamp.discovery import discover
from backstamp.errors import BadInput
from backstamp.model import DEFAULT_CONFIG, load_model
from backstamp.plan import Plan
from backstamp.reports import built_report

if TYPE_CHECKING:
    from backstamp.testing.demo import DemoReport

__all__ = ["add_to"]

_TOPK, _MIN_STEPS = 2, 2


def add_to(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command(name="demo")(with_flags(_demo, without=frozenset({"measurements", "workload"})))


def _demo(flags: Flags, as_json: AsJson = False) -> None:
    """Serve a small random decoder here: plans, stamps, speculative decoding, errors against float64."""
    if flags.host is not None:
        raise BadInput("demo --host", needed="this machine", found=flags.host, fix="It runs the kernels it plans for")
    ignored = (flags.engine, flags.draft_model, flags.tp_size, flags.dcp_size)
    if flags.role == "draft" or any(value is not None for value in ignored):
        needed = "none of --engine, --draft-model, --role, --tp-size, --dcp-size"
        raise BadInput("demo", needed=needed, found="one of them", fix="The demo has its own engine, draft and roles")
    try:
        from backstamp.testing.demo import run_demo
    except ImportError as cause:
        raise BadInput("demo", needed="torch, to run a model", found=str(cause), fix="pip install torch") from cause
    launch = replace(flags, role="target", speculative_topk=flags.speculative_topk or _TOPK).launch("draft")
    if launch.speculative_num_steps < _MIN_STEPS:
        found = str(launch.speculative_num_steps)
        raise BadInput("demo --speculative-num-steps", needed=f">= {_MIN_STEPS}, to run all five phases", found=found)
    if launch.kv_cache_dtype not in ("auto", "fp32", "float32"):
        raise BadInput("demo --kv-cache-dtype", needed="auto: the demo's cache is float32", found=launch.kv_cache_dtype)
    quiet = as_json or not sys.stderr.isatty()
    with _bars(quiet) as bars:
        report = run_demo(
            launch,
            _config(flags.model),
            flags.host_facts(),
            build_catalogue(discover()),
            progress=_progress(bars),
            planned=None if as_json else _print_plans,
        )
    if as_json:
        print_json(report.as_json())
    else:
        _print(report)
    raise typer.Exit(0 if report.sound else 1)


def _config(path: str | None) -> dict[str, object]:
    """The model's config.json, read once as facts so that a bad one is told apart before torch runs."""
    if path is None:
        text = files("backstamp").joinpath(DEFAULT_CONFIG).read_text("utf-8")
    else:
        load_model(path)
        text = Path(path).read_text("utf-8")
    config: dict[str, object] = json.loads(text)
    return config


def _bars(quiet: bool) -> Progress:
    columns = (TextColumn("{task.description:6}"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"))
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet)


def _progress(bars: Progress) -> Callable[[str, int, int], None]:
    tasks: dict[str, TaskID] = {}

    def show(what: str, done: int, total: int) -> None:
        if what not in tasks:
            tasks[what] = bars.add_task(what, total=total)
        bars.update(tasks[what], completed=done)

    return show


def _print_plans(target: Plan, draft: Plan) -> None:
    print_plan(target)
    say("")
    print_plan(draft)
    say("")


def _print(report: DemoReport) -> None:
    print_table(("runner", "phase", "stamp", "library", "steps"), _stamps(report), "Stamps read from the built objects")
    say("")
    rows = []
    for generation in report.generations:
        tokens = sum(len(output) for output in generation.tokens)
        same = "-" if generation is report.generations[0] else str(generation.tokens == report.generations[0].tokens)
        accepted = f"{generation.accept_length:.2f}" if generation.accept_length else "-"
        rows.append(
            (generation.name, str(len(generation.tokens)), str(tokens), same, accepted, f"{generation.seconds:.1f} s")
        )
    print_table(("decoding", "requests", "tokens", "equal to plain", "accept length", "took"), rows)
    say("")
    errors = [(role, phase, f"{error:.1e}") for (role, phase), error in sorted(report.errors.items())]
    print_table(("runner", "phase", "worst relative error vs float64"), errors)
    verdict = "speculative output equals plain output" if report.equal else "SPECULATIVE OUTPUT DIFFERS FROM PLAIN"
    worst = max(report.errors.values())
    say(f"{verdict}; worst error {worst:.1e}, bound {report.error_bound:.0e}", "green" if report.sound else "red")


def _stamps(report: DemoReport) -> list[tuple[str, ...]]:
    rows = []
    for backends in (report.target, report.draft):
        rows += _stamps_of(backends)
    return rows


def _stamps_of(backends: RunnerBackends) -> list[tuple[str, ...]]:
    phases = built_report(backends)["phases"]
    rows: list[tuple[str, ...]] = []
    for phase, record in phases.items():
        if record["kernel"] is None:
            continue
        library = record["library"]
        version = f"{library['distribution']} {library['version']}" if library else ""
        steps = ", ".join(record["steps"]) if record["steps"] else "-"
        rows.append((backends.plan.role, phase, record["kernel"], version, steps))
    return rows
