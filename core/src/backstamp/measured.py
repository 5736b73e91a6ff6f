"""What a record of times says about the kernels of one phase: their time a layer, what priority would have taken
instead, and what was never timed.

In: the facts of a resolve with its measurements, and a phase's table. Out: times for `backstamp.rank` to order by, and
rows of the plan. It times nothing and chooses nothing.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final

from backstamp.declarations import Phase, Slot
from backstamp.facts import Facts
from backstamp.launch import Launch
from backstamp.measurements import Load, WorkClass, bucket_of
from backstamp.model import LayerFacts
from backstamp.plan_rows import Timing, Warn
from backstamp.selection import Decision, Part, Table

__all__ = ["MEASURED", "rank_layer", "time_of", "timings_of", "unmeasured", "verify_tokens", "work_of"]

#: The source of a choice that times decided.
MEASURED: Final = "auto (measured)"


def time_of(facts: Facts, table: Table, parts: Sequence[Part]) -> float | None:
    """The time of one layer in microseconds, the mean over the layers these rows serve; None unless each was timed."""
    measurements = facts.measurements
    if measurements is None or not parts:
        return None
    total, layers = 0.0, 0
    for asked, row, _ in parts:
        for group in asked.groups:
            work = work_of(facts, table.slot, table.phase, group.facts, measurements.workload.load_of(table.phase))
            plugin = (row.plugin.distribution, row.plugin.version)
            time = measurements.time_of(work, row.offer.kernel, row.index, plugin, row.library) if work else None
            if time is None:
                return None
            total += time * len(group.layers)
            layers += len(group.layers)
    return total / layers


def work_of(facts: Facts, slot: Slot, phase: Phase, layer: LayerFacts, load: Load | None) -> WorkClass | None:
    """The class of the work a kind of layer is in a phase; None without a load."""
    if load is None:
        return None
    launch = facts.launch
    tokens = bucket_of(load.tokens)
    verifies = phase == "verify"
    page_size = launch.page_size if launch.page_size is not None else facts.cache.page_size
    return WorkClass(
        slot=slot,
        phase=phase,
        layer=rank_layer(layer, launch).describe(),
        dtype=facts.model.dtype,
        kv_dtype=facts.kv_dtype,
        page_size=page_size or 0,
        q_len=tokens if phase == "prefill" else verify_tokens(facts) if verifies else 1,
        tree=verifies and launch.speculative_topk > 1,
        rows=bucket_of(load.rows),
        kv_len=tokens if slot == "attention" else 0,
    )


def rank_layer(layer: LayerFacts, launch: Launch) -> LayerFacts:
    """A kind of layer with the heads one rank has of it."""
    heads, kv_heads = layer.num_qo_heads // launch.tp_size, layer.num_kv_heads // launch.tp_size
    return replace(layer, num_qo_heads=max(1, heads), num_kv_heads=max(1, kv_heads))


def verify_tokens(facts: Facts) -> int:
    """Tokens a row verifies: every drafted one and the one before them."""
    return max(1, facts.launch.speculative_num_steps) * facts.launch.speculative_topk + 1


def unmeasured(facts: Facts, table: Table, times: dict[str, float | None]) -> tuple[Warn, ...]:
    """Say which of several kernels the record has no time for: they come after those it has."""
    missing = [name for name, time in times.items() if time is None]
    if facts.measurements is None or not missing or len(times) < 2:
        return ()
    load = facts.measurements.workload.load_of(table.phase)
    at = f"for {load.rows} x {load.tokens} tokens" if load is not None else "in a draft's own phase"
    then = "they rank last" if len(missing) < len(times) else "priority decides"
    return (Warn("unmeasured", f"{table.phase}: no time of {', '.join(missing)} {at}; {then}"),)


def timings_of(
    facts: Facts, decisions: Iterable[Decision], by_priority: Callable[[Facts, Table], tuple[Part, ...]]
) -> tuple[Timing, ...]:
    """Both figures of every choice that times decided: its own, and that of what priority would have taken."""
    timings: list[Timing] = []
    for phase, table, choice in decisions if facts.measurements is not None else ():
        time = time_of(facts, table, choice.parts)
        first = by_priority(facts, table)
        if choice.source.startswith(MEASURED) and time is not None and first:
            component, name = choice.parts[0].asked.component, first[0].row.offer.kernel
            instead = time_of(facts, table, first)
            timings.append(Timing(table.slot, phase, component, choice.kernel, time, name, instead))
    return tuple(timings)
