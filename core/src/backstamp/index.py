"""One slot of a host's catalogue as bit masks: bit i of a mask is row i, and rows lie in rank order.

In: host rows. Out: a `SlotIndex` whose masks say which rows declare a value, so that a check on all rows is one AND,
and the lowest bit of what is left is the best row. It is built once a host; it remembers no question and no answer.

.. versionadded:: 0.1
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from backstamp.declarations import PHASES, GroupSizes, PageSizes
from backstamp.hostfit import HostRow
from backstamp.plan_rows import Verdict
from backstamp.words import words_of

__all__ = ["SlotIndex", "bits_of", "index_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotIndex:
    """The rows of one slot, best first, and masks over them.

    Attributes:
        names: every kernel, in name order, `distribution:kernel` where two claim it. kernels: the rows of each.
        accepted: the accepting verdict of each kernel. settled: verdicts of kernels this machine already refuses.
        machine: rows the machine fits. nearby: rows of its kind of device that it does not fit.
        installed: rows whose libraries are in place.
        has: by field, each declared value and its rows; "dim" has "any" for open head dims.
        needs, excludes: each declared condition, as the words that hold together, with its rows.
        inputs: each needed input with its rows; phase_inputs: the same by phase, of rows that need it there alone.
        sinks: what is declared about stored sinks (dtypes, conversion), with its rows.
        pages, groups: distinct page-size sets and group sizes, with their rows.
        renamed: rows that map operator names of KV dtypes.
        alignments: each declared prefill alignment with its rows.
        pickable: rows `auto` may take (exact, not interpreted, of one owner).
    """

    rows: tuple[HostRow, ...]
    names: tuple[str, ...]
    kernels: Mapping[str, int]
    accepted: Mapping[str, Verdict]
    settled: Mapping[str, Verdict]
    machine: int
    nearby: int
    installed: int
    has: Mapping[str, Mapping[Hashable, int]]
    needs: tuple[tuple[frozenset[str], int], ...]
    excludes: tuple[tuple[frozenset[str], int], ...]
    inputs: tuple[tuple[str, int], ...]
    phase_inputs: Mapping[str, tuple[tuple[str, int], ...]]
    sinks: tuple[tuple[frozenset[str], str, int], ...]
    pages: tuple[tuple[PageSizes, int], ...]
    groups: tuple[tuple[GroupSizes, int], ...]
    renamed: int
    alignments: tuple[tuple[int, int], ...]
    pickable: int

    def chosen(self, side: str) -> int:
        """The rows of a contested kernel that `auto` could take if they had one owner."""
        mask = self.kernels.get(side, 0)
        return sum(
            1 << at for at in bits_of(mask) if self.rows[at].offer.accuracy == "exact" and not self.rows[at].interpreted
        )


_FIELDS = (
    "phase", "dtype", "kv_dtype", "feature", "excludes", "needs", "kv_form", "index_form", "input", "layout", "dim",
    "family", "mask", "plan", "prefix", "deterministic", "alignment", "sinks",
    "prefill input", "decode input", "verify input", "draft_decode input", "draft_extend input",
)  # fmt: skip


def bits_of(mask: int) -> Iterator[int]:
    """The positions of a mask's bits, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def index_rows(rows: Sequence[HostRow]) -> SlotIndex:
    """Rank rows by priority, then kernel name, then declared order, and index what they declare."""
    ranked = tuple(sorted(rows, key=lambda row: (-row.offer.priority, row.name, row.index)))
    kernels: dict[str, int] = {}
    has: dict[str, dict[Hashable, int]] = {field: {} for field in _FIELDS}
    pages: dict[PageSizes, int] = {}
    groups: dict[GroupSizes, int] = {}
    flags = dict.fromkeys(("machine", "nearby", "installed", "renamed", "pickable"), 0)
    for at, row in enumerate(ranked):
        bit = 1 << at
        kernels[row.name] = kernels.get(row.name, 0) | bit
        pages[row.offer.page_sizes] = pages.get(row.offer.page_sizes, 0) | bit
        groups[row.offer.group_sizes] = groups.get(row.offer.group_sizes, 0) | bit
        for field, value in _declared_values(row):
            has[field][value] = has[field].get(value, 0) | bit
        for flag, holds in _flags(row).items():
            flags[flag] |= bit if holds else 0
    names = tuple(sorted(kernels))
    first = {name: ranked[next(bits_of(kernels[name]))] for name in names}
    return SlotIndex(
        rows=ranked,
        names=names,
        kernels={name: kernels[name] for name in names},
        accepted={name: Verdict(name, True, plugin=first[name].plugin.name) for name in names},
        settled={name: _settled(name, kernels[name], ranked) for name in names if not kernels[name] & flags["machine"]},
        has=has,
        needs=_conditions(has["needs"]),
        excludes=_conditions(has["excludes"]),
        inputs=_words(has["input"]),
        phase_inputs={phase: _words(has[f"{phase} input"]) for phase in PHASES},
        sinks=tuple((dtypes, words, mask) for (dtypes, words), mask in _pairs(has["sinks"])),
        pages=tuple(pages.items()),
        groups=tuple(groups.items()),
        alignments=tuple((int(str(tokens)), mask) for tokens, mask in has["alignment"].items()),
        **flags,
    )


def _conditions(masks: Mapping[Hashable, int]) -> tuple[tuple[frozenset[str], int], ...]:
    return tuple((words_of(words), mask) for words, mask in _words(masks))


def _words(masks: Mapping[Hashable, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted((str(value), mask) for value, mask in masks.items()))


def _pairs(masks: Mapping[Hashable, int]) -> Iterator[tuple[tuple[frozenset[str], str], int]]:
    for value, mask in masks.items():
        assert isinstance(value, tuple)
        yield value, mask


def _flags(row: HostRow) -> dict[str, bool]:
    return {
        "machine": row.refusal is None,
        "nearby": row.refusal is not None and row.refusal.code != "device",
        "installed": not row.installations,
        "renamed": bool(row.offer.kv_dtype_names),
        "pickable": row.offer.accuracy == "exact" and not row.interpreted and row.name == row.offer.kernel,
    }


def _declared_values(row: HostRow) -> Iterator[tuple[str, Hashable]]:
    """Every (field, value) a row declares."""
    offer = row.offer
    sets = {
        "phase": row.phases,
        "dtype": offer.dtypes,
        "kv_dtype": offer.kv_dtypes,
        "feature": offer.features,
        "excludes": offer.excludes,
        "needs": offer.needs,
        "kv_form": offer.kv_forms,
        "index_form": offer.index_forms,
        "input": offer.inputs,
        "layout": offer.layouts,
    }
    for field, values in sets.items():
        for value in values:
            yield field, value
    for dim in row.dims if row.dims is not None else ("any",):
        yield "dim", dim
    yield "family", offer.family
    yield "mask", offer.mask_format
    yield "plan", offer.plan
    yield "prefix", offer.prefix
    yield "deterministic", offer.deterministic
    if not offer.index_forms:
        yield "index_form", "none"
    if offer.alignment_tokens is not None:
        yield "alignment", offer.alignment_tokens
    if "sinks" in offer.features:
        yield "sinks", (offer.sink_dtypes, offer.sink_conversion)
    for phase, inputs in offer.phase_inputs.items():
        for name in inputs - offer.inputs:
            yield f"{phase} input", name


def _settled(kernel: str, mask: int, rows: Sequence[HostRow]) -> Verdict:
    """The verdict of a kernel none of whose rows fits this machine: its deepest refusal, like ones said together."""
    refused = [(row.refusal, row.plugin.name) for row in (rows[at] for at in bits_of(mask)) if row.refusal is not None]
    nearest, plugin = max(refused, key=lambda item: item[0].depth)
    like = [item for item, _ in refused if item.code == nearest.code]
    wanted = " or ".join(dict.fromkeys(item.wanted for item in like))
    return Verdict(kernel, False, nearest.code, nearest.field, wanted, nearest.have, plugin)
