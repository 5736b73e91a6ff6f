"""Whom the kit checks: one plugin, its rows, and the machine it is checked on.

In: the name of a distribution, of a plugin or of its module, as installed. Out: a `Subject`. A plugin that does not
load is no subject; its first cause is the error.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from backstamp.declarations import Offer
from backstamp.discovery import Discovery, Found, discover
from backstamp.errors import BadInput, PluginFailed
from backstamp.host import HostFacts, this_host
from backstamp.plan_rows import PluginRef
from backstamp.testing.conformance.solo import Solo
from backstamp.text import canonical, near

__all__ = ["Job", "Skipped", "Subject", "is_called", "not_installed", "subjects_of"]


class Skipped(Exception):
    """This machine cannot do what a job needs; the text says what it needs."""


class Job(NamedTuple):
    """One thing to check: `run` answers what is wrong, empty where nothing is, or raises `Skipped`.

    `name` is unique within the check. `fix` is what to do where something is wrong. Any other exception that `run`
    lets through is what is wrong.
    """

    check: str
    name: str
    run: Callable[[], str]
    fix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One plugin on one host."""

    found: Found
    host: HostFacts
    discovery: Discovery

    @property
    def solos(self) -> Iterator[tuple[str, Solo]]:
        """Every row with a name that tells it from its sisters: kernel, family, device and its place."""
        for at, offer in enumerate(self.found.declared.offers):
            yield self.name_of(at, offer), Solo(found=self.found, offer=offer, host=self.host)

    def name_of(self, at: int, offer: Offer) -> str:
        """How findings name a row."""
        return f"{offer.kernel} row {at} ({offer.family}, {offer.device})"


def subjects_of(name: str, host: HostFacts | None = None) -> tuple[Subject, ...]:
    """The plugins of a distribution, or the one of this name or module; on this machine unless told otherwise.

    Raises:
        BadInput: nothing of that name is installed. PluginFailed: it is, and did not load; its first cause is chained.
    """
    discovery = discover()
    for failure in discovery.failures:
        if is_called(name, failure.plugin, failure.entry):
            raise PluginFailed(
                f"check {name}",
                needed="a plugin that loads",
                found=failure.cause,
                fix="Correct it; `backstamp doctor` says where it was found",
            ) from failure.error
    found = [item for item in discovery.found if is_called(name, item.plugin, item.module)]
    if not found:
        raise not_installed(name, discovery)
    host = this_host() if host is None else host
    return tuple(Subject(found=item, host=host, discovery=discovery) for item in found)


def not_installed(name: str, discovery: Discovery) -> BadInput:
    """The error for a name that no installed plugin has."""
    known = sorted({item.plugin.distribution for item in discovery.found})
    guess = near(name, known)
    return BadInput(
        f"check {name}",
        needed="an installed plugin, by its distribution, its name or its module",
        found="none of that name",
        considered=f"installed: {', '.join(known) or 'none'}",
        fix=f"Did you mean {guess}?" if guess else "Install it first: pip install -e .",
    )


def is_called(name: str, plugin: PluginRef, module: str) -> bool:
    """Whether a name is a plugin's own, its module's, or its distribution's as packaging compares them."""
    own = name in (plugin.name, module, module.partition(":")[0])
    return own or canonical(name) == canonical(plugin.distribution)
