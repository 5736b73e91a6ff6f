"""How `bench/timing.py` replays a call that a graph has recorded."""

from __future__ import annotations

import weakref

import torch

from tests.bench_modules import bench_modules


class Graph:
    """Counts its replays, and holds nothing, as a CUDA graph does."""

    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        """What a CUDA graph has under this name."""
        self.replays += 1


def test_a_replay_keeps_the_tensors_of_its_call_alive() -> None:
    """A graph writes to their addresses, whoever has the memory by then."""
    graph, tensor = Graph(), torch.zeros(2)
    seen = weakref.ref(tensor)
    with bench_modules("timing") as (timing,):
        replay = timing.Replay(graph, tensor.neg_)
    del tensor
    replay()
    replay()
    assert seen() is not None
    # the call itself is not made
    assert (graph.replays, seen().tolist()) == (2, [0.0, 0.0])
    del replay
    assert seen() is None
