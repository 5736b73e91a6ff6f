"""The cases of one attention row: every value it declares, one at a time, and what engines hand every kernel.

In: an `Offer`. Out: its `AttentionCase`s: a plain one a phase, then that one with another dtype, head dim, page size,
index form, cache stride or feature, so that each declared value is met at least once and a failure names it. What a
row excludes together is left out, what it needs is in all of them.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from backstamp.declarations import PHASES, Offer, Phase
from backstamp.testing.conformance.cases import AttentionCase
from backstamp.testing.conformance.row_lengths import even_rows, long_rows, many_rows, rows_about_pages

if TYPE_CHECKING:
    from backstamp.testing.batches import CacheForm, IndexForm, TreeKind

__all__ = ["UNCHECKED_FEATURES", "base_case", "cases_of", "dims_of", "dtypes_of", "is_excluded", "sink_dtypes_of"]

#: Features no reference of ours computes; they are told as skipped, never taken for right.
UNCHECKED_FEATURES: Final = frozenset(
    {"chunked", "relative_bias", "score_mod", "fused_write", "indices", "backward", "tracked_states"}
)
_INDEX_FORMS: Final[tuple[IndexForm, ...]] = ("page_table", "csr", "indirect")
_CACHE_FORMS: Final[tuple[CacheForm, ...]] = ("hnd", "interleaved", "layers", "unlike")
_TREES: Final[tuple[TreeKind, ...]] = ("qlen", "full", "packed")
_WINDOW: Final = 21
#: The usual one, self alone, and one wider than any row.
_WINDOWS: Final = {"window": _WINDOW, "window of one": 0, "window wider than the rows": 4000}
#: Page sizes a row that takes multiples is met with, beside its preferred one.
_PAGES: Final = (1, 16, 64)


def cases_of(offer: Offer) -> tuple[AttentionCase, ...]:
    """Every case of a row, phase by phase; none of what it excludes."""
    every = [case for phase in PHASES if phase in offer.all_phases for case in _of_phase(offer, phase)]
    return tuple(case for case in every if not is_excluded(offer, case.said, graph=case.graph))


def base_case(offer: Offer, phase: Phase) -> AttentionCase:
    """The plainest step of a phase: ragged rows about page boundaries, an empty one, a single token."""
    page = _first_page(offer)
    case = AttentionCase(
        name="plain",
        phase=phase,
        rows=rows_about_pages(offer, phase, page),
        family=offer.family,
        heads=_heads(offer),
        dims=dims_of(offer)[0],
        page_size=page,
        dtype=dtypes_of(offer)[0],
        kv_dtype="same" if "same" in offer.kv_dtypes else min(offer.kv_dtypes),
        index_form=next((form for form in _INDEX_FORMS if form in offer.index_forms), "page_table"),
        cache_form="latent" if offer.family in ("mla", "sparse_mla", "csa") else "nhd",
        new="" if "paged" in offer.kv_forms else "all",
        layout=offer.layouts[0],
        token_rows="token_rows" in _inputs(offer, phase),
    )
    return _with_needs(offer, case)


def _with_needs(offer: Offer, case: AttentionCase) -> AttentionCase:
    """The case with what the row is for alone: a row may need a window, or sinks, or a deterministic launch."""
    needs = {word for need in offer.needs for word in need.split("+")}
    if "window" in needs:
        case = replace(case, window=_WINDOW)
    if "softcap" in needs:
        case = replace(case, softcap=20.0)
    if "sinks" in needs:
        case = replace(case, sinks=sink_dtypes_of(offer, case)[0])
    if "non_causal" in needs:
        case = replace(case, causal=False)
    return replace(case, words=frozenset(needs - case.said - {"window", "softcap", "sinks", "non_causal"}))


def _of_phase(offer: Offer, phase: Phase) -> Iterator[AttentionCase]:
    base = base_case(offer, phase)
    yield base
    if phase.startswith("draft"):
        # the kernel of a half again, in its draft's company: what only a draft brings, and each dtype and feature
        yield from _of_draft(offer, base)
        return
    yield from _of_types(offer, base)
    yield from _of_cache(offer, base)
    yield from _of_batch(offer, base)
    yield from _of_features(offer, base)


def _of_draft(offer: Offer, base: AttentionCase) -> Iterator[AttentionCase]:
    for dtype in dtypes_of(offer)[1:]:
        yield replace(base, name=dtype, dtype=dtype)
    for dtype in sorted(offer.kv_dtypes - {base.kv_dtype, "same"}):
        yield replace(base, name=f"cache of {dtype}", kv_dtype=dtype)
    for page in _pages(offer)[1:]:
        yield replace(base, name=f"pages of {page}", page_size=page, rows=rows_about_pages(offer, base.phase, page))
    yield from _of_features(offer, base)
    yield replace(base, name="many rows", rows=many_rows(base))
    if base.phase == "draft_decode":
        yield replace(base, name="five steps", num_steps=5)
        if "topk" in offer.features:
            yield replace(base, name="two branches a row", words=base.words | {"topk"})


def _of_types(offer: Offer, base: AttentionCase) -> Iterator[AttentionCase]:
    for dtype in dtypes_of(offer)[1:]:
        yield replace(base, name=dtype, dtype=dtype)
    for dtype in sorted(offer.kv_dtypes - {base.kv_dtype, "same"}):
        yield replace(base, name=f"cache of {dtype}", kv_dtype=dtype)
    for dims in dims_of(offer)[1:]:
        yield replace(base, name=f"head dims {dims[0]}/{dims[1]}", dims=dims)
    for heads in _more_heads(offer, base):
        yield replace(base, name=f"{heads[0]}/{heads[1]} heads", heads=heads)


def _of_cache(offer: Offer, base: AttentionCase) -> Iterator[AttentionCase]:
    if "paged" not in offer.kv_forms:
        return
    for page in _pages(offer)[1:]:
        yield replace(base, name=f"pages of {page}", page_size=page, rows=rows_about_pages(offer, base.phase, page))
    for form in _INDEX_FORMS:
        if form in offer.index_forms and form != base.index_form:
            yield replace(base, name=f"index {form}", index_form=form)
    if not base.latent:
        for stride in _CACHE_FORMS:
            yield replace(base, name=f"cache strides {stride}", cache_form=stride)


def _of_batch(offer: Offer, base: AttentionCase) -> Iterator[AttentionCase]:
    yield replace(base, name="tokens of no row", pad_tokens=3)
    yield replace(base, name="no rows", rows=())
    yield replace(base, name="one row", rows=(base.rows[1],))
    # more keys, queries and rows than one tile, split or block of a grid takes
    yield replace(base, name="long rows", rows=long_rows(base))
    yield replace(base, name="many rows", rows=many_rows(base))
    yield replace(base, name="large logits", loudness=20.0)
    if base.phase == "verify":
        yield replace(base, name="drafts of unlike lengths", rows=((1, 20), (2, 33), (5, 40), (8, 70)))
        yield replace(base, name="drafts of eight", rows=((8, 8), (8, 41), (8, 70)))
    if "host_lens" not in _inputs(offer, base.phase):
        yield replace(base, name="no host lengths", host_lens=False)
        yield replace(base, name="host lengths that are bounds", host_exact=False)
    if "ragged" in offer.kv_forms and base.phase == "prefill" and base.new != "all":
        rows = tuple((q, q) for q, _ in base.rows)
        yield replace(base, name="keys in no cache", rows=rows, new="all")
    if base.latent and base.dims[0] > base.dims[1]:
        yield replace(base, name="rotary part apart", rope_apart=True)
    if offer.graph != "never" and base.phase in ("decode", "verify"):
        yield replace(base, name="CUDA graph", rows=even_rows(base.phase, base.page_size), graph=True)


def _of_features(offer: Offer, base: AttentionCase) -> Iterator[AttentionCase]:
    has = offer.features
    plain: list[AttentionCase] = []
    if "window" in has:
        plain += [replace(base, name=name, window=window) for name, window in _WINDOWS.items()]
    if "softcap" in has:
        plain.append(replace(base, name="softcap", softcap=20.0))
    if "sinks" in has:
        plain += [replace(base, name=f"sinks in {dtype}", sinks=dtype) for dtype in sink_dtypes_of(offer, base)]
    if "alibi" in has:
        plain.append(replace(base, name="alibi", alibi=True))
    yield from plain
    yield from _loaded(offer, base)
    if "window" in has and "sinks" in has:
        yield replace(base, name="window and sinks", window=_WINDOW, sinks=sink_dtypes_of(offer, base)[0])
    if "window" in has and "softcap" in has:
        yield replace(base, name="window and softcap", window=_WINDOW, softcap=20.0)
    if "lse" in has and base.sinks is None:
        yield replace(base, name="lse", lse=True)
        if "window" in has:
            yield replace(base, name="lse in a window", lse=True, window=_WINDOW)
    if "non_causal" in has and base.causal:
        yield replace(base, name="non-causal", causal=False)
    if "split_kv" in has and base.phase == "prefill" and base.cached_prefix:
        yield replace(base, name="keys beside a cached prefix", new="beside")
    if "encoder" in has and base.phase == "prefill" and "ragged" in offer.kv_forms:
        rows = tuple((q, q) for q, _ in base.rows)
        yield replace(base, name="encoder", rows=rows, new="all", attn_type="encoder", causal=False)
    if "cross" in has and base.phase in ("prefill", "decode") and base.new != "all":
        yield replace(base, name="cross", attn_type="cross", causal=False)
    if "tree_mask" in has and base.phase == "verify":
        for tree in _TREES:
            yield replace(base, name=f"tree mask, {tree}", tree=tree)
        if "window" in has:
            yield replace(base, name="tree mask in a window", tree="qlen", window=_WINDOW)
        yield from _loaded(offer, replace(base, name="tree mask", tree="qlen"))


def _loaded(offer: Offer, case: AttentionCase) -> Iterator[AttentionCase]:
    """A case with all at once that the row declares of a layer: what one feature's branch does to another's."""
    has = offer.features & {"window", "softcap", "sinks"}
    if not has:
        return
    yield replace(
        case,
        name="all features" if case.name == "plain" else f"{case.name}, all features",
        window=_WINDOW if "window" in has else case.window,
        softcap=20.0 if "softcap" in has else case.softcap,
        sinks=sink_dtypes_of(offer, case)[0] if "sinks" in has else case.sinks,
    )


def _other(base: AttentionCase) -> CacheForm:
    return base.cache_form if base.latent else "hnd"


def is_excluded(offer: Offer, said: frozenset[str], *, graph: bool) -> bool:
    """Whether a row says that it does not serve what is said together, or not in a graph."""
    if any(set(words.split("+")) <= said for words in offer.excludes):
        return True
    levels = [level for words, level in offer.graph_under.items() if set(words.split("+")) <= said]
    return graph and "never" in levels


def _inputs(offer: Offer, phase: Phase) -> frozenset[str]:
    return offer.inputs | offer.phase_inputs.get(phase, frozenset())


def _first_page(offer: Offer) -> int:
    return offer.page_sizes.preferred


def _pages(offer: Offer) -> tuple[int, ...]:
    first = offer.page_sizes.preferred
    more = [*offer.page_sizes.exact, *(size for size in _PAGES if offer.page_sizes.accepts(size))]
    if offer.page_sizes.multiple_of:
        more.append(2 * offer.page_sizes.multiple_of)
    return tuple(dict.fromkeys((first, *sorted(more))))


def dtypes_of(offer: Offer) -> tuple[str, ...]:
    """The row's dtypes, the one that shows most first."""
    return tuple(dtype for dtype in ("fp32", "bf16", "fp16") if dtype in offer.dtypes)


def dims_of(offer: Offer) -> tuple[tuple[int, int], ...]:
    """The row's head dims, 64 or 128 first, and three unlike ones where it takes any."""
    if "any" in offer.head_dims:
        return ((64, 64), (128, 128), (80, 80), (96, 64))
    pairs = [dims if isinstance(dims, tuple) else (int(dims), int(dims)) for dims in offer.head_dims]
    return tuple(sorted(pairs, key=lambda pair: (pair not in ((64, 64), (128, 128)), pair)))


def _heads(offer: Offer) -> tuple[int, int]:
    if offer.family in ("mla", "sparse_mla", "csa"):
        return (_least_group(offer, 16), 1)
    group = _least_group(offer, 2)
    return (2 * group, 2)


def _more_heads(offer: Offer, base: AttentionCase) -> Iterator[tuple[int, int]]:
    shapes = [(64, 1), (128, 1)] if base.latent else [(2, 2), (8, 2), (16, 2), (4, 1), (8, 8), (32, 8)]
    for heads in shapes:
        if _takes_group(offer, heads[0] // heads[1]) and heads != base.heads:
            yield heads


def _least_group(offer: Offer, wanted: int) -> int:
    return min((group for group in range(1, 257) if _takes_group(offer, group)), key=lambda group: group != wanted)


def _takes_group(offer: Offer, group: int) -> bool:
    for size in offer.group_sizes:
        if size == "any" or size == group:
            return True
        if isinstance(size, tuple) and size[0] <= group <= size[1]:
            return True
    return False


def sink_dtypes_of(offer: Offer, base: AttentionCase) -> list[str]:
    """Dtypes of stored sinks the row reads as they are, then one that it converts."""
    direct = [base.dtype if dtype == "same" else dtype for dtype in sorted(offer.sink_dtypes)]
    if offer.sink_conversion == "any":
        direct += ["fp32", "bf16"]
    return list(dict.fromkeys(direct))
