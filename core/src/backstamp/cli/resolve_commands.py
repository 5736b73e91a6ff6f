"""`resolve`, `explain` and `build`: one launch, its plan, and the stamps of what the plan builds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

import typer

from backstamp.catalogue import Catalogue, build_catalogue
from backstamp.cli.console import print_groups, print_json, print_plan, print_table, say
from backstamp.cli.options import AsJson, Flags, with_flags
from backstamp.compiled import compile_for
from backstamp.construction import RunnerShape, build
from backstamp.discovery import discover
from backstamp.errors import BadInput
from backstamp.explanation import PhaseAnswer, explain_key
from backstamp.model import load_model
from backstamp.plan import Plan
from backstamp.plan_explanation import explain_plan
from backstamp.plan_rows import GroupPlan, PhasePlan, Warn
from backstamp.reports import built_report
from backstamp.resolution import resolve_on
from backstamp.testing.fakes import recording_factory
from backstamp.text import plain

__all__ = ["add_to"]


def add_to(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command(name="resolve")(with_flags(_resolve))
    app.command(name="explain")(with_flags(_explain))
    app.command(name="build")(with_flags(_build))


def _resolve(flags: Flags, as_json: AsJson = False) -> None:
    """Print the plan of one runner: kernel, library and reason for every phase."""
    plan, _ = _plan(flags)
    if as_json:
        print_json(plan.as_json())
    else:
        print_plan(plan)


def _explain(
    flags: Flags,
    key: Annotated[str | None, typer.Argument(metavar="[KEY]", help="A key; without one, the whole launch.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print the five phases of a launch: kernel, reason, the flag that changes it, the nearest refused kernel.

    With KEY, print what that key comes to in each phase.
    """
    if key is None:
        _explain_launch(flags, as_json)
        return
    host = compile_for(build_catalogue(discover()), flags.host_facts())
    model = flags.runner_model()
    answers = explain_key(host, flags.launch(), flags.engine_facts(), model, key)
    if as_json:
        print_json({"key": key, "host": host.host.name, "model": model.name, "phases": [a.as_json() for a in answers]})
        return
    say(f"{key} on {host.host.name} for {model.describe()}")
    columns = ("phase", "kernel", "set with", "because")
    print_table(columns, [_row(answer) for answer in answers], whole=frozenset({"set with"}))


def _explain_launch(flags: Flags, as_json: bool) -> None:
    host = compile_for(build_catalogue(discover()), flags.host_facts())
    model = flags.target_model()
    draft = load_model(flags.draft_model) if flags.draft_model is not None else None
    launch, measured = flags.launch("target"), flags.measured(host.host)
    stories, plans, linear = explain_plan(host, launch, flags.engine_facts(), model, draft, measured)
    failures = host.catalogue.failures
    if as_json:
        failed = [{**item.plugin.as_json(), "cause": item.cause} for item in failures]
        told = [story.as_json() for story in stories]
        components = [{"role": plan.role, "phase": row.phase, **group.as_json()} for plan, row, group in _beside(plans)]
        warnings = [warning.as_json() for warning in _warnings(plans)]
        slot = [story.as_json() for story in linear]
        answer = {"host": host.host.name, "model": model.name, "phases": told, "linear": slot, "components": components}
        print_json({**answer, "warnings": warnings, "failed": failed})
        return
    say(f"{model.name} on {host.host.name}")
    named = [*((story.phase, story) for story in stories), *((f"linear {story.phase}", story) for story in linear)]
    rows = [(name, story.kernel or "-", story.reason, story.setting) for name, story in named]
    print_table(("phase", "kernel", "because", "change with"), rows, whole=frozenset({"change with"}))
    nearest: dict[str, list[str]] = {}
    for name, story in named:
        if story.nearest:
            lacks = "; ".join(verdict.message for verdict in story.lacks)
            nearest.setdefault(f"{story.nearest}: {lacks}", []).append(name)
    for text, phases in nearest.items():
        say(f"nearest refused for {', '.join(phases)}: {text}")
    for plan in plans:
        print_groups(plan)
    for warning in _warnings(plans):
        say(f"{warning.code}: {warning.text}", "yellow")
    for item in failures:
        plugin = item.plugin
        say(f"FAILED: plugin {plugin.name} ({plugin.distribution} {plugin.version}): {plain(item.cause)}", "red")


def _beside(plans: Sequence[Plan]) -> Iterator[tuple[Plan, PhasePlan, GroupPlan]]:
    """The groups of layers beside the main component's."""
    for plan in plans:
        for row in plan.running:
            yield from ((plan, row, group) for group in row.groups if group.component != row.groups[0].component)


def _warnings(plans: Sequence[Plan]) -> list[Warn]:
    return list(dict.fromkeys(warning for plan in plans for warning in plan.warnings))


def _row(answer: PhaseAnswer) -> tuple[str, str, str, str]:
    """A phase's line: where nothing binds, the reason of each kernel the key stands for."""
    if answer.kernel is not None:
        return answer.phase, answer.kernel, answer.setting, "accepted"
    reasons = [f"{verdict.kernel} {verdict.message}" for verdict in answer.passed_over]
    return answer.phase, "refused", answer.setting, "; ".join(reasons) or answer.reason


def _build(
    flags: Flags,
    fake: Annotated[bool, typer.Option("--fake", help="Build with recording fakes, on any machine.")] = False,
    as_json: AsJson = False,
) -> None:
    """Build the plan of one runner and print the stamps read back from the objects and their steps."""
    if not fake:
        raise BadInput(
            "build", needed="--fake", found="no runner to build for", fix="An engine builds for real: backstamp.build"
        )
    plan, catalogue = _plan(flags)
    backends = build(plan, RunnerShape(), catalogue, load=recording_factory)
    report = built_report(backends)
    if as_json:
        print_json(report)
        return
    print_plan(plan, verdicts=False)
    rows = []
    linear = [(f"linear {phase.phase}", (report["linear"] or {})[phase.phase]) for phase in plan.running_linear]
    for name, record in [*((phase.phase, report["phases"][phase.phase]) for phase in plan.running), *linear]:
        steps = f"{len(record['steps'])} x {', '.join(dict.fromkeys(record['steps']))}" if record["steps"] else "-"
        rows.append((name, record["kernel"] or "", record["plugin"]["distribution"], steps))
    print_table(("phase", "stamp", "distribution", "steps"), rows, title="Stamps read from the built objects")


def _plan(flags: Flags) -> tuple[Plan, Catalogue]:
    catalogue = build_catalogue(discover())
    host = compile_for(catalogue, flags.host_facts())
    engine, measured = flags.engine_facts(), flags.measured(host.host)
    target = None
    if flags.draft_model is not None:
        # a target's plan does not read it, and a wrong name must not wait for the draft's
        load_model(flags.draft_model)
    if flags.role == "draft" and flags.draft_model is not None:
        target = resolve_on(host, flags.launch("target"), engine, flags.target_model(), measured)
    plan = resolve_on(host, flags.launch(), engine, flags.runner_model(), measured, role=flags.role, target=target)
    return plan, catalogue
