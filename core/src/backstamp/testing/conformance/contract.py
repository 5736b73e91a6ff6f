"""What the call contract asks of every backend, whatever it computes: signatures, states, layers of one step.

In: a `Subject`. Out: jobs. Signatures are read with `inspect`: a plugin needs no class of ours.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, cast

from backstamp.errors import BackstampError, UnsupportedBatch
from backstamp.stamp import parts_of
from backstamp.testing.conformance.cases import AttentionCase
from backstamp.testing.conformance.numerics import built_case
from backstamp.testing.conformance.row_cases import base_case, cases_of
from backstamp.testing.conformance.rows import each_row, skipped_job
from backstamp.testing.conformance.signatures import signature_faults
from backstamp.testing.conformance.solo import Solo, second_layer
from backstamp.testing.conformance.subject import Job, Skipped, Subject

if TYPE_CHECKING:
    from torch import Tensor

    from backstamp.attention import AttentionBackend
    from backstamp.testing.batches import MadeStep

__all__ = ["built_part", "contract_jobs", "cut_case", "same_bits", "tokens_of"]


def contract_jobs(subject: Subject) -> Iterator[Job]:
    """Signatures and states of every dense row, phase by phase."""
    checks: tuple[tuple[str, Callable[[Solo, AttentionCase], str]], ...] = (
        ("signatures", _signatures),
        ("two steps planned before either runs", _two_states),
        ("two layers of one step", _two_layers),
        ("a tree filled after plan", _late_tree),
        ("a state given back for another step right or refused", _renewed_state),
        ("forward without out", _no_out),
        ("inputs left as they were", _inputs_untouched),
        ("left padding right or refused", _left_padding),
        ("sinks written in place", _reloaded_sinks),
        ("a causal rule a row right or refused", _causal_rows),
    )
    for name, solo, reason in each_row(subject):
        if reason:
            yield skipped_job("contract", name, reason)
            continue
        for phase in ("prefill", "decode", "verify"):
            if phase not in solo.offer.phases:
                continue
            case = base_case(solo.offer, phase)
            for what, check in checks:
                if check in _ABOUT and _ABOUT[check] not in solo.offer.features:
                    continue
                fix = "Keep to the call contract: backstamp.attention, AttentionBackend"
                yield Job("contract", f"{name}: {phase}, {what}", partial(check, solo, case), fix)


def _signatures(solo: Solo, case: AttentionCase) -> str:
    backend, _ = built_case(solo, case)
    return "; ".join(fault for part in parts_of(backend) for fault in signature_faults(part, solo.offer))


def built_part(solo: Solo, case: AttentionCase) -> tuple[AttentionBackend[object], MadeStep]:
    if case.dtype == "bf16" and solo.interpreted:
        raise Skipped("Triton's interpreter computes bf16 wrongly; run it on a GPU")
    backend, step = built_case(solo, case)
    return cast("AttentionBackend[object]", backend), step


def _two_states(solo: Solo, case: AttentionCase) -> str:
    """An engine keeps several states alive: one a KV group, one a micro-batch."""
    from backstamp.testing.conformance.attend import rows_of, serve, truth_of, wrong

    backend, step = built_part(solo, case)
    live = [row for row, (q, _) in enumerate(case.rows) if q]
    first, second = rows_of(step, live[:2]), rows_of(step, live[2:] or live[:1])
    states = [backend.plan(first.batch), backend.plan(second.batch)]
    truth, true_lse = truth_of(case, step)
    for rows, made, state in ((live[:2], first, states[0]), (live[2:] or live[:1], second, states[1])):
        out = serve(backend, cut_case(case, rows), made, state)
        words = wrong(out, tokens_of(truth, step, rows), cut_case(case, rows), solo.offer.accuracy, lse=None,
                      true_lse=true_lse)  # fmt: skip
        if words:
            return f"the step planned {'first' if made is first else 'second'}: {words}"
    return ""


def _two_layers(solo: Solo, case: AttentionCase) -> str:
    """A step is planned once and serves every layer of its group, each with its own keys, scale and sinks."""
    from backstamp.testing.conformance.attend import make_step, serve, truth_of, wrong

    sinks = [one for one in cases_of(solo.offer) if one.phase == case.phase and one.sinks is not None and not one.graph]
    for one in (case, *sinks[:1]):
        backend, step = built_part(solo, one)
        other = replace(make_step(one, str(step.q.device), seed=1), batch=step.batch, layer=second_layer(step.layer))
        # other numbers under the first layer's own pages
        kv = make_step(one, str(step.q.device)).kv
        flipped = [None if cache is None else (-cache.float()).to(cache.dtype) for cache in (kv.k, kv.v)]
        for cache, numbers in zip((kv.k, kv.v), flipped, strict=True):
            if cache is not None and numbers is not None:
                cache.copy_(numbers)
        other = replace(other, kv=kv, pages=step.pages)
        state = backend.plan(step.batch)
        for what, layer in (("first", step), ("second", other), ("first again", step)):
            truth, true_lse = truth_of(one, layer)
            words = wrong(serve(backend, one, layer, state), truth, one, solo.offer.accuracy, lse=None,
                          true_lse=true_lse)  # fmt: skip
            if words:
                return f"the {what} layer: {words}"
    return ""


def _late_tree(solo: Solo, case: AttentionCase) -> str:
    """A tree kernel fills the target's buffer after `plan`: it is read in `forward`, or in `replan`."""
    from backstamp.testing.conformance.attend import serve, truth_of, wrong

    for one in [one for one in cases_of(solo.offer) if one.tree is not None and one.phase == case.phase][:3]:
        backend, step = built_part(solo, one)
        tree = step.batch.tree
        assert tree is not None
        filled = tree.buffer.clone()
        tree.buffer.zero_()
        state = backend.plan(step.batch)
        tree.buffer.copy_(filled)
        truth, true_lse = truth_of(one, step)
        words = wrong(serve(backend, one, step, state), truth, one, solo.offer.accuracy, lse=None, true_lse=true_lse)
        if words:
            return f"{one.tree}: {words}"
    return ""


def _renewed_state(solo: Solo, case: AttentionCase) -> str:
    """`plan` with a state gives the same addresses new values; a state that was not planned for it may be refused."""
    from backstamp.testing.conformance.attend import make_step, serve, truth_of, wrong

    backend, step = built_part(solo, case)
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

    backend, step = built_part(solo, case)
    kv, new = keys_of(case, step)
    out = backend.forward(step.q, kv, step.layer, backend.plan(step.batch), new=new)
    wanted = (step.batch.num_tokens, case.heads[0], case.dims[1])
    if tuple(out.shape) != wanted or out.dtype != step.q.dtype:
        return f"needs an answer {list(wanted)} {step.q.dtype}, got {list(out.shape)} {out.dtype}"
    truth, true_lse = truth_of(case, step)
    return wrong(out, truth, case, solo.offer.accuracy, lse=None, true_lse=true_lse)


def _inputs_untouched(solo: Solo, case: AttentionCase) -> str:
    from backstamp.testing.conformance.attend import serve

    backend, step = built_part(solo, case)
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
    changed = [name for name, old in before.items() if not same_bits(old, held[name])]
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

    case = next((one for one in cases_of(solo.offer) if one.phase == case.phase and one.sinks is not None), case)
    backend, step = built_part(solo, case)
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

    backend, step = built_part(solo, case)
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


def cut_case(case: AttentionCase, rows: Sequence[int]) -> AttentionCase:
    return replace(case, rows=tuple(case.rows[row] for row in rows))


def tokens_of(tensor: Tensor, step: MadeStep, rows: Sequence[int]) -> Tensor:
    """The tokens of some rows, in their order."""
    starts = step.batch.qo_indptr.tolist()
    return tensor[[token for row in rows for token in range(starts[row], starts[row + 1])]]


def same_bits(one: Tensor, other: Tensor | None) -> bool:
    """Bit for bit, NaN equal to itself."""
    import torch

    assert other is not None
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


#: What a check is about, where a row need not declare it.
_ABOUT: Final[dict[Callable[[Solo, AttentionCase], str], str]] = {_late_tree: "tree_mask", _reloaded_sinks: "sinks"}
