"""Plans travel: pickled, as JSON, into a forked and a spawned child, where the same object is built and answers alike.

In: a `Subject`. Out: jobs. The parent of the children is a fresh process that resolves and never builds, as an engine's
front end is: what it imports must not stand in its workers' way.

.. versionadded:: 0.2
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Final

from backstamp.plan_reading import plan_from_json
from backstamp.testing.conformance.cases import AttentionCase
from backstamp.testing.conformance.row_cases import base_case
from backstamp.testing.conformance.rows import each_row, skipped_job
from backstamp.testing.conformance.solo import Solo
from backstamp.testing.conformance.subject import Job, Subject, subjects_of

__all__ = ["process_jobs", "serve_in_child"]

_TIMEOUT_S: Final = 300
_METHODS: Final = ("fork", "spawn")
#: The front end: it resolves, then has a worker build and answer, by the start method it is told.
_PARENT: Final = """
import json, multiprocessing, pickle, sys
from backstamp.testing.conformance.processes import resolve_for, serve_in_child

if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    data = resolve_for(asked)
    context = multiprocessing.get_context(asked["method"])
    mine, theirs = context.Pipe()
    worker = context.Process(target=serve_in_child, args=(asked, data, theirs))
    worker.start()
    # the worker's own end alone: its death is then the end of the pipe
    theirs.close()
    try:
        answer = mine.recv() if mine.poll(240) else "the worker did not answer within 240 s"
    except EOFError:
        worker.join(10)
        answer = f"the worker ended without an answer (exit {worker.exitcode})"
    worker.join(10)
    if worker.is_alive():
        worker.kill()
    print(json.dumps({"answer": answer}))
"""


def process_jobs(subject: Subject) -> Iterator[Job]:
    """Pickling for every dense row; fork and spawn for the first row that runs here."""
    first: str | None = None
    for name, solo, reason in each_row(subject):
        if reason:
            yield skipped_job("processes", name, reason)
            continue
        phase = next(phase for phase in ("prefill", "decode", "verify") if phase in solo.offer.phases)
        case = base_case(solo.offer, phase)
        run = lambda solo=solo, case=case: _travels(solo, case)  # noqa: E731
        yield Job("processes", f"{name}: a plan pickled and as JSON", run)
        if first is None:
            first = name
            for method in _METHODS:
                asked = {"name": subject.found.plugin.name, "row": name, "phase": phase, "method": method}
                run_child = lambda asked=asked: _in_child(asked)  # noqa: E731
                fix = "Keep no state of the process in the plugin's modules: no handle, thread or device at import"
                yield Job("processes", f"{name}: built in a worker started by {method}", run_child, fix)


def resolve_for(asked: dict[str, str]) -> bytes:
    """The pickled plan of a row's plain case; in the front end, which builds nothing."""
    solo, case = _found(asked)
    return pickle.dumps(solo.plan(case))


def serve_in_child(asked: dict[str, str], data: bytes, answer: object) -> None:
    """Unpickle the plan, build its row, run it, and send what is wrong, or "": the worker's whole life."""
    send = answer.send  # type: ignore[attr-defined]
    try:
        send(_serve(asked, data))
    except BaseException as cause:  # whatever ends a worker has to be told
        send(f"{type(cause).__name__}: {cause}")


def _serve(asked: dict[str, str], data: bytes) -> str:
    from backstamp.device_check import torch_device
    from backstamp.testing.conformance import attend

    solo, case = _found(asked)
    plan = pickle.loads(data)
    step = attend.make_step(case, torch_device(plan.device))
    backend = solo.build(case, plan, step.layer, step.kv.k.shape[0]).serving_attention_backend(case.phase)
    return attend.faults_of_step(backend, case, step, solo.offer.accuracy)


def _found(asked: dict[str, str]) -> tuple[Solo, AttentionCase]:
    (subject,) = subjects_of(asked["name"])
    solo = next(solo for name, solo in subject.solos if name == asked["row"])
    return solo, base_case(solo.offer, asked["phase"])  # type: ignore[arg-type]


def _travels(solo: Solo, case: AttentionCase) -> str:
    plan = solo.plan(case)
    again = pickle.loads(pickle.dumps(plan))
    if again != plan or again.digest != plan.digest:
        return "a pickled plan is another plan"
    read = plan_from_json(json.loads(json.dumps(plan.as_json())))
    return "" if read.digest == plan.digest else "a plan read back from its JSON has another digest"


def _in_child(asked: dict[str, str]) -> str:
    program = [sys.executable, "-c", _PARENT, json.dumps(asked)]
    try:
        child = subprocess.run(program, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"the front end did not end within {_TIMEOUT_S} s"
    lines = child.stdout.strip().splitlines()
    if child.returncode or not lines:
        end = child.stderr.strip().splitlines()[-1:] or ["without a word"]
        return f"the front end ended (exit {child.returncode}): {end[0]}"
    return str(json.loads(lines[-1])["answer"])
