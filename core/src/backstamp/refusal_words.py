"""How each check of the evaluator reads when it refuses: what was wanted and what there was.

In: the row that was lost and what was asked. Out: two phrases for "needs X, got Y". It compares nothing.

.. versionadded:: 0.1
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from backstamp.hostfit import HostRow, dims_words, group_fits, group_words
from backstamp.words import holding, real_dtypes

if TYPE_CHECKING:
    from backstamp.evaluation import PhaseNeeds, Question

__all__ = ["INSTALLATION_CHECK", "WORDS", "Told", "Wording"]

#: The last check: its words were written when the catalogue was compiled for the host.
INSTALLATION_CHECK: Final = "installation"


class Told(NamedTuple):
    """What a refusal may quote: the question, and the phase's needs once a phase was asked."""

    question: Question
    needs: PhaseNeeds | None


#: What one row wanted, and what there was instead, over all rows a kernel lost at once.
Wanted = Callable[[HostRow, Told], str]
Have = Callable[[Sequence[HostRow], Told], str]


class Wording(NamedTuple):
    """A check's code, the declared field it reads, its two phrases, and what is asked for in a word."""

    code: str
    field: str
    wanted: Wanted
    have: Have
    asked: Callable[[Told], str] = lambda told: "it"


_FAMILIES: Final = {
    "mha": "an MHA (multi-head or grouped-query, non-MLA) model",
    "mla": "an MLA model",
    "sparse_mla": "a sparse MLA model",
    "csa": "a DeepSeek V4 (compressed sparse attention) model",
}


def _join(words: Iterable[str]) -> str:
    return ", ".join(sorted(words))


def _phase(told: Told) -> PhaseNeeds:
    assert told.needs is not None, "a phase's refusal before a phase was asked"
    return told.needs


def _holding(conditions: Iterable[str], told: Told) -> list[str]:
    return holding(conditions, told.question.words)


def _sinks_of(row: HostRow, told: Told) -> frozenset[str]:
    return real_dtypes(row.offer.sink_dtypes, told.question.dtype)


def _alignment(row: HostRow) -> str:
    tokens = row.offer.alignment_tokens
    return f"a prefill chunk in multiples of {tokens} tokens" if tokens else "a declared prefill alignment"


WORDS: Final[Mapping[str, Wording]] = {
    "family": Wording(
        "family",
        "family",
        lambda row, told: _FAMILIES.get(row.offer.family, f"a {row.offer.family} model"),
        lambda rows, told: told.question.family,
        lambda told: told.question.family,
    ),
    "phase": Wording(
        "phase",
        "phases",
        lambda row, told: f"a kernel for {_phase(told).phase}",
        lambda rows, told: f"{_join(frozenset().union(*(row.phases for row in rows)))} only",
        lambda told: _phase(told).phase,
    ),
    "dtype": Wording(
        "dtype",
        "dtypes",
        lambda row, told: _join(row.offer.dtypes),
        lambda rows, told: told.question.dtype,
        lambda told: told.question.dtype,
    ),
    "head_dim": Wording(
        "head_dim",
        "head_dims",
        lambda row, told: f"head dim {row.dims_words}",
        lambda rows, told: dims_words(told.question.dims - (rows[0].dims or frozenset())),
        lambda told: f"head dim {dims_words(told.question.dims)}",
    ),
    "group_size": Wording(
        "group_size",
        "group_sizes",
        lambda row, told: f"{group_words(row.offer.group_sizes)} query heads a KV head",
        lambda rows, told: ", ".join(
            str(size) for size in sorted(told.question.groups) if not group_fits(rows[0].offer.group_sizes, size)
        ),
        lambda told: f"{', '.join(map(str, sorted(told.question.groups)))} query heads a KV head",
    ),
    "feature": Wording(
        "feature",
        "features",
        lambda row, told: f"a kernel that declares {_join(told.question.features - row.offer.features)}",
        lambda rows, told: _join(rows[0].offer.features) or "no feature declared",
        lambda told: _join(told.question.features),
    ),
    "phase_feature": Wording(
        "feature",
        "features",
        lambda row, told: f"a kernel that declares {_join(_phase(told).features - row.offer.features)}",
        lambda rows, told: _join(rows[0].offer.features) or "no feature declared",
        lambda told: _join(_phase(told).features),
    ),
    "kv_dtype": Wording(
        "kv_dtype",
        "kv_dtypes",
        lambda row, told: f"KV dtype {_join(row.offer.kv_dtypes)}",
        lambda rows, told: told.question.kv_dtype,
        lambda told: f"KV dtype {told.question.kv_dtype}",
    ),
    "page_size": Wording(
        "page_size",
        "page_sizes",
        lambda row, told: f"page size {row.offer.page_sizes.describe()}",
        lambda rows, told: str(told.question.page_size),
    ),
    "layout": Wording(
        "layout",
        "layouts",
        lambda row, told: f"KV layout {', '.join(row.offer.layouts)}",
        lambda rows, told: _join(told.question.engine.layouts),
    ),
    "allowed": Wording(
        "not_allowed",
        "allowed",
        lambda row, told: f"a kernel that {told.question.allowed_by} allows ({_join(told.question.allowed or ())})",
        lambda rows, told: rows[0].name,
    ),
    "sinks": Wording(
        "sinks_dtype",
        "sink_dtypes",
        lambda row, told: f"sinks stored as {_join(_sinks_of(row, told))}",
        lambda rows, told: f"{' and '.join(told.question.sinks)} sinks",
    ),
    "excludes": Wording(
        "excludes",
        "excludes",
        lambda row, told: f"a launch without {' and '.join(_holding(row.offer.excludes, told))}",
        lambda rows, told: " and ".join(_holding(rows[0].offer.excludes, told)),
    ),
    "needs": Wording(
        "needs",
        "needs",
        lambda row, told: f"a launch with {_join(row.offer.needs - set(_holding(row.offer.needs, told)))}",
        lambda rows, told: _join(told.question.words - told.question.features) or "none of it",
    ),
    "alignment": Wording(
        "alignment",
        "alignment_tokens",
        lambda row, told: _alignment(row),
        lambda rows, told: str(told.question.chunk_tokens) if rows[0].offer.alignment_tokens else "none declared",
    ),
    "deterministic": Wording(
        "deterministic",
        "deterministic",
        lambda row, told: "a kernel that declares deterministic",
        lambda rows, told: "undeclared",
    ),
    "prefix": Wording(
        "prefix",
        "prefix",
        lambda row, told: "attention over cached tokens",
        lambda rows, told: "a kernel that does not declare it",
    ),
    "paged": Wording(
        "kv_form",
        "kv_forms",
        lambda row, told: "a kernel that reads paged KV",
        lambda rows, told: f"{_join(rows[0].offer.kv_forms)} KV only",
    ),
    "mask": Wording(
        "mask",
        "mask_format",
        lambda row, told: "a model without a causal mask",
        lambda rows, told: "a causal model",
    ),
    "kv_form": Wording(
        "kv_form",
        "kv_forms",
        lambda row, told: f"{_join(row.offer.kv_forms)} KV",
        lambda rows, told: f"{_join(told.question.engine.kv_forms)} KV",
    ),
    "index_form": Wording(
        "index_form",
        "index_forms",
        lambda row, told: f"KV index as {_join(row.offer.index_forms)}",
        lambda rows, told: f"an engine that builds {_join(told.question.engine.index_forms)}",
    ),
    "input": Wording(
        "input",
        "inputs",
        lambda row, told: f"the input {_join(row.offer.inputs - told.question.engine.inputs)}",
        lambda rows, told: f"an engine that supplies {_join(told.question.engine.inputs) or 'none'}",
    ),
    "phase_input": Wording(
        "input",
        "phase_inputs",
        lambda row, told: (
            f"the input {_join(row.offer.phase_inputs[_phase(told).phase] - told.question.engine.inputs)} "
            f"for {_phase(told).phase}"
        ),
        lambda rows, told: f"an engine that supplies {_join(told.question.engine.inputs) or 'none'}",
    ),
    "mask_form": Wording(
        "mask",
        "mask_format",
        lambda row, told: f"a {row.offer.mask_format} mask",
        lambda rows, told: f"an engine that supplies {_join(told.question.engine.mask_formats) or 'no mask'}",
    ),
    "plan": Wording(
        "plan",
        "plan",
        lambda row, told: "a plan that runs on the device alone, for an engine without a replay hook",
        lambda rows, told: "plan: host",
    ),
}
