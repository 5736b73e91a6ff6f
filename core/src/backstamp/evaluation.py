"""The one evaluator: it selects and it explains, so the two can never disagree.

In: a `SlotIndex`, one `Question` (what a launch needs for these layers) and one phase's needs. Out: an `Answer`: the
rows that are left after every check, and a verdict for every kernel: a kernel is refused by the check that took its
last row. It has no memory and no preference: ranking is selection's job.

.. versionadded:: 0.1
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from backstamp.declarations import Phase
from backstamp.engine import EngineFacts
from backstamp.hostfit import HostRow
from backstamp.index import SlotIndex, bits_of
from backstamp.plan import Verdict
from backstamp.refusal_words import INSTALLATION_CHECK, WORDS, Told

__all__ = ["Answer", "PhaseNeeds", "Question", "evaluate", "evaluate_phase"]


class Question(NamedTuple):
    """What a launch asks of a kernel for one family of layers of one component, whatever the phase.

    Attributes:
        dims: (head_dim, v_head_dim) of every layer. kv_dtype: canonical cache dtype; kv_name: as the operator wrote it.
        features: what the layers need of `FEATURES`. situations: words that hold ("spec", "dcp", "tp", "graph", ...).
        page_size: None when the kernel may choose. chunk_tokens: the engine's prefill chunk, or None.
    """

    family: str
    dims: frozenset[tuple[int, int]]
    features: frozenset[str]
    dtype: str
    kv_dtype: str
    kv_name: str
    situations: frozenset[str]
    page_size: int | None
    causal: bool
    deterministic: bool
    chunk_tokens: int | None
    bypass: frozenset[str]
    engine: EngineFacts


class PhaseNeeds(NamedTuple):
    """What one phase asks beside: its features, and whether its queries attend over cached tokens."""

    phase: Phase
    features: frozenset[str]
    prefix: bool


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

    def verdicts(self) -> dict[str, Verdict]:
        """Every kernel's verdict, by name."""
        refused, accepted = self.refused, self.slot_index.accepted
        return {name: refused.get(name) or accepted[name] for name in self.slot_index.names}


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
                refused[kernel] = _refused(kernel, check, index, rows & lost, Told(question, needs))
    return left


def _checks(index: SlotIndex, question: Question) -> Iterator[tuple[str, int]]:
    """The model, the cache, the situation and the engine, in this order."""
    has = index.has
    engine = question.engine
    yield "family", has["family"].get(question.family, 0)
    yield "dtype", has["dtype"].get(question.dtype, 0)
    open_dims = has["dim"].get("any", 0)
    # sets iterate in another order in every process, and which check refuses is part of the plan
    for dim in sorted(question.dims):
        yield "head_dim", has["dim"].get(dim, 0) | open_dims
    for feature in sorted(question.features):
        yield "feature", has["feature"].get(feature, 0)
    yield "kv_dtype", _kv_mask(index, question)
    if question.page_size is not None:
        yield "page_size", _any_of(mask for pages, mask in index.pages if pages.accepts(question.page_size))
    yield "layout", _any_of(has["layout"].get(layout, 0) for layout in engine.layouts)
    for situation in sorted(question.situations):
        yield "excludes", ~has["excludes"].get(situation, 0)
    for situation, mask in index.needs:
        if situation not in question.situations:
            yield "needs", ~mask
    if question.deterministic:
        yield "deterministic", has["deterministic"].get(True, 0)
    if question.causal:
        yield "mask", ~has["mask"].get("none", 0)
    yield "kv_form", _any_of(has["kv_form"].get(form, 0) for form in engine.kv_forms)
    yield "index_form", _any_of(has["index_form"].get(form, 0) for form in ("none", *engine.index_forms))
    for name, mask in index.inputs:
        if name not in engine.inputs:
            yield "input", ~mask
    for form in ("2d", "4d_bool"):
        if form not in engine.mask_formats:
            yield "mask_form", ~has["mask"].get(form, 0)
    if engine.graph != "never" and not engine.replay_hook:
        yield "plan", has["plan"].get("device", 0)


def _phase_checks(index: SlotIndex, question: Question, needs: PhaseNeeds) -> Iterator[tuple[str, int]]:
    """What the phase asks, then what is installed."""
    has = index.has
    yield "phase", has["phase"].get(needs.phase, 0)
    for feature in sorted(needs.features):
        yield "phase_feature", has["feature"].get(feature, 0)
    if needs.prefix:
        yield "prefix", has["prefix"].get(True, 0)
        yield "paged", has["kv_form"].get("paged", 0)
    if question.deterministic and needs.phase in ("prefill", "draft_extend"):
        yield "alignment", ~_misaligned(index, question)
    yield INSTALLATION_CHECK, _installed(index, question)


def _any_of(masks: Iterator[int]) -> int:
    joined = 0
    for mask in masks:
        joined |= mask
    return joined


def _kv_mask(index: SlotIndex, question: Question) -> int:
    mask = index.has["kv_dtype"].get(question.kv_dtype, 0)
    if question.kv_dtype == question.dtype:
        mask |= index.has["kv_dtype"].get("same", 0)
    # rows that read the operator's name in their own way answer for themselves
    for at in bits_of(index.renamed):
        offer = index.rows[at].offer
        kv = offer.kv_dtype_names.get(question.kv_name, question.kv_dtype)
        reads = kv in offer.kv_dtypes or (kv == question.dtype and "same" in offer.kv_dtypes)
        mask = mask | 1 << at if reads else mask & ~(1 << at)
    return mask


def _misaligned(index: SlotIndex, question: Question) -> int:
    """Rows whose prefill alignment a deterministic launch's chunk would break."""
    chunk = question.chunk_tokens
    if chunk is None or chunk <= 0:
        return 0
    rows = ((at, index.rows[at].offer.alignment_tokens) for at in bits_of(index.aligned))
    return _any_of(1 << at for at, tokens in rows if tokens is not None and chunk % tokens)


def _installed(index: SlotIndex, question: Question) -> int:
    if not question.bypass:
        return index.installed
    bypassed = (
        1 << at
        for at, row in enumerate(index.rows)
        if row.installation is not None and row.installation.code in question.bypass
    )
    return index.installed | _any_of(bypassed)


def _refused(kernel: str, check: str, index: SlotIndex, lost: int, told: Told) -> Verdict:
    """The verdict of a kernel that lost its last rows at one check; what its rows wanted is said together."""
    rows = [index.rows[at] for at in bits_of(lost)]
    first = rows[0]
    if check == INSTALLATION_CHECK:
        refusal = first.installation
        assert refusal is not None
        _, code, field, wanted, have = refusal
        return Verdict(kernel, False, code, field, wanted, have, first.plugin.name)
    wording = WORDS[check]
    wanted = wording.wanted(first, told)
    if len(rows) > 1:
        wanted = " or ".join(dict.fromkeys(wording.wanted(row, told) for row in rows))
    return Verdict(kernel, False, wording.code, wording.field, wanted, wording.have(rows, told), first.plugin.name)
