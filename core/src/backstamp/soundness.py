"""Whether one plugin's declarations can be taken at their word, before they reach the catalogue.

In: a plugin's `Declared` rows and the packages its factories may lie in. Out: every fault, as text, all at once. It
probes nothing and imports nothing.

.. versionadded:: 0.1
"""

from __future__ import annotations

from collections.abc import Iterable

from packaging.requirements import InvalidRequirement, Requirement

from backstamp.declarations import (
    ANY,
    BACKEND_REQUESTS,
    FEATURES,
    GRAPH_LEVELS,
    PHASES,
    SITUATIONS,
    Alias,
    FamilyDefault,
    Offer,
)
from backstamp.declared import Declared
from backstamp.wellformed import malformed

__all__ = ["faults_of"]

_DRAFT_PHASES = frozenset({"draft_decode", "draft_extend"})
_DTYPES = frozenset({"fp16", "bf16", "fp32"})
_MASKS = frozenset({"none", "2d", "4d_bool", "internal_causal"})
_CONVERSIONS = frozenset({"no", "lossless", "any"})


def faults_of(declared: Declared, packages: frozenset[str]) -> list[str]:
    """Every fault of a plugin's rows; an empty list means sound."""
    faults: list[str] = malformed(declared)
    if faults:
        # what has the wrong type cannot be asked for its meaning
        return faults
    if declared == Declared():
        faults.append("declares nothing: needs at least one offer, alias, entry class or default")
    for at, offer in enumerate(declared.offers):
        faults += [f"offer {at} ({offer.kernel!r}): {fault}" for fault in _offer_faults(offer, packages)]
    keys = [alias.key for alias in declared.aliases]
    for alias in declared.aliases:
        faults += [f"alias {alias.key!r}: {fault}" for fault in _alias_faults(alias)]
        if keys.count(alias.key) > 1:
            faults.append(f"alias {alias.key!r}: declared {keys.count(alias.key)} times")
    for default in declared.family_defaults:
        faults += [f"family default {default.model_type!r}: {fault}" for fault in _default_faults(default)]
    for feature in declared.feature_defaults:
        if not feature.archs:
            faults.append(f"feature default {feature.feature!r}: archs is empty, and undeclared means no")
    for setting in declared.retired_settings:
        if not setting.name.strip() or setting.request not in BACKEND_REQUESTS:
            faults.append(
                f"retired setting {setting.name!r}: needs a name and a backend request, got {setting.request!r}"
            )
    return list(dict.fromkeys(faults))


def _default_faults(default: FamilyDefault) -> list[str]:
    if not default.kernels and default.allowed is None:
        return ["says nothing: needs kernels, or the allowed ones"]
    outside = [kernel for kernel in default.kernels if default.allowed is not None and kernel not in default.allowed]
    return [f"prefers {', '.join(outside)}, which it does not allow"] if outside else []


def _offer_faults(offer: Offer, packages: frozenset[str]) -> list[str]:
    return [
        *_missing(offer),
        *_wrong_types(offer),
        *_unknown_words(offer),
        *_contradictions(offer),
        *_factory_faults(offer.factory, packages),
        *_requirement_faults(offer),
    ]


def _missing(offer: Offer) -> list[str]:
    empty = {
        "kernel": offer.kernel.strip(),
        "archs": offer.archs,
        "phases": offer.phases,
        "dtypes": offer.dtypes,
        "head_dims": offer.head_dims,
        "kv_dtypes": offer.kv_dtypes,
        "kv_forms": offer.kv_forms,
        "layouts": offer.layouts,
        "mask_format": offer.mask_format,
    }
    return [f"{name} is empty, and undeclared means no" for name, value in empty.items() if not value]


def _wrong_types(offer: Offer) -> list[str]:
    """Values that a checked plugin.py would not have, and that would stop the index of a whole host."""
    faults = []
    exact: object = offer.page_sizes.exact
    if not isinstance(exact, tuple):
        faults.append(f"page_sizes.exact needs a tuple, got {type(exact).__name__}")
    for dim in offer.head_dims:
        pair = isinstance(dim, tuple) and len(dim) == 2 and all(isinstance(part, int) for part in dim)
        if not (pair or isinstance(dim, int) or dim == "any"):
            faults.append(f"head_dims needs d, (qk, v) or ANY, got {dim!r}")
    return faults


def _unknown_words(offer: Offer) -> list[str]:
    known = (
        ("phases", offer.phases | (offer.draft_phases or frozenset()), frozenset(PHASES)),
        ("features", offer.features, FEATURES),
        ("dtypes", offer.dtypes, _DTYPES),
        ("kv_forms", offer.kv_forms, frozenset({"paged", "ragged"})),
        ("index_forms", offer.index_forms, frozenset({"page_table", "csr", "indirect"})),
        ("graph", frozenset({offer.graph, *offer.graph_under.values()}), frozenset(GRAPH_LEVELS)),
        ("phase_inputs", frozenset(offer.phase_inputs), frozenset(PHASES)),
        ("sink_conversion", frozenset({offer.sink_conversion}), _CONVERSIONS),
        ("mask_format", frozenset(filter(None, [offer.mask_format])), _MASKS),
    )
    faults = [
        f"{name} has unknown {sorted(words - allowed)}; known: {sorted(allowed)}"
        for name, words, allowed in known
        if words - allowed
    ]
    for name, conditions in (("needs", offer.needs), ("excludes", offer.excludes), ("graph_under", offer.graph_under)):
        unknown = sorted(_words_of(conditions) - SITUATIONS - FEATURES)
        if unknown:
            faults.append(f"{name} has unknown {unknown}; known: {sorted(SITUATIONS)}, features, and kv_ with a dtype")
    return faults


def _words_of(conditions: Iterable[str]) -> set[str]:
    """The words conditions are joined of, but for KV dtypes, which are open."""
    words = {word for condition in conditions for word in condition.split("+")}
    return {word for word in words if not (word.startswith("kv_") and len(word) > len("kv_"))}


def _contradictions(offer: Offer) -> list[str]:
    faults = []
    if not 0 <= offer.priority <= 100:
        faults.append(f"priority needs 0..100, got {offer.priority}")
    if offer.needs & offer.excludes:
        faults.append(f"needs and excludes both name {sorted(offer.needs & offer.excludes)}")
    if offer.draft_phases is not None and offer.draft_phases - _DRAFT_PHASES:
        faults.append(f"draft_phases names {sorted(offer.draft_phases - _DRAFT_PHASES)}, which are no draft phases")
    if not offer.page_sizes.accepts(offer.page_sizes.preferred):
        faults.append(f"prefers page size {offer.page_sizes.preferred} but accepts only {offer.page_sizes.describe()}")
    if offer.device == "any" and offer.archs != ANY:
        faults.append(f"device any needs archs ANY, got {list(offer.archs)}")
    if "paged" in offer.kv_forms and not offer.index_forms:
        faults.append("reads paged KV but declares no index form")
    if "tree_mask" in offer.features and "verify" not in offer.phases:
        faults.append("declares tree_mask but not the verify phase")
    if offer.alignment_tokens is not None and not offer.deterministic:
        faults.append("declares an alignment but is not deterministic")
    if offer.alignment_tokens is not None and offer.alignment_tokens < 1:
        faults.append(f"alignment_tokens needs a whole number >= 1, got {offer.alignment_tokens}")
    return faults


def _factory_faults(factory: str, packages: frozenset[str]) -> list[str]:
    module, separator, name = factory.partition(":")
    if not separator or not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        return [f'factory needs "module:callable", got {factory!r}']
    if module.partition(".")[0] not in packages:
        return [f"factory {factory!r} lies outside its distribution's packages {sorted(packages)}"]
    return []


def _requirement_faults(offer: Offer) -> list[str]:
    faults = []
    for text in (*offer.requires, *offer.runtimes):
        try:
            requirement = Requirement(text)
        except InvalidRequirement as cause:
            faults.append(f"{text!r} is no PEP 508 requirement: {str(cause).splitlines()[0]}")
            continue
        if requirement.marker is not None or requirement.url is not None:
            faults.append(f"{text!r} has a marker or URL; write another row instead")
    return faults


def _alias_faults(alias: Alias) -> list[str]:
    faults = []
    if not alias.key.strip() or ":" in alias.key:
        faults.append("key needs to be a word without ':'")
    if not alias.kernels and not alias.by_phase:
        faults.append("lists no kernels")
    unknown = set(alias.by_phase) - set(PHASES)
    if unknown:
        faults.append(f"by_phase names {sorted(unknown)}, which are no phases")
    return faults
