"""What is wrong with declarations that are sound one by one: contradictions, rows nothing reaches, ties, circles.

In: a `Catalogue` and the hosts to hold it against. Out: every `Flaw`, at once, in the same order whatever order the
plugins were found in. It refuses nothing and changes nothing: what must not reach a resolve, `backstamp.soundness` has
refused already and is told here as the failure it became.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from backstamp.catalogue import Catalogue, Row
from backstamp.host import HostFacts, load_host, profile_names
from backstamp.lint_names import alias_flaws, cycles, family_flaws, feature_flaws, retired_flaws
from backstamp.lint_reach import hosts_of, misnamed_dtypes, misspelt, never_matches, shadow_of, ties
from backstamp.lint_rows import Level, Said, row_flaws
from backstamp.text import plain

__all__ = ["Flaw", "known_hosts", "lint"]

_LEVELS: Final[tuple[Level, ...]] = ("fault", "note")


class Flaw(NamedTuple):
    """One finding: whose declaration, which one, what is wrong with it and what to do."""

    level: Level
    plugin: str
    subject: str
    text: str
    fix: str

    def as_json(self) -> dict[str, str]:
        """The finding for tools."""
        return self._asdict()


def known_hosts(more: Iterable[str] = ()) -> tuple[HostFacts, ...]:
    """Every named profile, and recorded hosts beside them.

    Raises:
        BadHost: a file that does not hold one host.
    """
    return tuple(load_host(name) for name in (*profile_names(), *more))


def lint(catalogue: Catalogue, hosts: Sequence[HostFacts]) -> tuple[Flaw, ...]:
    """Every finding, faults first, then by plugin and in the order of its declarations."""
    found = [
        *_refused(catalogue),
        *_rows(catalogue, hosts),
        *_names(catalogue, hosts),
        *_defaults(catalogue, hosts),
        *(_flaw(row, said) for row, said in ties(catalogue, hosts)),
    ]
    return tuple(sorted(dict.fromkeys(found), key=lambda flaw: (_LEVELS.index(flaw.level), flaw.plugin)))


def _refused(catalogue: Catalogue) -> Iterator[Flaw]:
    for failure in catalogue.failures:
        who = f"{failure.plugin.distribution} {failure.plugin.version}"
        yield Flaw("fault", failure.plugin.name, who, failure.cause, "Correct plugin.py and declare anew")
    for conflict in catalogue.conflicts.values():
        owners = " and ".join(conflict.distributions)
        for found in catalogue.found:
            if found.plugin.distribution in conflict.distributions:
                text = f"is claimed by {owners}, so nobody has it"
                yield Flaw("fault", found.plugin.name, f"name {conflict.name!r}", text, "Uninstall or rename one")


def _rows(catalogue: Catalogue, hosts: Sequence[HostFacts]) -> Iterator[Flaw]:
    for rows in catalogue.rows.values():
        for at, row in enumerate(rows):
            for said in (*row_flaws(row.offer), *_reach(rows, at, hosts)):
                yield _flaw(row, said, at)


def _reach(rows: Sequence[Row], at: int, hosts: Sequence[HostFacts]) -> Iterator[Said]:
    row = rows[at]
    offer = row.offer
    wrong = list(misspelt(offer.archs, offer.device, offer.forward_archs))
    yield from wrong
    yield from misnamed_dtypes(offer)
    never = never_matches(row, hosts) if not wrong else None
    if never is not None:
        yield never
    shadow = shadow_of(rows, at) if hosts_of(row, hosts) else None
    if shadow is not None:
        text = f"is never reached: row {shadow} of {offer.kernel} comes first and takes all it serves"
        yield Said("fault", text, "Drop it, narrow the other row, or list it first")


def _names(catalogue: Catalogue, hosts: Sequence[HostFacts]) -> Iterator[Flaw]:
    for (_, key), row in catalogue.aliases.items():
        for said in alias_flaws(row, catalogue, hosts):
            yield Flaw(said.level, row.plugin.name, f"alias {key!r}", said.text, said.fix)
    for slot, circle in cycles(catalogue):
        text = f"leads in a circle: {' -> '.join((*circle, circle[0]))}"
        for key in circle:
            plugin = catalogue.aliases[slot, key].plugin.name
            yield Flaw("fault", plugin, f"alias {circle[0]!r}", text, "List kernels, never another alias")


def _defaults(catalogue: Catalogue, hosts: Sequence[HostFacts]) -> Iterator[Flaw]:
    for found in catalogue.found:
        declared, plugin = found.declared, found.plugin.name
        subjects: list[tuple[str, Iterable[Said]]] = [
            *((f"retired setting {item.name!r}", retired_flaws(item, catalogue)) for item in declared.retired_settings),
            *(
                (f"family default {item.model_type!r}", family_flaws(item, catalogue))
                for item in declared.family_defaults
            ),
            *((f"feature default {item.feature!r}", feature_flaws(item, hosts)) for item in declared.feature_defaults),
        ]
        for subject, flaws in subjects:
            yield from (Flaw(said.level, plugin, subject, plain(said.text), said.fix) for said in flaws)


def _flaw(row: Row, said: Said, at: int | None = None) -> Flaw:
    offer = row.offer
    where = "" if at is None else f" row {at} ({offer.family}, {offer.device})"
    return Flaw(said.level, row.plugin.name, f"kernel {offer.kernel!r}{where}", plain(said.text), said.fix)
