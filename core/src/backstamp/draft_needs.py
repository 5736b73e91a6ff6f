"""What a draft needs of its target and of the algorithm that drives it, checked before anything is chosen or built.

In: the `Facts` of a draft's resolve. Out: nothing, or an error naming both sides; and a warning for each thing that
cannot be checked.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from backstamp.errors import ConflictingRequest
from backstamp.hostfit import HostRow
from backstamp.plan_rows import Warn
from backstamp.text import plain

if TYPE_CHECKING:
    from backstamp.declarations import Role
    from backstamp.facts import Facts
    from backstamp.launch import Launch
    from backstamp.model import ModelFacts
    from backstamp.plan import Plan

__all__ = ["check_draft", "check_shared_cache", "draft_doubts"]

#: Algorithms that hand auxiliary hidden states of the target to their draft.
#: Source: SGLang 0.5.23 `SpeculativeAlgorithm` and vLLM 0.32 `SpeculativeConfig`, for these and the next.
_SUPPLY: Final = frozenset({"EAGLE3", "DFLASH"})
#: Algorithms that hand over none: EAGLE, Medusa and next-token layers feed on the last hidden state alone, a draft
#: model, n-grams and suffixes on none. So does every variant of MTP, which is named after a model.
_SUPPLY_NONE: Final = frozenset(
    {"EAGLE", "MTP", "NEXTN", "MEDUSA", "MLP_SPECULATOR", "STANDALONE", "DRAFT_MODEL", "NGRAM", "SUFFIX"}
)


def check_draft(facts: Facts) -> None:
    """Refuse an algorithm that does not hand over what this draft consumes.

    Source: SGLang #21272, where accept length was 1.0 and nothing said why.

    Raises:
        ConflictingRequest: a draft with convolutions of its own and several steps; or one that needs auxiliary hidden
        states the named algorithm does not supply.
    """
    draft, launch = facts.model.draft, facts.launch
    if draft is None or facts.role != "draft":
        return
    if draft.conv_sidecar and launch.speculative_num_steps > 1:
        raise ConflictingRequest(
            f"draft {facts.model.architecture or facts.model.name}, which has short convolutions of its own",
            needed="a single draft step, because each step would have to keep a state of its own",
            found=f"{launch.speculative_num_steps} steps",
            fix="Draft with multi-layer EAGLE, or set --speculative-num-steps 1",
        )
    source, algorithm = launch.sources.get("speculative_algorithm"), _algorithm(launch)
    if source is None or not draft.aux_hidden_states or not _supplies_none(algorithm):
        return
    who = f"draft {facts.model.architecture or facts.model.name}"
    found = f"{algorithm}, which supplies 0"
    if source != "operator":
        found = f"{found}; no algorithm was named by --speculative-algorithm, {algorithm} is assumed"
    raise ConflictingRequest(
        f"{who} under --speculative-algorithm {algorithm}" if source == "operator" else who,
        needed=f"{draft.aux_hidden_states} auxiliary hidden states of the target",
        found=found,
        fix="Use EAGLE3, or a draft trained for this algorithm",
    )


def draft_doubts(launch: Launch, model: ModelFacts, role: Role, target: Plan | None) -> tuple[Warn, ...]:
    """What a draft needs and nobody can check: an algorithm of unknown make, a shared cache of an unknown target."""
    draft = model.draft
    if draft is None or role != "draft":
        return ()
    doubts = []
    algorithm = _algorithm(launch)
    known = algorithm in _SUPPLY or _supplies_none(algorithm)
    if draft.aux_hidden_states and "speculative_algorithm" in launch.sources and not known:
        text = f"{plain(algorithm)} is none of {', '.join(sorted(_SUPPLY | _SUPPLY_NONE))} or a variant of MTP"
        needs = f"whether it supplies the {draft.aux_hidden_states} auxiliary hidden states this draft needs"
        doubts.append(Warn("unknown_algorithm", f"{text}, so nobody knows {needs}"))
    if draft.shares_kv and target is None:
        text = "this draft shares its target's KV cache, and no plan of its target was given"
        doubts.append(Warn("lost", f"{text}: the target's locks and layout are not held"))
    return tuple(doubts)


def _algorithm(launch: Launch) -> str:
    return (launch.speculative_algorithm or "").strip().upper().replace("-", "_")


def _supplies_none(algorithm: str) -> bool:
    return algorithm in _SUPPLY_NONE or algorithm.endswith("_MTP")


def check_shared_cache(facts: Facts, kv_dtype: str, page_size: int, layout: str, rows: Sequence[HostRow]) -> None:
    """A draft that reads its target's KV cache must read it as the target lays it out.

    Raises:
        ConflictingRequest: another layout or page size; both sides' kernels are named.
    """
    target, draft = facts.target, facts.model.draft
    if target is None or draft is None or not draft.shares_kv:
        return
    ours = f"{kv_dtype} {layout} pages of {page_size}"
    theirs = f"{target.kv_dtype} {dict(target.layouts)['attention']} pages of {target.page_size}"
    if ours != theirs:
        kernels = ", ".join(dict.fromkeys(phase.kernel for phase in target.running if phase.kernel is not None))
        raise ConflictingRequest(
            f"draft of {facts.model.name}, which shares its target's KV cache",
            needed=f"{theirs}, as {kernels} of the target lays it out",
            found=f"{ours} of {', '.join(dict.fromkeys(row.offer.kernel for row in rows))}",
            fix="Ask for a draft kernel that reads the target's layout, or set --page-size for both",
        )
