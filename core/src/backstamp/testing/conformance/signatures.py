"""Whether a built object can be called as the call contract calls it, read with `inspect`.

In: an object a factory built, and its row. Out: a line for each call it cannot take. A plugin needs no class of ours.

.. versionadded:: 0.2
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Final

from backstamp.declarations import Offer
from backstamp.stamp import is_container

__all__ = ["signature_faults"]

_FORWARD_KEYWORDS: Final = ("out", "lse", "new", "q_rope", "indices")


def signature_faults(built: object, offer: Offer) -> Iterator[str]:
    """What of the call contract a built attention object cannot be called with."""
    if is_container(built):
        yield from _unlike(built, "plan", ("batches",), ())
        return
    yield from _unlike(built, "plan", ("batch",), ("state", "capture"))
    yield from _unlike(built, "forward", ("q", "kv", "layer", "state"), _FORWARD_KEYWORDS)
    for name, words in (("init_graphs", ("max_rows", "max_tokens")), ("replan", ("state",))):
        if hasattr(built, name):
            yield from _unlike(built, name, words, ())
        elif offer.graph != "never" and name == "replan" and offer.plan == "device":
            yield "replan is missing: a row with plan 'device' does its device half there"


def _unlike(built: object, name: str, positional: Sequence[str], keywords: Sequence[str]) -> Iterator[str]:
    method = getattr(built, name, None)
    wanted = f"{name}({', '.join([*positional, *(['*'] if keywords else []), *(f'{word}=...' for word in keywords)])})"
    if not callable(method):
        yield f"needs {wanted}, got no such method"
        return
    try:
        inspect.signature(method).bind(*positional, **dict.fromkeys(keywords))
    except TypeError as cause:
        yield f"needs {wanted}, got {name}{inspect.signature(method)}: {cause}"
    except ValueError:  # a method of an extension module says nothing of itself
        return
    required = [
        parameter.name
        for parameter in inspect.signature(method).parameters.values()
        if parameter.default is parameter.empty and parameter.kind is parameter.KEYWORD_ONLY
    ]
    if required:
        yield f"{name} needs {', '.join(required)} on every call, which no engine knows of"
