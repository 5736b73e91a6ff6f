"""The linear-attention kernels of one runner, stamped on it before anything that reads them is built.

In: a launch and, as an argument, the default of prefill. Out: a frozen `LinearAttnBackends`. Nothing here is
process-wide: building a draft never changes its target, and a default is never written back into the launch.

Source: SGLang #34376, #33492.

.. versionadded:: 0.2
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from backstamp.errors import Unstamped
from backstamp.launch import Launch

__all__ = [
    "LinearAttnBackends",
    "linear_attn_backends_of",
    "resolve_linear_attn_backends",
    "stamp_linear_attn_backends",
    "verify_follows",
]

ATTRIBUTE: Final = "linear_attn_backends"
#: The kernel that serves every phase of every linear family, for what nobody asked.
_PORTABLE: Final = "triton"
_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LinearAttnBackends:
    """The kernel of each linear phase of one runner."""

    decode: str
    prefill: str
    verify: str


def verify_follows(decode: str) -> str:
    """The kernel of an unset linear verify."""
    return decode if decode == "flashinfer" else _PORTABLE


def resolve_linear_attn_backends(
    launch: Launch, prefill_default: str | Callable[[], str | None] | None = None
) -> LinearAttnBackends:
    """What the operator asked for, and for prefill this runner's default where nothing was asked.

    `prefill_default` is a kernel, or a gate that may probe the device to name one; it is not called where the operator
    chose.
    """
    decode, prefill, verify = launch.linear("decode"), launch.linear("prefill"), launch.linear("verify")
    default = None
    if prefill is None:
        default = prefill_default() if callable(prefill_default) else prefill_default
    of_decode = decode.value if decode is not None else _PORTABLE
    return LinearAttnBackends(
        decode=of_decode,
        prefill=prefill.value if prefill is not None else default or _PORTABLE,
        verify=verify.value if verify is not None else verify_follows(of_decode),
    )


def stamp_linear_attn_backends(runner: object, backends: LinearAttnBackends) -> None:
    """Put the choice on its runner and log it, once a runner."""
    setattr(runner, ATTRIBUTE, backends)
    _LOG.info("linear attention: decode %s, prefill %s, verify %s", backends.decode, backends.prefill, backends.verify)


def linear_attn_backends_of(runner: object) -> LinearAttnBackends:
    """The choice stamped on a runner.

    Raises:
        Unstamped: nobody stamped this runner; a default would be another runner's.
    """
    backends = vars(runner).get(ATTRIBUTE)
    if not isinstance(backends, LinearAttnBackends):
        raise Unstamped(
            f"runner {type(runner).__name__}",
            needed="its linear-attention kernels stamped before a backend reads them",
            found="none",
            fix="Call stamp_linear_attn_backends(runner, resolve_linear_attn_backends(launch)) first",
        )
    return backends
