"""A program of its own: resolve a key on this machine, build it, run every phase of it, and print what came of it.

    python served.py KEY [DISTRIBUTION:NAME]

Out: JSON. {"error", "message"} where the key is refused; else for each phase the stamp that the built object carries
and its relative error against float64. The second argument says whose a contested name is.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import torch

from backstamp.catalogue import build_catalogue
from backstamp.construction import RunnerShape, build
from backstamp.discovery import discover
from backstamp.draft import DraftBackendFactory
from backstamp.engine import EngineFacts
from backstamp.errors import BackstampError
from backstamp.host import this_host
from backstamp.launch import Requests, make_launch
from backstamp.model import model_from_config
from backstamp.policy import Policy
from backstamp.resolution import resolve
from backstamp.stamp import parts_of, read_stamp
from backstamp.testing.batches import SMALL_LAYER, make_batch
from backstamp.testing.reference import reference_attention, relative_error

#: Head dims of 64, which all the kernels asked for have.
LAYER = replace(SMALL_LAYER, head_dim=64, v_head_dim=64, scale=64**-0.5)
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "dtype": "float32",
    "hidden_size": 128,
    "vocab_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": LAYER.num_qo_heads,
    "num_key_value_heads": LAYER.num_kv_heads,
    "head_dim": LAYER.head_dim,
}
#: Ragged rows with a cached prefix, an empty row, and pages in between that hold NaN.
STEPS = {
    "prefill": ([5, 0, 1], [37, 0, 20]),
    "decode": ([1, 1, 0], [40, 3, 0]),
    "verify": ([3, 3, 3], [30, 17, 3]),
    "draft_decode": ([1, 1], [18, 33]),
    "draft_extend": ([4, 2], [21, 2]),
}


def main(key: str, *duplicates: str) -> dict[str, object]:
    """What came of one key, for a target and for a draft."""
    catalogue = build_catalogue(discover())
    policy = Policy(duplicates=frozenset(duplicates))
    answer: dict[str, object] = {}
    for role, asked in (("target", "attention_backend"), ("draft", "draft_attention_backend")):
        requests = Requests(**{asked: key, "speculative_algorithm": "EAGLE", "speculative_num_steps": 3})
        launch = make_launch(requests, policy=policy, role=role)
        try:
            plan = resolve(launch, EngineFacts(), model_from_config(CONFIG), this_host(), catalogue, role=role)
            backends = build(plan, RunnerShape(layers=(LAYER,)), catalogue)
        except BackstampError as error:
            return {"error": type(error).__name__, "message": error.message}
        draft = DraftBackendFactory(backends) if role == "draft" else None
        for row in plan.running:
            if (draft is None) == row.phase.startswith("draft_"):
                continue
            built = draft.create_decode_backend() if row.phase == "draft_decode" else None
            built = built if built is not None else backends.serving_attention_backend(row.phase)
            parts = list(parts_of(built))
            answer[row.phase] = {
                "kernels": sorted({read_stamp(part).kernel for part in parts}),
                "stamp": read_stamp(built).as_json(row.phase),
                "error": max(error_of(part, row.phase, plan.page_size) for part in parts if hasattr(part, "forward")),
            }
    return answer


def error_of(backend: object, phase: str, page_size: int) -> float:
    """The relative error of one step of one phase."""
    q_lens, kv_lens = STEPS[phase]
    step = make_batch(q_lens, kv_lens, phase=phase, page_size=page_size, layer=LAYER, seed=3)
    truth, _ = reference_attention(step.q, step.kv, step.layer, step.batch)
    out = backend.forward(step.q, step.kv, step.layer, backend.plan(step.batch))
    assert torch.isfinite(out).all()
    return relative_error(out, truth)


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
