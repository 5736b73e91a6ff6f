"""One run of `kernels.py` on its way into a record: what was told since the last time is added, figure by figure.

In: a `Run` that grows. Out: the record as it is now, in its file where there is one. What another bench wrote since
stays, as the file is read again each time; of two figures of one kernel and shape the later stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from record_file import Owner, update
from records import Row, Run, is_joined, merge, number_of

__all__ = ["Recording"]


class Recording:
    """The record while a run is added to it; `number` is the run's in it once something was added."""

    def __init__(self, path: Path | None, owner: Owner, listed: Sequence[tuple[str, str]]) -> None:
        """Raises BadInput where the file is no record, or another's: to be asked before anything is measured."""
        self.path, self.owner, self.listed = path, owner, listed
        self.record: Row = update(path, owner) if path is not None else {}
        self.number: int | None = None
        #: Whether the run goes on with the record's last.
        self.joined = False
        self._results, self._not_run = 0, 0

    def add(self, run: Run) -> None:
        """Add what the run told since the last time."""
        if self.path is None:
            self.record = {**self.owner.as_json(), **self._merged(self.record, run)}
        else:
            self.record = update(self.path, self.owner, lambda before: self._merged(before, run))
        self._results, self._not_run = len(run.results), len(run.not_run)

    def _merged(self, before: Row, run: Run) -> dict[str, Any]:
        if self.number is None:
            self.number, self.joined = number_of(before, run), is_joined(before, run)
        return merge(before, run.since(self._results, self._not_run), self.listed, self.number)
