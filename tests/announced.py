"""What a kernel announces before it compiles, caught where the announcement is made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from backstamp import jit_notice

__all__ = ["catch_announcements"]


def catch_announcements(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The (kernel, work) pairs that objects built from here on announce through an `Announcer`, in order."""
    caught: list[tuple[str, str]] = []

    @contextmanager
    def compiling(kernel: str, what: str) -> Iterator[None]:
        caught.append((kernel, what))
        yield

    monkeypatch.setattr(jit_notice, "compiling", compiling)
    return caught
