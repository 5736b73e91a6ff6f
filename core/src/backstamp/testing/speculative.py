"""The speculative engine: a draft proposes, the target verifies, all five phases run.

In: prompts, a target runner, a draft runner with its own cache, and the draft's per-step container. Out: greedy tokens
equal to plain decoding, and the mean accept length. Each round: draft (chain, or a tree of `topk` branches), verify all
proposals in one target step, accept the longest path the target agrees with, move its K and V into place, and let the
draft catch up by a `draft_extend`. It never accepts a token the target would not have chosen.

.. versionadded:: 0.1
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from backstamp.attention import AttentionBackend, DraftContainer, TreeMask
from backstamp.declarations import Phase
from backstamp.errors import BadInput
from backstamp.testing.admission import Request
from backstamp.testing.runner import Part, Row, Runner, last_of_rows

__all__ = ["Progress", "Speculated", "SpeculativeEngine", "branch_tree"]

#: Called after each round with the number of tokens that round produced.
Progress = Callable[[int], None]


class Speculated(NamedTuple):
    """Generated tokens, one list a prompt, and the mean number of tokens a verify step gave a request (0.0: none)."""

    tokens: list[list[int]]
    accept_length: float


@dataclass(slots=True)
class _Drafted(Request):
    """A request with the draft's side: its pages, and its logits `[vocab]` after the last token.

    Between rounds the target's cache holds every token but the last, the draft's cache holds them all.
    """

    draft_pages: list[int] = field(default_factory=list)
    draft_cached: int = 0
    draft_logits: Tensor = field(default_factory=lambda: torch.empty(0))


def branch_tree(num_rows: int, num_steps: int, topk: int, device: torch.device | str) -> TreeMask:
    """The verify tree: node 0 is the last accepted token, then branch by branch `num_steps` nodes each.

    A node sees the root, the nodes before it on its own branch, and itself: bool `[B, S, S]`, S = 1 + topk * num_steps.
    """
    nodes = topk * num_steps
    branch, depth = torch.arange(nodes) // num_steps, torch.arange(nodes) % num_steps
    seen = torch.zeros(1 + nodes, 1 + nodes, dtype=torch.bool)
    seen[:, 0] = True
    seen[1:, 1:] = (branch[:, None] == branch[None, :]) & (depth[:, None] >= depth[None, :])
    return TreeMask(kind="qlen", buffer=seen.to(device).expand(num_rows, -1, -1).contiguous())


class SpeculativeEngine:
    """Continuous batching with a draft model; `topk` 1 drafts a chain, more a tree of that many branches.

    Attributes:
        draft_decode: container of `num_steps - 1` backends, None for one step.
        draft_extend: backend of that phase; the draft's prefill comes from `draft.backends`.
        max_rows: requests in flight at most. wave: requests that may arrive before each round.
    """

    def __init__(
        self,
        target: Runner,
        draft: Runner,
        draft_decode: DraftContainer[object] | None,
        draft_extend: AttentionBackend[object],
        *,
        num_steps: int,
        topk: int = 1,
        max_rows: int = 16,
        wave: int = 4,
        progress: Progress | None = None,
    ) -> None:
        if min(num_steps, topk, max_rows, wave) < 1 or topk > draft.decoder.config.vocab:
            needed = f"num_steps, topk, max_rows, wave of 1 or more, topk up to {draft.decoder.config.vocab}"
            found = f"{num_steps}, {topk}, {max_rows}, {wave}"
            raise BadInput("speculative engine", needed=needed, found=found)
        steps = 0 if draft_decode is None else len(draft_decode.attn_backends)
        if steps != num_steps - 1:
            raise BadInput("speculative engine", needed=f"{num_steps - 1} draft decode backends", found=str(steps))
        self.target, self.draft = target, draft
        self.draft_decode, self.draft_extend = draft_decode, draft_extend
        self.num_steps, self.topk = num_steps, topk
        self.max_rows, self.wave, self.progress = max_rows, wave, progress

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int | Sequence[int]) -> Speculated:
        """Greedy continuations, one a prompt. Raises `BadInput` for a request that could never run."""
        vocab = self.target.decoder.config.vocab
        requests = [
            _Drafted(request.tokens, request.prompt_len, request.max_new_tokens)
            for request in Request.accept(prompts, max_new_tokens, vocab)
        ]
        pools = (self.target.pool.num_pages, self.draft.pool.num_pages)
        for number, request in enumerate(requests):
            target_pages, draft_pages = self._pages_of(request)
            if target_pages > pools[0] or draft_pages + self._scratch_pages > pools[1]:
                raise BadInput(
                    f"speculative engine, request {number}",
                    needed=f"{target_pages} target and {draft_pages + self._scratch_pages} draft KV pages",
                    found=f"pools of {pools[0]} and {pools[1]}",
                )
        waiting, running, lengths = deque(requests), list[_Drafted](), list[int]()
        while waiting or running:
            before = sum(len(request.tokens) for request in requests)
            arrived = self._admit(waiting, len(running))
            if arrived:
                self._prefill(arrived)
            running = self._unfinished([*running, *arrived])
            if running:
                lengths += self._round(running)
                running = self._unfinished(running)
            if running:
                self._catch_up("draft_extend", running, self.draft_extend)
            if self.progress is not None:
                self.progress(sum(len(request.tokens) for request in requests) - before)
        return Speculated([request.generated for request in requests], sum(lengths) / max(len(lengths), 1))

    def _pages_of(self, request: Request) -> tuple[int, int]:
        """Pages of the target, verify nodes included, and of the draft, scratch apart."""
        num_tokens = request.prompt_len + request.max_new_tokens
        nodes = self.topk * self.num_steps
        return self.target.pool.pages_for(num_tokens + nodes - 1), self.draft.pool.pages_for(num_tokens)

    @property
    def _scratch_pages(self) -> int:
        """Draft pages one request's branches hold during a round, at most."""
        drafted = self.num_steps - 1
        return self.topk * self.draft.pool.pages_for(self.draft.pool.page_size - 1 + drafted) if drafted else 0

    def _admit(self, waiting: deque[_Drafted], num_running: int) -> list[_Drafted]:
        arrived = list[_Drafted]()
        while waiting and len(arrived) < min(self.wave, self.max_rows - num_running):
            target_pages, draft_pages = self._pages_of(waiting[0])
            scratch = self._scratch_pages * (num_running + len(arrived) + 1)
            if target_pages > self.target.pool.num_free or draft_pages + scratch > self.draft.pool.num_free:
                break
            request = waiting.popleft()
            request.pages = self.target.pool.allocate(target_pages)
            request.draft_pages = self.draft.pool.allocate(draft_pages)
            arrived.append(request)
        return arrived

    def _unfinished(self, requests: Sequence[_Drafted]) -> list[_Drafted]:
        for request in requests:
            if request.finished:
                self.target.pool.release(request.pages)
                self.draft.pool.release(request.draft_pages)
        return [request for request in requests if not request.finished]

    def _prefill(self, arrived: Sequence[_Drafted]) -> None:
        """Both models read the prompts; the draft also reads the first token, which the target has chosen by then."""
        rows = [Row(request.tokens, request.pages, 0) for request in arrived]
        logits = self.target.forward(rows, self.target.plan(self.target.batch("prefill", rows)))
        for request, token in zip(arrived, last_of_rows(logits, rows).argmax(-1).tolist(), strict=True):
            request.cached = request.prompt_len
            request.tokens.append(token)
        self._catch_up("prefill", arrived, self.draft.backends.serving_attention_backend("prefill"))

    def _catch_up(self, phase: Phase, requests: Sequence[_Drafted], backend: AttentionBackend[object]) -> None:
        """The draft reads every token it has not cached yet: a ragged step."""
        rows = [Row(r.tokens[r.draft_cached :], r.draft_pages, r.draft_cached) for r in requests]
        logits = self.draft.forward(rows, self.draft.plan(self.draft.batch(phase, rows), backend))
        for request, last in zip(requests, last_of_rows(logits, rows), strict=True):
            request.draft_cached, request.draft_logits = len(request.tokens), last

    def _round(self, running: Sequence[_Drafted]) -> list[int]:
        """Draft, verify and accept once; answer how many tokens each request won."""
        drafted = self._draft(running)
        choices = self._verify(running, drafted)
        return [self._accept(*turn) for turn in zip(running, drafted, choices, strict=True)]

    def _draft(self, running: Sequence[_Drafted]) -> list[list[list[int]]]:
        """Propose `topk` branches of `num_steps` tokens a request; the best first tokens, each continued greedily."""
        first = torch.stack([request.draft_logits for request in running]).topk(self.topk).indices.tolist()
        branches = [[token] for tokens in first for token in tokens]
        if self.draft_decode is not None:
            requests = [request for request in running for _ in range(self.topk)]
            forks = [self._fork(request) for request in requests]
            # lengths are known ahead, tokens are not: every step is planned before the first runs
            steps = [
                [Row([0], pages, r.draft_cached + step) for r, (pages, _) in zip(requests, forks, strict=True)]
                for step in range(self.num_steps - 1)
            ]
            batches = [self.draft.batch("draft_decode", rows) for rows in steps]
            states = {group: self.draft_decode.plan(batches) for group in self.draft.groups}
            for step, backend in enumerate(self.draft_decode.attn_backends):
                rows = [replace(row, tokens=branch[-1:]) for row, branch in zip(steps[step], branches, strict=True)]
                part = Part(backend, batches[step], {group: planned[step] for group, planned in states.items()})
                choices = self.draft.forward(rows, part).argmax(-1).tolist()
                for branch, token in zip(branches, choices, strict=True):
                    branch.append(token)
            for _, own in forks:
                self.draft.pool.release(own)
        return [branches[start : start + self.topk] for start in range(0, len(branches), self.topk)]

    def _fork(self, request: _Drafted) -> tuple[list[int], list[int]]:
        """Pages of one branch, and which of them are its own: full prefix pages are shared, the partial one copied."""
        pool, cached = self.draft.pool, request.draft_cached
        shared = cached // pool.page_size
        own = pool.allocate(pool.pages_for(cached + self.num_steps - 1) - shared)
        pages = [*request.draft_pages[:shared], *own]
        partial = (shared * pool.page_size, cached)
        pool.copy_tokens(pool.slots(request.draft_pages, *partial), pool.slots(pages, *partial))
        return pages, own

    def _verify(self, running: Sequence[_Drafted], drafted: Sequence[Sequence[Sequence[int]]]) -> list[list[int]]:
        """The target's choice after every node, `[B][S]`, in one step over the last token and all branches."""
        depths = [0, *(depth + 1 for _ in range(self.topk) for depth in range(self.num_steps))]
        rows = [
            Row(
                [request.tokens[-1], *(token for path in paths for token in path)],
                request.pages,
                request.cached,
                depths,
            )
            for request, paths in zip(running, drafted, strict=True)
        ]
        tree = branch_tree(len(rows), self.num_steps, self.topk, self.target.pool.device) if self.topk > 1 else None
        logits = self.target.forward(rows, self.target.plan(self.target.batch("verify", rows, tree=tree)))
        choices: list[list[int]] = logits.argmax(-1).view(len(rows), -1).tolist()
        return choices

    def _accept(self, request: _Drafted, paths: Sequence[Sequence[int]], choices: Sequence[int]) -> int:
        """Keep the longest path the target chose itself and the token after it; answer how many tokens that is."""
        matches = []
        for branch, path in enumerate(paths):
            first = 1 + branch * self.num_steps
            wanted = [choices[0], *choices[first : first + self.num_steps]]
            agreed = next((d for d, token in enumerate(path) if token != wanted[d]), self.num_steps)
            matches.append((agreed, first, [*path[:agreed], wanted[agreed]]))
        agreed, first, tokens = max(matches, key=lambda match: match[0])
        pool, cached = self.target.pool, request.cached
        source = pool.slots(request.pages, cached + first, cached + first + agreed)
        pool.copy_tokens(source, pool.slots(request.pages, cached + 1, cached + 1 + agreed))
        # the root is cached by now too; the last token, the target's own, is not
        request.cached += 1 + agreed
        request.tokens += tokens
        del request.tokens[request.prompt_len + request.max_new_tokens :]
        return len(tokens)
