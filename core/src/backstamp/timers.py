"""How long one call takes on a device: the median of many.

In: a call, and the device it runs on. Out: microseconds. `backstamp.tune` takes any other such function in its place.

.. versionadded:: 0.2
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Final, TypeAlias

from backstamp.errors import BadInput

__all__ = ["Timer", "time_on_cpu", "time_on_gpu", "timer_for"]

#: Median microseconds of one call.
Timer: TypeAlias = Callable[[Callable[[], object]], float]

#: On the CPU: at least so many calls, then more until so many seconds were spent, and never more than that many calls.
_LEAST_CALLS: Final = 5
_SECONDS: Final = 0.2
_MOST_CALLS: Final = 1000


def timer_for(device: str) -> Timer:
    """The timer of a device as host facts name it.

    Raises:
        BadInput: a device nothing here times.
    """
    if device == "cpu":
        return time_on_cpu
    if device in ("cuda", "rocm"):
        return time_on_gpu
    raise BadInput("tune", needed="a device of kind cuda, rocm or cpu, to time", found=device)


def time_on_cpu(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """By the wall clock, after one call that is not counted; `clock` answers seconds."""
    run()
    times: list[float] = []
    while len(times) < _LEAST_CALLS or (sum(times) < _SECONDS and len(times) < _MOST_CALLS):
        began = clock()
        run()
        times.append(clock() - began)
    return statistics.median(times) * 1e6


def time_on_gpu(run: Callable[[], object]) -> float:
    """By events on the device, the cache of the last level flushed between calls."""
    # triton ships no types
    from triton.testing import do_bench  # type: ignore[import-untyped]

    return float(do_bench(run, warmup=25, rep=100, return_mode="median")) * 1e3
