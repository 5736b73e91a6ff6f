"""The CUDA-graph level a row has in one situation: its declared level, or a weaker one under a condition that holds.

In: a row and the question it answers. Out: a position in `GRAPH_LEVELS`, weakest first.

Source: vLLM #48167 (support claimed from the causal path alone), #45425 (three features that break together).

.. versionadded:: 0.2
"""

from __future__ import annotations

from backstamp.declarations import GRAPH_LEVELS
from backstamp.evaluation import Question
from backstamp.hostfit import HostRow

__all__ = ["level_of"]


def level_of(row: HostRow, question: Question) -> int:
    """The strongest level a row has for what a question asks."""
    under = row.offer.graph_under
    if not under:
        return row.graph
    words = question.words
    return min(
        [row.graph, *(GRAPH_LEVELS.index(level) for when, level in under.items() if words.issuperset(when.split("+")))]
    )
