"""What a built backend must not do besides being quick: wait for the device, or answer otherwise out of a CUDA graph.

In: a built backend over a step, on a GPU. Out: words, empty or "same" where all is well. torch tells a wait
(`torch.cuda.set_sync_debug_mode`); a library that waits past torch is not seen here.
"""

from __future__ import annotations

from typing import Literal

import torch

from built import Serving
from steps import AttentionStep, LinearStep

__all__ = ["graph_replay", "waits_in"]


def waits_in(serving: Serving, part: Literal["plan", "forward"]) -> str:
    """What torch says where `plan` or `forward` waits for the device, once all is compiled; empty where none does."""
    state = serving.plan()
    serving.forward(state)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        if part == "plan":
            serving.plan()
        else:
            serving.forward(state)
    except RuntimeError as waited:
        if "synchroniz" not in str(waited):
            raise
        return str(waited).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def graph_replay(serving: Serving, step: AttentionStep | LinearStep) -> str:
    """How a replay compares with an eager call of the same planned state, bit for bit: "same", "not deterministic"
    where two eager calls differ, or what differs."""
    if serving.offer.graph == "never":
        return "no graph declared"
    backend = serving.backend
    if hasattr(backend, "init_graphs"):
        backend.init_graphs(step.batch.num_rows, step.batch.num_tokens)
    state = serving.plan(capture=True)
    answers = []
    for _ in range(2):
        _restore(step)
        answers.append(serving.forward(state).clone())
    _restore(step)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        if hasattr(backend, "replan"):
            backend.replan(state)
        serving.forward(state)
    serving.out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    if not torch.equal(*answers):
        return "not deterministic"
    wrong = int((serving.out != answers[0]).sum())
    return "same" if not wrong else f"{wrong} of {serving.out.numel()} numbers differ"


def _restore(step: AttentionStep | LinearStep) -> None:
    if isinstance(step, LinearStep):
        step.restore()
