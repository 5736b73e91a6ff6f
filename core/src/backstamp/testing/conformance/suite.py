"""The whole kit over one plugin: every job run, timed, and told as one report.

In: names of plugins. Out: a `Report`. A job that raises has failed, with what it raised as its words; a machine
that can run none of a plugin's rows has checked its declarations alone, and a plugin of which nothing ran has not
passed.

.. versionadded:: 0.2
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from backstamp.checking import check_installed, check_modules
from backstamp.discovery import Discovery, discover
from backstamp.errors import BackstampError, BadInput
from backstamp.findings import Finding, Outcome, Report
from backstamp.host import HostFacts
from backstamp.lint import known_hosts
from backstamp.model import LINEAR_FAMILIES
from backstamp.stamp import said
from backstamp.testing.conformance.contract import contract_jobs
from backstamp.testing.conformance.determinism import determinism_jobs
from backstamp.testing.conformance.imports import import_jobs
from backstamp.testing.conformance.isolation import outcomes_in_child
from backstamp.testing.conformance.linear_numerics import linear_numeric_jobs, linear_runs_here
from backstamp.testing.conformance.linear_solo import LinearSolo
from backstamp.testing.conformance.numerics import DENSE_FAMILIES, numeric_jobs, runs_here
from backstamp.testing.conformance.processes import process_jobs
from backstamp.testing.conformance.sparse_numerics import sparse_numeric_jobs, sparse_runs_here
from backstamp.testing.conformance.stamps import stamp_jobs
from backstamp.testing.conformance.subject import Job, Skipped, Subject, is_called, not_installed
from backstamp.testing.conformance.undeclared import undeclared_jobs
from backstamp.text import plain

__all__ = ["CHECKS", "DECLARATION_CHECKS", "check_plugins", "jobs_of", "needs_known", "outcome_of", "reasons_not_here"]


def _declaration_jobs(subject: Subject) -> Iterator[Job]:
    def run() -> str:
        flaws = check_modules([subject.found.module], known_hosts()).flaws
        return "; ".join(f"{flaw.subject} {flaw.text}. {flaw.fix}" for flaw in flaws if flaw.level == "fault")

    yield Job("declarations", f"plugin {subject.found.plugin.name}", run)


def _number_jobs(subject: Subject) -> Iterator[Job]:
    yield from numeric_jobs(subject)
    yield from sparse_numeric_jobs(subject)
    yield from linear_numeric_jobs(subject)


#: Every check, in the order it runs: what needs no kernel first.
CHECKS: Final[dict[str, Callable[[Subject], Iterable[Job]]]] = {
    "declarations": _declaration_jobs,
    "imports": import_jobs,
    "stamps": stamp_jobs,
    "contract": contract_jobs,
    "undeclared": undeclared_jobs,
    "numerics": _number_jobs,
    "determinism": determinism_jobs,
    "processes": process_jobs,
}
#: What needs none of a plugin's hardware.
DECLARATION_CHECKS: Final = ("declarations", "imports")


def check_plugins(
    names: Sequence[str] = (),
    checks: Sequence[str] = (),
    *,
    hosts: Sequence[HostFacts] = (),
    told: Callable[[Outcome], None] | None = None,
) -> Report:
    """Check plugins by distribution, name or module: all of `CHECKS` unless told which.

    Without names it is every installed plugin, and their declarations alone unless `checks` says more. A module that no
    distribution has as its plugin is held to its declarations. `hosts` are those to hold declarations against, the
    named ones if empty; kernels run on this machine. `told` hears of each outcome as it ends.

    Raises:
        BadInput: nothing of a name is installed or can be imported, or an unknown check.
    """
    needs_known(checks)
    wanted = tuple(checks) or (tuple(CHECKS) if names else ("declarations",))
    installed = discover()
    outcomes: list[Outcome] = []

    def tell(outcome: Outcome) -> None:
        outcomes.append(outcome)
        if told is not None:
            told(outcome)

    modules = [module for name in names for module in _modules_of(name, installed)]
    if "declarations" in wanted:
        against = hosts or known_hosts()
        checked = check_modules(modules, against) if names else check_installed(against)
        for outcome in checked.outcomes:
            tell(outcome)
    for found in installed.found:
        if not names or found.module in modules:
            # only the child that runs kernels asks which host this is
            subject = Subject(found=found, host=known_hosts()[0], discovery=installed)
            for outcome in _outcomes_of(subject, [check for check in wanted if check != "declarations"]):
                tell(outcome)
    return Report(tool="backstamp check", subject=", ".join(names) or "all plugins", outcomes=tuple(outcomes))


def _modules_of(name: str, installed: Discovery) -> list[str]:
    """The modules of what is installed under a name; what is not, is a module itself."""
    found = [item.module for item in installed.found if is_called(name, item.plugin, item.module)]
    found += [item.entry for item in installed.failures if is_called(name, item.plugin, item.entry)]
    if not found and "." not in name:
        raise not_installed(name, installed)
    return found or [name]


def _outcomes_of(subject: Subject, checks: Sequence[str]) -> Iterator[Outcome]:
    """What needs no kernel here, the rest in a process that a kernel may end."""
    told: list[Outcome] = []
    for job in jobs_of(subject, [check for check in checks if check in DECLARATION_CHECKS]):
        told.append(outcome_of(job))
        yield told[-1]
    kernels = [check for check in checks if check not in DECLARATION_CHECKS]
    for outcome in outcomes_in_child(subject.found.plugin.name, kernels) if kernels else ():
        told.append(outcome)
        yield outcome
    yield from _nothing_ran(subject.found.plugin.distribution, checks, told)


def reasons_not_here(subject: Subject) -> list[str]:
    """Why this machine runs none of each of a plugin's rows; empty where it does."""
    reasons = []
    for _, solo in subject.solos:
        if solo.offer.family in DENSE_FAMILIES:
            reasons.append(runs_here(solo))
        elif solo.offer.family in LINEAR_FAMILIES:
            alone = LinearSolo(found=solo.found, offer=solo.offer, host=solo.host)
            reasons.append(linear_runs_here(alone))
        else:
            reasons.append(sparse_runs_here(solo))
    return reasons


def needs_known(checks: Sequence[str]) -> None:
    """Refuse a check nobody knows.

    Raises:
        BadInput: it, and those there are.
    """
    unknown = sorted(set(checks) - set(CHECKS))
    if unknown:
        raise BadInput("backstamp check", needed=f"checks among {', '.join(CHECKS)}", found=", ".join(unknown))


def jobs_of(subject: Subject, checks: Sequence[str] = tuple(CHECKS)) -> Iterator[Job]:
    """The jobs of these checks over one plugin."""
    for check in checks:
        yield from CHECKS[check](subject)


def outcome_of(job: Job) -> Outcome:
    """Run one job."""
    began = time.perf_counter()
    words, reason = "", ""
    try:
        words = job.run()
    except Skipped as skipped:
        reason = plain(str(skipped))
    except KeyboardInterrupt:
        raise
    except BackstampError as refused:
        words = refused.message
    except BaseException as cause:  # a kernel may raise anything, SystemExit included
        words = f"raised {said(cause)}"
    seconds = time.perf_counter() - began
    if not words:
        return Outcome(check=job.check, name=job.name, reason=reason, seconds=seconds)
    finding = Finding("fault", job.check, job.name, plain(words, most=1000), job.fix)
    return Outcome(check=job.check, name=job.name, findings=(finding,), seconds=seconds)


def _nothing_ran(name: str, checks: Sequence[str], outcomes: Sequence[Outcome]) -> Iterator[Outcome]:
    """Rows that were declared and none of them run: no pass of the checks that run kernels."""
    kernels = set(checks) - set(DECLARATION_CHECKS)
    # keys of a plugin are held against a catalogue, without a kernel
    of_rows = [one for one in outcomes if one.check in kernels and not one.name.startswith("key ")]
    if not kernels or any(one.status != "skipped" for one in of_rows):
        return
    reasons = list(dict.fromkeys(one.reason for one in of_rows))
    text = f"no kernel of it ran on this machine: {'; '.join(reasons[:3]) or 'it declares no row'}"
    fix = f"Run it where one of its rows is served; {' and '.join(DECLARATION_CHECKS)} need no hardware"
    finding = Finding("fault", "nothing-ran", name, text, fix)
    yield Outcome(check="numerics", name=f"{name}: something ran", findings=(finding,))
