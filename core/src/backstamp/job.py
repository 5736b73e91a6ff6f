"""One job over several hosts: one kernel that serves on all of them, or, where the policy says so, one for each.

In: the resolver's arguments with a host a rank. Out: a plan a rank, equal but for the host and for which declared row
and library of one kernel serve there, or an error that names the host that refuses. Independent choices of ranks hang
collectives: without `Policy.per_rank` there are none.

Source: flashinfer #3186.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from backstamp.catalogue import Catalogue
from backstamp.compiled import HostCatalogue, compile_for
from backstamp.declarations import Offer, Role, Slot
from backstamp.engine import EngineFacts
from backstamp.errors import BadInput, ConflictingRequest
from backstamp.host import HostFacts
from backstamp.hostfit import HostRow
from backstamp.index import index_rows
from backstamp.installation import INSTALL_DEPTH, Refusal
from backstamp.kv_dtypes import kv_dtype_of
from backstamp.launch import Launch
from backstamp.model import ModelFacts
from backstamp.plan import Plan
from backstamp.plan_rows import PhasePlan, PluginRef, Warn
from backstamp.resolution import resolve_on

__all__ = ["resolve_job"]


def resolve_job(
    launch: Launch,
    engine: EngineFacts,
    model: ModelFacts,
    hosts: Sequence[HostFacts],
    catalogue: Catalogue,
    role: Role = "target",
    *,
    target: Plan | None = None,
) -> tuple[Plan, ...]:
    """Resolve every rank of a job; `hosts[i]` is rank i's.

    Raises:
        BackstampError: as `resolve`; a refusal names the host it comes from.
        ConflictingRequest: the hosts read one KV dtype in two forms.
    """
    if not hosts:
        raise BadInput("job", needed="a host for each rank", found="none")
    compiled = [compile_for(catalogue, host) for host in hosts]
    if launch.policy.per_rank:
        plans = tuple(resolve_on(at, launch, engine, model, role=role, target=target) for at in compiled)
        return _told_apart(plans)
    _check_kv_dtypes(launch, model, hosts, catalogue)
    joint, ranks = _joint(compiled)
    plan = resolve_on(joint, launch, engine, model, role=role, target=target)
    return tuple([_of_rank(plan, host, ranks, at) for at, host in enumerate(hosts)])


#: A row of the joint catalogue, and the row that serves in its place on each host.
Ranks = Mapping[tuple[Slot, str, PluginRef, int], Sequence[HostRow]]


def _joint(compiled: Sequence[HostCatalogue]) -> tuple[HostCatalogue, Ranks]:
    """One catalogue in which a row serves where every host lets it, or another row that answers alike."""
    first = compiled[0]
    joined: dict[Slot, list[HostRow]] = {"attention": [], "linear": []}
    ranks: dict[tuple[Slot, str, PluginRef, int], Sequence[HostRow]] = {}
    for slot, of_slot in joined.items():
        # rows are ranked by what they declare, so that one position is one row on every host
        for alike in _alike(first.slots[slot].rows):
            for rows in _served(compiled, [[host.slots[slot].rows[at] for at in alike] for host in compiled]):
                of_slot.append(_joint_row([(host.host.name, row) for host, row in zip(compiled, rows, strict=True)]))
                ranks[slot, rows[0].offer.kernel, rows[0].plugin, rows[0].index] = rows
    beside = tuple(host.host for host in compiled[1:])
    return replace(first, slots={slot: index_rows(rows) for slot, rows in joined.items()}, beside=beside), ranks


def _alike(rows: Sequence[HostRow]) -> list[list[int]]:
    """The positions of rows of one kernel and plugin that answer every question alike, wherever they serve."""
    alike: dict[tuple[str, PluginRef], list[tuple[Offer, list[int]]]] = {}
    for at, row in enumerate(rows):
        anywhere = replace(
            row.offer, device="any", archs=(), forward_archs="no", cpu_features=frozenset(), runtimes=(), requires=()
        )
        groups = alike.setdefault((row.name, row.plugin), [])
        same = next((positions for offer, positions in groups if offer == anywhere), None)
        if same is None:
            groups.append((anywhere, [at]))
        else:
            same.append(at)
    return [positions for groups in alike.values() for _, positions in groups]


def _served(compiled: Sequence[HostCatalogue], by_host: Sequence[Sequence[HostRow]]) -> Iterator[Sequence[HostRow]]:
    """What like rows come to on the hosts of a job: themselves where one of them serves everywhere, else the best row
    of each host. Where a host has none, themselves, with what is against them there alone.
    """
    together = [list(rows) for rows in zip(*by_host, strict=True)]
    everywhere = any(not any(row.refusals or row.installations for row in rows) for rows in together)
    serving = [[row for row in rows if not row.refusals] for rows in by_host]
    if all(serving):
        if everywhere:
            yield from together
        else:
            yield [min(rows, key=lambda row: len(row.installations)) for rows in serving]
        return
    for rows in together:
        yield [replace(row, refusals=()) if of_host else row for row, of_host in zip(rows, serving, strict=True)]


def _joint_row(rows: Sequence[tuple[str, HostRow]]) -> HostRow:
    refusals = dict.fromkeys(_on(name, refusal) for name, of in rows for refusal in of.refusals)
    missing = tuple(dict.fromkeys(_on(name, refusal) for name, of in rows for refusal in of.installations))
    return replace(
        rows[0][1],
        refusals=tuple(sorted(refusals, key=lambda refusal: refusal.depth)),
        installations=missing or _unlike_versions(rows),
        assumed=any(of.assumed for _, of in rows),
        interpreted=any(of.interpreted for _, of in rows),
    )


def _of_rank(plan: Plan, host: HostFacts, ranks: Ranks, at: int) -> Plan:
    """The plan as one rank runs it: the same kernels, by the rows and libraries of its own host."""
    phases = tuple([_of_phase(phase, "attention", ranks, at) for phase in plan.phases])
    linear = plan.linear
    if linear is not None:
        linear = replace(linear, **{row.phase: _of_phase(row, "linear", ranks, at) for row in linear.rows})
    return replace(plan, host=host.name, device=host.device, phases=phases, linear=linear)


def _of_phase(phase: PhasePlan, slot: Slot, ranks: Ranks, at: int) -> PhasePlan:
    groups = []
    library = phase.library
    for group in phase.groups:
        row = ranks[slot, group.kernel, group.plugin, group.row][at]
        groups.append(group._replace(row=row.index, library=row.library))
        if (group.kernel, group.plugin, group.library) == (phase.kernel, phase.plugin, phase.library):
            library = row.library
    return phase._replace(groups=tuple(groups), library=library)


def _on(host: str, refusal: Refusal) -> Refusal:
    return refusal._replace(have=f"{refusal.have} on {host}")


def _unlike_versions(rows: Sequence[tuple[str, HostRow]]) -> tuple[Refusal, ...]:
    """One kernel of two versions of a library is two kernels; unlike machines may need unlike libraries."""
    versions: dict[str, tuple[str, str | None]] = {}
    for host, row in rows:
        if row.library is None:
            continue
        name, version = row.library
        first_host, first = versions.setdefault(name, (host, version))
        if first == version:
            continue
        wanted, have = f"{name} {first}, as on {first_host}", f"{name} {version} on {host}"
        if None in (first, version):
            unlisted, listed = (
                (first_host, f"{version} on {host}") if first is None else (host, f"{first} on {first_host}")
            )
            wanted, have = (
                f"{name} at one version",
                f"{listed} and an unknown one on {unlisted}, which has no library list",
            )
        return (Refusal(INSTALL_DEPTH, "library_version", name, wanted, have),)
    return ()


def _check_kv_dtypes(launch: Launch, model: ModelFacts, hosts: Sequence[HostFacts], catalogue: Catalogue) -> None:
    read = {kv_dtype_of(launch, model, host, catalogue): host.name for host in hosts}
    if len(read) > 1:
        found = " and ".join(f"{name} on {host}" for name, host in sorted(read.items()))
        needed = f"one form of KV dtype {launch.kv_cache_dtype} on every host"
        raise ConflictingRequest("job", needed=needed, found=found, fix="Set --kv-cache-dtype to one form")


def _told_apart(plans: tuple[Plan, ...]) -> tuple[Plan, ...]:
    """Ranks that run unlike kernels say so, all of them."""
    if len({plan.digest for plan in plans}) == 1:
        return plans
    kernels = {plan.host: ", ".join(dict.fromkeys(str(row.kernel) for row in plan.running)) for plan in plans}
    warning = Warn(
        "per_rank", "ranks run unlike kernels: " + "; ".join(f"{host}: {of}" for host, of in kernels.items())
    )
    return tuple(replace(plan, warnings=(*plan.warnings, warning)) for plan in plans)
