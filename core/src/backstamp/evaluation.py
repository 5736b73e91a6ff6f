"""The one evaluator: it selects and it explains, so the two can never disagree.

In: a `SlotIndex`, one `Question` (what a launch needs for these layers) and one phase's needs. Out: an `Answer`: the
rows that are left after every check, and a verdict for every kernel: a kernel is refused by the check that took its
last row. It has no memory and no preference: ranking is selection's job.

.. versionadded:: 0.1
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from backstamp.declarations import Phase
from backstamp.engine import EngineFacts
from backstamp.hostfit import HostRow, group_fits
from backstamp.index import SlotIndex, bits_of
from backstamp.plan_rows import Verdict
from backstamp.refusal_words import INSTALLATION_CHECK, WORDS, Told
from backstamp.row_masks import aligned, any_of, installed, kv_mask, sinks_mask

__all__ = [
    "Answer",
    "PhaseNeeds",
    "Question",
    "Reasons",
    "all_reasons",
    "evaluate",
    "evaluate_phase",
    "installed_reasons",
    "row_reasons",
]


class Question(NamedTuple):
    """What a launch asks of a kernel for one family of layers of one component, whatever the phase.

    Attributes:
        dims: (head_dim, v_head_dim) of every layer. kv_dtype: canonical cache dtype; kv_name: as the operator wrote it.
        groups: query heads a KV head of every layer on one rank, as far as the launch tells them.
        features: what the layers need of `FEATURES`. words: what holds: situations, features and the KV dtype.
        sinks: dtypes of the stored sinks, none without sinks.
        allowed: the only kernels the model's family allows, None for all; `allowed_by` names who says so.
        cached: whether these layers have a KV cache; without one nobody asks about its dtype, pages, layout or index.
        page_size: None when the kernel may choose. chunk_tokens: the engine's prefill chunk, or None.
    """

    family: str
    dims: frozenset[tuple[int, int]]
    groups: frozenset[int]
    features: frozenset[str]
    dtype: str
    kv_dtype: str
    kv_name: str
    words: frozenset[str]
    sinks: tuple[str, ...]
    allowed: frozenset[str] | None
    allowed_by: str
    cached: bool
    page_size: int | None
    causal: bool
    deterministic: bool
    chunk_tokens: int | None
    bypass: frozenset[str]
    engine: EngineFacts


class PhaseNeeds(NamedTuple):
    """What one phase asks beside: its features, whether its queries attend over cached tokens, and whether a
    deterministic launch truncates it at a kernel's alignment."""

    phase: Phase
    features: frozenset[str]
    prefix: bool
    aligned: bool


class Answer(NamedTuple):
    """Which rows are left, what each refused kernel was told, and by which question."""

    slot_index: SlotIndex
    question: Question
    rows: int
    refused: Mapping[str, Verdict]

    def row_of(self, kernel: str, among: int = -1) -> HostRow | None:
        """The best row of a kernel that is left, among the rows of a mask."""
        left = self.rows & self.slot_index.kernels.get(kernel, 0) & among
        return self.slot_index.rows[(left & -left).bit_length() - 1] if left else None

    def rows_of(self, kernel: str, among: int = -1) -> list[HostRow]:
        """The rows of a kernel that are left, among the rows of a mask, best first."""
        return [self.slot_index.rows[at] for at in bits_of(self.rows & self.slot_index.kernels.get(kernel, 0) & among)]

    def verdicts(self) -> dict[str, Verdict]:
        """Every kernel's verdict, by name."""
        return {**self.slot_index.accepted, **self.refused}


def evaluate(index: SlotIndex, question: Question) -> Answer:
    """Put one question to every row at once; phases are asked of what is left."""
    refused = dict(index.settled)
    left = _filter(index, question, None, index.machine, refused, _checks(index, question))
    return Answer(index, question, left, refused)


def evaluate_phase(common: Answer, needs: PhaseNeeds) -> Answer:
    """Put one phase's needs to the rows an answer left; what is installed is asked last."""
    index, question = common.slot_index, common.question
    refused = dict(common.refused)
    left = _filter(index, question, needs, common.rows, refused, _phase_checks(index, question, needs))
    return Answer(index, question, left, refused)


class Reasons(NamedTuple):
    """Everything that keeps the nearest row of a kernel from serving, machine first; empty where it serves."""

    row: HostRow
    verdicts: tuple[Verdict, ...]

    @property
    def distance(self) -> tuple[bool, bool, int]:
        """How far it is from serving: first another kind of device, then another family of layers."""
        codes = {verdict.code for verdict in self.verdicts}
        return "device" in codes, "family" in codes, len(self.verdicts)


def all_reasons(answer: Answer, needs: PhaseNeeds) -> Mapping[str, Reasons]:
    """Of every kernel the row that fails least, and all it fails: the checks of `evaluate`, none skipped."""
    checks = _every_check(answer, needs)
    nearest: dict[str, Reasons] = {}
    for name in answer.slot_index.names:
        for at in bits_of(answer.slot_index.kernels[name]):
            found = _reasons_of(answer, needs, name, at, checks)
            if name not in nearest or found.distance < nearest[name].distance:
                nearest[name] = found
        verdicts = nearest[name].verdicts
        if verdicts and verdicts[0].code == "device":
            # then no row is for this kind of device, and all the kinds there are rows for are named
            nearest[name] = nearest[name]._replace(verdicts=(answer.slot_index.settled[name], *verdicts[1:]))
    return nearest


def installed_reasons(answer: Answer, needs: PhaseNeeds, kernel: str) -> list[Reasons]:
    """Of one kernel every row whose library is there, with all that keeps it from serving.

    .. versionadded:: 0.2
    """
    found = row_reasons(answer, needs, kernel)
    return [of for of in found if of.row.library is not None and of.row.library.version is not None]


def row_reasons(answer: Answer, needs: PhaseNeeds, kernel: str) -> list[Reasons]:
    """Of one kernel every row, with all that keeps it from serving.

    .. versionadded:: 0.2
    """
    checks = _every_check(answer, needs)
    rows = bits_of(answer.slot_index.kernels.get(kernel, 0))
    return [_reasons_of(answer, needs, kernel, at, checks) for at in rows]


def _every_check(answer: Answer, needs: PhaseNeeds) -> list[tuple[str, int]]:
    index, question = answer.slot_index, answer.question
    return [*_checks(index, question), *_phase_checks(index, question, needs)]


def _reasons_of(answer: Answer, needs: PhaseNeeds, kernel: str, at: int, checks: list[tuple[str, int]]) -> Reasons:
    """All that the row at one place fails, machine first."""
    index, told = answer.slot_index, Told(answer.question, needs)
    row = index.rows[at]
    verdicts = [Verdict(kernel, False, *refusal[1:], row.plugin.name) for refusal in row.refusals]
    verdicts += [
        _refused(kernel, check, index, 1 << at, 1 << at, 0, told) for check, mask in checks if not mask >> at & 1
    ]
    return Reasons(row, tuple(verdicts))


def _filter(
    index: SlotIndex,
    question: Question,
    needs: PhaseNeeds | None,
    left: int,
    refused: dict[str, Verdict],
    checks: Iterator[tuple[str, int]],
) -> int:
    """Apply checks in order; a kernel whose last row one takes is refused by it."""
    for check, mask in checks:
        lost = left & ~mask
        if not lost:
            continue
        left &= mask
        for kernel, rows in index.kernels.items():
            if rows & lost and not rows & left:
                refused[kernel] = _refused(kernel, check, index, rows, lost, mask, Told(question, needs))
    return left


def _checks(index: SlotIndex, question: Question) -> Iterator[tuple[str, int]]:
    """The model, the cache, the situation and the engine, in this order."""
    has = index.has
    engine = question.engine
    if question.allowed is not None:
        yield "allowed", any_of(mask for kernel, mask in index.kernels.items() if kernel in question.allowed)
    yield "family", has["family"].get(question.family, 0)
    yield "dtype", has["dtype"].get(question.dtype, 0)
    open_dims = has["dim"].get("any", 0)
    # sets iterate in another order in every process, and which check refuses is part of the plan
    for dim in sorted(question.dims):
        yield "head_dim", has["dim"].get(dim, 0) | open_dims
    for size in sorted(question.groups):
        yield "group_size", any_of(mask for sizes, mask in index.groups if group_fits(sizes, size))
    for feature in sorted(question.features):
        yield "feature", has["feature"].get(feature, 0)
    for stored in question.sinks:
        yield "sinks", sinks_mask(index, stored, question.dtype)
    if question.cached:
        yield from _cache_checks(index, question)
    for words, mask in index.excludes:
        if words <= question.words:
            yield "excludes", ~mask
    for words, mask in index.needs:
        if not words <= question.words:
            yield "needs", ~mask
    if question.deterministic:
        yield "deterministic", has["deterministic"].get(True, 0)
    if question.causal:
        yield "mask", ~has["mask"].get("none", 0)
    for name, mask in index.inputs:
        if name not in engine.inputs:
            yield "input", ~mask
    for form in ("2d", "4d_bool"):
        if form not in engine.mask_formats:
            yield "mask_form", ~has["mask"].get(form, 0)
    if engine.graph != "never" and not engine.replay_hook:
        yield "plan", has["plan"].get("device", 0)


def _cache_checks(index: SlotIndex, question: Question) -> Iterator[tuple[str, int]]:
    """What is asked of a kernel that reads a KV cache."""
    has, engine = index.has, question.engine
    yield "kv_dtype", kv_mask(index, question)
    if question.page_size is not None:
        yield "page_size", any_of(mask for pages, mask in index.pages if pages.accepts(question.page_size))
    yield "layout", any_of(has["layout"].get(layout, 0) for layout in engine.layouts)
    yield "kv_form", any_of(has["kv_form"].get(form, 0) for form in engine.kv_forms)
    yield "index_form", any_of(has["index_form"].get(form, 0) for form in ("none", *engine.index_forms))


def _phase_checks(index: SlotIndex, question: Question, needs: PhaseNeeds) -> Iterator[tuple[str, int]]:
    """What the phase asks, then what is installed."""
    has = index.has
    yield "phase", has["phase"].get(needs.phase, 0)
    for feature in sorted(needs.features):
        yield "phase_feature", has["feature"].get(feature, 0)
    if needs.prefix:
        yield "prefix", has["prefix"].get(True, 0)
        yield "paged", has["kv_form"].get("paged", 0)
    for name, mask in index.phase_inputs[needs.phase]:
        if name not in question.engine.inputs:
            yield "phase_input", ~mask
    if question.deterministic and needs.aligned:
        yield "alignment", aligned(index, question)
    yield INSTALLATION_CHECK, installed(index, question)


#: Checks of what a kernel may offer on other machines only.
_ELSEWHERE: Final = frozenset(
    {"family", "phase", "dtype", "head_dim", "group_size", "feature", "phase_feature", "kv_dtype"}
)


def _refused(kernel: str, check: str, index: SlotIndex, rows: int, lost: int, mask: int, told: Told) -> Verdict:
    """The verdict of a kernel that lost its last rows at one check; what its rows wanted is said together."""
    elsewhere = rows & index.nearby & mask
    if check in _ELSEWHERE and elsewhere:
        return _elsewhere(kernel, check, index.rows[next(bits_of(elsewhere))], told)
    refused = [index.rows[at] for at in bits_of(rows & lost)]
    first = refused[0]
    if check == INSTALLATION_CHECK:
        refusal = first.lacks(told.question.bypass)
        assert refusal is not None, "refused for an installation that lacks nothing"
        _, code, field, wanted, have = refusal
        return Verdict(kernel, False, code, field, wanted, have, first.plugin.name)
    wording = WORDS[check]
    wanted = " or ".join(dict.fromkeys(wording.wanted(row, told) for row in refused))
    return Verdict(kernel, False, wording.code, wording.field, wanted, wording.have(refused, told), first.plugin.name)


def _elsewhere(kernel: str, check: str, row: HostRow, told: Told) -> Verdict:
    """What is asked for, the kernel has on another machine of this kind: the machine is the reason."""
    refusal = row.refusal
    assert refusal is not None
    wanted = f"{refusal.wanted} for {WORDS[check].asked(told)}"
    return Verdict(kernel, False, refusal.code, refusal.field, wanted, refusal.have, row.plugin.name)
