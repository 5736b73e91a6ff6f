"""What an engine's log says of a plan, before weights load, and of what was built from it.

In: an engine's own logger, a plan or built objects. Out: lines of its log. It decides nothing.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Iterable
from logging import Logger

from backstamp.plan import Plan
from backstamp.plan_rows import PhasePlan
from backstamp.stamp import read_stamp

__all__ = ["tell_phases", "tell_stamps", "tell_warnings"]


def tell_phases(log: Logger, plan: Plan, what: str, rows: Iterable[PhasePlan]) -> None:
    """Say what will run and who decided; `what` says of which layers, where a model has others too."""
    phases = "; ".join(
        f"{row.phase} {row.kernel} ({row.plugin.distribution} {row.plugin.version}, {row.source})"
        for row in rows
        if row.plugin is not None
    )
    log.info("Backstamp plan for %s%s: %s; digest %s", plan.model, what, phases, plan.digest[:12])


def tell_warnings(log: Logger, plan: Plan) -> None:
    """Say what an operator should read."""
    for warning in plan.warnings:
        log.warning("Backstamp plan, %s: %s", warning.code, warning.text)


def tell_stamps(log: Logger, objects: Iterable[object], reads: str) -> None:
    """Say what was built, once for objects alike; `reads` says of what."""
    for stamp in dict.fromkeys(read_stamp(built) for built in objects):
        library = f"{stamp.library.distribution} {stamp.library.version}" if stamp.library else "no library"
        plugin = f"{stamp.plugin.distribution} {stamp.plugin.version}"
        log.info("Backstamp built %s for %s: %s, %s, %s", stamp.kernel, ", ".join(stamp.phases), plugin, library, reads)
