"""Every kernel's checks, a process each and a few at a time: their lines, collected, and a table of them.

A process that loses the device, or hangs, is started again behind the case that did it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

__all__ = ["check_all", "check_table", "merge_lines"]

HERE = Path(__file__).parent
#: Scripts that check what no dense attention case can, a kernel each: sparse attention, and recurrences.
OTHER_CHECKS = (
    *(("sparse_checks.py", kernel) for kernel in ("dsa", "dsv4", "flashmla")),
    *(("linear_checks.py", kernel) for kernel in ("triton", "flashinfer", "flashkda", "torch_native")),
)
#: Seconds a kernel may take for all its cases, restarts included; a first compile of a large kernel takes minutes.
KERNEL_SECONDS = 540
MOST_RESTARTS = 6


def check_all(kernels: Sequence[str], jobs: int, seconds: float = KERNEL_SECONDS) -> Iterator[list[dict[str, object]]]:
    """The last line of every case, a list a kernel, as they end."""
    commands = [[str(HERE / "checks.py"), kernel] for kernel in kernels]
    commands += [[str(HERE / script), kernel] for script, kernel in OTHER_CHECKS if kernel in kernels]
    with ThreadPoolExecutor(jobs) as pool:
        runs = [pool.submit(lambda command=command: list(_run(command, seconds))) for command in commands]
        for run in as_completed(runs):
            yield run.result()


def _run(command: list[str], seconds: float) -> Iterator[dict[str, object]]:
    first, until = 0, time.monotonic() + seconds
    for _ in range(MOST_RESTARTS):
        lines, lost = _child([*command, "--from", str(first)], until - time.monotonic())
        done: dict[object, dict[str, object]] = {line["number"]: line for line in lines}
        for line in done.values():
            if line["status"] == "running":
                line |= {"status": "failed", "reason": f"the process ended in it ({lost})"}
            yield line
        if lost == "ended" or not done or time.monotonic() > until:
            if not done:
                yield {"number": first, "kernel": Path(command[-1]).stem, "status": "failed", "reason": lost}
            return
        first = 1 + max(int(str(number)) for number in done)


def _child(command: list[str], seconds: float) -> tuple[list[dict[str, object]], str]:
    """One process's lines, and how it ended: "ended", or what took it."""
    try:
        child = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as late:
        text = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        return _lines(text), f"took over {seconds:.0f} s"
    if child.returncode == 0:
        return _lines(child.stdout), "ended"
    tail = child.stderr.strip().splitlines()[-1:] or [""]
    return _lines(child.stdout), f"exit {child.returncode}: {tail[0][:300]}"


def _lines(text: str) -> list[dict[str, object]]:
    # a process that is ended may leave half a line
    whole = (line for line in text.splitlines(keepends=True) if line.endswith("\n"))
    return [json.loads(line) for line in whole if line.startswith('{"number"')]


def merge_lines(before: Sequence[dict[str, object]], now: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """What another run found, brought up to date: a case is told once a library, a refusal where no library served it.

    Two builds of one kernel cannot be installed beside each other, so each has a run of its own.
    """

    def place(line: dict[str, object]) -> str:
        return json.dumps([line.get("key", line["kernel"]), *(line.get(name) for name in ("family", "phase", "case"))])

    def library(line: dict[str, object]) -> str:
        found = line.get("library")
        return str(found["distribution"]) if isinstance(found, dict) else ""

    merged = {(place(line), library(line)): line for line in (*before, *now)}
    served = {at for at, of in merged if of}
    return [line for (at, of), line in sorted(merged.items()) if of or at not in served]


def check_table(lines: Sequence[dict[str, object]]) -> str:
    """For people: the cases that are not refused, and how many were."""
    told = [f"{'kernel':16} {'family':10} {'phase':13} {'case':24} {'error':>8}  status"]
    for line in lines:
        if line["status"] == "refused":
            continue
        error = line.get("rel_error")
        number = f"{error:8.1e}" if isinstance(error, float) else " " * 8
        reason = f": {line['reason']}" if line.get("reason") else ""
        place = f"{line.get('family', ''):10} {line.get('phase', ''):13} {line.get('case', ''):24}"
        told.append(f"{line['kernel']:16} {place} {number}  {line['status']}{reason}")
    counts = Counter(str(line["status"]) for line in lines)
    told.append(", ".join(f"{count} {status}" for status, count in sorted(counts.items())))
    return "\n".join(told)
