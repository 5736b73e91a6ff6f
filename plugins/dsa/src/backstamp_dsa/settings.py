"""What an operator may ask of dsa's insides, and what a built object makes of it.

In: `BuildRequest.sub_settings`. Out: the implementation of each half, and whether draft steps are seeded. A value
nobody here knows is an error that lists those that are known; nothing is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from backstamp.declarations import Phase
from backstamp.errors import BadInput, ConflictingRequest
from backstamp.factories import BuildRequest

__all__ = ["SEED", "Implementation", "Inside", "read_inside"]

Implementation = Literal["library", "triton"]
SEED: Final = "seed_dsa_topk_from_draft_extend"
#: Which half a phase asks. Source: SGLang 0.5.23, dsa_backend.py:1130-1138: verify and draft extend follow decode.
_HALF: Final[Mapping[Phase, str]] = {
    "prefill": "dsa_prefill_backend",
    "decode": "dsa_decode_backend",
    "verify": "dsa_decode_backend",
    "draft_decode": "dsa_decode_backend",
    "draft_extend": "dsa_decode_backend",
}


@dataclass(frozen=True, slots=True)
class Inside:
    """The implementation of each phase, and whether draft steps take the draft-extend's choice of keys."""

    by_phase: Mapping[Phase, Implementation]
    seeded: bool


def read_inside(request: BuildRequest, default: Implementation) -> Inside:
    """Read the sub-settings of one object; unset phases take `default`.

    Raises:
        BadInput: a name or a value the row does not know.
        ConflictingRequest: a seed where there are branches.
    """
    known = request.offer.sub_settings
    for name, value in request.sub_settings.items():
        if name == SEED:
            _check_seed(request, value)
        elif name not in known:
            raise BadInput("dsa", needed=f"sub-settings among {', '.join(sorted({*known, SEED}))}", found=repr(name))
        elif value not in known[name]:
            flag = "--" + name.replace("_", "-")
            raise BadInput(f"dsa, {flag}", needed=f"one of {', '.join(sorted(known[name]))}", found=repr(value))
    by_phase: dict[Phase, Implementation] = {}
    for phase in request.phases:
        asked = request.sub_settings.get(_HALF[phase])
        by_phase[phase] = default if asked is None else "triton" if asked == "triton" else "library"
    return Inside(by_phase, request.sub_settings.get(SEED) == "true")


def _check_seed(request: BuildRequest, value: str) -> None:
    flag = "--" + SEED.replace("_", "-")
    if value not in ("true", "false"):
        raise BadInput(f"dsa, {flag}", needed="true or false", found=repr(value))
    if value == "true" and request.topk > 1:
        # Source: SGLang 0.5.23, eagle_worker_v2.py:305-309: choosing among branches reorders rows under the seed
        raise ConflictingRequest(
            f"dsa, {flag}",
            needed="one branch a step (--speculative-topk 1)",
            found=f"{request.topk} branches",
            fix=f"Leave {flag} out",
        )
