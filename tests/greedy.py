"""Greedy tokens of small seeded decoders, by dense recomputation and by the mini engine over backends a test made.

In: a model's name. Out: tokens to compare, or an engine whose kernels were planned, built and stamped like any other's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from backstamp.attention import Batch, LayerSpec, PagedKV
from backstamp.construction import RunnerShape, build
from backstamp.factories import Built
from backstamp.host import load_host
from backstamp.launch import Requests, make_launch
from backstamp.policy import Policy
from backstamp.resolution import resolve
from backstamp.testing.decoder import Decoder, DecoderConfig
from backstamp.testing.demo import facts_of_decoder
from backstamp.testing.dists import cpu_offer
from backstamp.testing.fakes import catalogue_of, fake_plugin
from backstamp.testing.mini_engine import ENGINE, MiniEngine
from backstamp.testing.reference import reference_attention

__all__ = [
    "MODELS",
    "NEW_TOKENS",
    "PROMPT_LENS",
    "ReferenceBackend",
    "decoder",
    "dense_tokens",
    "engine",
    "prompts",
]

LLAMA = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "hidden_size": 256, "model_type": "llama"}
GPT_OSS = {
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "rope_parameters": {"rope_type": "yarn", "factor": 32.0, "rope_theta": 150000.0},
    "rms_norm_eps": 1e-5,
}
GEMMA2 = {
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 4096,
    "layer_types": ["sliding_attention", "full_attention"] * 13,
    # the real cap is 50; a tighter one bends more logits of so small a model
    "attn_logit_softcapping": 10.0,
}
MODELS = {"llama": LLAMA, "gpt-oss": GPT_OSS, "gemma2": GEMMA2}
PROMPT_LENS = (1, 5, 17, 26, 9, 12, 3, 14)
NEW_TOKENS = (12, 8, 10, 7, 5, 9, 14, 1)


@dataclass
class ReferenceBackend:
    """Serves the contract by float64 reference; `spoil` alters what it is asked, to see the tests red."""

    spoil: Callable[[Batch, LayerSpec], tuple[Batch, LayerSpec]] = lambda batch, layer: (batch, layer)
    gain: float = 1.0
    batches: list[Batch] = field(default_factory=list)
    layers: list[int] = field(default_factory=list)

    def plan(self, batch: Batch, *, state: object = None, capture: bool = False) -> Batch:
        self.batches.append(batch)
        return batch

    def forward(self, q: Tensor, kv: PagedKV, layer: LayerSpec, state: Batch, *, out: Tensor) -> Tensor:
        self.layers.append(layer.layer_id)
        batch, layer = self.spoil(state, layer)
        return out.copy_(self.gain * reference_attention(q, kv, layer, batch)[0])


def decoder(model: str, layers: int = 2) -> Decoder:
    """A small random model, one seed."""
    config = DecoderConfig.from_config(MODELS[model], layers=layers, hidden=64, vocab=128, max_window_tokens=6)
    return Decoder(config, seed=1)


def prompts() -> list[list[int]]:
    """Ragged prompts, shorter and longer than a page and a window."""
    draw = random.Random(0)
    return [[draw.randrange(128) for _ in range(length)] for length in PROMPT_LENS]


def engine(
    target: Decoder,
    *backends: object,
    page_size: int = 4,
    features: Sequence[frozenset[str]] = (),
    **knobs: int,
) -> MiniEngine:
    """The mini engine over the given backends, one kernel each: `kernel_0` has the highest priority.

    `features` are those of each kernel; unset, every kernel has them all.
    """
    built = dict(enumerate(backends or (ReferenceBackend(),)))
    everything = frozenset({"window", "sinks", "softcap"})
    offers = [
        replace(cpu_offer(f"kernel_{at}", "fake"), priority=90 - at, features=features[at] if features else everything)
        for at in built
    ]
    catalogue = catalogue_of(fake_plugin("fake", offers))
    model = facts_of_decoder({"model_type": "llama"}, target.config)
    launch = make_launch(Requests(page_size=page_size), policy=Policy(layers="per_layer"))
    plan = resolve(launch, ENGINE, model, load_host("epyc"), catalogue)

    def load(row: object, catalogue: object) -> Callable[[object], Built]:
        return lambda request: Built(request.kernel, built[int(request.kernel[-1])], request.settings)

    return MiniEngine(target, build(plan, RunnerShape(layers=target.layer_specs), catalogue, load=load), **knobs)


def dense_attend(q: Tensor, k: Tensor, v: Tensor, layer: LayerSpec) -> Tensor:
    """Whole-sequence attention with one masked softmax: no cache, no batch, no contract."""
    share = layer.num_qo_heads // layer.num_kv_heads
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    logits = torch.einsum("qhd,khd->hqk", q, k) * layer.scale
    if layer.softcap:
        logits = layer.softcap * (logits / layer.softcap).tanh()
    seen = torch.ones(len(q), len(q), dtype=torch.bool).tril()
    if layer.window_left >= 0:
        seen = seen.triu(-layer.window_left)
    logits = logits.masked_fill(~seen, float("-inf"))
    if layer.sinks is not None:
        logits = torch.cat([logits, layer.sinks[:, None, None].expand(-1, len(q), 1)], dim=-1)
    return torch.einsum("hqk,khd->qhd", logits.softmax(-1)[..., : len(q)], v)


def dense_tokens(model: Decoder, new_tokens: tuple[int, ...] = NEW_TOKENS) -> list[list[int]]:
    """Greedy continuations of `prompts()`, each token from the whole sequence anew."""
    answers = []
    for prompt, limit in zip(prompts(), new_tokens, strict=True):
        tokens = list(prompt)
        for _ in range(limit):
            logits = model.forward(torch.tensor(tokens), torch.arange(len(tokens)), dense_attend)
            tokens.append(int(logits[-1].argmax()))
        answers.append(tokens[len(prompt) :])
    return answers
