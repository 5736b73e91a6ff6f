"""Which targets a draft is held against.

In: entry classes, and what says more than a name: an operator's `--pair`, a plugin's `EntryPair`, an engine's own rule
for making a draft's architecture from its target's. Out: pairs, and a reason for every draft that has none.

The first that speaks decides, in that order; then the name. What a draft's name leaves without its draft word and its
head (`EagleLlamaForCausalLM`: `Llama`) is the model it drafts for, and every generating target of exactly that model is
its target, since it is loaded beside any of them. Nothing is guessed from a part of a model's name.

.. versionadded:: 0.2
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from backstamp.entry_classes.engines import Engine
from backstamp.entry_classes.facts import EntryClass
from backstamp.errors import BadInput
from backstamp.text import near

__all__ = ["DRAFT_WORDS", "Paired", "Unpaired", "is_draft", "pair_up", "read_pairs"]

#: What a draft's name has and its target's has not; the longer words first.
DRAFT_WORDS: Final = (
    "NextN",
    "MTP",
    "PEagle",
    "Peagle",
    "Eagle3",
    "Eagle",
    "EAGLE3",
    "EAGLE",
    "DSpark",
    "DFlash2",
    "DFlash",
    "Medusa",
    "LiLiCorr",
    "XPress",
    "Assistant",
    "Speculator",
    "Draft",
)
_WORD: Final = re.compile("|".join(DRAFT_WORDS))
#: What the name of a class says of its head, not of its model; and the heads that generate.
_GENERATES: Final = re.compile(r"(ForCausalLM|ForConditionalGeneration|LMHeadModel)$")
_HEAD: Final = re.compile(r"(ForCausalLM|ForConditionalGeneration|LMHeadModel|Model)+$")


class Paired(NamedTuple):
    """A draft beside one target; `why` says what paired them: "--pair", "EntryPair", "engine" or "name"."""

    draft: EntryClass
    target: EntryClass
    why: str


class Unpaired(NamedTuple):
    """A draft without a target, and why it has none."""

    draft: EntryClass
    why: str


def is_draft(entry: EntryClass) -> bool:
    """Whether its table says so, or where none does, a draft word in its name."""
    if entry.draft is not None:
        return entry.draft
    return _WORD.search(entry.name) is not None


def read_pairs(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """`DRAFT=TARGET` as the command line has it; a draft may be named more than once.

    Raises:
        BadInput: another form.
    """
    pairs: dict[str, tuple[str, ...]] = {}
    for text in texts:
        draft, equals, target = (part.strip() for part in text.partition("="))
        if not (draft and equals and target):
            raise BadInput("--pair", needed="DRAFT=TARGET", found=repr(text))
        pairs[draft] = (*pairs.get(draft, ()), target)
    return pairs


def pair_up(
    entries: Sequence[EntryClass],
    engines: Sequence[Engine],
    asked: Mapping[str, tuple[str, ...]],
    declared: Mapping[str, tuple[str, ...]],
) -> tuple[tuple[Paired, ...], tuple[Unpaired, ...]]:
    """Every draft with its targets, in order of the drafts' names, and the drafts that have none.

    `asked` is the operator's, `declared` the plugins'; both map drafts to targets.

    Raises:
        BadInput: a pair was asked for whose draft or target is not among the entry classes.
    """
    by_name = {name: entry for entry in reversed(entries) for name in (*entry.archs, entry.name)}
    _check_names(asked, by_name, len(entries))
    said = {by_name[draft].name: (targets, "EntryPair") for draft, targets in declared.items()}
    said |= {by_name[draft].name: (targets, "--pair") for draft, targets in asked.items()}
    pairs: list[Paired] = []
    unpaired: list[Unpaired] = []
    drafts = [entry for entry in entries if is_draft(entry) or entry.name in said]
    targets = [entry for entry in entries if entry not in drafts]
    for draft in sorted(drafts, key=lambda entry: entry.name):
        if draft.name in said:
            names, why = said[draft.name]
            found = tuple(by_name[name] for name in names)
            reason = "its declared target could not be read"
        else:
            found, why = _targets_of(draft, targets, by_name, engines)
            reason = why
        pairs += [Paired(draft, target, why) for target in found]
        if not found:
            unpaired.append(Unpaired(draft, reason))
    return tuple(pairs), tuple(unpaired)


def _check_names(asked: Mapping[str, tuple[str, ...]], by_name: Mapping[str, EntryClass], count: int) -> None:
    for name in (*asked, *(target for targets in asked.values() for target in targets)):
        if name not in by_name:
            close = near(name, sorted(by_name))
            fix = f"Did you mean {close}?" if close else "Name a class as its engine lists it, or as module:Class"
            raise BadInput("--pair", needed=f"entry classes among the {count} read", found=name, fix=fix)


def _targets_of(
    draft: EntryClass, targets: Sequence[EntryClass], by_name: Mapping[str, EntryClass], engines: Sequence[Engine]
) -> tuple[tuple[EntryClass, ...], str]:
    """A draft's targets and what paired them, or none and why."""
    for engine in engines:
        for name in draft.archs:
            known = [by_name[target] for target in engine.pairs.get(name, ()) if target in by_name]
            if known:
                return tuple(dict.fromkeys(known)), "engine"
    models = {model for name in draft.archs if (model := _model(_WORD.sub("", name)))}
    same = {target: [name for name in target.archs if _model(name) in models] for target in targets}
    named = tuple(target for target, names in same.items() if names)
    # a classifier or an embedding model of the same name generates nothing to draft for
    generating = tuple(target for target in named if any(_GENERATES.search(name) for name in same[target]))
    if named:
        return generating or named, "name"
    for engine in engines:
        for name in draft.archs:
            if name in engine.any_target:
                return (), engine.any_target[name]
    if models:
        return (), f"no target is named after {' or '.join(sorted(models))}"
    return (), "its name says of no model"


def _model(name: str) -> str:
    """The model a class name speaks of: without its head, its case and its underscores."""
    return _HEAD.sub("", name).replace("_", "").lower()
