"""The child of a serving test: one vLLM engine, its tokens, and what its worker says of itself, as one JSON file.

Run as a program, because vLLM spawns its processes from one: `python serve_once.py REQUEST.json ANSWER.json`.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

NUM_PROMPTS = 32
#: Fewer than most prompts have: they come in chunks, beside rows that decode.
CHUNK = 48


def prompts(vocab: int) -> list[list[int]]:
    """Prompts of 1 to 230 tokens; a third starts with what others start with, longer than a page."""
    draw = random.Random(0)
    shared = [draw.randrange(3, vocab) for _ in range(140)]
    heads = [shared[: draw.choice([0, 130, 140])] for _ in range(NUM_PROMPTS)]
    return [[*head, *(draw.randrange(3, vocab) for _ in range(draw.randrange(1, 90)))] for head in heads]


def touched(worker: object) -> dict[str, object]:
    """What of Backstamp a worker has met."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    context = worker.model_runner.vllm_config.compilation_config.static_forward_context
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum

    layers = [layer for layer in context.values() if isinstance(layer, Attention)]
    return {
        "impls": sorted({f"{type(layer.impl).__module__}.{type(layer.impl).__name__}" for layer in layers}),
        "decode_first": worker.model_runner.reorder_batch_threshold,
        "overridden": [
            member.name
            for member in (AttentionBackendEnum.CPU_ATTN, MLAPrefillBackendEnum.CPU)
            if member.is_overridden()
        ],
        "replaced": sorted(op_registry_oot),
        # an editable plugin's declarations are read from its plugin.py
        "modules": sorted(
            name
            for name in sys.modules
            if name.startswith(("backstamp_vllm.", "backstamp_cpu.")) and not name.endswith(".plugin")
        ),
    }


def stamps(worker: object) -> dict[str, object]:
    """The stamps of a worker's layers; a module of ours is imported for it, so it is asked last."""
    from backstamp_vllm.stamps import stamps_of

    return stamps_of(worker)


def distances(worker: object) -> list[float]:
    """How far a hybrid model's layers are from vLLM's own."""
    from linear_steps import distances

    return distances(worker)


def main(request: dict[str, object]) -> dict[str, object]:
    """Serve every prompt greedily."""
    from vllm import LLM, SamplingParams

    if "parent_only" in request:
        # a plugin that this process finds and the processes it spawns do not
        from backstamp_vllm.names import offer_names

        sys.path.insert(0, request["parent_only"])
        offer_names()
        sys.path.remove(request["parent_only"])
    if "attention_config" in request["llm"]:
        # `LLM` reads it before it loads plugins, `vllm serve` after
        from vllm.plugins import load_general_plugins

        load_general_plugins()
    usual = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_batched_tokens": CHUNK,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 64 << 20,
        "seed": 0,
    }
    llm = LLM(**{**usual, **request["llm"]})
    asked = [{"prompt_token_ids": tokens} for tokens in prompts(request["vocab"])]
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    answers = llm.generate(asked, greedy, use_tqdm=False)
    return {
        "tokens": [list(answer.outputs[0].token_ids) for answer in answers],
        "cached": [answer.num_cached_tokens for answer in answers],
        "touched": llm.collective_rpc(touched)[0],
        "stamps": llm.collective_rpc(stamps)[0],
        "distances": llm.collective_rpc(distances)[0] if request["drive_linear"] else [],
    }


if __name__ == "__main__":
    answer = main(json.loads(Path(sys.argv[1]).read_text("utf-8")))
    Path(sys.argv[2]).write_text(json.dumps(answer), "utf-8")
