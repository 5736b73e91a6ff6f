"""One job over several hosts: one kernel that serves on all of them, or, where the policy says so, one for each.

In: the resolver's arguments with a host a rank. Out: a plan a rank, equal but for the host's name, or an error that
names the host that refuses. Independent choices of ranks hang collectives: without `Policy.per_rank` there are none.

Source: flashinfer #3186.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from backstamp.catalogue import Catalogue
from backstamp.compiled import HostCatalogue, compile_for
from backstamp.declarations import Role, Slot
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
from backstamp.plan_rows import Warn
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
    plan = resolve_on(_joint(compiled), launch, engine, model, role=role, target=target)
    return tuple(replace(plan, host=host.name, device=host.device) for host in hosts)


def _joint(compiled: Sequence[HostCatalogue]) -> HostCatalogue:
    """One catalogue in which a row serves where every host lets it."""
    first = compiled[0]
    slots: tuple[Slot, ...] = ("attention", "linear")
    joined = {slot: [_joint_row(compiled, slot, at) for at in range(len(first.slots[slot].rows))] for slot in slots}
    beside = tuple(host.host for host in compiled[1:])
    return replace(first, slots={slot: index_rows(rows) for slot, rows in joined.items()}, beside=beside)


def _joint_row(compiled: Sequence[HostCatalogue], slot: Slot, at: int) -> HostRow:
    # rows are ranked by what they declare, so that one position is one row on every host
    rows = [(host.host.name, host.slots[slot].rows[at]) for host in compiled]
    row = rows[0][1]
    refusals = dict.fromkeys(_on(name, refusal) for name, of in rows for refusal in of.refusals)
    missing = tuple(dict.fromkeys(_on(name, refusal) for name, of in rows for refusal in of.installations))
    return replace(
        row,
        refusals=tuple(sorted(refusals, key=lambda refusal: refusal.depth)),
        installations=missing or _unlike_versions(rows),
        assumed=any(of.assumed for _, of in rows),
        interpreted=any(of.interpreted for _, of in rows),
    )


def _on(host: str, refusal: Refusal) -> Refusal:
    return refusal._replace(have=f"{refusal.have} on {host}")


def _unlike_versions(rows: Sequence[tuple[str, HostRow]]) -> tuple[Refusal, ...]:
    """One kernel of two library versions is two kernels."""
    first_host, first = rows[0]
    for host, row in rows:
        if row.library != first.library and row.library is not None and first.library is not None:
            name = row.library.distribution
            wanted = f"{name} {first.library.version}, as on {first_host}"
            return (Refusal(INSTALL_DEPTH, "library_version", name, wanted, f"{name} {row.library.version} on {host}"),)
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
