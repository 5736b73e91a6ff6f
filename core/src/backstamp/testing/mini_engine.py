"""The mini engine: a whole engine around Backstamp in one file, which docs/integrate.md walks through.

In: a decoder and what an operator asked for. Out: greedy tokens. It admits requests while pages are free, and a step
serves the requests that decode beside chunks of prompts. It calls Backstamp by its public names alone and never looks
inside a backend.

.. versionadded:: 0.1
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

import backstamp
from backstamp.testing.admission import Request
from backstamp.testing.decoder import Decoder

__all__ = ["ENGINE", "MAX_ROWS", "POOL_TOKENS", "MiniEngine", "Part", "build_backends", "serve", "why"]

#: What this engine hands a kernel: page tables over a paged cache, lengths on the host too. It captures no CUDA graph.
ENGINE = backstamp.EngineFacts(
    name="mini engine",
    index_forms=frozenset({"page_table"}),
    kv_forms=frozenset({"paged"}),
    inputs=frozenset({"host_lens"}),
    graph="never",
)
#: Requests in flight and prompt tokens of a step, at most; tokens the cache holds.
MAX_ROWS, CHUNK_TOKENS, POOL_TOKENS = 10, 32, 2048


def serve(
    requests: backstamp.Requests,
    model: backstamp.ModelFacts,
    host: backstamp.HostFacts,
    decoder: Decoder,
    log: Callable[[str], None] = print,
) -> MiniEngine:
    """From an operator's flags to an engine. Raises `BackstampError` for what cannot be served as asked."""
    catalogue = backstamp.build_catalogue(backstamp.discover())
    plan = backstamp.resolve(backstamp.make_launch(requests), ENGINE, model, host, catalogue)
    log(why(plan))
    backends = build_backends(plan, decoder, catalogue)
    for row in plan.running:
        for at in range(len(row.groups)):
            stamp = backstamp.read_stamp(backends.serving_attention_backend(row.phase, at))
            log(f"{row.phase} is served by {stamp.kernel} of {stamp.plugin.distribution} {stamp.plugin.version}")
    return MiniEngine(decoder, backends)


def why(plan: backstamp.Plan) -> str:
    """Text for the log: what runs each phase and who decided, what was refused and why, what to heed."""
    lines = [f"{plan.role} of {plan.model}: pages of {plan.page_size} tokens, digest {plan.digest[:12]}"]
    refused: dict[str, list[str]] = {}
    for row in plan.running:
        kernels = dict.fromkeys(group.kernel for group in row.groups)
        lines.append(f"{row.phase}: {', '.join(kernels)} ({row.source})")
        for verdict in row.verdicts:
            if not verdict.accepted:
                refused.setdefault(f"not {verdict.kernel}: {verdict.message}", []).append(row.phase)
    lines += [f"{text} ({', '.join(phases)})" for text, phases in refused.items()]
    lines += [f"warning {warning.code}: {warning.text}" for warning in plan.warnings]
    return "\n".join(lines)


def build_backends(plan: backstamp.Plan, decoder: Decoder, catalogue: backstamp.Catalogue) -> backstamp.RunnerBackends:
    """Build and stamp what the plan names, large enough for every step to come."""
    shape = backstamp.RunnerShape(
        device=str(decoder.device),
        layers=decoder.layer_specs,
        max_rows=MAX_ROWS * plan.topk,
        max_tokens=POOL_TOKENS,
        max_pages=POOL_TOKENS // plan.page_size,
        max_kv_len=POOL_TOKENS,
    )
    return backstamp.build(plan, shape, catalogue)


class Part(NamedTuple):
    """A phase's share of a step, and by layer the backend and the state it is called with."""

    batch: backstamp.Batch
    calls: dict[int, tuple[backstamp.AttentionBackend[object], object]]


@dataclass(slots=True)
class MiniEngine:
    """Continuous batching with greedy decoding, over one paged cache.

    `cache` is `[layers, K or V, pages, page_size, heads, dim]`; pages are handed out in shuffled order.
    """

    decoder: Decoder
    backends: backstamp.RunnerBackends
    num_tokens: int = POOL_TOKENS
    chunk_tokens: int = CHUNK_TOKENS
    max_rows: int = MAX_ROWS
    cache: Tensor = field(init=False)
    free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        # a step larger than the kernels were built for would write past their workspaces
        if not (1 <= self.max_rows <= MAX_ROWS and 1 <= self.chunk_tokens <= POOL_TOKENS >= self.num_tokens):
            found = f"{self.max_rows}, {self.chunk_tokens} and {self.num_tokens}"
            raise ValueError(f"needs 1..{MAX_ROWS} rows, chunks and a cache of up to {POOL_TOKENS} tokens, got {found}")
        layers, page_size = self.decoder.layer_specs, self.backends.plan.page_size
        shape = (len(layers), 2, self.num_tokens // page_size, page_size, layers[0].num_kv_heads, layers[0].head_dim)
        # NaN shows a kernel that reads what nobody wrote
        self.cache = torch.full(shape, torch.nan, dtype=self.decoder.dtype, device=self.decoder.device)
        self.free = random.Random(0).sample(range(shape[2]), shape[2])

    def pages_for(self, request: Request) -> int:
        """Pages of a whole request; its last token is never read."""
        return -(-(request.prompt_len + request.max_new_tokens - 1) // self.backends.plan.page_size)

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int | Sequence[int]) -> list[list[int]]:
        """Greedy continuations, one a prompt. Raises `ValueError` for a request that could never run."""
        requests = Request.accept(prompts, max_new_tokens, self.decoder.config.vocab)
        for number, needed in enumerate(map(self.pages_for, requests)):
            if needed > self.cache.shape[2]:
                raise ValueError(f"request {number}: needs {needed} KV pages, got a cache of {self.cache.shape[2]}")
        waiting, running = deque(requests), list[Request]()
        while waiting or running:
            while waiting and len(running) < self.max_rows and self.pages_for(waiting[0]) <= len(self.free):
                running.append(waiting.popleft())
                running[-1].pages = [self.free.pop() for _ in range(self.pages_for(running[-1]))]
            self.step(running)
            for request in running:
                if request.finished:
                    self.cache[:, :, request.pages] = torch.nan
                    self.free[:0] = request.pages
            running = [request for request in running if not request.finished]
        return [request.generated for request in requests]

    def step(self, running: Sequence[Request]) -> None:
        """A token for each request that decodes, and for prompts a chunk, oldest first."""
        budget = self.chunk_tokens
        for request in running:
            left = request.prompt_len - request.cached
            request.count = min(left, budget) if left > 0 else 1
            budget -= request.count if left > 0 else 0
        decoding = [request for request in running if request.cached >= request.prompt_len]
        filling = [request for request in running if request.cached < request.prompt_len and request.count]
        batches = [self.batch("decode", decoding)] if decoding else []
        batches += [self.batch("prefill", filling)] if filling else []
        rows = [*decoding, *filling]
        logits = self.forward(rows, [self.plan(batch) for batch in batches])
        last = [end - 1 for end in accumulate(request.count for request in rows)]
        for request, token in zip(rows, logits[last].argmax(-1).tolist(), strict=True):
            request.cached += request.count
            # a prompt read in part says nothing yet
            if request.cached == len(request.tokens):
                request.tokens.append(token)

    def batch(self, phase: Literal["prefill", "decode"], rows: Sequence[Request]) -> backstamp.Batch:
        """Describe one phase's rows: each reads `count` new tokens after those the cache holds."""
        page_size, device = self.backends.plan.page_size, self.cache.device
        width = max(len(row.pages) for row in rows)
        table = torch.tensor([row.pages + [-1] * (width - len(row.pages)) for row in rows], dtype=torch.int32)
        slots = [row.pages[i // page_size] * page_size + i % page_size for row in rows for i in row.positions]
        qo_indptr = torch.tensor([0, *accumulate(row.count for row in rows)], dtype=torch.int32)
        kv_lens = torch.tensor([row.positions.stop for row in rows], dtype=torch.int32)
        return backstamp.Batch(
            phase=phase,
            num_rows=len(rows),
            num_tokens=len(slots),
            max_q_len=max(row.count for row in rows),
            max_kv_len=max(row.positions.stop for row in rows),
            decode_q_len=1 if phase == "decode" else None,
            qo_indptr=qo_indptr.to(device),
            kv_lens=kv_lens.to(device),
            index=backstamp.KVIndex(page_size=page_size, page_table=table.to(device)),
            slot_mapping=torch.tensor(slots, device=device),
            qo_indptr_host=qo_indptr,
            kv_lens_host=kv_lens,
        )

    def plan(self, batch: backstamp.Batch) -> Part:
        """Plan a batch once for each kernel and KV group."""
        part = Part(batch, {})
        for at, group in enumerate(self.backends.plan.phase(batch.phase).groups):
            built = self.backends.serving_attention_backend(batch.phase, at)
            backend = cast("backstamp.AttentionBackend[object]", built)
            layers = [layer for layer in self.decoder.layer_specs if layer.layer_id in group.layers]
            states = {kv_group: backend.plan(batch) for kv_group in {layer.group for layer in layers}}
            part.calls.update({layer.layer_id: (backend, states[layer.group]) for layer in layers})
        return part

    def forward(self, rows: Sequence[Request], parts: Sequence[Part]) -> Tensor:
        """Run the decoder once over all rows: logits `[T, vocab]`."""
        slots = torch.cat([part.batch.slot_mapping for part in parts if part.batch.slot_mapping is not None])

        def attend(q: Tensor, k: Tensor, v: Tensor, layer: backstamp.LayerSpec) -> Tensor:
            keys, values = self.cache[layer.layer_id]
            keys.flatten(0, 1)[slots], values.flatten(0, 1)[slots] = k, v
            out, start = torch.full_like(q, torch.nan), 0
            for part in parts:
                share = slice(start, start := start + part.batch.num_tokens)
                self.attend(part, layer, q[share], backstamp.PagedKV(k=keys, v=values), out[share])
            return out

        tokens = torch.tensor([request.tokens[i] for request in rows for i in request.positions], device=slots.device)
        positions = torch.tensor([i for request in rows for i in request.positions], device=slots.device)
        logits = self.decoder.forward(tokens, positions, attend)
        if not bool(logits.isfinite().all()):
            raise FloatingPointError("mini engine: logits are not finite")
        return logits

    def attend(self, part: Part, layer: backstamp.LayerSpec, q: Tensor, kv: backstamp.PagedKV, out: Tensor) -> None:
        """One layer of one part: `q [T, Hq, Dk]` to `out [T, Hq, Dv]`, written in place."""
        backend, state = part.calls[layer.layer_id]
        backend.forward(q, kv, layer, state, out=out)
