"""`lock` and `diff`: the plans of many hosts and models in one file, and what changed since."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from backstamp.catalogue import build_catalogue
from backstamp.cli.console import print_json, print_table, say
from backstamp.cli.options import AsJson, Flags, with_flags
from backstamp.discovery import discover
from backstamp.drift import Drift, check_lock
from backstamp.errors import BadInput
from backstamp.lock import Lock, LockLaunch, lock_from_json, lock_text, make_lock
from backstamp.lock_subjects import GivenWords, read_subjects, resolve_lock, subjects_of
from backstamp.plan_reading import plan_from_json
from backstamp.records import read_record, write_record

__all__ = ["add_to"]


def add_to(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command(name="lock")(with_flags(_lock, without=frozenset({"host", "model", "measurements", "workload"})))
    app.command(name="diff")(_diff)


def _lock(
    flags: Flags,
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE", help="Default standard output.")
    ] = None,
    check: Annotated[
        str | None,
        typer.Option("--check", metavar="FILE", help="Resolve a lock's launch again; exit 1 on a difference."),
    ] = None,
    host: Annotated[list[str] | None, typer.Option(metavar="[NAME=]HOST", help="As `resolve`; repeatable.")] = None,
    model: Annotated[list[str] | None, typer.Option(metavar="[NAME=]FILE", help="As `resolve`; repeatable.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write the plans of every host and model to one file, or check that they are still what was locked."""
    given = GivenWords(hosts=host or (), models=model or (), draft=flags.draft_model, engine=flags.engine)
    if check is not None:
        _check(check, flags, given, output, as_json)
        return
    launch = LockLaunch(
        requests=flags.requests(),
        policy=flags.policy(),
        role=flags.role,
        device=flags.device,
        settings=tuple(sorted(flags.settings().items())),
    )
    lock = resolve_lock(build_catalogue(discover()), launch, read_subjects(given, flags.device))
    if output is None:
        sys.stdout.write(lock_text(lock))
        return
    write_record(output, lock_text(lock))
    if as_json:
        print_json({"wrote": output, **_counts(lock)})
    else:
        _print_lock(lock)
        say(f"wrote {output}")


def _check(path: str, flags: Flags, given: GivenWords, output: str | None, as_json: bool) -> None:
    files = Flags(draft_model=flags.draft_model, engine=flags.engine)
    if output is not None or flags != files:
        raise BadInput(
            "--check",
            needed="the launch of the lock, and nothing else asked for",
            found="--output" if output is not None else "other launch flags",
            fix="Leave them out; hosts, models, the draft and the engine may be given again as files",
        )
    lock = lock_from_json(read_record(path, "lock"), f"lock {path}")
    now = resolve_lock(build_catalogue(discover()), lock.launch, subjects_of(lock, given))
    _answer(check_lock(lock, now), lock, as_json)


def _diff(
    old: Annotated[str, typer.Argument(metavar="OLD", help="A lock, or the JSON of a plan.")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="Another of the same kind.")],
    as_json: AsJson = False,
) -> None:
    """Print what changed between two records, and which plugin version changed it; exit 1 on a difference."""
    before, after = _read(old), _read(new)
    _answer(check_lock(before, after), before, as_json)


def _read(path: str) -> Lock:
    data = read_record(path, "record")
    if isinstance(data, dict) and "phases" in data:
        return make_lock([plan_from_json(data, f"plan {path}")])
    return lock_from_json(data, f"lock {path}")


def _answer(drifts: Sequence[Drift], lock: Lock, as_json: bool) -> None:
    if as_json:
        print_json({"differences": [drift.as_json() for drift in drifts], "count": len(drifts), **_counts(lock)})
    elif drifts:
        rows = [(_where(drift), drift.phase or "-", _what(drift), ", ".join(drift.because) or "-") for drift in drifts]
        print_table(("host, model", "phase", "what changed", "changed by"), rows)
    else:
        say(f"no difference in {len(lock.entries)} plan(s) and refusal(s)", "green")
    raise typer.Exit(1 if drifts else 0)


def _where(drift: Drift) -> str:
    if not drift.host:
        return "all"
    return f"{drift.host}, {drift.model}" + (" (draft)" if drift.role == "draft" else "")


def _what(drift: Drift) -> str:
    return f"{drift.field}: {drift.before} -> {drift.after}" + (f" ({drift.reason})" if drift.reason else "")


def _print_lock(lock: Lock) -> None:
    rows = []
    for entry in lock.entries:
        kernels = [row.kernel for row in entry.plan.running] if entry.plan is not None else []
        found = ", ".join(dict.fromkeys(kernel for kernel in kernels if kernel is not None))
        said = f"refused: {entry.refusal.message}" if entry.refusal is not None else found
        rows.append((entry.host, entry.model, entry.role, said))
    print_table(("host", "model", "role", "kernels"), rows)


def _counts(lock: Lock) -> dict[str, object]:
    refused = [[*entry.key, entry.refusal.code] for entry in lock.entries if entry.refusal is not None]
    return {"plans": len(lock.entries) - len(refused), "refused": refused}
