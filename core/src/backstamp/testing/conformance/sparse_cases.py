"""One step of sparse attention that a declared row has to serve, as data; and the cases of one sparse row.

In: numbers, or an `Offer` of family sparse_mla or csa. Out: `SparseCase`s: an attention case with what its tokens
choose, and in csa how many of them a compressed entry stands for. Nothing here touches a tensor.

A declaration has no words for how many keys are chosen, nor for the rate of compression: a row has to serve one of
each in its plain step, and a refusal of another, in words, is told as skipped.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Final, Literal, TypeAlias

from backstamp.declarations import Offer, Phase
from backstamp.model import LayerFacts, LayerGroup, ModelFacts
from backstamp.phase_choice import SPARSE_KEY
from backstamp.testing.conformance.cases import AttentionCase
from backstamp.testing.conformance.row_cases import base_case, cases_of

__all__ = ["SPARSE_FAMILIES", "SparseCase", "sparse_base_case", "sparse_cases_of", "sparse_ways_of"]

SPARSE_FAMILIES: Final = frozenset({"sparse_mla", "csa"})
#: What is among a token's choices: keys it may see alone, and beside them -1, keys past its row, keys ahead of it, all
#: of these; or nothing at all.
Choices: TypeAlias = Literal["seen", "holes", "past", "ahead", "mixed", "none"]
_CHOICES: Final[dict[Choices, str]] = {
    "holes": "choices of -1",
    "past": "choices past the row",
    "ahead": "choices ahead of the token",
    "none": "nothing chosen",
}
#: How many keys a token chooses: fewer than most rows have; more than any has.
_WIDTHS: Final = (64, 2048)
#: Tokens a compressed entry stands for, as DeepSeek V4's layers have it; 0 in a layer without.
_RATES: Final = (4, 128, 0)
#: What an indexer is asked for: fewer keys than most rows have, so that it has to choose.
_INDEXED: Final = 16
_WINDOW: Final = 21
#: Most query tokens of a row that has others cached: sparse kernels take each token by itself.
_QUERIES: Final = 17


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseCase(AttentionCase):
    """One step of one sparse layer.

    Attributes:
        topk: keys a token chooses; 0 where it chooses none and, in csa, sees all compressed entries.
        rate: csa: tokens a compressed entry stands for, 0 in a layer without.
        indexer: the kernel's own indexer chooses, from index queries of `index_heads` and `index_dim`.
        fixed: "topk" and "rate", where the case is about them. optional: no declaration can promise the case.
    """

    topk: int = 64
    rate: int = 0
    choices: Choices = "seen"
    indexer: bool = False
    index_heads: int = 64
    index_dim: int = 128
    fixed: frozenset[str] = frozenset()
    optional: bool = False

    @property
    def scale(self) -> float:
        """Factor on the logits; an absorbed latent's is that of its heads before absorption, 128 + 64."""
        return float(self.dims[0] ** -0.5 if self.family == "csa" else 192**-0.5)

    def model(self) -> ModelFacts:
        """The layer as the resolver sees it: a model of one."""
        (dk, dv), compressed = self.dims, self.family == "csa"
        facts = LayerFacts(
            family=self.family,
            num_qo_heads=self.heads[0],
            num_kv_heads=self.heads[1],
            head_dim=dk,
            v_head_dim=dv,
            window_left=self.window,
            sinks=self.sinks,
            causal=self.causal,
            index_topk=self.topk,
            index_heads=self.index_heads if self.topk else 0,
            index_head_dim=self.index_dim if self.topk else 0,
            compress_rate=self.rate,
            kv_lora_rank=0 if compressed else dv,
            qk_rope_head_dim=0 if compressed else dk - dv,
            ragged_dims=None if compressed else (192, 128),
        )
        groups = (LayerGroup("main", facts, (0,)),)
        return ModelFacts(name="conformance", architecture="", dtype=self.dtype, layers=((facts,),), groups=groups)


def sparse_cases_of(offer: Offer) -> tuple[SparseCase, ...]:
    """Every case of a row that the reference knows, phase by phase; none twice, none of what it excludes."""
    every: dict[SparseCase, SparseCase] = {}
    for case in cases_of(offer):
        if _is_known(case):
            sparse = _sparse(offer, case)
            every.setdefault(replace(sparse, name=""), sparse)
            if case.name == "plain":
                for more in _of_choices(offer, sparse):
                    every.setdefault(replace(more, name=""), more)
    return tuple(every.values())


def sparse_base_case(offer: Offer, phase: Phase) -> SparseCase:
    """The plainest step of a phase: choices that every token may see."""
    return _sparse(offer, base_case(offer, phase))


def sparse_ways_of(case: SparseCase) -> Iterator[SparseCase]:
    """The case, then with what it is not about the other way: a kernel has to serve one of them."""
    yield case
    if case.topk and "topk" not in case.fixed:
        yield from (replace(case, topk=width) for width in _WIDTHS if width != case.topk)
    if case.family == "csa" and "rate" not in case.fixed:
        yield from (_at_rate(case, rate) for rate in _rates(case) if rate != case.rate)


def _sparse(offer: Offer, case: AttentionCase) -> SparseCase:
    """The same step with choices; csa with its window, and a rate that its pages can have."""
    known = {field.name: getattr(case, field.name) for field in fields(AttentionCase)}
    topk = _WIDTHS[0] if "indices" in offer.features else 0
    rows = tuple((min(q, _QUERIES) if case.cached_prefix else q, kv) for q, kv in case.rows)
    sparse = SparseCase(**{**known, "topk": topk, "rows": rows})
    if case.family != "csa":
        return sparse
    sparse = replace(sparse, window=case.window if case.window >= 0 else _WINDOW)
    return _at_rate(sparse, _rates(sparse)[0])


def _at_rate(case: SparseCase, rate: int) -> SparseCase:
    """Layers of the finest rate choose, the others see all there is."""
    return replace(case, rate=rate, topk=case.topk if rate == _RATES[0] else 0)


def _rates(case: SparseCase) -> tuple[int, ...]:
    """The rates whose entries fill pages of this size."""
    chooses = [rate for rate in _RATES if rate and case.page_size % rate == 0]
    return (*chooses, 0)


def _is_known(case: AttentionCase) -> bool:
    """Whether the sparse reference computes what an attention case has."""
    if case.tree is not None or case.new or case.alibi or case.softcap or case.attn_type != "decoder":
        return False
    if case.family == "csa":
        # its reference sees by position alone
        return case.causal
    return case.window < 0 and case.sinks is None


def _of_choices(offer: Offer, base: SparseCase) -> Iterator[SparseCase]:
    for layout in offer.layouts[1:]:
        yield replace(base, name=f"cache of layout {layout}", layout=layout)
    if base.family == "csa":
        for rate in _rates(base):
            words = f"one compressed entry for {rate} tokens" if rate else "no compressed entries"
            yield replace(_at_rate(base, rate), name=words, fixed=base.fixed | {"rate"}, optional=True)
    if not base.topk:
        return
    for choices, words in _CHOICES.items():
        # a token that sees nothing has an LSE all the same
        lse = choices == "none" and "lse" in offer.features and base.sinks is None
        yield replace(base, name=words, choices=choices, lse=lse)
    for width in (1, 40, _WIDTHS[1]):
        about = base.fixed | {"topk"}
        yield replace(base, name=f"{width} of the keys", topk=width, choices="mixed", fixed=about, optional=True)
    if base.family == "sparse_mla" and base.phase != "draft_decode":
        yield replace(base, name="chosen by the indexer", indexer=True, topk=_INDEXED)
    yield from _of_insides(offer, base)


def _of_insides(offer: Offer, base: SparseCase) -> Iterator[SparseCase]:
    """Every value of the kernel's insides, asked of both halves; no launch can ask it of another kernel's."""
    if offer.kernel != SPARSE_KEY or not offer.phases >= {"prefill", "decode"} or base.phase.startswith("draft"):
        return
    for value in sorted({value for values in offer.sub_settings.values() for value in values}):
        names = [name for name, values in sorted(offer.sub_settings.items()) if value in values]
        yield replace(base, name=f"asked for {value}", asks=tuple((name, value) for name in names), choices="mixed")
