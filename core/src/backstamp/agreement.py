"""Before the first collective: do the plans of one job's ranks, or of its instances, go together?

In: plans, or this rank's plan and a way to the others. Out: nothing where they agree, else one error that names the
first field that differs, whose it is and both values. Plans travel as JSON bytes, never as pickles, and never over
NCCL, where a dead rank is a hang. A plan that was handed over is adopted or refused (`adopt`), never re-derived.

.. versionadded:: 0.2
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from backstamp.adoption import adopt
from backstamp.errors import BadInput, BadPlan, Disagreement
from backstamp.exchange import Store, exchange
from backstamp.plan import Plan
from backstamp.plan_reading import plan_from_json
from backstamp.text import plain

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Difference", "Of", "adopt", "agree", "compare", "differences"]

#: Ranks run one model together and must run the same; instances (prefill, decode) hand one another their caches.
Of = Literal["ranks", "instances"]
#: What two plans that run the same may differ in. Everything else a plan says, ranks must agree on.
_FREE: Final = frozenset(
    {
        *("schema", "host", "device", "digest", "verdicts", "losses", "warnings", "bypassed", "timings"),
        *("requested", "setting", "source", "page_size_source", "row", "skipped"),
    }
)
#: What decides the bytes of a cache. Which kernels read it is each instance's own matter.
_CACHE: Final = ("model", "role", "layouts", "kv_cache_dtype", "page_size")
#: What an instance may declare that it converts.
_CONVERTIBLE: Final = frozenset({"page_size"})


class Difference(NamedTuple):
    """The first field in which one plan is not as most are: whose, which, what it says and what the others say."""

    who: str
    field: str
    value: str
    reference: str
    agreeing: tuple[str, ...]


def compare(
    plans: Mapping[str, Plan] | Sequence[Plan], of: Of = "ranks", *, convertible: frozenset[str] = frozenset()
) -> None:
    """Hold the plans of a job's ranks, in order of rank, or of its instances, by name, against each other.

    `convertible` names what an instance converts when it takes a cache over: "page_size".

    Raises:
        Disagreement: they do not go together; the first differing field, whose, and both values.
        BadInput: an unknown `of` or `convertible`, or what should be a plan is none.
    """
    found = differences(plans, of, convertible=convertible)
    if not found:
        return
    first, others = found[0], found[1:]
    raise Disagreement(
        f"{first.who}, {first.field}",
        needed=f"{first.reference}, as {_listed(first.agreeing)}",
        found=first.value,
        considered="; ".join(f"{item.who}, {item.field}, {item.value} vs {item.reference}" for item in others),
        fix=_FIX[of],
    )


def differences(
    plans: Mapping[str, Plan] | Sequence[Plan], of: Of = "ranks", *, convertible: frozenset[str] = frozenset()
) -> tuple[Difference, ...]:
    """What `compare` would raise about, one row for each plan that is not as most are; between equals the first wins.

    Raises:
        BadInput: an unknown `of` or `convertible`, or what should be a plan is none.
    """
    _check_words(of, convertible)
    noun = "rank" if of == "ranks" else "instance"
    named = _by_name(plans, noun)
    facts = {f"{noun} {name}": _facts(plan, of, convertible) for name, plan in named.items()}
    if not facts:
        return ()
    alike: dict[str, list[str]] = {}
    for who, fields in facts.items():
        alike.setdefault(json.dumps(fields, sort_keys=True), []).append(who)
    # the first of equals, so that every rank names the same
    agreeing = tuple(sorted(alike.values(), key=len, reverse=True)[0])
    reference = facts[agreeing[0]]
    found = []
    for who, fields in facts.items():
        if who not in agreeing:
            field = next(at for at in dict.fromkeys([*reference, *fields]) if fields.get(at) != reference.get(at))
            found.append(Difference(who, field, fields.get(field, _ABSENT), reference.get(field, _ABSENT), agreeing))
    return tuple(found)


def agree(
    through: Store | ProcessGroup,
    plan: Plan,
    rank: int | None = None,
    world_size: int | None = None,
    *,
    timeout_s: float = 60.0,
    key: str = "backstamp/plans",
) -> None:
    """Call on every rank, the same number of times, before the job's first collective: returns where all plans agree.

    `through` is the job's `torch.distributed` store, with `rank` and `world_size`, or a gloo group, which knows both.
    A group without gloo is refused: make one with `new_group(backend="gloo")`, or hand in the store. After an error
    the gloo group is of no more use; a store is. `key` is where a store keeps what is exchanged.

    Raises:
        Disagreement: as `compare`, on every rank. RankMissing: a rank did not answer within `timeout_s` seconds, or
        closed its end; the error names who answered and who did not. BadPlan: what a rank showed is no plan.
        BadInput: `through` is neither, `plan` is none, or rank and world size do not fit.
    """
    _check_plan("agree", plan)
    facts = json.dumps(_facts(plan, "ranks", frozenset()), sort_keys=True).encode()
    mine = hashlib.sha256(facts).hexdigest().encode()
    # where all agree, which is nearly always, 64 bytes a rank say so
    digests = exchange(through, mine, rank, world_size, timeout_s=timeout_s, key=key)
    if len(set(digests.values())) == 1:
        return
    shown = exchange(through, canonical_bytes(plan), rank, world_size, timeout_s=timeout_s, key=key)
    plans = [plan_from_json(_parsed(shown[at], at), f"plan of rank {at}") for at in sorted(shown)]
    compare(plans)


def canonical_bytes(plan: Plan) -> bytes:
    """The plan's JSON without spaces, as ASCII: the same plan, the same bytes."""
    return json.dumps(plan.as_json(), separators=(",", ":")).encode("ascii")


_ABSENT: Final = "none"
_FIX: Final[Mapping[Of, str]] = {
    "ranks": "Resolve on one rank and let the others adopt its plan, or install and ask for the same on all",
    "instances": "Ask for kernels that share a layout, with one --kv-cache-dtype and --page-size on both",
}


def _by_name(plans: object, noun: str) -> Mapping[str, Plan]:
    """Plans by name, of ranks or instances; those of a list are named by their place."""
    if not isinstance(plans, Mapping | list | tuple):
        raise BadInput("compare", needed="plans, as a list or by name", found=type(plans).__name__)
    named = plans if isinstance(plans, Mapping) else {str(at): plan for at, plan in enumerate(plans)}
    for name, plan in named.items():
        _check_plan(f"compare, {noun} {name}", plan)
    return named


def _check_plan(who: str, plan: object) -> None:
    if not isinstance(plan, Plan):
        raise BadInput(who, needed="a resolved plan", found=plain(repr(plan)))


def _check_words(of: str, convertible: frozenset[str]) -> None:
    if of not in tuple(_FIX):
        raise BadInput("compare", needed="of='ranks' or of='instances'", found=repr(of))
    if not isinstance(convertible, Set):
        raise BadInput("compare, convertible", needed="a set of words", found=repr(convertible))
    unknown = sorted(convertible - (_CONVERTIBLE if of == "instances" else frozenset()))
    if unknown:
        known = "page_size, between instances" if of == "instances" else "nothing convertible: ranks run the same"
        raise BadInput("compare, convertible", needed=known, found=", ".join(unknown))


def _facts(plan: Plan, of: Of, convertible: frozenset[str]) -> dict[str, str]:
    """What must agree, by its readable path, in the order of the plan."""
    said = plan.as_json()
    if of == "instances":
        said = {name: said[name] for name in _CACHE if name not in convertible}
    return dict(_flat(said, ""))


def _flat(value: object, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        if set(value) == {"name", "distribution", "version"} or set(value) == {"distribution", "version"}:
            # a plugin or a library is one value to a reader
            yield path, f"{value['distribution']} {value['version']}"
            return
        for name, below in value.items():
            if name not in _FREE:
                yield from _flat(below, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for at, item in enumerate(value):
            yield from _flat(item, f"{path}[{at}]")
    elif isinstance(value, list):
        yield path, ", ".join(str(item) for item in value)
    else:
        yield path, _ABSENT if value is None else str(value)


def _parsed(shown: bytes, rank: int) -> object:
    try:
        return json.loads(shown)
    except (ValueError, RecursionError) as cause:
        raise BadPlan(f"plan of rank {rank}", needed="JSON", found=f"{len(shown)} other bytes") from cause


def _listed(names: Sequence[str]) -> str:
    if len(names) <= 4:
        return f"{', '.join(names)} {'has' if len(names) == 1 else 'have'} it"
    return f"{names[0]} and {len(names) - 1} others have it"
