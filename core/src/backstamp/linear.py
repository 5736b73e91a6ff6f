"""The linear-attention kernels of one runner, stamped on it before anything that reads them is built.

In: a plan; or, where an engine chooses without one, a launch and as an argument the default of prefill. Out: a frozen
`LinearAttnBackends`. Nothing here is process-wide: building a draft never changes its target, and a default is never
written back into the launch.

Source: SGLang #34376, #33492.

.. versionadded:: 0.2
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from backstamp.errors import ConflictingRequest, Unstamped
from backstamp.launch import Launch

if TYPE_CHECKING:
    from backstamp.factories import BuildRequest
    from backstamp.host import HostFacts
    from backstamp.model import ModelFacts
    from backstamp.plan import Plan

__all__ = [
    "LinearAttnBackends",
    "flashinfer_prefill_on_sm100",
    "linear_attn_backends_in",
    "linear_attn_backends_of",
    "linear_attn_backends_of_request",
    "resolve_linear_attn_backends",
    "settle_linear_attn_backends",
    "stamp_linear_attn_backends",
    "stamped_linear_attn_backends",
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
    chose. It knows no host: what is left unset is triton, whatever a plan came to. A runner that is built from a plan
    is stamped with `linear_attn_backends_in(plan)`, which `build` does where the runner carries nothing.
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


def flashinfer_prefill_on_sm100(model: ModelFacts, read_host: Callable[[], HostFacts]) -> Callable[[], str | None]:
    """The gate of prefill's default: flashinfer on SM100 and SM103 for a runner of gated delta nets, else none.

    The host is read when the gate is asked, which is only where the operator named no prefill kernel; a model without
    a gated delta net never has it read. With a plan the default is `linear_attn_backends_in(plan).prefill`: what `auto`
    ranks first on its host.
    """

    def gate() -> str | None:
        if all(group.facts.family != "gdn" for group in model.linear_groups):
            return None
        host = read_host()
        return "flashinfer" if host.device == "cuda" and host.arch in ("10.0", "10.3") else None

    return gate


def linear_attn_backends_in(plan: Plan) -> LinearAttnBackends | None:
    """What a plan settled on, None for a runner without linear layers: what was asked for, else what `auto` came to.

    A runner stamped with it before `build` is built as it is. The kernel of a verify phase that never runs is the one
    an unset request would have come to.
    """
    if plan.linear is None:
        return None
    decode, prefill, verify = (row.kernel for row in plan.linear.rows)
    assert decode is not None, "a linear slot without a kernel for decode"
    assert prefill is not None, "a linear slot without a kernel for prefill"
    return LinearAttnBackends(decode=decode, prefill=prefill, verify=verify or verify_follows(decode))


def stamp_linear_attn_backends(runner: object, backends: LinearAttnBackends) -> None:
    """Put the choice on its runner and log it, once a runner."""
    setattr(runner, ATTRIBUTE, backends)
    _LOG.info("linear attention: decode %s, prefill %s, verify %s", backends.decode, backends.prefill, backends.verify)


def linear_attn_backends_of(runner: object) -> LinearAttnBackends:
    """The choice stamped on a runner.

    Raises:
        Unstamped: nobody stamped this runner; a default would be another runner's.
    """
    backends = stamped_linear_attn_backends(runner)
    if backends is None:
        raise _unstamped(f"runner {type(runner).__name__}")
    return backends


def linear_attn_backends_of_request(request: BuildRequest) -> LinearAttnBackends:
    """The choice of the runner a linear kernel is built for: what its factory reads before it builds.

    Raises:
        Unstamped: the runner carried none.
    """
    if request.linear_attn_backends is None:
        phases = ", ".join(request.phases)
        raise _unstamped(f"{request.role} linear {phases} backend {request.kernel!r}, {ATTRIBUTE} of its runner")
    return request.linear_attn_backends


def stamped_linear_attn_backends(runner: object) -> LinearAttnBackends | None:
    """The choice a runner itself carries; one on its class is no stamp, for it would answer for every runner."""
    state: object = getattr(runner, "__dict__", None)
    found = state.get(ATTRIBUTE) if isinstance(state, Mapping) else None
    if found is None and any(ATTRIBUTE in kind.__dict__.get("__slots__", ()) for kind in type(runner).__mro__):
        found = getattr(runner, ATTRIBUTE, None)
    return found if isinstance(found, LinearAttnBackends) else None


def settle_linear_attn_backends(plan: Plan, runner: object) -> None:
    """Stamp a runner as its plan says, or hold the stamp the engine put there against the plan.

    Raises:
        ConflictingRequest: the stamp names another kernel than the plan for a phase that runs, both named.
    """
    planned = linear_attn_backends_in(plan)
    if plan.linear is None or planned is None:
        return
    stamped = stamped_linear_attn_backends(runner)
    if stamped is None:
        stamp_linear_attn_backends(runner, planned)
        return
    by_phase = {"decode": stamped.decode, "prefill": stamped.prefill, "verify": stamped.verify}
    unlike = [row for row in plan.linear.rows if row.kernel is not None and row.kernel != by_phase[row.phase]]
    if unlike:
        raise ConflictingRequest(
            f"linear attention of {plan.model} ({plan.role})",
            needed="; ".join(f"{row.kernel} for {row.phase}, as planned" for row in unlike),
            found="; ".join(f"{by_phase[row.phase]} for {row.phase}, stamped on the runner" for row in unlike),
            fix="Stamp the runner with linear_attn_backends_in(plan), or leave it to build()",
        )


def _unstamped(who: str) -> Unstamped:
    return Unstamped(
        who,
        needed="its linear-attention kernels stamped before a backend reads them",
        found=f"none in {ATTRIBUTE}",
        fix="Call stamp_linear_attn_backends(runner, linear_attn_backends_in(plan)) first, as build() does",
    )
