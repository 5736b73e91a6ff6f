"""Which version of the plugin contract a distribution was written for, and how older declarations are read.

In: a distribution's requirements. Out: the newest contract version both sides know, or a refusal before anything of
the plugin is imported; and the rows of an older contract as today's. The present version and the one before it are
read, nothing else.

.. versionadded:: 0.2
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from backstamp import API_VERSION, API_VERSIONS, __version__
from backstamp.declared import Declared

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

__all__ = ["contract_of", "note_of", "upgrade"]


def contract_of(requires: Iterable[str], who: str) -> str:
    """The contract version to read a plugin by.

    Raises:
        ImportError: its requirement on backstamp has no range, or a range that none of `API_VERSIONS` lies in.
    """
    from packaging.specifiers import SpecifierSet

    ranges, texts = SpecifierSet(), []
    for specifier, text in _ranges(requires):
        ranges &= specifier
        texts.append(text)
    if not texts:
        raise ImportError(f"{who} declares no contract: its metadata needs `Requires-Dist: backstamp` with a range")
    for version in API_VERSIONS:
        if _reaches(ranges, version):
            return version
    raise ImportError(f"{who} needs contract backstamp{','.join(texts)}, this core has {API_VERSION}")


def note_of(who: str, version: str) -> str | None:
    """What to tell the owner of a plugin that is read by an older contract."""
    if version == API_VERSION:
        return None
    return f"{who}: written for contract {version}, which is read until backstamp {_after(API_VERSION)}"


def upgrade(declared: Declared, version: str) -> Declared:
    """Rows of an older contract as today's: in 0.1 a row that said no mask format meant `internal_causal`."""
    if version != "0.1":
        return declared
    offers = tuple(
        replace(offer, mask_format="internal_causal") if offer.mask_format is None else offer
        for offer in declared.offers
    )
    return replace(declared, offers=offers)


def _ranges(requires: Iterable[str]) -> Iterable[tuple[SpecifierSet, str]]:
    """Every range that holds here, with its text as the author wrote it."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    for text in requires:
        if not text.strip().lower().startswith("backstamp"):
            continue
        requirement = Requirement(text)
        applies = requirement.marker is None or requirement.marker.evaluate()
        if canonicalize_name(requirement.name) == "backstamp" and applies and requirement.specifier:
            written = re.search(r"[<>=!~][^;)]*", text)
            yield requirement.specifier, re.sub(r"\s", "", written.group()) if written is not None else ""


def _reaches(ranges: SpecifierSet, version: str) -> bool:
    """Whether a range holds a release of this contract version; of the present one, a release up to this core's."""
    if version == API_VERSION:
        candidates = [f"{version}.0", __version__]
    else:
        bounds = [specifier.version.removesuffix(".*") for specifier in ranges]
        candidates = [f"{version}.0", f"{version}.9999", *(b for b in bounds if f"{b}.".startswith(f"{version}."))]
    return any(ranges.contains(candidate, prereleases=True) for candidate in candidates)


def _after(version: str) -> str:
    major, _, minor = version.partition(".")
    return f"{major}.{int(minor) + 1}"
