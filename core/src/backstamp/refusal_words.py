"""How each check of the evaluator reads when it refuses: what was wanted and what there was.

In: the row that was lost and what was asked. Out: two phrases for "needs X, got Y". It compares nothing.

.. versionadded:: 0.1
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from backstamp.hostfit import HostRow, dims_words

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
    """A check's code, the declared field it reads, and its two phrases."""

    code: str
    field: str
    wanted: Wanted
    have: Have


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


WORDS: Final[Mapping[str, Wording]] = {
    "family": Wording(
        "family",
        "family",
        lambda row, told: _FAMILIES.get(row.offer.family, f"a {row.offer.family} model"),
        lambda rows, told: told.question.family,
    ),
    "phase": Wording(
        "phase",
        "phases",
        lambda row, told: f"a kernel for {_phase(told).phase}",
        lambda rows, told: f"{_join(frozenset().union(*(row.phases for row in rows)))} only",
    ),
    "dtype": Wording(
        "dtype", "dtypes", lambda row, told: _join(row.offer.dtypes), lambda rows, told: told.question.dtype
    ),
    "head_dim": Wording(
        "head_dim",
        "head_dims",
        lambda row, told: f"head dim {row.dims_words}",
        lambda rows, told: dims_words(told.question.dims - (rows[0].dims or frozenset())),
    ),
    "feature": Wording(
        "feature",
        "features",
        lambda row, told: f"a kernel that declares {_join(told.question.features - row.offer.features)}",
        lambda rows, told: _join(rows[0].offer.features) or "no feature declared",
    ),
    "phase_feature": Wording(
        "feature",
        "features",
        lambda row, told: f"a kernel that declares {_join(_phase(told).features - row.offer.features)}",
        lambda rows, told: _join(rows[0].offer.features) or "no feature declared",
    ),
    "kv_dtype": Wording(
        "kv_dtype",
        "kv_dtypes",
        lambda row, told: f"KV dtype {_join(row.offer.kv_dtypes)}",
        lambda rows, told: told.question.kv_dtype,
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
    "excludes": Wording(
        "excludes",
        "excludes",
        lambda row, told: f"a launch without {_join(row.offer.excludes & told.question.situations)}",
        lambda rows, told: _join(rows[0].offer.excludes & told.question.situations),
    ),
    "needs": Wording(
        "needs",
        "needs",
        lambda row, told: f"a launch with {_join(row.offer.needs - told.question.situations)}",
        lambda rows, told: _join(told.question.situations) or "none of it",
    ),
    "alignment": Wording(
        "alignment",
        "alignment_tokens",
        lambda row, told: f"a prefill chunk in multiples of {row.offer.alignment_tokens} tokens",
        lambda rows, told: str(told.question.chunk_tokens),
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
