"""Whether one plugin's declarations can be taken at their word, before they reach the catalogue.

In: a plugin's `Declared` rows and the packages its factories may lie in. Out: every fault, as text, all at once. It
probes nothing and imports nothing.

.. versionadded:: 0.1
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Iterator
from typing import Final, Literal, cast, get_args, get_origin, get_type_hints

from packaging.requirements import InvalidRequirement, Requirement

from backstamp.declarations import (
    ANY,
    BACKEND_REQUESTS,
    FEATURES,
    GRAPH_LEVELS,
    PHASES,
    SITUATIONS,
    Alias,
    EntryPair,
    FamilyDefault,
    FeatureDefault,
    Offer,
    RetiredSetting,
)
from backstamp.declared import Declared
from backstamp.wellformed import malformed

__all__ = ["faults_of"]

_DRAFT_PHASES: Final = frozenset({"draft_decode", "draft_extend"})
_DTYPES: Final = frozenset({"fp16", "bf16", "fp32"})


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
        faults += [f"feature default {feature.feature!r}: {fault}" for fault in _feature_faults(feature)]
    for setting in declared.retired_settings:
        faults += [f"retired setting {setting.name!r}: {fault}" for fault in _setting_faults(setting)]
    for pair in declared.entry_classes:
        faults += [f"entry class {pair.draft!r}: {fault}" for fault in _entry_faults(pair)]
    return list(dict.fromkeys(faults))


def _offer_faults(offer: Offer, packages: frozenset[str]) -> list[str]:
    return [
        *_missing(offer),
        *_number_faults(offer),
        *_literal_faults(offer),
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
        "group_sizes": offer.group_sizes,
        "kv_dtypes": offer.kv_dtypes,
        "kv_forms": offer.kv_forms,
        "layouts": offer.layouts,
        "mask_format": offer.mask_format,
    }
    return [f"{name} is empty, and undeclared means no" for name, value in empty.items() if not value]


def _number_faults(offer: Offer) -> Iterator[str]:
    """Numbers that no size, priority or length has."""
    for dim in offer.head_dims:
        parts: tuple[object, ...] = dim if isinstance(dim, tuple) and len(dim) == 2 else (dim,)
        if dim != "any" and not all(type(part) is int and part >= 1 for part in parts):
            yield f"head_dims needs d, (qk, v) or ANY, got {dim!r}"
    for size in offer.group_sizes if offer.group_sizes != ANY else ():
        least, most = size if isinstance(size, tuple) and len(size) == 2 else (size, size)
        if type(least) is not int or type(most) is not int or not 1 <= least <= most:
            yield f"group_sizes needs a number, (least, most) or ANY, got {size!r}"
    pages = offer.page_sizes
    if min(pages.preferred, *pages.exact, 1) < 1:
        yield f"page_sizes needs sizes >= 1, got preferred {pages.preferred} and exact {list(pages.exact)}"
    if pages.multiple_of < 0:
        yield f"page_sizes.multiple_of needs a whole number >= 0, got {pages.multiple_of}"
    if not 0 <= offer.priority <= 100:
        yield f"priority needs 0..100, got {offer.priority}"
    if offer.alignment_tokens is not None and offer.alignment_tokens < 1:
        yield f"alignment_tokens needs a whole number >= 1, got {offer.alignment_tokens}"
    if offer.fill_value < 0:
        yield f"fill_value needs a kv_len >= 0, got {offer.fill_value}"


def _literal_faults(row: Offer | Alias | FamilyDefault | FeatureDefault) -> list[str]:
    """Fields that take one word of a few, and have another: each is a key that a later step looks up."""
    return [
        f"{name} has unknown {[value]}; known: {sorted(known)}"
        for name, known in _literals(cast("Hashable", type(row)))
        if (value := getattr(row, name)) is not None and value not in known
    ]


@functools.cache
def _literals(kind: Hashable) -> tuple[tuple[str, frozenset[str]], ...]:
    """The fields of a row class that take one word of a Literal, and its words."""
    hints = get_type_hints(kind)
    found = []
    for name in hints:
        # `Literal[...]` itself, or one beside None; words inside collections are asked for by name
        for hint in (hints[name], *(get_args(hints[name]) if type(None) in get_args(hints[name]) else ())):
            if get_origin(hint) is Literal:
                found.append((name, frozenset(get_args(hint))))
    return tuple(found)


def _unknown_words(offer: Offer) -> list[str]:
    known = (
        ("phases", offer.phases | (offer.draft_phases or frozenset()), frozenset(PHASES)),
        ("features", offer.features, FEATURES),
        ("dtypes", offer.dtypes, _DTYPES),
        ("kv_forms", offer.kv_forms, frozenset({"paged", "ragged"})),
        ("index_forms", offer.index_forms, frozenset({"page_table", "csr", "indirect"})),
        ("graph_under", frozenset(offer.graph_under.values()), frozenset(GRAPH_LEVELS)),
        ("build_settings", offer.build_settings, FEATURES),
        ("phase_inputs", frozenset(offer.phase_inputs), frozenset(PHASES)),
        ("sub_settings", frozenset(offer.sub_settings), BACKEND_REQUESTS),
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
    if offer.accuracy != offer.accuracy.strip() or not offer.accuracy:
        faults.append(f"accuracy needs 'exact' or the name of a bound, got {offer.accuracy!r}")
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
    return faults


def _factory_faults(factory: str, packages: frozenset[str]) -> list[str]:
    if not _is_path(factory):
        return [f'factory needs "module:callable", got {factory!r}']
    if factory.partition(":")[0].partition(".")[0] not in packages:
        return [f"factory {factory!r} lies outside its distribution's packages {sorted(packages)}"]
    return []


def _is_path(text: str) -> bool:
    """Whether a text is "module:name"."""
    module, _, name = text.partition(":")
    return all(part.isidentifier() for part in (*module.split("."), name))


def _requirement_faults(offer: Offer) -> Iterator[str]:
    for text in (*offer.requires, *offer.runtimes, *offer.companions):
        try:
            requirement = Requirement(text)
        except InvalidRequirement as cause:
            yield f"{text!r} is no PEP 508 requirement: {str(cause).splitlines()[0]}"
            continue
        if requirement.marker is not None or requirement.url is not None:
            yield f"{text!r} has a marker or URL; write another row instead"
        if text in offer.companions and (requirement.specifier or requirement.extras):
            yield f"companions needs the name of a distribution alone, got {text!r}: its version is the library's"


def _alias_faults(alias: Alias) -> list[str]:
    faults = _literal_faults(alias)
    if not alias.key.strip() or ":" in alias.key:
        faults.append("key needs to be a word without ':'")
    if not alias.kernels and not alias.by_phase:
        faults.append("lists no kernels")
    unknown = set(alias.by_phase) - set(PHASES)
    if unknown:
        faults.append(f"by_phase names {sorted(unknown)}, which are no phases")
    if alias.deprecated is not None and alias.deprecated.strip() in ("", alias.key):
        faults.append(f"deprecated needs the key to use instead, got {alias.deprecated!r}")
    return faults


def _default_faults(default: FamilyDefault) -> list[str]:
    faults = [*_blank("model_type", default.model_type), *_blank("component", default.component)]
    faults += _literal_faults(default)
    if not default.kernels and not default.allowed:
        faults.append("says nothing: needs kernels, or the allowed ones")
    outside = [kernel for kernel in default.kernels if default.allowed is not None and kernel not in default.allowed]
    return [*faults, f"prefers {', '.join(outside)}, which it does not allow"] if outside else faults


def _feature_faults(default: FeatureDefault) -> list[str]:
    faults = [*_blank("feature", default.feature), *_literal_faults(default)]
    if not default.archs:
        faults.append("archs is empty, and undeclared means no")
    if "any" in default.archs and default.archs != ANY:
        faults.append(f"archs needs ANY or archs, got both in {list(default.archs)}")
    return faults


def _setting_faults(setting: RetiredSetting) -> list[str]:
    faults = [*_blank("replacement", setting.replacement)]
    if not setting.name.strip() or setting.request not in BACKEND_REQUESTS:
        faults.append(f"needs a name and a backend request, got {setting.request!r}")
    return faults


def _entry_faults(pair: EntryPair) -> list[str]:
    sides = (("draft", pair.draft), ("target", pair.target))
    return [f'{side} needs "module:Class", got {text!r}' for side, text in sides if not _is_path(text)]


def _blank(name: str, text: str) -> list[str]:
    return [] if text.strip() else [f"{name} needs a word, got {text!r}"]
