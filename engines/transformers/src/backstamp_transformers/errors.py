"""Refusals in Transformers' own idiom: `ValueError` for what cannot be served, `ImportError` for what is not there.

In: a refusal of core. Out: the same five parts and verdicts, as a class that callers of `from_pretrained` catch. Core
answers unknown and missing kernels with `LookupError`, which Transformers takes for a missing key of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from backstamp.errors import BackstampError, NoKernel, NotInstalled, UnknownKey

__all__ = [
    "KeyNotInstalled",
    "NoKernelForModel",
    "NotServed",
    "UnknownImplementation",
    "UntestedTransformers",
    "in_engine_idiom",
]


class UnknownImplementation(UnknownKey, ValueError):
    """No distribution declares the key."""


class NoKernelForModel(NoKernel, ValueError):
    """Nothing installed serves this model here."""


class KeyNotInstalled(NotInstalled, ImportError):
    """The key is known, its distribution or library is not installed."""


class NotServed(BackstampError, ValueError):
    """A call asks for what this adapter does not hand to a kernel."""

    code = "not_served"


class UntestedTransformers(BackstampError, ImportError):
    """A Transformers release this adapter was not tested with."""

    code = "untested_version"


_IDIOM: tuple[tuple[type[BackstampError], type[BackstampError]], ...] = (
    (UnknownKey, UnknownImplementation),
    (NoKernel, NoKernelForModel),
    (NotInstalled, KeyNotInstalled),
)


@contextmanager
def in_engine_idiom() -> Iterator[None]:
    """Re-raise what core answers with `LookupError`, cause chained."""
    try:
        yield
    except BackstampError as refusal:
        for cause, ours in _IDIOM:
            if isinstance(refusal, cause) and not isinstance(refusal, ours):
                raise ours(
                    refusal.who,
                    needed=refusal.needed,
                    found=refusal.found,
                    considered=refusal.considered,
                    fix=refusal.fix,
                    verdicts=refusal.verdicts,
                ) from refusal
        raise
