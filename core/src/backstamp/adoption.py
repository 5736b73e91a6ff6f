"""A plan made elsewhere, used as it is or refused: by a rank from rank 0, by a worker from its parent.

In: a plan's JSON, this host and its catalogue. Out: the plan, when every stamp it names can be built here, before any
weight is loaded; else one error with every reason. It never resolves: another choice, however good, would be one that
the other ranks do not have. It imports no plugin.

.. versionadded:: 0.2
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from backstamp.catalogue import Catalogue
from backstamp.compiled import HostCatalogue, compile_for
from backstamp.declarations import Offer, Slot
from backstamp.errors import BadPlan, NotAdopted
from backstamp.host import HostFacts
from backstamp.hostfit import HostRow
from backstamp.plan import Plan
from backstamp.plan_reading import plan_from_json
from backstamp.plan_rows import GroupPlan, PhasePlan, PluginRef
from backstamp.policy import BYPASSABLE
from backstamp.text import plain
from backstamp.words import real_dtypes

__all__ = ["adopt"]


def adopt(plan_json: object, host: HostFacts, catalogue: Catalogue) -> Plan:
    """The plan, if this host can build all of it: its distributions, versions and rows are here, and accepted here.

    `plan_json` is the text or bytes of a plan's JSON, or the same parsed.

    Raises:
        BadPlan: it cannot be read as a plan. NotAdopted: it cannot be built here; every reason is told.
    """
    plan = plan_from_json(_parsed(plan_json), "plan handed over")
    compiled = compile_for(catalogue, host)
    reasons = [f"{phase}: {reason}" for phase, reason in _reasons(plan, compiled)]
    if not reasons:
        return plan
    raise NotAdopted(
        f"{plan.role} plan of {plan.model}, made on {plan.host}",
        needed=f"everything it names, as it names it, on {host.name}",
        found="; ".join(dict.fromkeys(reasons)),
        fix="Install what it names, or resolve on a host that all ranks are like; a plan is never changed on the way",
    )


def _parsed(plan_json: object) -> object:
    if not isinstance(plan_json, str | bytes | bytearray):
        return plan_json
    try:
        return json.loads(plan_json)
    except (ValueError, RecursionError) as cause:
        raise BadPlan("plan handed over", needed="JSON", found=plain(str(cause))) from cause


def _reasons(plan: Plan, host: HostCatalogue) -> Iterator[tuple[str, str]]:
    """Every (phase, reason) why a plan cannot be built here."""
    slots: list[tuple[Slot, str, PhasePlan]] = [("attention", row.phase, row) for row in plan.phases]
    if plan.linear is not None:
        rows = plan.linear.rows
        slots += [("linear", f"linear {row.phase}", row) for row in rows]
    compiled_in: dict[tuple[str, int], dict[str, tuple[float, str]]] = {}
    for slot, phase, row in slots:
        for reason in _torn(row):
            yield phase, reason
        for group in row.groups:
            for reason in _unlike_settings(slot, group, phase, host, compiled_in):
                yield phase, reason
            for reason in _group_reasons(slot, group, row, plan, host):
                yield phase, reason


def _torn(row: PhasePlan) -> Iterator[str]:
    """What a phase says of itself and its groups do not: the digest covers the groups only."""
    named = (row.kernel, row.plugin, row.library)
    if row.groups and named not in [(group.kernel, group.plugin, group.library) for group in row.groups]:
        yield f"it names {row.kernel}, which none of its layers has"
    if not row.groups and named != (None, None, None):
        yield f"it names {row.kernel} and no layers"


def _unlike_settings(
    slot: Slot,
    group: GroupPlan,
    phase: str,
    host: HostCatalogue,
    compiled_in: dict[tuple[str, int], dict[str, tuple[float, str]]],
) -> Iterator[str]:
    """Settings no row compiles in, and layers that one phase compiles with another value than the next.

    A plan does not carry its model: a setting gone from every phase of a layer cannot be told from one never there.
    """
    there = _row_of(slot, group, host)
    if there is None:
        return
    settings = dict(group.settings)
    for name in sorted(settings.keys() - there.offer.build_settings):
        yield f"{group.kernel} needs a setting it compiles in, got {name} {settings[name]:g}"
    for name in sorted(there.offer.build_settings):
        value = settings.get(name, 0.0)
        for layer in group.layers:
            before, where = compiled_in.setdefault((group.component, layer), {}).setdefault(name, (value, phase))
            if before != value:
                yield f"{group.kernel} needs {name} {before:g} for layer {layer}, as in {where}, got {value:g}"
                break


def _group_reasons(slot: Slot, group: GroupPlan, row: PhasePlan, plan: Plan, host: HostCatalogue) -> Iterator[str]:
    there = _row_of(slot, group, host)
    if there is None:
        yield (
            f"{group.kernel} needs {_named(group.plugin)} and its row {group.row} for {group.family}, got "
            + _instead(slot, group, host)
        )
        return
    bypassed = BYPASSABLE.intersection(plan.bypassed)
    # an operator may have switched off a check of the installation, never one of the machine
    against = [*there.refusals, *(refusal for refusal in there.installations if refusal.code not in bypassed)]
    for refusal in against:
        yield f"{group.kernel} needs {refusal.wanted}, got {refusal.have}"
    if row.phase not in there.phases:
        yield f"{group.kernel} needs a phase it declares, got {row.phase}"
    if group.cached or slot == "linear":
        yield from _cache_reasons(slot, there, plan)
    yield from _declared_reasons(there.offer, group, plan)
    planned, here = group.library, there.library
    if planned is not None and here is not None and None not in (planned.version, here.version) and planned != here:
        yield f"{group.kernel} needs {planned.distribution} {planned.version}, got {here.distribution} {here.version}"


def _cache_reasons(slot: Slot, there: HostRow, plan: Plan) -> Iterator[str]:
    """What the plan says of the cache and the row does not read: no resolver wrote such a plan."""
    offer, layout = there.offer, dict(plan.layouts).get(slot)
    if slot == "linear":
        if offer.state_layouts and layout not in offer.state_layouts:
            yield f"{offer.kernel} needs state layout {', '.join(offer.state_layouts)}, got {layout}"
        return
    if not offer.page_sizes.accepts(plan.page_size):
        yield f"{offer.kernel} needs page size {offer.page_sizes.describe()}, got {plan.page_size}"
    if layout not in offer.layouts:
        yield f"{offer.kernel} needs KV layout {', '.join(offer.layouts)}, got {layout}"
    reads = {plan.dtype if name == "same" else name for name in offer.kv_dtypes}
    if plan.kv_dtype not in reads:
        yield f"{offer.kernel} needs KV dtype {', '.join(sorted(offer.kv_dtypes))}, got {plan.kv_dtype}"


def _declared_reasons(offer: Offer, group: GroupPlan, plan: Plan) -> Iterator[str]:
    """What a plan carries of a row for decisions, and the row does not say: the digest leaves it out."""
    if group.alignment_tokens != offer.alignment_tokens:
        yield f"{offer.kernel} needs the alignment it declares ({offer.alignment_tokens}), got {group.alignment_tokens}"
    if group.sinks is None:
        return
    declared = tuple(sorted(real_dtypes(offer.sink_dtypes, plan.dtype))), offer.sink_conversion
    if (group.sinks.reads, group.sinks.conversion) != declared:
        wanted, got = (f"{', '.join(reads)}, conversion {how}" for reads, how in (declared, group.sinks[1:]))
        yield f"{offer.kernel} needs sinks read as it declares ({wanted}), got {got}"


def _row_of(slot: Slot, group: GroupPlan, host: HostCatalogue) -> HostRow | None:
    """The declared row a group names, as this host sees it."""
    for row in host.slots[slot].rows:
        # two distributions may have a kernel of one name, of which the operator chose one
        if (row.offer.kernel, row.index, row.plugin) == (group.kernel, group.row, group.plugin):
            return row if row.offer.family == group.family else None
    return None


def _instead(slot: Slot, group: GroupPlan, host: HostCatalogue) -> str:
    owner = host.catalogue.owner(group.kernel, slot)
    failure = host.catalogue.failure_of(group.kernel)
    if owner is None:
        return f"a plugin that failed: {plain(failure.cause)}" if failure is not None else "no plugin that has it"
    return _named(owner) if owner != group.plugin else "another row there"


def _named(plugin: PluginRef) -> str:
    return f"{plugin.distribution} {plugin.version}"
