"""Whether an answer is right: numbers held against float64, with the bounds of each dtype and accuracy class.

In: what a kernel wrote and what is true. Out: a line of words on the first thing that is wrong, empty where nothing
is. It never changes a tensor and knows no backend.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from backstamp.testing.conformance.cases import AttentionCase

__all__ = ["ACCURACY_FACTORS", "LSE_TOLERANCE", "TOLERANCES", "Answer", "Tolerance", "not_finite", "off", "wrong"]


class Tolerance(NamedTuple):
    """An answer is right where |out - truth| <= absolute + relative * |truth|, and over all within `norm`.

    `norm` is the relative error of the whole: where one number may be off by chance, all of them may not.
    """

    absolute: float
    relative: float
    norm: float


class Answer(NamedTuple):
    """What a step came to, `out [T, Hq, Dv]` and `lse [T, Hq]` (None where not asked), each beside its truth."""

    out: Tensor
    truth: Tensor
    lse: Tensor | None
    true_lse: Tensor


#: Outputs are means of N(0, 1) values: at most about 4, rounded once in the query's dtype, from weights that a kernel
#: may keep in that dtype too. Every kernel measured was within a third of these norms (bench/results).
TOLERANCES: Final = {
    "fp32": Tolerance(1e-4, 1e-4, 2e-5),
    "fp16": Tolerance(8e-3, 8e-3, 1.5e-3),
    "bf16": Tolerance(4e-2, 4e-2, 8e-3),
}
#: An accuracy class widens them: `exact` is held to them as they are, a query or a cache quantised inside is not.
ACCURACY_FACTORS: Final = {"exact": 1.0, "fp8": 16.0, "int8": 16.0, "fp4": 64.0}
LSE_TOLERANCE: Final = Tolerance(4e-3, 4e-3, 2e-3)


def wrong(
    out: Tensor, truth: Tensor, case: AttentionCase, accuracy: str, *, lse: Tensor | None, true_lse: Tensor
) -> str:
    """What is wrong with an answer: its first token that is no number, or that is off, and by how much."""

    def of_token(token: int) -> str:
        return _of_token(case, token)

    words = not_finite(out, of_token)
    if words:
        return words
    if accuracy not in ACCURACY_FACTORS:
        return f"accuracy class {accuracy!r} has no bound; those that have are {', '.join(ACCURACY_FACTORS)}"
    factor = ACCURACY_FACTORS[accuracy]
    words = off(out, truth, TOLERANCES[case.dtype], factor, "output", of_token)
    if words or lse is None:
        return words
    seen = torch.isfinite(true_lse)
    logs = lse.double().cpu()
    if bool((logs[~seen] != float("-inf")).any()):
        return "LSE needs -inf where a token sees no key, got another number"
    return off(logs[seen], true_lse[seen], LSE_TOLERANCE, factor, "LSE", lambda entry: f"entry {entry}")


def not_finite(out: Tensor, where: Callable[[int], str]) -> str:
    """The first token `[T, H, D]` with a number that is none."""
    bad = (~torch.isfinite(out.double().cpu())).any(-1).any(-1).nonzero().flatten().tolist()
    return f"output is not finite in token {bad[0]} and {len(bad) - 1} more: {where(bad[0])}" if bad else ""


def off(got: Tensor, truth: Tensor, bound: Tolerance, factor: float, what: str, where: Callable[[int], str]) -> str:
    """How far the whole is off, and where most: `where` names an index of the first dimension."""
    if not got.numel():
        return ""
    got, truth = got.double().cpu(), truth.double().cpu()
    error = (got - truth).abs()
    allowed = factor * (bound.absolute + bound.relative * truth.abs())
    # a token off everywhere by less than one number may be, is off
    norm = float(error.norm() / truth.norm().clamp_min(1e-9))
    if bool((error <= allowed).all()) and norm <= factor * bound.norm:
        return ""
    worst = (error - allowed).nan_to_num(float("inf"))
    first = int(worst.flatten(1).amax(1).argmax()) if got.dim() > 1 else int(worst.argmax())
    return (
        f"{what} is off by {float(error.max()):.1e} at most, {norm:.1e} of the whole (allowed "
        f"{factor * bound.norm:.1e}), most in {where(first)}"
    )


def _of_token(case: AttentionCase, token: int) -> str:
    """Which row a token is of."""
    first = 0
    for row, (q_len, kv_len) in enumerate(case.rows):
        if token < first + q_len:
            return f"row {row}, query {token - first} of {q_len}, {kv_len} keys"
        first += q_len
    return f"token {token}, of no row"
