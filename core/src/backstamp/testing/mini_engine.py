"""The mini engine: continuous batching and plain greedy decoding on top of the runner's steps.

In: prompts and one runner. Out: greedy tokens. It admits requests while pages are free, mixes decode rows with chunks
of prompts in one step, and frees pages as requests finish. It never looks inside a backend or a batch.

.. versionadded:: 0.1
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from backstamp.errors import BadInput
from backstamp.forward import split_batch
from backstamp.testing.runner import Row, Runner, ServesPhases, last_of_rows

__all__ = ["MiniEngine", "Progress", "Request", "ServesPhases"]

#: Called after each step with the number of tokens that step produced.
Progress = Callable[[int], None]


@dataclass(slots=True)
class Request:
    """One request in flight: its prompt and what was generated, and how many of its tokens the cache holds."""

    tokens: list[int]
    prompt_len: int
    max_new_tokens: int
    pages: list[int] = field(default_factory=list)
    cached: int = 0

    @property
    def generated(self) -> list[int]:
        """Tokens after the prompt."""
        return self.tokens[self.prompt_len :]

    @property
    def finished(self) -> bool:
        """Whether all asked tokens are there."""
        return len(self.tokens) >= self.prompt_len + self.max_new_tokens

    def row(self, num_tokens: int) -> Row:
        """Its next tokens, which follow the cached ones."""
        return Row(self.tokens[self.cached : self.cached + num_tokens], self.pages, self.cached)

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


class MiniEngine:
    """Continuous batching with plain greedy decoding; decode rows first, then chunks of prompts, in one step.

    Attributes:
        chunk_size: prompt tokens a step takes at most, over all requests; None takes whole prompts.
        max_rows: requests in flight at most. wave: requests that may arrive before each step.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        chunk_size: int | None = None,
        max_rows: int = 16,
        wave: int = 4,
        progress: Progress | None = None,
    ) -> None:
        if min(max_rows, wave, 1 if chunk_size is None else chunk_size) < 1:
            raise BadInput(
                "mini engine",
                needed="chunk_size, max_rows and wave of 1 or more",
                found=f"{chunk_size}, {max_rows} and {wave}",
            )
        self.runner, self.chunk_size, self.max_rows, self.wave = runner, chunk_size, max_rows, wave
        self.progress = progress

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int | Sequence[int]) -> list[list[int]]:
        """Greedy continuations, one a prompt. Raises `BadInput` for a request that could never run."""
        pool = self.runner.pool
        requests = Request.accept(prompts, max_new_tokens, self.runner.decoder.config.vocab)
        for number, request in enumerate(requests):
            needed = self._pages_of(request)
            if needed > pool.num_pages:
                raise BadInput(
                    f"mini engine, request {number}", needed=f"{needed} KV pages", found=f"a pool of {pool.num_pages}"
                )
        waiting, running = deque(requests), list[Request]()
        while waiting or running:
            for _ in range(min(self.wave, len(waiting), self.max_rows - len(running))):
                if self._pages_of(waiting[0]) > pool.num_free:
                    break
                request = waiting.popleft()
                request.pages = pool.allocate(self._pages_of(request))
                running.append(request)
            produced = self._step(running)
            for request in running:
                if request.finished:
                    pool.release(request.pages)
            running = [request for request in running if not request.finished]
            if self.progress is not None:
                self.progress(produced)
        return [request.generated for request in requests]

    def _pages_of(self, request: Request) -> int:
        # the last token is never fed back
        return self.runner.pool.pages_for(request.prompt_len + request.max_new_tokens - 1)

    def _step(self, running: Sequence[Request]) -> int:
        """Advance every decoding request by a token and some prompts by a chunk; answer how many tokens came out."""
        turns = [(request, 1) for request in running if request.cached >= request.prompt_len]
        num_decode_rows = len(turns)
        turns += self._chunks([request for request in running if request.cached < request.prompt_len])
        rows = [request.row(num_tokens) for request, num_tokens in turns]
        batch = self.runner.batch("prefill", rows, num_decode_rows=num_decode_rows)
        parts = [self.runner.plan(half) for half in split_batch(batch) if half is not None]
        choices = last_of_rows(self.runner.forward(rows, parts), rows).argmax(-1).tolist()
        produced = 0
        for (request, num_tokens), choice in zip(turns, choices, strict=True):
            request.cached += num_tokens
            if request.cached == len(request.tokens):
                request.tokens.append(choice)
                produced += 1
        return produced

    def _chunks(self, filling: Sequence[Request]) -> list[tuple[Request, int]]:
        """Share `chunk_size` prompt tokens out, oldest request first."""
        chunks, budget = [], self.chunk_size
        for request in filling:
            missing = request.prompt_len - request.cached
            num_tokens = missing if budget is None else min(missing, budget)
            if num_tokens:
                chunks.append((request, num_tokens))
            budget = None if budget is None else budget - num_tokens
        return chunks
