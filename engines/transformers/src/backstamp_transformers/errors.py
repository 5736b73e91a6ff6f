"""Refusals in Transformers' own idiom: `ValueError` for what cannot be served, `ImportError` for what is not there.

In: a refusal of core. Out: the same five parts and verdicts, as a class that callers of `from_pretrained` catch, in
the words of who asked. Core answers unknown and missing kernels with `LookupError`, which Transformers takes for a
missing key of its own, and names the flag of a request that here was an argument.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from backstamp.errors import AliasConflict, BackstampError, NoKernel, NotInstalled, UnknownKey

__all__ = [
    "ImplementationConflict",
    "KeyNotInstalled",
    "NoKernelForModel",
    "NotServed",
    "UnknownImplementation",
    "UntestedTransformers",
    "in_engine_idiom",
    "refuse_gradients",
]


class UnknownImplementation(UnknownKey, ValueError):
    """No distribution declares the key."""


class ImplementationConflict(AliasConflict, ValueError):
    """Two distributions claim the key."""


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
    (AliasConflict, ImplementationConflict),
    (NoKernel, NoKernelForModel),
    (NotInstalled, KeyNotInstalled),
)


@contextmanager
def in_engine_idiom(words: Mapping[str, str]) -> Iterator[None]:
    """Re-raise what core refuses, its cause chained; `words` are the caller's, by the flags that core names."""
    try:
        yield
    except BackstampError as refusal:
        kind = next((ours for cause, ours in _IDIOM if type(refusal) is cause), type(refusal))
        parts = (refusal.who, refusal.needed, refusal.found, refusal.considered, refusal.fix)
        who, needed, found, considered, fix = (_said(part, words) for part in parts)
        raise kind(
            who, needed=needed, found=found, considered=considered, fix=fix, verdicts=refusal.verdicts
        ) from refusal.__cause__


def refuse_gradients(who: str, parts: Mapping[str, Tensor | None]) -> None:
    """Refuse a call whose gradients would be lost: a kernel writes its output in place and has no backward.

    Raises:
        NotServed: one of the parts requires gradients.
    """
    for name, part in parts.items():
        if part is not None and part.requires_grad:
            fix = "Run under torch.inference_mode() or torch.no_grad(); train with sdpa or eager"
            raise NotServed(who, needed="a call without gradients", found=f"{name} with them", fix=fix)


def _said(part: str, words: Mapping[str, str]) -> str:
    for flag, word in words.items():
        part = part.replace(flag, word)
    return part
