"""How long calls take on this machine, and what the machine itself reaches: the limits figures are read against.

In: calls. Out: microseconds, medians over device events with the cache of the last level flushed between calls; on the
CPU by the clock. A slow call is made a few times and no more: time on a device is dear.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import importlib_metadata
import torch
from torch import Tensor

from backstamp.timers import time_on_cpu

__all__ = ["LIBRARIES", "Replay", "alternate", "captured", "copy_of", "limits", "microseconds", "release", "versions"]

#: Distributions whose versions a record keeps, where they are installed.
LIBRARIES: Final = (
    *("triton", "flashinfer-python", "tokenspeed-fa3", "fa3-fwd", "flash-attn-3", "tokenspeed-fa4"),
    *("tokenspeed-mla", "sgl-flash-mla", "fla-core", "tokenspeed-flashkda", "nvidia-cutlass-dsl"),
)
_WARM_MS: Final = 20
_MOST_MS: Final = 100
#: A call that takes longer is made a few times; one that takes much longer once.
_SLOW_MS: Final = 25.0
_VERY_SLOW_MS: Final = 1000.0
_SLOW_CALLS: Final = 3


def microseconds(run: Callable[[], object]) -> float:
    """The median of one call, which has been made before."""
    if not torch.cuda.is_available():
        return time_on_cpu(run)
    slow = _event_ms(run)
    if slow > _VERY_SLOW_MS:
        return slow * 1e3
    if slow > _SLOW_MS:
        return statistics.median([slow, *(_event_ms(run) for _ in range(_SLOW_CALLS - 1))]) * 1e3
    from triton.testing import do_bench

    return float(do_bench(run, warmup=_WARM_MS, rep=_MOST_MS, return_mode="median")) * 1e3


@dataclass(frozen=True, slots=True)
class Replay:
    """The replay of a recorded call, whose tensors live as long as the call does: a graph holds none of them."""

    graph: torch.cuda.CUDAGraph
    recorded: Callable[[], Tensor]

    def __call__(self) -> None:
        """Do on the device what the call did there."""
        self.graph.replay()


def captured(run: Callable[[], Tensor]) -> Callable[[], object] | None:
    """The replay of one call recorded in a CUDA graph, as engines run decode: a short kernel's time without its
    launches. None where it cannot be recorded, or where its replay does not write what the call answers.

    Raises:
        RuntimeError: the device is lost.
    """
    if not torch.cuda.is_available():
        return None
    graph, whole = torch.cuda.CUDAGraph(), False
    try:
        with torch.cuda.graph(graph):
            out = run()
        # what runs on a stream of its own is not recorded, and leaves this as it is
        out.fill_(float("nan"))
        graph.replay()
        whole = bool(torch.isfinite(out).all())
    except Exception as refused:
        print(f"no graph: {type(refused).__name__}: {str(refused).splitlines()[:1]}", file=sys.stderr)
    torch.cuda.synchronize()
    return Replay(graph, run) if whole else None


def alternate(runs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The median of `rounds` medians of each call, taken in turn: what a machine does meanwhile meets all alike."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(microseconds(run))
    return {name: statistics.median(of) for name, of in times.items()}


def copy_of(size: float, device: str) -> Callable[[], object]:
    """A kernel that reads `size / 2` bytes and writes as many, timed as a short one is: in a graph where there are."""
    source = torch.ones(int(size / 4), dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)

    def run() -> Tensor:
        # a copy proper is no kernel in a graph: the copy engines do it, at half the speed
        return torch.neg(source, out=target)

    run()
    return captured(run) or run


def limits(tiny: bool = False) -> dict[str, float]:
    """What this machine's memory and matrix units reach now: a copy of 1 GiB, and a bf16 product of 8192 cubed."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    numbers, size = (1 << 20, 256) if tiny or device == "cpu" else (1 << 29, 8192)
    source = torch.randn(numbers, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    target.copy_(source)
    copy_us = microseconds(lambda: target.copy_(source))
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    torch.matmul(a, b)
    product_us = microseconds(lambda: a @ b)
    # four digits: on a CPU both are small
    return {
        "copy_tbps": float(f"{4 * numbers / copy_us / 1e6:.4g}"),
        "bf16_tflops": float(f"{2 * size**3 / product_us / 1e6:.4g}"),
    }


def versions() -> dict[str, str]:
    """What is measured with what."""
    named = {"torch": torch.__version__}
    if torch.version.cuda is not None:
        named["cuda"] = torch.version.cuda
    for name in LIBRARIES:
        try:
            named[name] = importlib_metadata.version(name)
        except importlib_metadata.PackageNotFoundError:
            continue
    return named


def release() -> None:
    """Give back what the last kernel held."""
    import gc

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _event_ms(run: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))
