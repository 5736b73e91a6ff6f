"""Before any step: prompts and limits → checked requests, the record an engine keeps of each.

In: prompts and how many new tokens each may have. Out: one `Request` a prompt, or an error that names the first at
fault. It knows no model, no cache and no backend.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from backstamp.errors import BadInput

__all__ = ["Request"]


@dataclass(slots=True)
class Request:
    """One request in flight: its prompt and what was generated, its pages, and how many of its tokens the cache holds.

    `count` is how many of the tokens after those this step reads.
    """

    tokens: list[int]
    prompt_len: int
    max_new_tokens: int
    pages: list[int] = field(default_factory=list)
    cached: int = 0
    count: int = 0

    @property
    def generated(self) -> list[int]:
        """Tokens after the prompt."""
        return self.tokens[self.prompt_len :]

    @property
    def finished(self) -> bool:
        """Whether all asked tokens are there."""
        return len(self.tokens) >= self.prompt_len + self.max_new_tokens

    @property
    def positions(self) -> range:
        """Positions of the tokens this step reads."""
        return range(self.cached, self.cached + self.count)

    @classmethod
    def accept(cls, prompts: Sequence[Sequence[int]], max_new_tokens: int | Sequence[int], vocab: int) -> list[Request]:
        """Check prompts and limits (one for all, or one each). Raises `BadInput` naming the first request at fault."""
        limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
        if len(limits) != len(prompts):
            raise BadInput("mini engine", needed=f"{len(prompts)} limits of new tokens", found=str(len(limits)))
        for number, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
            who = f"mini engine, request {number}"
            if not prompt or not all(0 <= token < vocab for token in prompt):
                found = "an empty prompt" if not prompt else f"tokens {min(prompt)} to {max(prompt)}"
                raise BadInput(who, needed=f"one or more tokens in 0..{vocab - 1}", found=found)
            if limit < 1:
                raise BadInput(who, needed="at least one new token", found=str(limit))
        return [cls(list(prompt), len(prompt), limit) for prompt, limit in zip(prompts, limits, strict=True)]
