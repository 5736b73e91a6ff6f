"""The CUDA-graph level a row has in one situation: its declared level, or a weaker one under a condition that holds.

In: a row and the question it answers. Out: a position in `GRAPH_LEVELS`, weakest first, or the conditions behind it.

Source: vLLM #48167 (support claimed from the causal path alone), #45425 (three features that break together).

.. versionadded:: 0.2
"""

from __future__ import annotations

from backstamp.declarations import GRAPH_LEVELS
from backstamp.evaluation import Question
from backstamp.hostfit import HostRow
from backstamp.words import words_of

__all__ = ["level_of", "lowered_under"]


def level_of(row: HostRow, question: Question) -> int:
    """The strongest level a row has for what a question asks."""
    if not row.offer.graph_under:
        return row.graph
    return min([row.graph, *_holding(row, question).values()])


def lowered_under(row: HostRow, question: Question) -> tuple[str, ...]:
    """The conditions that hold and take a row to the level it has; none where that is its declared one."""
    level = level_of(row, question)
    if level == row.graph:
        return ()
    return tuple(when for when, lower in sorted(_holding(row, question).items()) if lower == level)


def _holding(row: HostRow, question: Question) -> dict[str, int]:
    under, words = row.offer.graph_under, question.words
    return {when: GRAPH_LEVELS.index(level) for when, level in under.items() if words_of(when) <= words}
