"""`list`, `hosts`, `matrix`, `doctor` and `declare`: what is installed, where it runs, and what is wrong with it."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from backstamp.catalogue import Catalogue, build_catalogue
from backstamp.cli.console import print_json, print_table, say
from backstamp.cli.options import AsJson
from backstamp.declared import declared_to_json
from backstamp.discovery import JSON_NAME, discover, import_plugin
from backstamp.doctor import examine, find_killers
from backstamp.engine import EngineFacts
from backstamp.errors import BadInput
from backstamp.explanation import MatrixCell, matrix
from backstamp.host import load_host, profile_names, this_host
from backstamp.launch import Requests, make_launch
from backstamp.model import default_model, load_model
from backstamp.tables import markdown_matrix
from backstamp.text import plain

__all__ = ["add_to"]

hosts_app = typer.Typer(help="Named, recorded and probed hosts.", no_args_is_help=True)


def add_to(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command(name="list")(_list)
    app.command(name="matrix")(_matrix)
    app.command(name="doctor")(_doctor)
    app.command(name="declare")(_declare)
    hosts_app.command(name="list")(_hosts_list)
    hosts_app.command(name="show")(_hosts_show)
    hosts_app.command(name="record")(_hosts_record)
    app.add_typer(hosts_app, name="hosts")


def _list(as_json: AsJson = False) -> None:
    """Print the installed plugins, their kernels and aliases, and what failed."""
    catalogue = build_catalogue(discover())
    if as_json:
        print_json(_listing(catalogue))
        return
    rows = []
    for (slot, kernel), offers in catalogue.rows.items():
        plugin = offers[0].plugin
        devices = ", ".join(dict.fromkeys(row.offer.device for row in offers))
        families = ", ".join(dict.fromkeys(row.offer.family for row in offers))
        rows.append((kernel, slot, families, devices, f"{plugin.distribution} {plugin.version}"))
    print_table(("kernel", "slot", "family", "device", "distribution"), rows)
    if catalogue.aliases:
        say("")
        print_table(
            ("alias", "kernels, in order", "distribution"),
            [
                (key, ", ".join(row.alias.kernels), row.plugin.distribution)
                for (_, key), row in catalogue.aliases.items()
            ],
        )
    for failure in catalogue.failures:
        say(f"failed: plugin {failure.plugin.name} ({failure.plugin.distribution}): {failure.cause}", "red")
    for conflict in catalogue.conflicts.values():
        say(f"conflict: {conflict.name!r} is claimed by {', '.join(conflict.distributions)}", "red")
    if not catalogue.rows:
        say("No plugin is installed; `pip install backstamp-cpu` serves any device.", "yellow")


def _listing(catalogue: Catalogue) -> dict[str, object]:
    return {
        "plugins": [{**found.plugin.as_json(), "origin": found.origin} for found in catalogue.found],
        "kernels": [
            {
                "kernel": kernel,
                "slot": slot,
                "plugin": rows[0].plugin.as_json(),
                "families": list(dict.fromkeys(row.offer.family for row in rows)),
                "devices": list(dict.fromkeys(row.offer.device for row in rows)),
            }
            for (slot, kernel), rows in catalogue.rows.items()
        ],
        "aliases": [
            {
                "key": key,
                "slot": slot,
                "kernels": list(row.alias.kernels),
                "by_phase": {phase: list(kernels) for phase, kernels in row.alias.by_phase.items()},
                "deprecated": row.alias.deprecated,
                "plugin": row.plugin.as_json(),
            }
            for (slot, key), row in catalogue.aliases.items()
        ],
        "conflicts": [conflict._asdict() for conflict in catalogue.conflicts.values()],
        "failures": [{**item.plugin.as_json(), "cause": item.cause} for item in catalogue.failures],
        "notes": list(catalogue.notes),
    }


def _hosts_list(as_json: AsJson = False) -> None:
    """Print the named hosts that ship with Backstamp."""
    hosts = [load_host(name) for name in profile_names()]
    if as_json:
        print_json([host.as_json() for host in hosts])
    else:
        rows = [(host.name, host.device, host.arch, host.device_name) for host in hosts]
        print_table(("host", "device", "arch", "name"), rows)


def _hosts_show(
    name: Annotated[str | None, typer.Argument(metavar="HOST", help="Name or file; default this machine.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print one host's facts."""
    host = load_host(name) if name is not None else this_host()
    if as_json:
        print_json(host.as_json())
        return
    say(f"{host.name}: {host.device} {host.arch} {host.device_name}")
    if host.cpu_features:
        say(f"CPU features: {', '.join(sorted(host.cpu_features))}")
    for runtime, version in host.runtimes:
        say(f"{runtime} {version}")
    say("libraries: not recorded" if host.libraries is None else f"libraries: {len(host.libraries)} distributions")
    for probe in host.probes:
        say(f"probe {probe.name}: {'ok, ' if probe.ok else ''}{probe.reason}", "" if probe.ok else "yellow")


def _hosts_record(
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE", help="Default standard output.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Device of this machine to record.")] = None,
) -> None:
    """Record this machine's facts as JSON, to be asked about from any other."""
    text = this_host(device).to_json()
    if output is None:
        sys.stdout.write(text)
    else:
        _write(Path(output), text)


def _matrix(
    keys: Annotated[list[str] | None, typer.Argument(metavar="[KEY]...", help="Default every key.")] = None,
    host: Annotated[
        list[str] | None, typer.Option(metavar="HOST", help="Default every named host; repeatable.")
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="FILE", help="Model config.json.")] = None,
    form: Annotated[Literal["table", "md", "csv", "json"], typer.Option("--format", help="Output form.")] = "table",
    as_json: AsJson = False,
) -> None:
    """Print which kernel each key comes to, on each host, in each phase."""
    hosts = [load_host(name) for name in host or profile_names()]
    facts = load_model(model) if model is not None else default_model()
    launch = make_launch(Requests(speculative_algorithm="STANDALONE"))
    cells = matrix(build_catalogue(discover()), hosts, launch, EngineFacts(), facts, keys or ())
    if as_json or form == "json":
        print_json({"model": facts.name, "cells": [cell.as_json() for cell in cells]})
    elif form == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(MatrixCell._fields)
        writer.writerows(cell[:3] + (cell.kernel or "", *cell[4:]) for cell in cells)
    elif form == "md":
        sys.stdout.write(markdown_matrix(cells))
    else:
        _print_matrix(cells)


def _print_matrix(cells: tuple[MatrixCell, ...]) -> None:
    for alias in dict.fromkeys(cell.alias for cell in cells):
        say(alias, "bold")
        rows: dict[str, list[str]] = {}
        for cell in cells:
            if cell.alias == alias:
                rows.setdefault(cell.host, []).append(cell.kernel or f"({cell.code})")
        phases = ("prefill", "decode", "verify", "draft_decode", "draft_extend")
        print_table(("host", *phases), [(name, *row) for name, row in rows.items()])
        say("")


def _doctor(as_json: AsJson = False) -> None:
    """Look for broken plugins, shadowed distributions, name conflicts and failed probes; exit 1 on a fault."""
    # a plugin that takes its process down would take this one down too
    findings = find_killers() or examine(build_catalogue(discover()), this_host())
    faults = sum(finding.level == "fault" for finding in findings)
    if as_json:
        print_json({"findings": [finding.as_json() for finding in findings], "faults": faults})
    else:
        print_table(
            ("", "subject", "finding"),
            [(item.level, item.subject, item.text + (f". {item.fix}" if item.fix else "")) for item in findings],
        )
        say(f"{faults} fault(s)", "red" if faults else "green")
    raise typer.Exit(1 if faults else 0)


def _declare(
    module: Annotated[str, typer.Argument(metavar="MODULE", help="Plugin module, e.g. backstamp_cpu.plugin.")],
    check: Annotated[bool, typer.Option("--check", help="Compare only; exit 1 when they differ.")] = False,
) -> None:
    """Write backstamp.json beside a plugin module, so that installed wheels are read without being run."""
    try:
        text = declared_to_json(import_plugin(module))
    except Exception as cause:
        found = plain(f"{type(cause).__name__}: {cause}")
        raise BadInput(f"declare {plain(module)}", needed="a plugin module that imports", found=found) from cause
    path = Path(str(sys.modules[module.partition(":")[0]].__file__)).with_name(JSON_NAME)
    if check:
        same = path.is_file() and path.read_text("utf-8") == text
        say(f"{path} {'says what' if same else 'does not say what'} {module} says", "green" if same else "red")
        raise typer.Exit(0 if same else 1)
    _write(path, text)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, "utf-8")
    except OSError as cause:
        raise BadInput(str(path), needed="a file that can be written", found=str(cause)) from cause
    say(f"wrote {path}")
