"""Start the processes that measure, read what they tell, and start again behind a kernel that ended or stalled one.

In: which shapes and kernels. Out: a `Run` after every figure, so that a record can be written that often. What a kernel
takes down with it is its own figure; the process that comes after leaves that kernel out of that shape.
"""

from __future__ import annotations

import json
import math
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final

from checkout import checkout
from records import Row, Run
from shapes import Shape

__all__ = ["KERNEL_SECONDS", "measure_all"]

_SCRIPT: Final = Path(__file__).parent / "measuring.py"
#: Seconds one kernel may take for one shape, its first compile among them, and a process to start.
KERNEL_SECONDS: Final = 120.0


def measure_all(
    shapes: Sequence[Shape],
    which: Sequence[int],
    *,
    kernels: Sequence[str] = (),
    skip: Sequence[str] = (),
    rounds: int = 1,
    tiny: bool = False,
    untuned: bool = False,
    eager: bool = False,
    seconds: float = KERNEL_SECONDS,
    budget: float = math.inf,
    join: bool = False,
    script: Path = _SCRIPT,
) -> Iterator[Run]:
    """Measure `shapes[at]` for each `at` of `which`; everything told so far after each figure, and at the end.

    What is being measured is told on stderr as it begins, with the seconds since the start. After `budget` seconds
    nothing more is begun, and the shapes that are left say so. A kernel that stalls at a shape of a work has no turn at
    the others.
    """
    stalled: dict[str, dict[str, str]] = {}
    request = {
        "kernels": list(kernels),
        "skip": list(skip),
        "stalled": stalled,
        "rounds": rounds,
        "tiny": tiny,
        "untuned": untuned,
        "eager": eager,
    }
    code, started = checkout(), time.monotonic()
    about: dict[str, Any] = {}
    results: list[Row] = []
    not_run: list[Row] = []
    left, without = list(which), list[str]()
    while left:
        shape = shapes[left[0]]
        begun: str | None = None
        lines = _lines(script, request | {"shapes": left, "without": without}, seconds)
        for told in lines:
            if "limits" in told:
                # of the first process: a run has one
                about = about or {**told, **code}
            elif "begin" in told:
                begun = told["begin"]
                seconds_in = time.monotonic() - started
                print(f"{seconds_in:5.0f} s  {shape.work} {shape.label}: {begun}", file=sys.stderr, flush=True)
                if seconds_in > budget:
                    spent = f"the {budget:.0f} s of the run were spent"
                    not_run += [_about(shapes[at]) | {"status": "refused", "reason": spent} for at in left]
                    left = []
                    break
            elif "row" in told or "missing" in told:
                line = told.get("row") or told["missing"]
                (results if "row" in told else not_run).append(line)
                without.append(line.get("kernel", ""))
                yield Run(about, results, not_run, rounds, join)
            elif "end" in told:
                left, without, begun = left[1:], [], None
                shape = shapes[left[0]] if left else shape
            elif "lost" in told and left:
                lost = _lost(shape, begun, told["lost"])
                if begun and told["lost"].startswith("took over"):
                    # a compile that takes all its time would take it again at every shape
                    reason = f"{lost['reason']}, at {shape.label}; not tried again"
                    stalled.setdefault(shape.work, {})[begun] = reason
                if begun and begun not in without:
                    not_run.append(lost | {"kernel": begun})
                    without.append(begun)
                elif begun is None or begun == "":
                    # no kernel to leave out: the shape itself, or the whole process, cannot be measured
                    not_run.append(lost)
                    left, without = left[1:], []
        # a process that is still at work has no more to tell
        lines.close()
        if not about:
            raise SystemExit(f"bench: the measuring process did not start: {not_run[-1]['reason'] if not_run else '?'}")
        yield Run(about, results, not_run, rounds, join)


def _about(shape: Shape) -> Row:
    return {"work": shape.work, "shape": shape.label}


def _lost(shape: Shape, begun: str | None, how: str) -> Row:
    where = "in it" if begun else "as kernels were timed in turn" if begun == "" else "before a kernel began"
    reason = f"the process ended {where} ({how})"
    return _about(shape) | {"status": "failed", "reason": reason}


def _lines(script: Path, request: dict[str, Any], seconds: float) -> Generator[dict[str, Any]]:
    """What one process tells; a last `lost` where it did not end by itself and well."""
    # a pipe of its own: what libraries print is no line of ours
    told, tell = os.pipe()
    with open(told, encoding="utf-8") as stream:
        try:
            child = subprocess.Popen(
                [sys.executable, str(script), json.dumps(request), str(tell)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                pass_fds=(tell,),
            )
        finally:
            os.close(tell)
        yield from _told(child, stream, seconds)


def _told(child: subprocess.Popen[str], stream: IO[str], seconds: float) -> Generator[dict[str, Any]]:
    assert child.stderr is not None, "a pipe"
    lines: queue.Queue[str | None] = queue.Queue()
    errors: list[str] = []
    readers = [
        threading.Thread(target=_read, args=(stream, lines.put), daemon=True),
        threading.Thread(target=_read, args=(child.stderr, lambda line: errors.append(line or "")), daemon=True),
    ]
    for reader in readers:
        reader.start()
    lost, ended = "", False
    try:
        while (line := lines.get(timeout=seconds)) is not None:
            # a process that is ended may leave half a line
            if line.endswith("\n"):
                yield json.loads(line)
        ended = True
    except queue.Empty:
        lost = f"took over {seconds:.0f} s"
    finally:
        if not ended:
            child.kill()
        child.wait()
        for reader in readers:
            reader.join()
        child.stderr.close()
    tail = next((line.strip() for line in reversed(errors) if line.strip()), "")
    if lost or child.returncode:
        yield {"lost": lost or f"exit {child.returncode}: {tail[:300]}"}


def _read(stream: IO[str], tell: Any) -> None:
    for line in stream:
        tell(line)
    tell(None)
