"""How answers look: tables that fit 80 columns, JSON, and errors in their five parts.

In: values of the library. Out: text on a stream. Every string that came from a plugin, a file or an exception is
printed as text, never read as markup.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from backstamp.errors import BackstampError
from backstamp.plan import Plan
from backstamp.text import plain

#: A part of a refusal is printed whole up to here: it may list every key there is.
_MOST_CHARACTERS = 20_000

__all__ = ["print_error", "print_groups", "print_json", "print_plan", "print_table", "say"]


def say(text: str, style: str = "") -> None:
    """One line of text, wrapped at the terminal's width; names in it may come from files and plugins."""
    _console().print(Text(plain(text, most=4000), style=style))


def print_json(value: object) -> None:
    """JSON on standard output."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "", whole: frozenset[str] = frozenset()
) -> None:
    """A table; cells are text, wrapped where the terminal is narrow, but for the columns kept `whole`."""
    table = Table(
        title=Text(title) if title else None, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0)
    )
    for column in columns:
        table.add_column(column, overflow="fold", header_style="bold", no_wrap=column in whole)
    for row in rows:
        table.add_row(*(Text(plain(cell)) for cell in row))
    _console().print(table)


def print_error(error: BackstampError, as_json: bool) -> None:
    """A refusal: JSON on standard output for tools, else its parts on standard error, one a line."""
    if as_json:
        print_json(error.as_json())
        return
    console = Console(stderr=True, highlight=False)
    parts = [
        ("", f"{error.who}: needs {error.needed}"),
        ("got", error.found),
        ("also considered", error.considered),
        ("what to do", error.fix),
    ]
    for label, part in parts:
        if not part:
            continue
        lines = part.split("; ") if label == "also considered" else [part]
        for line in lines:
            head = f"{label}: " if label else ""
            text = Text(plain(line, _MOST_CHARACTERS))
            console.print(Text("  " * bool(label)) + Text(head, style="bold") + text, soft_wrap=False)


def print_plan(plan: Plan, verdicts: bool = True) -> None:
    """A plan: its phases, then why the other kernels were refused, then warnings and losses."""
    say(
        f"{plan.role} {plan.model} on {plan.host}: page size {plan.page_size} ({plan.page_size_source}), "
        f"KV {plan.kv_dtype} {dict(plan.layouts)['attention']}, digest {plan.digest[:12]}"
    )
    rows: list[tuple[str, ...]] = []
    for slot, row in (*(("", row) for row in plan.phases), *(("linear ", row) for row in plan.running_linear)):
        library = f"{row.library.distribution} {row.library.version or '(assumed)'}" if row.library else ""
        asked = f"{row.requested} ({row.setting})" if row.requested else "-"
        rows.append((f"{slot}{row.phase}", asked, row.kernel or "-", library, row.source))
    print_table(("phase", "asked", "kernel", "library", "source"), rows)
    print_groups(plan)
    if verdicts:
        _print_refusals(plan)
    for feature in plan.features:
        say(f"feature {feature.feature}: {'on' if feature.on else 'off'} ({feature.source}): {feature.reason}")
    for item in plan.conversions:
        say(f"{item.phase}: {item.kernel} reads {item.parameter} as {item.wanted}; they are stored as {item.stored}")
    for timing in plan.timings:
        instead = timing.by_priority_microseconds
        figure = f"{instead:.1f} us" if instead is not None else "not timed"
        other = f"; priority would take {timing.by_priority}, {figure}" if timing.by_priority != timing.kernel else ""
        say(f"measured: {timing.phase} {timing.kernel} {timing.microseconds:.1f} us a layer{other}")
    for loss in plan.losses:
        better = f"; {loss.alternative} would not" if loss.alternative else ""
        say(f"loss ({loss.code}): {loss.phase} {loss.kernel}: {loss.cost}{better}", "yellow")
    for warning in plan.warnings:
        say(f"{warning.code}: {warning.text}", "yellow")


def print_groups(plan: Plan) -> None:
    """Which kernel runs which layers, where that is not one for all."""
    kinds = {(group.component, group.kernel) for row in plan.running for group in row.groups}
    if len(kinds) == 1:
        return
    places: dict[tuple[str, str, str, str, str], list[str]] = {}
    for row in plan.running:
        for group in row.groups:
            count = f"{len(group.layers)} x {group.family}"
            key = (group.component, count, group.kernel, group.source, str(group.layers))
            places.setdefault(key, []).append(row.phase)
    say("")
    rows = [
        (component, count, kernel, source, ", ".join(at))
        for (component, count, kernel, source, _), at in places.items()
    ]
    print_table(("component", "layers", "kernel", "source", "phases"), rows)


def _print_refusals(plan: Plan) -> None:
    """Each reason once, with the kernels it refuses and the phases it refuses them for."""
    phases: dict[tuple[str, str], list[str]] = {}
    for row in plan.phases:
        for verdict in row.verdicts:
            if not verdict.accepted:
                phases.setdefault((verdict.kernel, verdict.message), []).append(row.phase)
    kernels: dict[tuple[str, str], list[str]] = {}
    for (kernel, why), places in phases.items():
        kernels.setdefault((", ".join(places), why), []).append(kernel)
    if kernels:
        say("")
        rows = [(", ".join(names), places, why) for (places, why), names in kernels.items()]
        print_table(("refused", "for", "because it"), rows)


def _console() -> Console:
    return Console(highlight=False)
