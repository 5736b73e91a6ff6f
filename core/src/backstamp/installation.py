"""What is wrong with what is installed for one row: libraries, versions, companions.

In: an offer and a host's libraries. Out: the library that goes on the stamp and every refusal. It reads versions as
data and imports no library.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from backstamp.declarations import Offer
from backstamp.plan_rows import LibraryRef

__all__ = ["INSTALLATION", "INSTALL_DEPTH", "Installed", "Refusal", "installation_of", "library_name"]

#: Versions by distribution; None where a distribution is there and its version cannot be read.
Installed = Mapping[str, "str | None"]


class Refusal(NamedTuple):
    """Why one row does not fit; `depth` is how far it came, and a kernel's deepest refusal is the one worth telling."""

    depth: int
    code: str
    field: str
    wanted: str
    have: str


#: Refusal codes that mean "the machine would do, its installation does not".
INSTALLATION = frozenset({"library_missing", "library_version", "library_unknown", "companion", "not_installed"})
INSTALL_DEPTH = 100


def installation_of(offer: Offer, installed: Installed | None) -> tuple[LibraryRef | None, tuple[Refusal, ...]]:
    """The library that goes on the stamp, and everything that is wrong with what is installed; `installed` None means
    that libraries count as present."""
    if not offer.requires:
        return None, ()
    first = library_name(offer.requires[0])
    if installed is None:
        return LibraryRef(first, None), ()
    library = LibraryRef(first, installed.get(first))
    refusals = [refusal for text in offer.requires if (refusal := _library_refusal(text, installed)) is not None]
    for companion in offer.companions:
        name = library_name(companion)
        have = installed.get(name) or "an unknown version"
        if name in installed and not _same_version(have, library.version or ""):
            wanted = f"{companion} {library.version} beside {first} {library.version}"
            refusals.append(Refusal(INSTALL_DEPTH, "companion", companion, wanted, f"{companion} {have}"))
    return library, tuple(refusals)


def _same_version(one: str, other: str) -> bool:
    """Whether two versions are one as packaging reads them: v0.6.14, 0.6.14 and 0.6.14.0 are."""
    # flashinfer-jit-cache carries a build tag (0.6.1+cu130) that its library does not
    texts = [text.partition("+")[0] for text in (one, other)]
    if texts[0] == texts[1]:
        return True
    from packaging.version import InvalidVersion, Version

    try:
        return Version(texts[0]) == Version(texts[1])
    except InvalidVersion:
        return False


def _library_refusal(text: str, installed: Installed) -> Refusal | None:
    from packaging.requirements import Requirement
    from packaging.version import InvalidVersion, Version

    requirement = Requirement(text)
    name = library_name(text)
    if name not in installed:
        return Refusal(INSTALL_DEPTH, "library_missing", name, text, f"{name} is not installed")
    have = installed[name]
    try:
        version = Version(have or "unknown")
    except InvalidVersion:
        return Refusal(INSTALL_DEPTH, "library_unknown", name, text, f"{name} with unreadable version {have!r}")
    if not any(version.release):
        # versioneer and setuptools-scm write 0+unknown, 0.0.0 and their like where they could not find the version
        return Refusal(INSTALL_DEPTH, "library_unknown", name, text, f"{name} with unknown version {have}")
    # a local or pre-release build of a good version is that version
    if not requirement.specifier.contains(version.public, prereleases=True):
        return Refusal(INSTALL_DEPTH, "library_version", name, text, f"{name} {have}")
    return None


def library_name(text: str) -> str:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    return canonicalize_name(Requirement(text).name)
