"""Fifth step of the flow: the catalogue compiled for one host, so that a resolve only compares what a launch changes.

In: a `Catalogue` and `HostFacts`. Out: a `HostCatalogue` with one `SlotIndex` a slot.

.. versionadded:: 0.1
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from backstamp.catalogue import Catalogue
from backstamp.declarations import Slot
from backstamp.host import HostFacts
from backstamp.hostfit import HostRow, host_row
from backstamp.index import SlotIndex, index_rows

__all__ = ["HostCatalogue", "compile_for"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCatalogue:
    """A catalogue compiled for one host; `beside` are the other hosts of a job whose ranks run one plan."""

    host: HostFacts
    catalogue: Catalogue
    slots: Mapping[Slot, SlotIndex]
    beside: tuple[HostFacts, ...] = ()


def compile_for(catalogue: Catalogue, host: HostFacts) -> HostCatalogue:
    """Settle everything about every row that only the host decides."""
    installed = None if host.libraries is None else dict(host.libraries)
    runtimes = dict(host.runtimes)
    rows: dict[Slot, list[HostRow]] = {"attention": [], "linear": []}
    for (slot, name), declared in catalogue.rows.items():
        rows[slot] += [host_row(at, name, row, host, installed, runtimes) for at, row in enumerate(declared)]
    return HostCatalogue(
        host=host, catalogue=catalogue, slots={slot: index_rows(of_slot) for slot, of_slot in rows.items()}
    )
