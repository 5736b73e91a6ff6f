"""A step recorded in a CUDA graph and replayed over another step's numbers, as an engine runs its decode.

In: a built backend, a batch, and how to run and how to change the step. Out: nothing; the replay's output lies where
the run writes it. A fault of the GPU shows here, not in the next case.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

__all__ = ["replay", "synchronize"]

Step = TypeVar("Step")


class _Sized(Protocol):
    @property
    def num_rows(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...


Planned = TypeVar("Planned", bound=_Sized, contravariant=True)


class _Planner(Protocol[Planned, Step]):
    # the half of `AttentionBackend` and of `LinearBackend` that is alike
    def plan(self, batch: Planned, *, state: Step | None = None, capture: bool = False) -> Step: ...


def replay(
    backend: _Planner[Planned, Step],
    batch: Planned,
    run: Callable[[Step], object],
    change: Callable[[], Planned],
    out: Tensor,
) -> None:
    """Capture `run` of a planned step; let `change` write another step to the same addresses and answer its batch;
    replay what was recorded. `out` is what `run` writes: NaN before the replay."""
    if hasattr(backend, "init_graphs"):
        backend.init_graphs(batch.num_rows, batch.num_tokens)
    state = backend.plan(batch, capture=True)
    run(state)
    synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        if hasattr(backend, "replan"):
            backend.replan(state)
        run(state)
    backend.plan(change(), state=state)
    out.fill_(float("nan"))
    # what a plan dropped is written over before a graph that still reads it runs
    spoilt = [torch.full_like(out, float("nan")) for _ in range(64)]
    graph.replay()
    synchronize()
    del spoilt


def synchronize() -> None:
    """Let a fault of a GPU show where it happened."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
