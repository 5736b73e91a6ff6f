"""The cases of one row of the linear slot: every value it declares, one at a time, and what engines hand every kernel.

In: an `Offer` of a gated delta net or of Kimi delta attention. Out: its `LinearCase`s: a plain one a phase, then that
one with another dtype, head dim, state layout, gate form or kind of row, so that a failure names it.

A declaration has no words for the dtype of states, for gates that are computed already, for where verify leaves its
states, and for verify rows of unlike lengths. A row has to serve one way of each in its plain step; a kernel that
refuses another way, in words, is told as skipped. One that serves it wrongly is at fault like any other.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final, cast

from backstamp.declarations import Offer, Phase
from backstamp.testing.conformance.linear_cases import TREE, LinearCase, LinearFamily, Order, VerifyForm
from backstamp.testing.conformance.row_cases import dims_of, dtypes_of, is_excluded

__all__ = ["LINEAR_PHASES", "linear_base_case", "linear_cases_of", "ways_of"]

#: The phases of the slot: a draft's run by the halves they follow.
LINEAR_PHASES: Final[tuple[Phase, ...]] = ("prefill", "decode", "verify")
_ORDERS: Final[tuple[Order, ...]] = ("vk", "kv")
_STATE_DTYPES: Final = ("fp32", "bf16")
_FORMS: Final[tuple[VerifyForm, ...]] = ("intermediate", "slot_table")
#: Rows about the chunks that libraries cut prefill into, 16 to 128 tokens; one token.
_ROWS: Final[dict[str, tuple[int, ...]]] = {"prefill": (65, 1, 128, 7), "decode": (1,) * 5, "verify": (4, 4, 4)}
_ACCEPTED: Final = (1, 3, 2)
#: The bound of every model that has one. Source: SGLang 0.5.23 models/kimi_k3.py
_BOUND: Final = -5.0


def linear_cases_of(offer: Offer) -> tuple[LinearCase, ...]:
    """Every case of a row, phase by phase; none of what it excludes."""
    every = [case for phase in LINEAR_PHASES if phase in offer.phases for case in _of_phase(offer, phase)]
    return tuple(case for case in every if not is_excluded(offer, case.said, graph=case.graph))


def linear_base_case(offer: Offer, phase: Phase) -> LinearCase:
    """The plainest step of a phase: rows that have states, and nothing else."""
    case = LinearCase(
        name="plain",
        phase=phase,
        q_lens=_ROWS[phase],
        family=cast("LinearFamily", offer.family),
        dims=dims_of(offer)[0],
        order=orders_of(offer)[0],
        dtype=dtypes_of(offer)[0],
    )
    needs = {word for need in offer.needs for word in need.split("+")}
    if "tree_mask" in needs and phase == "verify":
        case = _tree(case)
    if "bounded_gates" in needs:
        case = replace(case, lower_bound=_BOUND)
    return replace(case, words=frozenset(needs - case.said))


def orders_of(offer: Offer) -> tuple[Order, ...]:
    """The state layouts of a row, best first; the first there is where it declares none."""
    return tuple(order for order in _ORDERS if order in offer.state_layouts) or _ORDERS[:1]


def ways_of(case: LinearCase) -> Iterator[LinearCase]:
    """The case, then with what it is not about the other way: a kernel has to serve one of them."""
    for state_dtype in (case.state_dtype,) if "states" in case.fixed else _STATE_DTYPES:
        for raw_gates in (case.raw_gates,) if "gates" in case.fixed else (True, False):
            for form in (case.form,) if "form" in case.fixed or case.phase != "verify" else _FORMS:
                yield replace(case, state_dtype=state_dtype, raw_gates=raw_gates, form=form)


def _of_phase(offer: Offer, phase: Phase) -> Iterator[LinearCase]:
    base = linear_base_case(offer, phase)
    yield base
    yield from _of_types(offer, base)
    yield from _of_states(offer, base)
    yield from _of_rows(base)
    yield from _of_engines(offer, base)
    if phase == "verify" and base.parents is None:
        yield from _of_verify(offer, base)


def _of_types(offer: Offer, base: LinearCase) -> Iterator[LinearCase]:
    for dtype in dtypes_of(offer)[1:]:
        yield replace(base, name=dtype, dtype=dtype)
    for dims in dims_of(offer)[1:]:
        yield replace(base, name=f"head dims {dims[0]}/{dims[1]}", dims=dims)
    for heads in ((4, 4), (1, 8)):
        yield replace(base, name=f"{heads[0]}/{heads[1]} heads", heads=heads)
    for order in orders_of(offer)[1:]:
        yield replace(base, name=f"states in order {order}", order=order)


def _of_states(offer: Offer, base: LinearCase) -> Iterator[LinearCase]:
    """What no declaration has a word for, and gates with a bound."""
    for dtype in _STATE_DTYPES:
        fixed = base.fixed | {"states"}
        yield replace(base, name=f"states in {dtype}", state_dtype=dtype, fixed=fixed, optional=True)
    for raw, words in ((True, "raw gates"), (False, "computed gates")):
        yield replace(base, name=words, raw_gates=raw, fixed=base.fixed | {"gates"}, optional=True)
    if base.lower_bound is None:
        declared = "bounded_gates" in offer.features
        name = "a bounded decay" if declared else "a bounded decay, which the row does not declare"
        yield replace(base, name=name, lower_bound=_BOUND, fixed=base.fixed | {"gates"}, refused=not declared)


def _of_rows(base: LinearCase) -> Iterator[LinearCase]:
    yield replace(base, name="pads", pads=(1,))
    yield replace(base, name="tokens of no row", pad_tokens=3)
    yield replace(base, name="no rows", q_lens=(), parents=None)
    yield replace(base, name="one row", q_lens=base.q_lens[:1], parents=base.parents and base.parents[:1])
    if base.phase == "prefill":
        yield replace(base, name="rows without a state", has_state=(True, False, False, True))
    if base.parents is None:
        lens = (0, *base.q_lens[1:], 0)
        # verify may want as many tokens in every row
        yield replace(base, name="empty rows", q_lens=lens, optional=base.phase == "verify")


def _of_engines(offer: Offer, base: LinearCase) -> Iterator[LinearCase]:
    """How engines lay a step out."""
    own = replace(base, name="slots of the layer's own", own_slots=True)
    # a slot table is the batch's, whatever the layer
    if base.phase == "verify":
        own = replace(own, form="intermediate", fixed=base.fixed | {"form"}, optional=True)
    yield own
    yield replace(base, name="views of wider tensors", strided=True)
    if "host_lens" not in offer.inputs | offer.phase_inputs.get(base.phase, frozenset()):
        yield replace(base, name="no host offsets", host_lens=False)
    if offer.graph != "never" and base.phase != "prefill":
        yield replace(base, name="CUDA graph", graph=True)


def _of_verify(offer: Offer, base: LinearCase) -> Iterator[LinearCase]:
    kept = replace(base, form="intermediate", fixed=base.fixed | {"form"}, optional=True)
    table = replace(kept, form="slot_table", num_accepted=_ACCEPTED)
    yield replace(kept, name="states kept apart")
    yield replace(table, name="a slot for each token")
    yield replace(table, name="rows that kept nothing", num_accepted=(2, 0, 9))
    yield replace(table, name="a token whose state is not kept", unkept=True)
    yield replace(base, name="rows of unlike lengths", q_lens=(3, 1, 4), optional=True)
    if "tree_mask" in offer.features:
        yield replace(_tree(base), name="tree")
    else:
        yield replace(_tree(base), name="a tree, which the row does not declare", refused=True)


def _tree(base: LinearCase) -> LinearCase:
    lens = tuple(len(parents) for parents in TREE)
    # tokens of a slot table are a chain
    return replace(base, q_lens=lens, parents=TREE, form="intermediate", fixed=base.fixed | {"form"})
