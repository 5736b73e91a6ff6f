"""What a built backend must not do besides being quick: wait for the device, or answer otherwise out of a CUDA graph.

In: a built backend over a step, on a GPU. Out: words, empty or "same" where all is well; where calls are not
deterministic, how far a replay is off. torch tells a wait (`torch.cuda.set_sync_debug_mode`); a library that waits past
torch is not seen here.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from built import Serving
from measuring import bound_of
from steps import AttentionStep, LinearStep
from truth import worst_of

__all__ = ["graph_replay", "replay_words", "waits_in"]


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
    """How a replay compares with an eager call of the same planned state: as `replay_words` has it."""
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
    return replay_words(answers[0], answers[1], serving.out, bound_of(step))


def replay_words(first: Tensor, second: Tensor, replayed: Tensor, bound: float) -> str:
    """ "same" where a replay is what two eager calls answered, bit for bit; where those differ, how near it is to the
    first of them, and "differs" past a bound on a token's relative error."""
    if torch.equal(first, second):
        wrong = int((replayed != first).sum())
        return "same" if not wrong else f"{wrong} of {replayed.numel()} numbers differ"
    off = worst_of(replayed, first)
    if not off <= bound:
        return f"not deterministic, and a replay differs by {off:.1e}, more than {bound:.0e}"
    return f"not deterministic, a replay within {off:.1e}"


def _restore(step: AttentionStep | LinearStep) -> None:
    if isinstance(step, LinearStep):
        step.restore()
