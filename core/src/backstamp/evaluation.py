"""The one evaluator: it selects and it explains, so the two can never disagree.

In: a `HostCatalogue` and one `Question` (what a phase of these layers needs). Out: for every kernel of the slot a
verdict, and for the accepted ones the row that would be built. It has no memory and no preference: ranking is
selection's job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from backstamp.declarations import Phase, Slot
from backstamp.hostfit import HostCatalogue, HostRow, Refusal
from backstamp.plan import Verdict

__all__ = ["Candidate", "Question", "evaluate", "first_refusal", "judge"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What one phase asks of a kernel, for one family of layers of one component.

    Attributes:
        dims: (head_dim, v_head_dim) of every layer. kv_dtype: canonical cache dtype; kv_name: as the operator wrote it.
        features: needed members of `FEATURES`. situations: words that hold ("spec", "dcp", "tp", "graph", ...).
        page_size: None when the kernel may choose.
        chunk_tokens: the engine's prefill chunk, or None.
    """

    slot: Slot
    phase: Phase
    family: str
    dims: frozenset[tuple[int, int]]
    dtype: str
    kv_dtype: str
    kv_name: str
    features: frozenset[str]
    situations: frozenset[str]
    index_forms: frozenset[str]
    kv_forms: frozenset[str]
    inputs: frozenset[str]
    mask_formats: frozenset[str]
    layouts: frozenset[str]
    page_size: int | None
    prefix: bool
    causal: bool
    deterministic: bool
    device_plan: bool
    chunk_tokens: int | None
    bypass: frozenset[str]


class Candidate(NamedTuple):
    """One kernel's answer: its verdict, the row that would be built, and why not where it is refused."""

    kernel: str
    verdict: Verdict
    row: HostRow | None
    refusal: Refusal | None


#: Words for a family in a refusal; golden messages and people say MLA, sparse, DeepSeek V4.
_FAMILY_WORDS: Final = {
    "mha": "an MHA (multi-head or grouped-query, non-MLA) model",
    "mla": "an MLA model",
    "sparse_mla": "a sparse MLA model",
    "csa": "a DeepSeek V4 (compressed sparse attention) model",
}


def evaluate(host: HostCatalogue, question: Question) -> dict[str, Candidate]:
    """Judge every kernel of the question's slot, by name."""
    return {kernel: judge(kernel, rows, question) for kernel, rows in host.kernels[question.slot].items()}


def judge(kernel: str, rows: Sequence[HostRow], question: Question) -> Candidate:
    """One kernel's answer: accepted by its first row that fits, else refused with the deepest refusal of its rows."""
    nearest: Refusal | None = None
    nearest_row: HostRow | None = None
    for row in rows:
        refusal = first_refusal(row, question)
        if refusal is None:
            return Candidate(kernel, Verdict(kernel, True, plugin=row.plugin.name), row, None)
        if nearest is None or refusal.depth > nearest.depth:
            nearest, nearest_row = refusal, row
        elif refusal.depth == nearest.depth and refusal.code == nearest.code and refusal.wanted not in nearest.wanted:
            nearest = nearest._replace(wanted=f"{nearest.wanted} or {refusal.wanted}")
    assert nearest is not None, f"kernel {kernel} has no rows"
    assert nearest_row is not None
    plugin = nearest_row.plugin.name
    _, code, field, wanted, have = nearest
    return Candidate(kernel, Verdict(kernel, False, code, field, wanted, have, plugin), nearest_row, nearest)


def first_refusal(row: HostRow, question: Question) -> Refusal | None:
    """The first fact of a question that a row does not fit: the machine, then the model, the step, the installation."""
    if row.refusal is not None:
        return row.refusal
    offer = row.offer
    if offer.family != question.family:
        return Refusal(10, "family", "family", _family(offer.family), question.family)
    if question.phase not in row.phases:
        return Refusal(11, "phase", "phases", f"a kernel for {question.phase}", f"{_words(row.phases)} only")
    if question.dtype not in offer.dtypes:
        return Refusal(12, "dtype", "dtypes", _words(offer.dtypes), question.dtype)
    if row.dims is not None and not question.dims <= row.dims:
        wide = ", ".join(f"{qk}/{v}" if qk != v else str(qk) for qk, v in sorted(question.dims - row.dims))
        return Refusal(13, "head_dim", "head_dims", f"head dim {_dims(row.dims)}", wide)
    if not question.features <= offer.features:
        lacking = _words(question.features - offer.features)
        return Refusal(
            14, "feature", "features", f"a kernel that declares {lacking}", f"none of it declared by {offer.kernel}"
        )
    refusal = _kv_refusal(row, question) or _situation_refusal(row, question) or _engine_refusal(row, question)
    if refusal is not None:
        return refusal
    if row.installation is not None and row.installation.code not in question.bypass:
        return row.installation
    return None


def _kv_refusal(row: HostRow, question: Question) -> Refusal | None:
    offer = row.offer
    kv = offer.kv_dtype_names.get(question.kv_name, question.kv_dtype)
    if kv not in offer.kv_dtypes and not (kv == question.dtype and "same" in offer.kv_dtypes):
        return Refusal(15, "kv_dtype", "kv_dtypes", f"KV dtype {_words(offer.kv_dtypes)}", kv)
    if question.page_size is not None and not offer.page_sizes.accepts(question.page_size):
        return Refusal(
            16, "page_size", "page_sizes", f"page size {offer.page_sizes.describe()}", str(question.page_size)
        )
    if question.layouts.isdisjoint(offer.layouts):
        return Refusal(17, "layout", "layouts", f"KV layout {', '.join(offer.layouts)}", _words(question.layouts))
    return None


def _situation_refusal(row: HostRow, question: Question) -> Refusal | None:
    offer = row.offer
    if offer.excludes & question.situations:
        clash = _words(offer.excludes & question.situations)
        return Refusal(18, "excludes", "excludes", f"a launch without {clash}", clash)
    if not offer.needs <= question.situations:
        return Refusal(19, "needs", "needs", _words(offer.needs - question.situations), _words(question.situations))
    if question.deterministic and question.phase in ("prefill", "draft_extend") and offer.alignment_tokens is not None:
        chunk = question.chunk_tokens
        if chunk is not None and chunk > 0 and chunk % offer.alignment_tokens:
            wanted = f"a prefill chunk in multiples of {offer.alignment_tokens} tokens"
            return Refusal(20, "alignment", "alignment_tokens", wanted, str(chunk))
    if question.deterministic and not offer.deterministic:
        return Refusal(20, "deterministic", "deterministic", "a kernel that declares deterministic", "undeclared")
    if question.prefix and not offer.prefix:
        return Refusal(21, "prefix", "prefix", "attention over cached tokens", "a kernel that does not declare it")
    if offer.mask_format == "none" and question.causal:
        return Refusal(22, "mask", "mask_format", "a model without a causal mask", "a causal model")
    return None


def _engine_refusal(row: HostRow, question: Question) -> Refusal | None:
    offer = row.offer
    if offer.kv_forms.isdisjoint(question.kv_forms):
        return Refusal(23, "kv_form", "kv_forms", f"{_words(offer.kv_forms)} KV", f"{_words(question.kv_forms)} KV")
    if question.prefix and "paged" not in offer.kv_forms:
        return Refusal(23, "kv_form", "kv_forms", "a kernel that reads paged KV", f"{_words(offer.kv_forms)} KV only")
    if offer.index_forms and offer.index_forms.isdisjoint(question.index_forms):
        wanted = f"KV index as {_words(offer.index_forms)}"
        return Refusal(24, "index_form", "index_forms", wanted, f"an engine that builds {_words(question.index_forms)}")
    if not offer.inputs <= question.inputs:
        lacking = _words(offer.inputs - question.inputs)
        return Refusal(
            25, "input", "inputs", f"the input {lacking}", f"an engine that supplies {_words(question.inputs)}"
        )
    if offer.mask_format in ("2d", "4d_bool") and offer.mask_format not in question.mask_formats:
        have = _words(question.mask_formats) or "an engine that supplies no mask"
        return Refusal(26, "mask", "mask_format", f"a {offer.mask_format} mask", have)
    if question.device_plan and offer.plan != "device":
        return Refusal(27, "plan", "plan", "a plan that runs on the device alone", "plan: host, and no replay hook")
    return None


def _family(family: str) -> str:
    return _FAMILY_WORDS.get(family, f"a {family} model")


def _words(words: frozenset[str]) -> str:
    return ", ".join(sorted(words))


def _dims(dims: frozenset[tuple[int, int]]) -> str:
    same = sorted(qk for qk, v in dims if qk == v)
    mixed = sorted(pair for pair in dims if pair[0] != pair[1])
    # every pair of the same sizes is said once
    if len(mixed) > 6:
        return f"{', '.join(map(str, same))} (also mixed)"
    return ", ".join([*map(str, same), *(f"{qk}/{v}" for qk, v in mixed)])
