"""What the call contract asks of every backend, whatever it computes: signatures, states, bits.

In: a `Subject`. Out: jobs. Signatures are read with `inspect`: a plugin needs no class of ours. Determinism is held
where it is declared: the same bits for a row whatever shares its batch.

.. versionadded:: 0.2
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, cast

from backstamp.declarations import Offer
from backstamp.errors import BackstampError, UnsupportedBatch
from backstamp.stamp import is_container, parts_of
from backstamp.testing.conformance.cases import AttentionCase
from backstamp.testing.conformance.numerics import DENSE_FAMILIES, built_case, runs_here
from backstamp.testing.conformance.row_cases import base_case, cases_of
from backstamp.testing.conformance.solo import Solo
from backstamp.testing.conformance.subject import Job, Skipped, Subject

if TYPE_CHECKING:
    from torch import Tensor

    from backstamp.attention import AttentionBackend
    from backstamp.testing.batches import MadeStep

__all__ = ["contract_jobs", "determinism_jobs", "signature_faults"]

_FORWARD_KEYWORDS: Final = ("out", "lse", "new", "q_rope", "indices")


def contract_jobs(subject: Subject) -> Iterator[Job]:
    """Signatures and states of every dense row, phase by phase."""
    checks: tuple[tuple[str, Callable[[Solo, AttentionCase], str]], ...] = (
        ("signatures", _signatures),
        ("two steps planned before either runs", _two_states),
        ("a state given back for another step right or refused", _renewed_state),
        ("forward without out", _no_out),
        ("inputs left as they were", _inputs_untouched),
        ("left padding right or refused", _left_padding),
        ("sinks written in place", _reloaded_sinks),
        ("a causal rule a row right or refused", _causal_rows),
    )
    for name, solo in subject.solos:
        if solo.offer.family not in DENSE_FAMILIES or runs_here(solo):
            continue
        for phase in ("prefill", "decode", "verify"):
            if phase not in solo.offer.phases:
                continue
            case = base_case(solo.offer, phase)
            for what, check in checks:
                run = lambda solo=solo, case=case, check=check: check(solo, case)  # noqa: E731
                yield Job("contract", f"{name}: {phase}, {what}", run)


def determinism_jobs(subject: Subject) -> Iterator[Job]:
    """Rows that declare the same bits for a row whatever shares its batch."""
    for name, solo in subject.solos:
        if not solo.offer.deterministic or solo.offer.family not in DENSE_FAMILIES or runs_here(solo):
            continue
        words = ("plain", "bf16", "fp16", "window", "window and sinks")
        for case in cases_of(solo.offer):
            if case.name in words and not case.phase.startswith("draft"):
                run = lambda solo=solo, case=case: _same_bits(solo, case)  # noqa: E731
                fix = "Make a row's sums independent of its neighbours, or do not declare deterministic"
                yield Job("determinism", f"{name}: {case.phase}, {case.name}", run, fix)


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


def _signatures(solo: Solo, case: AttentionCase) -> str:
    backend, _ = built_case(solo, case)
    return "; ".join(fault for part in parts_of(backend) for fault in signature_faults(part, solo.offer))


def _built(solo: Solo, case: AttentionCase) -> tuple[AttentionBackend[object], MadeStep]:
    if case.dtype == "bf16" and solo.interpreted:
        raise Skipped("Triton's interpreter computes bf16 wrongly; run it on a GPU")
    backend, step = built_case(solo, case)
    return cast("AttentionBackend[object]", backend), step


def _two_states(solo: Solo, case: AttentionCase) -> str:
    """An engine keeps several states alive: one a KV group, one a micro-batch."""
    from backstamp.testing.conformance.attend import rows_of, serve, truth_of, wrong

    backend, step = _built(solo, case)
    live = [row for row, (q, _) in enumerate(case.rows) if q]
    first, second = rows_of(step, live[:2]), rows_of(step, live[2:] or live[:1])
    states = [backend.plan(first.batch), backend.plan(second.batch)]
    truth, true_lse = truth_of(case, step)
    for rows, made, state in ((live[:2], first, states[0]), (live[2:] or live[:1], second, states[1])):
        out = serve(backend, _of_rows(case, rows), made, state)
        words = wrong(out, _tokens(truth, step, rows), _of_rows(case, rows), solo.offer.accuracy, lse=None,
                      true_lse=true_lse)  # fmt: skip
        if words:
            return f"the step planned {'first' if made is first else 'second'}: {words}"
    return ""


def _renewed_state(solo: Solo, case: AttentionCase) -> str:
    """`plan` with a state gives the same addresses new values; a state that was not planned for it may be refused."""
    from backstamp.testing.conformance.attend import make_step, serve, truth_of, wrong

    backend, step = _built(solo, case)
    state = backend.plan(step.batch)
    serve(backend, case, step, state)
    other = replace(make_step(case, str(step.q.device), seed=1), layer=step.layer)
    try:
        renewed = backend.plan(other.batch, state=state)
    except UnsupportedBatch:
        return ""
    out = serve(backend, case, other, renewed)
    truth, true_lse = truth_of(case, other, seed=1)
    return wrong(out, truth, case, solo.offer.accuracy, lse=None, true_lse=true_lse)


def _no_out(solo: Solo, case: AttentionCase) -> str:
    from backstamp.testing.conformance.attend import keys_of, truth_of, wrong

    backend, step = _built(solo, case)
    kv, new = keys_of(case, step)
    out = backend.forward(step.q, kv, step.layer, backend.plan(step.batch), new=new)
    wanted = (step.batch.num_tokens, case.heads[0], case.dims[1])
    if tuple(out.shape) != wanted or out.dtype != step.q.dtype:
        return f"needs an answer {list(wanted)} {step.q.dtype}, got {list(out.shape)} {out.dtype}"
    truth, true_lse = truth_of(case, step)
    return wrong(out, truth, case, solo.offer.accuracy, lse=None, true_lse=true_lse)


def _inputs_untouched(solo: Solo, case: AttentionCase) -> str:
    from backstamp.testing.conformance.attend import serve

    backend, step = _built(solo, case)
    batch = step.batch
    held: dict[str, Tensor | None] = {
        "q": step.q,
        "the cache": step.kv.k,
        "the cache of values": step.kv.v,
        "qo_indptr": batch.qo_indptr,
        "kv_lens": batch.kv_lens,
        "the index": next(
            (item for item in (batch.index.page_table, batch.index.kv_indices, batch.index.table) if item is not None),
            None,
        ),
    }
    before = {name: tensor.clone() for name, tensor in held.items() if tensor is not None}
    serve(backend, case, step, backend.plan(batch))
    changed = [name for name, old in before.items() if not _equal(old, held[name])]
    return f"wrote into {', '.join(changed)}, which is the engine's" if changed else ""


def _left_padding(solo: Solo, case: AttentionCase) -> str:
    """`kv_starts` hides the first keys of a row: a kernel reads it, or refuses it."""
    import torch

    starts = [min(2, kv - q) for q, kv in case.rows]
    if not any(starts):
        raise Skipped("the row serves no cached prefix, which is what left padding cuts")

    def padded(step: MadeStep) -> MadeStep:
        tensor = torch.tensor(starts, dtype=torch.int32, device=step.q.device)
        return replace(step, batch=replace(step.batch, kv_starts=tensor))

    return _right_or_refused(solo, case, padded)


def _reloaded_sinks(solo: Solo, case: AttentionCase) -> str:
    """A weight reload writes the stored sinks where they lie: `copy_` by itself, `data.copy_` with a refresh."""
    import torch

    from backstamp.testing.conformance.attend import serve, truth_of, wrong

    if "sinks" not in solo.offer.features:
        raise Skipped("the row declares no sinks")
    case = next((one for one in cases_of(solo.offer) if one.phase == case.phase and one.sinks is not None), case)
    backend, step = _built(solo, case)
    sinks = step.layer.sinks
    assert sinks is not None
    serve(backend, case, step, backend.plan(step.batch))
    for way in ("copy_", "data.copy_ and refresh_parameters"):
        fresh = torch.randn(sinks.shape, generator=torch.Generator().manual_seed(len(way))).to(sinks)
        if way == "copy_":
            sinks.copy_(fresh)
        else:
            sinks.data.copy_(fresh)
            if hasattr(backend, "refresh_parameters"):
                backend.refresh_parameters()
        out = serve(backend, case, step, backend.plan(step.batch))
        truth, true_lse = truth_of(case, step)
        words = wrong(out, truth, case, solo.offer.accuracy, lse=None, true_lse=true_lse)
        if words:
            return f"after {way}: {words}"
    return ""


def _causal_rows(solo: Solo, case: AttentionCase) -> str:
    """`causal` may say it row by row: a kernel reads it, or refuses it."""
    import torch

    def rows(step: MadeStep) -> MadeStep:
        flags = [(row + 1) % 2 for row in range(len(case.rows))]
        tensor = torch.tensor(flags, dtype=torch.int32, device=step.q.device)
        return replace(step, batch=replace(step.batch, causal=tensor))

    return _right_or_refused(solo, case, rows)


def _right_or_refused(solo: Solo, case: AttentionCase, change: Callable[[MadeStep], MadeStep]) -> str:
    from backstamp.testing.conformance.attend import make_step, serve, wrong
    from backstamp.testing.reference import reference_attention

    backend, step = _built(solo, case)
    step = change(step)
    try:
        out = serve(backend, case, step, backend.plan(step.batch))
    except UnsupportedBatch:
        return ""
    except BackstampError as refused:
        return f"needs an UnsupportedBatch, got {type(refused).__name__}"
    index = make_step(case, "cpu").batch.index
    truth, true_lse = reference_attention(step.q, step.kv, step.layer, replace(step.batch, index=index))
    words = wrong(out, truth, case, solo.offer.accuracy, lse=None, true_lse=true_lse)
    return f"neither refused nor read: {words}" if words else ""


def _same_bits(solo: Solo, case: AttentionCase) -> str:
    """Each row alone, and all in reverse, against all in order."""
    from backstamp.testing.conformance.attend import rows_of, serve

    backend, step = _built(solo, case)
    together = serve(backend, case, step, backend.plan(step.batch))
    live = [row for row, (q, _) in enumerate(case.rows) if q]
    for rows in ([row] for row in live):
        alone = rows_of(step, rows)
        out = serve(backend, _of_rows(case, rows), alone, backend.plan(alone.batch))
        if not _equal(out, _tokens(together, step, rows)):
            return f"row {rows[0]} has other bits alone than among {len(case.rows)} rows"
    turned = list(reversed(range(len(case.rows))))
    made = rows_of(step, turned)
    out = serve(backend, _of_rows(case, turned), made, backend.plan(made.batch))
    return "" if _equal(out, _tokens(together, step, turned)) else "the same rows in reverse have other bits"


def _of_rows(case: AttentionCase, rows: Sequence[int]) -> AttentionCase:
    return replace(case, rows=tuple(case.rows[row] for row in rows))


def _tokens(tensor: Tensor, step: MadeStep, rows: Sequence[int]) -> Tensor:
    """The tokens of some rows, in their order."""
    starts = step.batch.qo_indptr.tolist()
    return tensor[[token for row in rows for token in range(starts[row], starts[row + 1])]]


def _equal(one: Tensor, other: Tensor | None) -> bool:
    """Bit for bit, NaN equal to itself."""
    import torch

    assert other is not None
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
