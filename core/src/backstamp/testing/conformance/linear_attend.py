"""A case of a recurrence run by a built backend and held against float64: outputs, and every state of the pool.

In: a case, the device, and what was built for it. Out: the tensors of one step, and what is wrong: a line of words,
empty where nothing is. A slot that nobody may write has to hold the bits it held.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Final, NamedTuple

import torch
from torch import Tensor

from backstamp.attention import ComputedGates, LinearBackend, LinearBatch, RawGates
from backstamp.testing.conformance.attend import DTYPES
from backstamp.testing.conformance.linear_cases import LinearCase
from backstamp.testing.conformance.replays import replay, synchronize
from backstamp.testing.conformance.verdicts import ACCURACY_FACTORS, Tolerance, not_finite, off
from backstamp.testing.linear_batches import MadeLinearStep, make_linear_step
from backstamp.testing.linear_reference import LinearAnswer, reference_linear

__all__ = ["LinearOutcome", "make_linear_case", "outcome_of", "outcome_of_graph", "wrong_linear"]

#: Relative errors of all outputs, and of a state: chunked kernels keep what is inside a chunk in the dtype of the
#: tokens. Every kernel measured was within half of them (bench/results).
NORMS: Final = {"fp32": 2e-5, "fp16": 4e-3, "bf16": 8e-3}
#: One number may be off by so many times the norm's bound, of itself and of the size of a usual one.
_ONE_OF_MANY: Final = 16


class LinearOutcome(NamedTuple):
    """What a call left behind: outputs `[T, HV, V]`; the step, with the states as they are now; the states as they
    were; and the truth."""

    out: Tensor
    made: MadeLinearStep
    before: LinearAnswer
    truth: LinearAnswer


def make_linear_case(case: LinearCase, device: str, seed: int = 0) -> MadeLinearStep:
    """The case's tensors; the same seed gives the same numbers and slots on every device."""
    made = make_linear_step(
        case.q_lens,
        family=case.family,
        phase=case.phase,
        layer=case.layer(),
        order=case.order,
        has_state=case.has_state,
        pads=case.pads,
        form=case.form,
        parents=case.parents,
        num_accepted=case.num_accepted,
        raw_gates=case.raw_gates,
        lower_bound=case.lower_bound,
        dtype=DTYPES[case.dtype],
        state_dtype=DTYPES[case.state_dtype],
        pad_tokens=case.pad_tokens,
        host_lens=case.host_lens,
        device=device,
        seed=seed,
    )
    if case.unkept and made.batch.slot_table is not None:
        made.batch.slot_table[0, -1] = -1
    if case.pads or case.unkept or case.num_accepted:
        made = _away_from_the_ends(made)
    # the windows of short convolutions are the engine's own
    windows = torch.ones(made.pool.ssm.shape[0], 8, 3, device=device)
    made = replace(made, pool=replace(made.pool, conv=(windows,)))
    return _in_wider_tensors(made) if case.strided else made


def outcome_of(backend: LinearBackend[object], case: LinearCase, made: MadeLinearStep, seed: int = 0) -> LinearOutcome:
    """Plan and run one step, outputs preset to NaN."""
    before = _states_of(made)
    out = torch.full_like(made.v, float("nan"), memory_format=torch.contiguous_format)
    planned = replace(made.batch, slots=_other_slots(made)) if case.own_slots else made.batch
    _forward(backend, made, backend.plan(planned), out)
    synchronize()
    return LinearOutcome(out, made, before, true_answer(case, seed))


def outcome_of_graph(backend: LinearBackend[object], case: LinearCase, made: MadeLinearStep) -> LinearOutcome:
    """Capture a step in a CUDA graph, and replay it after `plan` was given another, whose rows have other slots."""
    again = make_linear_case(case, str(made.q.device), seed=1)
    before = _states_of(again)
    out = torch.zeros_like(made.v)

    def change() -> LinearBatch:
        for old, new in zip(_tensors_of(made), _tensors_of(again), strict=True):
            old.copy_(new)
        # its rows lie elsewhere: what was recorded reads them where they were
        return replace(again.batch, intermediate=made.batch.intermediate)

    replay(backend, made.batch, lambda state: _forward(backend, made, state, out), change, out)
    return LinearOutcome(out, made, before, true_answer(case, 1))


def true_answer(case: LinearCase, seed: int) -> LinearAnswer:
    """What the step comes to, from the same numbers on the CPU."""
    made = make_linear_case(case, "cpu", seed)
    return reference_linear(made.q, made.k, made.v, made.gates, made.layer, made.batch, made.pool)


def wrong_linear(outcome: LinearOutcome, case: LinearCase, accuracy: str = "exact") -> str:
    """What is wrong with what a call left behind, the first of: outputs, states, states of others."""
    out, made, before, truth = outcome
    if accuracy not in ACCURACY_FACTORS:
        return f"accuracy class {accuracy!r} has no bound; those that have are {', '.join(ACCURACY_FACTORS)}"
    norm = max(NORMS[case.dtype], NORMS[case.state_dtype]) * ACCURACY_FACTORS[accuracy]

    def of_token(token: int) -> str:
        return _of_token(case, token)

    live = truth.out.abs().sum((1, 2)) > 0
    at = live.nonzero().flatten().tolist()
    words = not_finite(out, of_token) or _off(
        out[live.to(out.device)], truth.out[live], norm, "output", lambda i: of_token(at[i])
    )
    if words:
        return words
    pools = [("slot", made.pool.ssm, before.ssm, truth.ssm, _written_slots(case, made.batch))]
    if truth.intermediate is not None and made.batch.intermediate is not None and before.intermediate is not None:
        left = [item.flatten(0, 1) for item in (made.batch.intermediate, before.intermediate, truth.intermediate)]
        pools.append(("place", left[0], left[1], left[2], _written_places(case, made.batch)))
    for what, now, was, true, written in pools:
        words = _wrong_states(what, now.cpu(), was, true, written, norm)
        if words:
            return words
    if any(bool((windows != 1.0).any()) for windows in made.pool.conv):
        return "the convolution's windows were written: they are the engine's own"
    return ""


def _wrong_states(what: str, now: Tensor, was: Tensor, true: Tensor, written: dict[int, str], norm: float) -> str:
    """The first state that is off, then the first that was not to be touched and was."""
    for slot, row in written.items():
        state = now[slot]
        if not bool(torch.isfinite(state).all()):
            return f"the state of {row} in {what} {slot} is not finite"
        words = _off(state, true[slot], norm, f"the state of {row} in {what} {slot}", lambda head: f"head {head}")
        if words:
            return words
    for slot in range(now.shape[0]):
        # a NaN that is still one is what it was
        if slot not in written and not torch.equal(now[slot].double().nan_to_num(0.5), was[slot].nan_to_num(0.5)):
            return f"{what} {slot}, which is no row's to write, was touched"
    return ""


def _off(got: Tensor, truth: Tensor, norm: float, what: str, where: Callable[[int], str]) -> str:
    """As `off`, with room for one number in the size of a usual one."""
    usual = float(truth.double().square().mean().sqrt()) if truth.numel() else 0.0
    return off(got, truth, Tolerance(_ONE_OF_MANY * norm * usual, _ONE_OF_MANY * norm, norm), 1.0, what, where)


def _written_slots(case: LinearCase, batch: LinearBatch) -> dict[int, str]:
    """Slots that a row leaves a state in, with the row."""
    written: dict[int, str] = {}
    for row, q_len in enumerate(case.q_lens):
        if not q_len or (case.phase == "verify" and batch.slot_table is None):
            continue
        if case.phase != "verify" or batch.slot_table is None:
            written[int(batch.slots[row])] = f"row {row}"
        elif _is_live(batch, row):
            written |= {int(batch.slot_table[row, at]): f"row {row}, token {at}" for at in range(q_len)}
    written.pop(-1, None)
    return written


def _written_places(case: LinearCase, batch: LinearBatch) -> dict[int, str]:
    """Places of `intermediate`, its first two dims as one, that a row leaves a state in."""
    assert batch.intermediate is not None
    width = batch.intermediate.shape[1]
    lens = enumerate(case.q_lens)
    live = [(row, q_len) for row, q_len in lens if int(batch.slots[row]) >= 0]
    return {row * width + at: f"row {row}, token {at}" for row, q_len in live for at in range(q_len)}


def _is_live(batch: LinearBatch, row: int) -> bool:
    """Whether a row of a slot table starts from a state."""
    assert batch.slot_table is not None
    assert batch.num_accepted is not None
    accepted = int(batch.num_accepted[row])
    return 1 <= accepted <= batch.slot_table.shape[1] and int(batch.slot_table[row, accepted - 1]) >= 0


def _states_of(made: MadeLinearStep) -> LinearAnswer:
    """The states as they are, in the form of an answer."""
    left = made.batch.intermediate
    kept = None if left is None else left.double().cpu().clone()
    return LinearAnswer(out=made.v[:0].double(), ssm=made.pool.ssm.double().cpu().clone(), intermediate=kept)


def _forward(backend: LinearBackend[object], made: MadeLinearStep, state: object, out: Tensor) -> None:
    answer = backend.forward(
        made.q, made.k, made.v, made.gates, made.layer, state, pool=made.pool, slots=made.batch.slots, out=out
    )
    if answer is not out and answer.data_ptr() != out.data_ptr():
        raise AssertionError("forward answered another tensor than the `out` it was given")


def _other_slots(made: MadeLinearStep) -> Tensor:
    """Slots of another layer for the same rows: the next ones; pads stay pads."""
    slots = made.batch.slots
    return torch.where(slots < 0, slots, (slots + 1) % made.pool.ssm.shape[0])


def _away_from_the_ends(made: MadeLinearStep) -> MadeLinearStep:
    """The same step with no row in the first slot and the last, where a kernel that takes -1 for a slot would write."""
    slots, table, last = made.batch.slots, made.batch.slot_table, made.pool.ssm.shape[0] - 1
    used = set(slots.tolist()) if table is None else set(table.flatten().tolist())
    free = [slot for slot in range(1, last) if slot not in used]
    to = list(range(last + 1))
    for end in (0, last):
        if end in used:
            other = free.pop()
            to[end], to[other] = other, end
    moved = torch.tensor(to, dtype=torch.int32, device=slots.device)

    def move(old: Tensor) -> Tensor:
        return torch.where(old < 0, old, moved[old.long()])

    batch = replace(made.batch, slots=move(slots), slot_table=None if table is None else move(table))
    # pairs change places: what moves in is what moved out
    return replace(made, batch=batch, pool=replace(made.pool, ssm=made.pool.ssm[moved.long()]))


def _in_wider_tensors(made: MadeLinearStep) -> MadeLinearStep:
    """The same step as engines hold it: tokens cut out of one projection, states out of slots that hold more."""
    keys = made.q.shape[1]
    wide = made.q.new_full((made.q.shape[0], 2 * keys + 1, made.q.shape[2]), float("nan"))
    wide[:, :keys], wide[:, keys : 2 * keys] = made.q, made.k
    values = made.v.new_full((made.v.shape[0], made.v.shape[1] + 1, made.v.shape[2]), float("nan"))
    values[:, 1:] = made.v
    states = made.pool.ssm.new_full((made.pool.ssm.shape[0], 2, *made.pool.ssm.shape[1:]), float("nan"))
    states[:, 1] = made.pool.ssm
    pool = replace(made.pool, ssm=states[:, 1])
    return replace(made, q=wide[:, :keys], k=wide[:, keys : 2 * keys], v=values[:, 1:], pool=pool)


def _tensors_of(made: MadeLinearStep) -> list[Tensor]:
    """What an engine writes at fixed addresses: tokens, gates and states."""
    kind = RawGates if isinstance(made.gates, RawGates) else ComputedGates
    gates = [part for field in fields(kind) if isinstance(part := getattr(made.gates, field.name), Tensor)]
    kept = [] if made.batch.intermediate is None else [made.batch.intermediate]
    return [made.q, made.k, made.v, *gates, made.pool.ssm, *kept]


def _of_token(case: LinearCase, token: int) -> str:
    """Which row a token is of."""
    first = 0
    for row, q_len in enumerate(case.q_lens):
        if token < first + q_len:
            pad = ", a pad" if row in case.pads else ""
            return f"row {row}, token {token - first} of {q_len}{pad}"
        first += q_len
    return f"token {token}, of no row"
