"""A step whose every query token is a row of its own: for kernels that take rows of equal length only.

In: a ragged step. Out: one page-table row and one key count a token. The causal rule is in the counts: a token sees
the keys up to itself and no others. Device work only, recordable in a graph.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from backstamp_trtllm.steps import Step

__all__ = ["TokenSteps", "token_steps"]


@dataclass(frozen=True, slots=True)
class TokenSteps:
    """`table [T, W]` i32 and `visible [T]` i32."""

    table: Tensor
    visible: Tensor


def token_steps(step: Step) -> TokenSteps:
    """Each token's own page-table row; a step must have been planned with every token."""
    assert step.tokens is not None, "planned with every token"
    return TokenSteps(step.table.index_select(0, step.tokens.rows), step.tokens.visible)
