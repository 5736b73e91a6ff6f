"""What vLLM's log says: a plan before weights load, and the stamps of what was built from it.

In: a plan's phases, or built objects. Out: lines of vLLM's log.
"""

from __future__ import annotations

from collections.abc import Iterable

from backstamp.plan import Plan
from backstamp.plan_rows import PhasePlan
from backstamp.stamp import read_stamp
from backstamp_vllm.names import LOG

__all__ = ["tell_phases", "tell_stamps", "tell_warnings"]


def tell_phases(plan: Plan, what: str, rows: Iterable[PhasePlan]) -> None:
    """Say what will run and who decided; `what` says of which layers, where a model has others too."""
    phases = "; ".join(
        f"{row.phase} {row.kernel} ({row.plugin.distribution} {row.plugin.version}, {row.source})"
        for row in rows
        if row.plugin is not None
    )
    LOG.info("Backstamp plan for %s%s: %s; digest %s", plan.model, what, phases, plan.digest[:12])


def tell_warnings(plan: Plan) -> None:
    """Say what an operator should read."""
    for warning in plan.warnings:
        LOG.warning("Backstamp plan, %s: %s", warning.code, warning.text)


def tell_stamps(objects: Iterable[object], reads: str) -> None:
    """Say what was built, once for objects alike; `reads` says of what."""
    for stamp in dict.fromkeys(read_stamp(built) for built in objects):
        library = f"{stamp.library.distribution} {stamp.library.version}" if stamp.library else "no library"
        plugin = f"{stamp.plugin.distribution} {stamp.plugin.version}"
        LOG.info("Backstamp built %s for %s: %s, %s, %s", stamp.kernel, ", ".join(stamp.phases), plugin, library, reads)
