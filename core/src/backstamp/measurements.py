"""What kernels were measured at on a host: a frozen record that `auto` may rank by.

In: rows another tool timed. Out: the time of a kernel in a phase, or None. It times nothing itself.

.. versionadded:: 0.1
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Measurements"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Times in microseconds by (slot, phase, kernel), taken on the host named."""

    host: str
    microseconds: tuple[tuple[str, str, str, float], ...] = ()

    def time_of(self, slot: str, phase: str, kernel: str) -> float | None:
        """The measured time of a kernel in microseconds, or None if it was not measured."""
        for row_slot, row_phase, row_kernel, time in self.microseconds:
            if (row_slot, row_phase, row_kernel) == (slot, phase, kernel):
                return time
        return None
