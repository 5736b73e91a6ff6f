"""A `BuildRequest` for tests of a plugin: what construction would ask for one declared row, with small limits.

In: an `Offer`, and what to change. Out: the request its factory takes.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from backstamp.declarations import PHASES, Offer
from backstamp.factories import BuildRequest

if TYPE_CHECKING:
    from backstamp.attention import LayerSpec

__all__ = ["request_for"]


def request_for(offer: Offer, layers: Sequence[LayerSpec] = (), **changes: object) -> BuildRequest:
    """A request for all of a row's phases, its preferred page size and first layout, on the CPU.

    `changes` are fields of `BuildRequest`; the dtype is "fp32" where the row has it, else its first by name.
    """
    dtype = "fp32" if "fp32" in offer.dtypes else min(offer.dtypes)
    request = BuildRequest(
        kernel=offer.kernel,
        offer=offer,
        family=offer.family,
        phases=tuple(phase for phase in PHASES if phase in offer.all_phases),
        role="target",
        layers=tuple(layers),
        dtype=dtype,
        kv_dtype="same",
        page_size=offer.page_sizes.preferred,
        layout=(offer.state_layouts if offer.slot == "linear" else offer.layouts)[0],
        device="cpu",
        max_rows=64,
        max_tokens=4096,
        max_pages=4096,
        max_kv_len=4096,
    )
    return replace(request, **changes)  # type: ignore[arg-type]
