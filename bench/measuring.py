"""One process that measures some shapes and tells each figure as a line of JSON: `measure_runs.py` starts and reads it.

    python bench/measuring.py REQUEST FD

In: a request as JSON. Out, a line each: `limits` first; `begin` before each kernel; `row` or `missing` after it; `end`
after each shape. They go to a file descriptor of their own, since libraries print to stdout. A kernel that takes the
device with it ends the process, exit 3: what was told stays told.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import IO, Any, Final, NamedTuple

from backstamp.catalogue import build_catalogue
from backstamp.discovery import discover
from backstamp.errors import BackstampError
from backstamp.host import this_host
from built import Candidate, Here, Ready, candidates
from linear_checks import take_first_configurations
from linear_peers import linear_peers
from peers import attention_peers
from shape_list import SHAPES, TINY
from shapes import Shape
from steps import AttentionStep, LinearStep, attention_step, linear_step
from timing import alternate, captured, copy_of, limits, release, versions
from truth import Truth, error_of, truth_of

__all__ = ["DeviceLost", "Wrong", "bound_of", "is_asked", "is_lost", "measure", "missing_of"]

#: Worst relative error of a sampled token: outputs are rounded to bf16, weights may be; chunks of a recurrence keep
#: what is inside them in bf16 too.
ATTENTION_BOUND: Final = 1e-2
LINEAR_BOUND: Final = 2e-2
#: Most tokens of a step that is timed as a replay of a graph where it can be: its launches are not its own time.
_RECORDED_TOKENS: Final = 4096
#: What moves its states and little else: a copy of 1 GiB is faster than one of a short step's bytes.
_COPIED: Final = ("gdn_decode", "kda_decode")
_COPY: Final = "copy of as many bytes"
#: Words of an error after which nothing runs on the device in this process.
_LOST: Final = ("CUDA error", "cudaError", "HIP error", "illegal memory access", "Triton Error")


class Wrong(Exception):
    """An answer that is off: the kernel is told, and not timed."""


class DeviceLost(Exception):
    """A kernel left the device unusable for this process."""


class Checked(NamedTuple):
    """A kernel that answered right, ready to be timed: by a replay of a CUDA graph where it has one."""

    candidate: Candidate
    ready: Ready
    error: float
    replay: Callable[[], object] | None

    @property
    def run(self) -> Callable[[], object]:
        """What is timed."""
        return self.replay or self.ready.run


def main() -> int:
    """Measure what the request names."""
    request, tell = json.loads(sys.argv[1]), int(sys.argv[2])
    # a compiler started from here would hold the pipe open past our end
    os.set_inheritable(tell, False)
    with open(tell, "w", encoding="utf-8") as stream:
        return _tell_all(request, partial(_say, stream))


def _tell_all(request: Mapping[str, Any], say: Callable[..., None]) -> int:
    if request["untuned"]:
        take_first_configurations()
    here = Here(this_host("cpu" if request["tiny"] else None), build_catalogue(discover()))
    host = here.host.device_name or f"{here.host.arch} CPU"
    say(limits=limits(request["tiny"]), versions=versions(), host=host, device=here.host.device, arch=here.host.arch)
    shapes = TINY if request["tiny"] else SHAPES
    for at in request["shapes"]:
        without = request["without"] if at == request["shapes"][0] else ()
        try:
            lines = measure(
                shapes[at],
                here,
                request["kernels"],
                request["skip"],
                without=without,
                stalled=request["stalled"].get(shapes[at].work, {}),
                rounds=request["rounds"],
                eager=request["eager"],
            )
            for told in lines:
                say(**told)
        except DeviceLost as lost:
            print(lost, file=sys.stderr)
            return 3
        say(end=at)
    return 0


def _say(stream: IO[str], **told: object) -> None:
    print(json.dumps(told), file=stream, flush=True)


def is_asked(kernel: str, asked: Sequence[str]) -> bool:
    """Whether a name is among those asked for: all where none is; `flashinfer` also stands for `flashinfer decode`."""
    return not asked or any(kernel == name or kernel.startswith((f"{name} ", f"{name},")) for name in asked)


def measure(
    shape: Shape,
    here: Here,
    asked: Sequence[str] = (),
    skipped: Sequence[str] = (),
    *,
    without: Sequence[str] = (),
    stalled: Mapping[str, str] = MappingProxyType({}),
    rounds: int = 1,
    eager: bool = False,
) -> Iterator[dict[str, object]]:
    """What is told of one shape: every kernel that is asked for and not skipped. Those of `without` were told before;
    those of `stalled` took all their time at another shape, and are told with that reason."""
    peers = linear_peers(shape) if shape.linear else attention_peers(shape)
    every = [
        one
        for one in (*candidates(shape, here), *peers)
        if is_asked(one.kernel, asked) and not (skipped and is_asked(one.kernel, skipped))
    ]
    if not every:
        yield {"missing": _about(shape) | {"status": "refused", "reason": _nobody(shape, here)}}
    # nothing is made for kernels that are all refused before they read it
    step: AttentionStep | LinearStep | None = None
    truth: Truth | None = None
    waiting: dict[str, Checked] = {}
    for candidate in (one for one in every if one.kernel not in without):
        if candidate.kernel in stalled:
            told = {"kernel": candidate.kernel, "status": "failed", "reason": stalled[candidate.kernel]}
            yield {"missing": _about(shape) | told}
            continue
        yield {"begin": candidate.kernel}
        try:
            if step is None:
                step = linear_step(shape, here.device) if shape.linear else attention_step(shape, here.device)
            if isinstance(step, LinearStep):
                step.restore()
            ready = candidate.prepare(step)
            answer = ready.run()
            truth = truth or truth_of(step)
            checked = _checked(candidate, ready, error_of(answer, step, truth), step, eager)
            if rounds == 1:
                yield from _timed(shape, {candidate.kernel: checked}, 1, here.device)
            else:
                waiting[candidate.kernel] = checked
        except Exception as cause:
            told = missing_of(cause)
            yield {"missing": _about(shape) | {"kernel": candidate.kernel} | told}
            if is_lost(cause):
                raise DeviceLost(told["reason"]) from cause
        finally:
            checked = ready = answer = None  # type: ignore[assignment]
            release()
    if waiting:
        yield {"begin": ""}
        yield from _timed(shape, waiting, rounds, here.device)


def bound_of(step: AttentionStep | LinearStep) -> float:
    """Most relative error of a sampled token of a step."""
    return LINEAR_BOUND if isinstance(step, LinearStep) else ATTENTION_BOUND


def _checked(
    candidate: Candidate, ready: Ready, error: float, step: AttentionStep | LinearStep, eager: bool
) -> Checked:
    """A kernel whose answer is this far off, recorded in a graph where its work is.

    Raises:
        Wrong: too far.
    """
    bound = bound_of(step)
    if not error <= bound:
        raise Wrong(f"relative error {error:.1e} of a sampled token, more than {bound:.0e}")
    # a long step hides its launches
    recorded = not eager and step.shape.num_tokens <= _RECORDED_TOKENS
    replay = captured(ready.run) if recorded else None
    return Checked(candidate, ready, error, replay)


def _timed(
    shape: Shape, kernels: Mapping[str, Checked], rounds: int, device: str
) -> Iterator[dict[str, dict[str, object]]]:
    """A row of each kernel; what reads states and writes them back is timed in turn with a copy of as many bytes."""
    runs = {name: checked.run for name, checked in kernels.items()}
    if shape.work in _COPIED:
        runs[_COPY] = copy_of(shape.bytes, device)
    times = alternate(runs, rounds)
    beside = {"copy_us": _digits(times[_COPY])} if _COPY in times else {}
    for name, checked in kernels.items():
        yield {"row": _row(shape, checked, times[name]) | beside}


def _row(shape: Shape, checked: Checked, us: float) -> dict[str, object]:
    return {
        **_about(shape),
        "kernel": checked.candidate.kernel,
        "library": checked.ready.library,
        "direct": checked.candidate.direct,
        "timed": "eager" if checked.replay is None else "graph",
        # four digits are more than a repeated run agrees on
        "us": _digits(us),
        "tflops": _digits(shape.flops / us / 1e6),
        "tbps": _digits(shape.bytes / us / 1e6),
        "rel_error": _digits(checked.error),
    }


def _about(shape: Shape) -> dict[str, object]:
    return {"work": shape.work, "shape": shape.label}


def is_lost(cause: Exception) -> bool:
    """Whether nothing runs on the device in this process after it."""
    return any(word in str(cause) for word in _LOST)


def missing_of(cause: Exception) -> Mapping[str, Any]:
    """Why a kernel has no figure: `refused` before it ran, `failed`, or `wrong`."""
    if isinstance(cause, BackstampError):
        return {"status": "refused", "reason": f"needs {cause.needed}, got {cause.found}"[:400]}
    if isinstance(cause, ImportError):
        return {"status": "refused", "reason": str(cause)}
    said = str(cause).strip().splitlines() or [""]
    status = "wrong" if isinstance(cause, Wrong) else "failed"
    return {"status": status, "reason": said[0] if status == "wrong" else f"{type(cause).__name__}: {said[0]}"[:400]}


def _nobody(shape: Shape, here: Here) -> str:
    return f"no kernel asked for has a row for {shape.work} on {here.host.device}"


def _digits(number: float) -> float:
    return float(f"{number:.4g}")


if __name__ == "__main__":
    sys.exit(main())
