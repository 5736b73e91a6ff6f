"""Described hosts for tests: a named profile, with a library list or the interpreter where a test needs them.

In: a profile's name. Out: `HostFacts`. A described host stands for a machine we do not have.

.. versionadded:: 0.1
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from backstamp.host import HostFacts, load_host

__all__ = ["described_host"]


def described_host(
    name: str, *, libraries: Mapping[str, str] | None = None, triton_interpreter: bool = False
) -> HostFacts:
    """A named profile; `libraries` maps distributions to versions, None leaves them assumed."""
    pairs = None if libraries is None else tuple(sorted(libraries.items()))
    return replace(load_host(name), libraries=pairs, triton_interpreter=triton_interpreter)
