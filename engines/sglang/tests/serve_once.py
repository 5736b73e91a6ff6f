"""The child of a serving test: one SGLang engine, its tokens, and what its scheduler says of itself, as one JSON file.

Run as a program, because SGLang spawns its processes from one: `python serve_once.py REQUEST.json ANSWER.json`.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

NUM_PROMPTS = 32
#: Fewer than most prompts have: they come in chunks, beside rows that decode.
CHUNK = 48
_ENGINE = {
    "dtype": "float32",
    "device": "cpu",
    "skip_tokenizer_init": True,
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "mem_fraction_static": 0.2,
    "max_total_tokens": 2048,
    "context_length": 512,
    "chunked_prefill_size": CHUNK,
    "max_running_requests": 8,
    "log_level": "info",
}


def prompts(vocab: int) -> list[list[int]]:
    """Prompts of 1 to 230 tokens; two thirds start with what others start with."""
    draw = random.Random(0)
    shared = [draw.randrange(3, vocab) for _ in range(140)]
    heads = [shared[: draw.choice([0, 130, 140])] for _ in range(NUM_PROMPTS)]
    return [[*head, *(draw.randrange(3, vocab) for _ in range(draw.randrange(1, 90)))] for head in heads]


def main(request: dict[str, object], probed: Path) -> dict[str, object]:
    """Serve every prompt greedily."""
    import sglang
    from sglang.srt.plugins import load_plugins

    if "parent_only" in request:
        # a plugin that this process finds and the processes it spawns do not
        sys.path.insert(0, request["parent_only"])
        load_plugins()
        sys.path.remove(request["parent_only"])
    engine = sglang.Engine(**{**_ENGINE, **request["engine"]})
    greedy = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    asked = [tokens[-request["longest"] :] for tokens in prompts(request["vocab"])[: request["count"]]]
    answers = engine.generate(input_ids=asked, sampling_params=greedy)
    engine.collective_rpc("backstamp_probe", path=str(probed))
    engine.shutdown()
    return {
        "tokens": [answer["output_ids"] for answer in answers],
        "cached": [answer["meta_info"]["cached_tokens"] for answer in answers],
        "accepted": [answer["meta_info"].get("spec_correct_drafts_histogram") for answer in answers],
        **json.loads(probed.read_text("utf-8")),
    }


if __name__ == "__main__":
    answer = Path(sys.argv[2])
    answer.write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_text("utf-8")), answer.with_name("probed"))))
