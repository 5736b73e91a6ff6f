"""Kernels run in a child process: one that ends it is told by name, and ends no report.

In: a plugin's name and checks. Out: outcomes, as the child tells them. What a kernel prints goes to standard error; the
child's own words have a pipe of their own.

.. versionadded:: 0.2
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

from backstamp.findings import Finding, Outcome
from backstamp.stamp import said

__all__ = ["outcomes_in_child"]

_PROGRAM = "from backstamp.testing.conformance.isolation import serve; serve()"


def outcomes_in_child(name: str, checks: Sequence[str]) -> Iterator[Outcome]:
    """Every outcome of a plugin's checks; where the child ends before it is done, the job it was in has failed."""
    program = [sys.executable, "-c", _PROGRAM, name, ",".join(checks)]
    running, done = ("kernels", f"plugin {name}"), False
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            word = json.loads(line)
            if "running" in word:
                running = (word["running"][0], word["running"][1])
            elif "outcome" in word:
                yield _outcome(word["outcome"])
            else:
                done = True
    if not done:
        text = f"the process ended in it ({_words(child.returncode)}); what was left was not run"
        finding = Finding("fault", running[0], running[1], text, "A kernel that fails raises")
        yield Outcome(check=running[0], name=running[1], findings=(finding,))


def serve() -> None:
    """The child: run the jobs of the plugin and the checks it was given, and say before each which it is."""
    # what a kernel or a library prints is not for the reader of outcomes
    told = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    name, checks = sys.argv[1], sys.argv[2].split(",")
    try:
        _run(name, checks, told)
    except Exception as cause:
        finding = Finding("fault", "kernels", f"plugin {name}", f"its jobs could not be made: {said(cause)}")
        _say(told, {"outcome": _as_json(Outcome(check="kernels", name=f"plugin {name}", findings=(finding,)))})
    _say(told, {"done": True})


def _run(name: str, checks: Sequence[str], told: TextIO) -> None:
    from backstamp.testing.conformance.subject import subjects_of
    from backstamp.testing.conformance.suite import jobs_of, outcome_of

    for subject in subjects_of(name):
        if subject.found.plugin.name == name:
            for job in jobs_of(subject, checks):
                _say(told, {"running": [job.check, job.name]})
                _say(told, {"outcome": _as_json(outcome_of(job))})


def _say(told: TextIO, word: dict[str, object]) -> None:
    told.write(json.dumps(word) + "\n")
    told.flush()


def _as_json(outcome: Outcome) -> dict[str, object]:
    return {**outcome.as_json(), "findings": [finding.as_json() for finding in outcome.findings]}


def _outcome(data: dict[str, object]) -> Outcome:
    found: list[dict[str, str | int]] = data["findings"]  # type: ignore[assignment]
    return Outcome(
        check=str(data["check"]),
        name=str(data["name"]),
        findings=tuple(Finding(**finding) for finding in found),  # type: ignore[arg-type]
        reason=str(data["reason"]),
        seconds=float(str(data["seconds"])),
    )


def _words(status: int) -> str:
    if status >= 0:
        return f"exit {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
