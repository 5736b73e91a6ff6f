"""What one host settles about one row, before any model or launch is known.

In: a catalogue row and `HostFacts`. Out: a `HostRow`: its facts as plain sets and, where the host already refuses it,
the refusal. Two kinds are kept apart because aliases treat them differently: what the machine is (device, arch, CPU
features, runtimes) and what is installed on it (libraries, versions, companions).

.. versionadded:: 0.1
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from backstamp.catalogue import Row
from backstamp.declarations import ANY, GRAPH_LEVELS, GroupSizes, Offer
from backstamp.host import HostFacts
from backstamp.installation import INSTALL_DEPTH, INSTALLATION, Installed, Refusal, installation_of, library_name
from backstamp.plan_rows import LibraryRef, PluginRef

__all__ = [
    "INSTALLATION",
    "INSTALL_DEPTH",
    "HostRow",
    "Refusal",
    "arch_fits",
    "arch_words",
    "archs_fit",
    "dims_words",
    "group_fits",
    "group_words",
    "host_row",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRow:
    """One row as this host sees it (`index` in its kernel's rows): sets and numbers, ready to compare.

    `name` is the kernel's, with its distribution in front where two claim the name. `refusals` are all the facts of
    the machine that do not fit, `installations` all that is wrong with what is installed.
    """

    index: int
    name: str
    offer: Offer
    plugin: PluginRef
    library: LibraryRef | None
    refusals: tuple[Refusal, ...]
    installations: tuple[Refusal, ...]
    assumed: bool
    interpreted: bool
    phases: frozenset[str]
    dims: frozenset[tuple[int, int]] | None
    dims_words: str
    graph: int

    @property
    def refusal(self) -> Refusal | None:
        """The first fact of the machine that does not fit."""
        return self.refusals[0] if self.refusals else None

    def lacks(self, bypass: frozenset[str]) -> Refusal | None:
        """The first thing wrong with what is installed that is not bypassed."""
        return next((refusal for refusal in self.installations if refusal.code not in bypass), None)

    def skipped(self, bypass: frozenset[str]) -> tuple[str, ...]:
        """The codes of what is wrong with what is installed and bypassed."""
        return tuple(dict.fromkeys(refusal.code for refusal in self.installations if refusal.code in bypass))


def host_row(
    index: int, name: str, row: Row, host: HostFacts, installed: Installed | None, runtimes: dict[str, str]
) -> HostRow:
    """Settle everything about one row that only the host decides; `installed` None means libraries are assumed."""
    offer = row.offer
    interpreted = _is_interpreted(offer, host)
    refusals = () if interpreted else tuple(_machine_refusals(offer, host, runtimes))
    library, installations = installation_of(offer, installed)
    open_dims = offer.head_dims == ANY
    dims = frozenset((dim, dim) if isinstance(dim, int) else _pair(dim) for dim in offer.head_dims if dim != "any")
    return HostRow(
        index=index,
        name=name,
        offer=offer,
        plugin=row.plugin,
        library=library,
        refusals=refusals,
        installations=installations,
        assumed=installed is None and bool(offer.requires),
        interpreted=interpreted,
        phases=offer.all_phases,
        dims=None if open_dims else dims,
        dims_words=dims_words(dims),
        graph=GRAPH_LEVELS.index(offer.graph),
    )


def _pair(dim: tuple[int, int] | str) -> tuple[int, int]:
    assert not isinstance(dim, str), dim
    return dim


def _is_interpreted(offer: Offer, host: HostFacts) -> bool:
    """Triton's interpreter runs a Triton row on the CPU; the first GPU row stands for all of them."""
    if not host.triton_interpreter or host.device != "cpu" or offer.device != "cuda":
        return False
    return any(library_name(text) == "triton" for text in offer.requires)


def _machine_refusals(offer: Offer, host: HostFacts, runtimes: dict[str, str]) -> Iterator[Refusal]:
    """Everything about the machine that does not fit; another kind of device says all."""
    if offer.device not in ("any", host.device):
        yield Refusal(0, "device", "device", offer.device, _device_words(host))
        return
    if not arch_fits(offer, host.arch):
        claimed = {"no": "", "major": " or a newer minor", "any": " or newer"}[offer.forward_archs]
        wanted = ", ".join(arch_words(arch, host.device) for arch in offer.archs) + claimed
        yield Refusal(1, "arch", "arch", wanted, arch_words(host.arch, host.device))
    missing = offer.cpu_features - host.cpu_features
    if missing:
        needed = f"CPU features {', '.join(sorted(offer.cpu_features))}"
        # a CPU reports a hundred; those that were asked for matter
        have = f"only {', '.join(sorted(there))}" if (there := offer.cpu_features - missing) else "a CPU without them"
        yield Refusal(2, "cpu_feature", "cpu_features", needed, have if host.cpu_features else "none known")
    for text in offer.runtimes:
        refusal = _runtime_refusal(text, runtimes)
        if refusal is not None:
            yield refusal


def arch_fits(offer: Offer, arch: str) -> bool:
    """Whether an arch is listed, or claimed by forward compatibility."""
    return archs_fit(offer.archs, arch, offer.forward_archs)


def archs_fit(archs: tuple[str, ...], arch: str, forward: Literal["no", "major", "any"] = "no") -> bool:
    """Whether one of these archs, or of these images, runs on a host's arch.

    "9.0a" is an image for 9.0 and goes no further whatever is claimed; "10.0f" goes no further than its major.
    Source: CUDA C++ programming guide, architecture- and family-specific feature sets.
    """
    if archs == ANY or arch in archs:
        return True
    version = _capability(arch)
    if version is None:
        return False
    return any(_image_runs(image, version, forward) for image in archs)


def arch_words(archs: str, device: str) -> str:
    """Archs as people say them: the capability, or the image, with its SM name on CUDA."""
    if device != "cuda":
        return archs
    return f"SM{archs.replace('.', '')} ({archs})" if _capability(archs) is not None else f"capability {archs}"


def dims_words(dims: Iterable[tuple[int, int]]) -> str:
    """Head dims as people say them: 64, 128, 192/128."""
    pairs = sorted(dims)
    same = [str(qk) for qk, v in pairs if qk == v]
    mixed = [f"{qk}/{v}" for qk, v in pairs if qk != v]
    # a kernel that takes every pair of its sizes says so once
    return ", ".join(same + mixed) if len(mixed) <= 6 else f"{', '.join(same)} in any pair"


def group_fits(sizes: GroupSizes, group: int) -> bool:
    """Whether so many query heads a KV head are declared.

    .. versionadded:: 0.2
    """
    if sizes == ANY:
        return True
    return any(size[0] <= group <= size[1] if isinstance(size, tuple) else size == group for size in sizes)


def group_words(sizes: GroupSizes) -> str:
    """Group sizes as people say them: 1 to 64 or 128.

    .. versionadded:: 0.2
    """
    said = [f"{size[0]} to {size[1]}" if isinstance(size, tuple) else str(size) for size in sizes]
    return " or ".join(filter(None, (", ".join(said[:-1]), said[-1])))


def _image_runs(image: str, version: tuple[int, int], forward: Literal["no", "major", "any"]) -> bool:
    listed = _capability(image)
    if listed is None or version == listed:
        return listed is not None
    if forward == "no" or image.endswith("a"):
        return False
    if forward == "any" and not image.endswith("f"):
        return version > listed
    return version[0] == listed[0] and version[1] > listed[1]


def _capability(arch: str) -> tuple[int, int] | None:
    """A CUDA capability, with or without the letter of an image."""
    major, dot, minor = arch.partition(".")
    minor = minor[:-1] if minor[-1:] in ("a", "f") else minor
    return (int(major), int(minor)) if dot and major.isdecimal() and minor.isdecimal() else None


def _device_words(host: HostFacts) -> str:
    return f"{host.device} ({host.arch})" if host.device != "cpu" else "cpu"


def _runtime_refusal(text: str, runtimes: dict[str, str]) -> Refusal | None:
    from packaging.requirements import Requirement

    requirement = Requirement(text)
    have = runtimes.get(requirement.name)
    if have is None or not requirement.specifier.contains(have, prereleases=True):
        return Refusal(
            3, "runtime", f"runtimes.{requirement.name}", text, have or f"no {requirement.name} version known"
        )
    return None
