"""What a row can reach: hosts that fit it, rows before it that take everything, kernels that tie with it.

In: rows of a catalogue and known hosts. Out: answers and findings. Hosts are machines only: what is installed on them
is never asked here.

.. versionadded:: 0.2
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Final

from backstamp.catalogue import Catalogue, Row
from backstamp.declarations import ANY, PHASES, Offer, PageSizes
from backstamp.errors import BadInput
from backstamp.host import HostFacts
from backstamp.hostfit import Refusal, archs_fit, host_row
from backstamp.kv_dtypes import kv_dtype_of
from backstamp.launch import Launch
from backstamp.lint_rows import Said, words_of
from backstamp.model import default_model

__all__ = ["covers", "hosts_of", "misnamed_dtypes", "misspelt", "never_matches", "shadow_of", "ties"]

_SPELLINGS: Final[Mapping[str, str]] = {
    "cuda": r"\d+\.\d+[af]?",
    "rocm": r"gfx[0-9a-f]{3,}",
    "cpu": r"(?i:(?!amd64|x64)\D.*)",
}
_SHORT: Final = re.compile(r"(?:sm_?|compute_|capability )?(\d+)\.?(\d)([af]?)", re.IGNORECASE)
#: Stands for every host where only the spelling of a cache dtype is asked about.
_ANYWHERE: Final = HostFacts(name="any host", device="cuda", arch="9.0")
_CONVERSIONS: Final = ("no", "lossless", "any")


def misspelt(archs: Sequence[str], device: str, forward: str = "no") -> Iterator[Said]:
    """Archs no host of this device says in these letters, and claims that no listed arch carries."""
    pattern = _SPELLINGS.get(device)
    # "any" among others accepts nothing: only alone does it stand for every arch
    named = [] if tuple(archs) == ANY else archs
    wrong = [arch for arch in named if arch == "any" or (pattern is not None and not re.fullmatch(pattern, arch))]
    for arch in wrong:
        yield Said("fault", f"arch {arch!r} is how no {device} host says it", _spelling(arch, device))
    carries = [arch for arch in archs if arch == "any" or re.fullmatch(r"\d+\.\d+f?", arch)]
    if forward != "no" and not carries and not wrong:
        text = f"forward_archs {forward!r} claims newer chips, and {', '.join(archs)} run on no other"
        yield Said("fault", text, "Say forward_archs='no', or list what the claim starts from")


def misnamed_dtypes(offer: Offer) -> Iterator[Said]:
    """Cache dtypes written as operators write them: a launch's are canonical by the time rows are asked."""
    for dtype in sorted(offer.kv_dtypes - {"same"}):
        try:
            canonical = kv_dtype_of(Launch(kv_cache_dtype=dtype), default_model(), _ANYWHERE, Catalogue())
        except BadInput:
            # a name of the plugin's own, which only its rows read
            continue
        if canonical != dtype:
            text = f"kv_dtypes names {dtype!r}, which operators write for {canonical!r}: no launch ever asks for it"
            yield Said("fault", text, f"Say {canonical!r}")


def hosts_of(row: Row, hosts: Sequence[HostFacts]) -> frozenset[str]:
    """The names of the hosts whose machine a row fits."""
    return frozenset(host.name for host in hosts if _refusal(row, host) is None)


def never_matches(row: Row, hosts: Sequence[HostFacts]) -> Said | None:
    """The finding of a row that fits none of these hosts, with the nearest one."""
    refused = [(host, refusal) for host in hosts if (refusal := _refusal(row, host)) is not None]
    if len(refused) < len(hosts) or not refused:
        return None
    host, nearest = max(refused, key=lambda item: item[1].depth)
    text = f"fits no known host; the nearest, {host.name}: needs {nearest.wanted}, got {nearest.have}"
    fix = "Correct it, or record such a host with `backstamp hosts record` and pass it by --host"
    return Said("fault", text, fix)


def covers(wide: Offer, narrow: Offer, phases: frozenset[str], *, installed: bool = True) -> bool:
    """Whether one row accepts, in these phases, everything another accepts; `installed` False leaves libraries out."""
    return (
        wide.family == narrow.family
        and narrow.all_phases & phases <= wide.all_phases
        and _machine_covers(wide, narrow)
        and _model_covers(wide, narrow)
        and _cache_covers(wide, narrow)
        and _launch_covers(wide, narrow)
        and (not installed or _installation_covers(wide, narrow))
    )


def shadow_of(rows: Sequence[Row], at: int) -> int | None:
    """Which row of a kernel is always taken before row `at`, if one is."""
    narrow = rows[at].offer
    for before, row in enumerate(rows):
        wide = row.offer
        first = (-wide.priority, before) < (-narrow.priority, at)
        # auto takes exact rows only, so an approximate one hides no exact one
        taken = wide.accuracy == "exact" or narrow.accuracy != "exact"
        if first and taken and covers(wide, narrow, frozenset(PHASES)):
            return before
    return None


def ties(catalogue: Catalogue, hosts: Sequence[HostFacts]) -> Iterator[tuple[Row, Said]]:
    """Pairs of kernels `auto` can tell apart by name only, each once, under the one that loses."""
    fits = {key: [(row, hosts_of(row, hosts)) for row in rows] for key, rows in catalogue.rows.items()}
    for one, other in combinations(fits, 2):
        # two sides of one claimed name never rank: the name is a conflict, and told as one
        claimed = catalogue.rows[one][0].offer.kernel == catalogue.rows[other][0].offer.kernel
        pairs = product(fits[one], fits[other]) if one[0] == other[0] and not claimed else ()
        met = [(a, b, on & also) for (a, on), (b, also) in pairs if _tie(a.offer, b.offer, on & also)]
        if not met:
            continue
        families = ", ".join(sorted({a.offer.family for a, _, _ in met}))
        served = {phase for a, b, _ in met for phase in a.offer.all_phases & b.offer.all_phases}
        phases = ", ".join(phase for phase in PHASES if phase in served)
        first, second, both = met[0]
        host = min(both)
        text = (
            f"{one[1]} and {other[1]} both serve {families} in {phases} at priority {first.offer.priority} "
            f"(on {host}): auto falls to the name, {min(one[1], other[1])}"
        )
        yield second, Said("note", text, "Give one of them another priority")


def _tie(a: Offer, b: Offer, hosts: frozenset[str]) -> bool:
    together = words_of({*a.needs, *b.needs})
    return (
        bool(hosts)
        and (a.priority, a.family, a.accuracy) == (b.priority, b.family, "exact")
        and b.accuracy == "exact"
        and bool(a.all_phases & b.all_phases)
        and bool(a.dtypes & b.dtypes)
        and (ANY in (a.head_dims, b.head_dims) or bool(_pairs(a) & _pairs(b)))
        and bool(set(a.layouts) & set(b.layouts))
        and not any(words_of([excluded]) <= together for excluded in a.excludes | b.excludes)
    )


def _refusal(row: Row, host: HostFacts) -> Refusal | None:
    return host_row(0, row.offer.kernel, row, host, None, dict(host.runtimes)).refusal


def _spelling(arch: str, device: str) -> str:
    if arch.startswith("gfx") and device != "rocm":
        return "Say device='rocm'"
    if ":" in arch:
        return f"Say {arch.partition(':')[0]!r}"
    if arch == "any":
        return "Say archs=ANY, or leave it out"
    short = _SHORT.fullmatch(arch)
    if device == "cuda" and short is not None:
        major, minor, letter = short.groups()
        return f"Say '{major}.{minor}{letter.lower()}'"
    if device == "cuda" and arch.isdecimal():
        return f"Say '{arch}.0'"
    if device == "cpu" and arch.lower() in ("amd64", "x64"):
        return "Say 'x86_64'"
    if device == "rocm" and arch[:1].isdecimal() and arch.isalnum():
        return f"Say 'gfx{arch}'"
    return "Say it as `backstamp hosts list` does"


def _machine_covers(wide: Offer, narrow: Offer) -> bool:
    archs = wide.archs == ANY or (
        narrow.archs != ANY
        and all(archs_fit(wide.archs, arch, wide.forward_archs) for arch in narrow.archs)
        and (narrow.forward_archs == "no" or wide.forward_archs in (narrow.forward_archs, "any"))
    )
    return (
        wide.device in ("any", narrow.device)
        and archs
        and wide.cpu_features <= narrow.cpu_features
        and set(wide.runtimes) <= set(narrow.runtimes)
    )


def _model_covers(wide: Offer, narrow: Offer) -> bool:
    return (
        narrow.dtypes <= wide.dtypes
        and (wide.head_dims == ANY or (narrow.head_dims != ANY and _pairs(narrow) <= _pairs(wide)))
        and (wide.group_sizes == ANY or set(narrow.group_sizes) <= set(wide.group_sizes))
        and narrow.features <= wide.features
        and wide.mask_format == narrow.mask_format
        and narrow.sink_dtypes <= wide.sink_dtypes
        and _CONVERSIONS.index(narrow.sink_conversion) <= _CONVERSIONS.index(wide.sink_conversion)
    )


def _cache_covers(wide: Offer, narrow: Offer) -> bool:
    return (
        narrow.kv_dtypes <= wide.kv_dtypes
        and wide.kv_dtype_names == narrow.kv_dtype_names
        and _reads_all_pages(wide.page_sizes, narrow.page_sizes)
        and narrow.kv_forms <= wide.kv_forms
        and narrow.index_forms <= wide.index_forms
        and narrow.prefix <= wide.prefix
        and set(narrow.layouts) <= set(wide.layouts)
        and set(narrow.state_layouts) <= set(wide.state_layouts)
    )


def _launch_covers(wide: Offer, narrow: Offer) -> bool:
    aligned = wide.alignment_tokens is None or (
        narrow.alignment_tokens is not None and narrow.alignment_tokens % wide.alignment_tokens == 0
    )
    asked = all(inputs <= narrow.phase_inputs.get(at, frozenset()) for at, inputs in wide.phase_inputs.items())
    return (
        wide.needs <= narrow.needs
        and wide.excludes <= narrow.excludes
        and narrow.deterministic <= wide.deterministic
        and (aligned or not narrow.deterministic)
        and wide.inputs <= narrow.inputs
        and asked
        and (wide.plan == "device" or narrow.plan == "host")
    )


def _installation_covers(wide: Offer, narrow: Offer) -> bool:
    return set(wide.requires) <= set(narrow.requires) and set(wide.companions) <= set(narrow.companions)


def _reads_all_pages(wide: PageSizes, narrow: PageSizes) -> bool:
    if narrow.multiple_of and (not wide.multiple_of or narrow.multiple_of % wide.multiple_of):
        return False
    return all(wide.accepts(size) for size in narrow.exact)


def _pairs(offer: Offer) -> frozenset[object]:
    return frozenset((dim, dim) if isinstance(dim, int) else dim for dim in offer.head_dims)
