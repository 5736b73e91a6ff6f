"""The kit as a pytest class: a subclass names its distribution, and every job is a test of its own.

In: `distribution`, and `checks` where not all are wanted. Out: one test a job; a job this machine cannot run is
skipped with its reason. A plugin of which nothing can run here fails, in a test of its own.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import pytest

    from backstamp.testing.conformance.subject import Job

__all__ = ["PluginConformance"]


class PluginConformance:
    """Subclass it under a name that pytest collects, and say which distribution is checked."""

    distribution: ClassVar[str] = ""
    checks: ClassVar[Sequence[str]] = ()

    @classmethod
    def pytest_generate_tests(cls, metafunc: pytest.Metafunc) -> None:
        """One test a job."""
        if "conformance_job" in metafunc.fixturenames:
            jobs = list(cls.jobs())
            metafunc.parametrize("conformance_job", jobs, ids=[f"{job.check}-{job.name}" for job in jobs])

    @classmethod
    def jobs(cls) -> Iterator[Job]:
        """Every job of this class's plugin.

        Raises:
            BadInput: no `distribution`, nothing of that name installed, or an unknown check. PluginFailed: it does not
            load.
        """
        from backstamp.errors import BadInput
        from backstamp.testing.conformance.subject import subjects_of
        from backstamp.testing.conformance.suite import CHECKS, jobs_of, needs_known

        if not cls.distribution:
            raise BadInput(cls.__qualname__, needed='a line distribution = "..."', found="none")
        needs_known(cls.checks)
        for subject in subjects_of(cls.distribution):
            yield from jobs_of(subject, cls.checks or tuple(CHECKS))

    def test_conformance(self, conformance_job: Job) -> None:
        """One job."""
        import pytest

        from backstamp.testing.conformance.suite import outcome_of

        outcome = outcome_of(conformance_job)
        if outcome.status == "skipped":
            pytest.skip(outcome.reason)
        if outcome.findings:
            finding = outcome.findings[0]
            pytest.fail(f"{finding.subject}: {finding.words}", pytrace=False)

    def test_something_runs_here(self) -> None:
        """Nothing ran is no pass: a kernel that no test met may be anything."""
        import pytest

        from backstamp.testing.conformance.subject import subjects_of
        from backstamp.testing.conformance.suite import reasons_not_here

        reasons = [reason for subject in subjects_of(self.distribution) for reason in reasons_not_here(subject)]
        if all(reasons) and (not self.checks or "numerics" in self.checks):
            told = "; ".join(dict.fromkeys(reasons)) or "it declares no row"
            pytest.fail(f"no kernel of {self.distribution} runs on this machine: {told}", pytrace=False)
