"""What a row does not declare must be refused: a mask, a sink or a softcap is never dropped, a dtype never guessed.

In: a `Subject`. Out: jobs. Each builds a row for its plain case and hands it something the row does not declare; the
answer has to be an `UnsupportedBatch` out of `plan` or `forward`. A number is wrong, whatever number it is.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, TypeAlias, cast

from backstamp.declarations import Offer, Phase
from backstamp.errors import UnsupportedBatch
from backstamp.stamp import is_container, said
from backstamp.testing.conformance.cases import AttentionCase
from backstamp.testing.conformance.numerics import built_case
from backstamp.testing.conformance.row_cases import base_case, sink_dtypes_of
from backstamp.testing.conformance.rows import each_row, skipped_job
from backstamp.testing.conformance.solo import Solo
from backstamp.testing.conformance.subject import Job, Subject

if TYPE_CHECKING:
    from torch import Tensor

    from backstamp.attention import AttentionBackend
    from backstamp.testing.batches import MadeStep

__all__ = ["undeclared_jobs"]

_PHASES: Final[tuple[Phase, ...]] = ("prefill", "decode", "verify")
_FIX: Final = "Check it with backstamp.step_checks: check_batch in plan, check_call in forward"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One call of a backend: a step, and what else `plan` and `forward` are told."""

    step: MadeStep
    capture: bool = False
    new: bool = False
    lse: Tensor | None = None
    indices: Tensor | None = None
    q_rope: Tensor | None = None


#: How a plain call becomes one with something undeclared.
_Change: TypeAlias = "Callable[[AttentionCase, MadeStep], _Call]"


def undeclared_jobs(subject: Subject) -> Iterator[Job]:
    """A job for each thing that a dense row does not declare, in each of its phases."""
    for name, solo, reason in each_row(subject):
        if reason:
            yield skipped_job("undeclared", name, reason)
            continue
        for phase in _PHASES:
            if phase not in solo.offer.phases:
                continue
            case = base_case(solo.offer, phase)
            for what, change in _changes(solo.offer, case):
                title = f"{name}: {phase}, {what}"
                run = lambda solo=solo, case=case, what=what, change=change: _faults(solo, case, what, change)  # noqa: E731
                yield Job("undeclared", title, run, _FIX)


def _faults(solo: Solo, case: AttentionCase, what: str, change: _Change) -> str:
    backend, step = built_case(solo, case)
    assert not is_container(backend)
    call = change(case, step)
    part = cast("AttentionBackend[object]", backend)
    try:
        state = part.plan(call.step.batch, capture=call.capture)
        out = _forward(part, case, call, state)
    except UnsupportedBatch:
        return ""
    except Exception as cause:
        return f"needs an UnsupportedBatch that names it, got {said(cause)}"
    return f"undeclared, handed over and not refused: {_meaning(case, call, step, out)}"


def _forward(part: AttentionBackend[object], case: AttentionCase, call: _Call, state: object) -> Tensor:
    from backstamp.testing.conformance.attend import keys_of

    step = call.step
    kv, new = keys_of(case, step)
    if call.new:
        kv, new = keys_of(replace(case, new="beside"), step)
    out = step.q.new_zeros(step.batch.num_tokens, step.layer.num_qo_heads, step.layer.v_head_dim)
    return part.forward(
        step.q, kv, step.layer, state, out=out, lse=call.lse, new=new, indices=call.indices, q_rope=call.q_rope
    )


def _meaning(case: AttentionCase, call: _Call, plain: MadeStep, out: Tensor) -> str:
    """Whether the answer is that of the plain step: then what was handed over was dropped."""
    from backstamp.testing.conformance.attend import truth_of, wrong

    truth, true_lse = truth_of(case, plain)
    if out.shape != truth.shape or wrong(out, truth, case, "exact", lse=None, true_lse=true_lse):
        return "it was read, or misread"
    return "it was dropped, the answer is the one without it"


def _changes(offer: Offer, case: AttentionCase) -> Iterator[tuple[str, _Change]]:
    """What this row does not declare, as changes of a plain call."""
    has = offer.features | {word for need in offer.needs for word in need.split("+")}
    yield from _of_layer(has)
    yield from _of_step(offer, has, case)
    yield from _of_tensors(offer, case)
    yield from _beside(offer, has, case)


def _of_layer(has: frozenset[str]) -> Iterator[tuple[str, _Change]]:
    import torch

    def with_layer(**changes: object) -> _Change:
        return lambda case, step: _Call(step=replace(step, layer=replace(step.layer, **changes)))  # type: ignore[arg-type]

    def with_heads(field: str) -> _Change:
        def change(case: AttentionCase, step: MadeStep) -> _Call:
            slopes = torch.linspace(0.5, 3.0, case.heads[0], device=step.q.device)
            return _Call(step=replace(step, layer=replace(step.layer, **{field: slopes})))  # type: ignore[arg-type]

        return change

    if "window" not in has:
        yield "a sliding window", with_layer(window_left=5)
    if "softcap" not in has:
        yield "a softcap", with_layer(softcap=2.0)
    for feature in ("sinks", "alibi"):
        if feature not in has:
            yield feature, with_heads(feature)


def _of_step(offer: Offer, has: frozenset[str], case: AttentionCase) -> Iterator[tuple[str, _Change]]:
    from backstamp.testing.batches import make_tree

    def with_tree(case: AttentionCase, step: MadeStep) -> _Call:
        q_lens, kv_lens = [q for q, _ in case.rows], [kv for _, kv in case.rows]
        tree = make_tree(q_lens, kv_lens, "qlen", device=str(step.q.device))
        return _Call(step=replace(step, batch=replace(step.batch, tree=tree)))

    def with_batch(**changes: object) -> _Change:
        return lambda case, step: _Call(step=replace(step, batch=replace(step.batch, **changes)))  # type: ignore[arg-type]

    if "tree_mask" not in has and case.phase == "verify":
        yield "a tree mask", with_tree
    if "non_causal" not in has and case.phase != "decode":
        yield "a step without the causal rule", with_batch(causal=False)
    inputs = offer.inputs | offer.phase_inputs.get(case.phase, frozenset())
    if "token_rows" in inputs:
        yield "no row of each token", with_batch(token_rows=None)
    if "host_lens" in inputs:
        yield "no host lengths", with_batch(qo_indptr_host=None, kv_lens_host=None)
        yield "host lengths that are bounds", with_batch(host_exact=False)
    if offer.graph == "never":
        yield "a capture", lambda case, step: _Call(step=step, capture=True)
    if "paged" in offer.kv_forms:
        for form in ("page_table", "csr", "indirect"):
            if form not in offer.index_forms:
                yield f"an index as {form}", _with_form(form)


def _with_form(form: str) -> _Change:
    from backstamp.testing.conformance.attend import make_step

    def change(case: AttentionCase, step: MadeStep) -> _Call:
        other = make_step(replace(case, index_form=form), str(step.q.device))  # type: ignore[arg-type]
        return _Call(step=replace(step, batch=replace(step.batch, index=other.batch.index)))

    return change


def _of_tensors(offer: Offer, case: AttentionCase) -> Iterator[tuple[str, _Change]]:
    from backstamp.testing.conformance.attend import DTYPES, make_step

    def other_step(**changes: object) -> _Change:
        return lambda case, step: _Call(step=make_step(replace(case, **changes), str(step.q.device)))  # type: ignore[arg-type]

    def with_kv(**changes: object) -> _Change:
        return lambda case, step: _Call(step=replace(step, kv=replace(step.kv, **changes)))  # type: ignore[arg-type]

    def other_cache(case: AttentionCase, step: MadeStep) -> _Call:
        dtype = DTYPES["fp16" if case.dtype != "fp16" else "fp32"]
        v = None if step.kv.v is None else step.kv.v.to(dtype)
        return _Call(step=replace(step, kv=replace(step.kv, k=step.kv.k.to(dtype), v=v)))

    for dtype in ("fp32", "fp16", "bf16"):
        if dtype != case.dtype:
            yield f"a query in {dtype}, built for {case.dtype}", other_step(dtype=dtype)
            break
    if "any" not in offer.head_dims and not case.latent:
        yield "head dims it does not have", other_step(dims=(case.dims[0] + 8, case.dims[1] + 8))
    if "paged" in offer.kv_forms:
        yield "a cache in another dtype", other_cache
        yield "pages of another size than built for", other_step(page_size=2 * case.page_size)
        yield "a cache of an unknown layout", with_kv(layout="made-up")


def _beside(offer: Offer, has: frozenset[str], case: AttentionCase) -> Iterator[tuple[str, _Change]]:
    import torch

    from backstamp.testing.conformance.attend import DTYPES

    def with_lse(case: AttentionCase, step: MadeStep) -> _Call:
        lse = torch.zeros(step.batch.num_tokens, case.heads[0], device=step.q.device)
        return _Call(step=step, lse=lse)

    def with_indices(case: AttentionCase, step: MadeStep) -> _Call:
        indices = torch.zeros(step.batch.num_tokens, 4, dtype=torch.int32, device=step.q.device)
        return _Call(step=step, indices=indices)

    def with_rope(case: AttentionCase, step: MadeStep) -> _Call:
        return _Call(step=step, q_rope=torch.zeros_like(step.q[..., :16]))

    def with_lse_and_sinks(case: AttentionCase, step: MadeStep) -> _Call:
        dtype = DTYPES[sink_dtypes_of(offer, case)[0]]
        sinks = torch.zeros(case.heads[0], dtype=dtype, device=step.q.device)
        layer = replace(step.layer, sinks=sinks)
        return replace(with_lse(case, step), step=replace(step, layer=layer))

    if "lse" not in has:
        yield "a tensor for LSE", with_lse
    elif "sinks" in has:
        yield "LSE of a layer with sinks", with_lse_and_sinks
    if "split_kv" not in has and case.phase == "prefill" and case.cached_prefix:
        yield "keys beside a cached prefix", lambda case, step: _Call(step=step, new=True)
    if "indices" not in has:
        yield "a selection of keys", with_indices
    if not case.latent:
        yield "a rotary part of its own", with_rope
