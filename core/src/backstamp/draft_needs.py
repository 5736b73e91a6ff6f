"""What a draft needs of its target and of the algorithm that drives it, checked before anything is chosen or built.

In: the `Facts` of a draft's resolve. Out: nothing, or an error naming both sides.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from backstamp.errors import ConflictingRequest
from backstamp.facts import Facts
from backstamp.hostfit import HostRow

__all__ = ["check_draft", "check_shared_cache"]

#: Auxiliary hidden states of the target that an algorithm hands to its draft; one not listed here is not judged.
#: Source: SGLang 0.5.23 `SpeculativeAlgorithm` and vLLM 0.32 `SpeculativeConfig`: EAGLE and next-token layers feed on
#: the last hidden state alone, a standalone or n-gram draft on none.
_SUPPLIES: Final[Mapping[str, int]] = {"EAGLE": 0, "MTP": 0, "NEXTN": 0, "STANDALONE": 0, "DRAFT_MODEL": 0, "NGRAM": 0}


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
    if "speculative_algorithm" not in launch.sources:
        return
    algorithm = (launch.speculative_algorithm or "").upper()
    supplied = _SUPPLIES.get(algorithm)
    if supplied is not None and draft.aux_hidden_states > supplied:
        raise ConflictingRequest(
            f"draft {facts.model.architecture or facts.model.name} under --speculative-algorithm {algorithm}",
            needed=f"{draft.aux_hidden_states} auxiliary hidden states of the target",
            found=f"{algorithm}, which supplies {supplied}",
            fix="Use EAGLE3, or a draft trained for this algorithm",
        )


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
