"""Which phase, and so which backend, serves a forward mode; and how a mixed batch is split in two.

In: the engine's forward mode, or a batch whose leading rows are decode rows. Out: a phase, or two batches on disjoint
slices. It reads no launch and no host, and never reorders rows.

.. versionadded:: 0.1
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal

from backstamp.attention import Batch, KVIndex
from backstamp.declarations import PHASES, Phase, Role
from backstamp.errors import BadInput, BuiltMismatch
from backstamp.stamp import Stamp, parts_of, read_stamp

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FORWARD_MODES", "ForwardMode", "check_entry", "linear_phase_of", "phase_named", "phase_of", "split_batch"]

ForwardMode = Literal["extend", "mixed", "decode", "idle", "target_verify", "draft_extend"]
#: Extend and mixed run prefill, decode and idle run decode; verify and draft-extend are phases of their own.
FORWARD_MODES: Final[dict[ForwardMode, Phase]] = {
    "extend": "prefill",
    "mixed": "prefill",
    "decode": "decode",
    "idle": "decode",
    "target_verify": "verify",
    "draft_extend": "draft_extend",
}
#: A draft decodes in its loop; a target has no draft-extend of its own, and its prefill half runs one.
_OF_ROLE: Final[dict[Role, dict[Phase, Phase]]] = {
    "target": {"draft_extend": "prefill"},
    "draft": {"decode": "draft_decode"},
}
_HALF_OF_DRAFT: Final[dict[Phase, Phase]] = {"draft_decode": "decode", "draft_extend": "prefill"}


def phase_of(mode: str) -> Phase:
    """The phase that serves a forward mode.

    Raises:
        BadInput: an unknown mode; asking about no mode is an error too.
    """
    for known, phase in FORWARD_MODES.items():
        if known == mode:
            return phase
    raise BadInput("forward mode", needed=f"one of {', '.join(FORWARD_MODES)}", found=repr(mode))


def phase_named(name: str, role: Role) -> Phase:
    """The phase in which a runner of this role serves a phase or a forward mode.

    A draft decodes in draft_decode, and a target's prefill half runs a draft-extend; every other name is its own phase
    or that of its mode.

    Raises:
        BadInput: neither a phase nor a mode.
    """
    phase = _phase_called(name)
    return _OF_ROLE[role].get(phase, phase)


def _phase_called(name: str) -> Phase:
    return next((phase for phase in PHASES if phase == name), None) or phase_of(name)


def linear_phase_of(name: str) -> Phase:
    """The phase of the linear slot that serves a phase or a forward mode: a draft's run by the halves they follow.

    Raises:
        BadInput: as `phase_named`.
    """
    phase = _phase_called(name)
    return _HALF_OF_DRAFT.get(phase, phase)


def check_entry(backend: object, mode: str, role: Role | None = None) -> Stamp:
    """Hold the backend a forward is about to use, and each of its steps, against a phase or a forward mode; its stamp.

    A runner calls it for what it hands out, with its own role; an engine that keeps backends itself, on entry to a
    forward, and there the role is the one each was stamped for.

    Raises:
        Unstamped: it carries no stamp, because it was swapped in after start. BuiltMismatch: it was built for other
        phases. ContainerWithoutChildren: its steps cannot be read. BadInput: an unknown mode.
    """
    stamps = [read_stamp(part) for part in parts_of(backend)]
    for stamp in stamps:
        phase = linear_phase_of(mode) if stamp.slot == "linear" else phase_named(mode, role or stamp.role)
        if phase not in stamp.phases:
            raise BuiltMismatch(
                f"forward mode {mode}",
                needed=f"a backend built for {phase}",
                found=f"{stamp.kernel} ({stamp.role}), built for {', '.join(stamp.phases)}",
                fix=f"Use what build() made for {phase}",
            )
    return stamps[0]


def split_batch(batch: Batch, tail_qo_indptr: Tensor | None = None) -> tuple[Batch | None, Batch | None]:
    """Split a mixed batch into its leading decode rows and the rest, both over slices of the engine's tensors.

    The caller slices `q`, `out` and `lse` at `batch.num_decode_tokens`. `tail_qo_indptr`, `[B+1]` i32, is a buffer of
    fixed address for the rebased offsets of the tail; without it they are allocated. Either side is None when empty.
    A batch whose decode rows do not come first has `num_decode_rows` 0 and goes to prefill whole.
    """
    rows, tokens = batch.num_decode_rows, batch.num_decode_tokens
    if rows == 0:
        return None, replace(batch, phase="prefill")
    decode = _slice(batch, "decode", 0, rows, tokens, batch.decode_q_len or batch.max_q_len)
    if rows == batch.num_rows:
        return decode, None
    rest = _slice(batch, "prefill", rows, batch.num_rows, batch.num_tokens - tokens, batch.max_q_len)
    offsets = rest.qo_indptr - tokens
    if tail_qo_indptr is not None:
        offsets = tail_qo_indptr[: offsets.shape[0]].copy_(offsets)
    host = rest.qo_indptr_host - tokens if rest.qo_indptr_host is not None else None
    return decode, replace(rest, qo_indptr=offsets, qo_indptr_host=host)


def _slice(batch: Batch, phase: Phase, start: int, stop: int, num_tokens: int, max_q_len: int) -> Batch:
    tokens = slice(0, num_tokens) if start == 0 else slice(batch.num_decode_tokens, batch.num_tokens)
    offsets = slice(start, stop + 1)
    return replace(
        batch,
        phase=phase,
        num_rows=stop - start,
        num_tokens=num_tokens,
        max_q_len=max_q_len,
        num_decode_rows=0,
        num_decode_tokens=0,
        decode_q_len=batch.decode_q_len if start == 0 else None,
        qo_indptr=batch.qo_indptr[offsets],
        kv_lens=batch.kv_lens[start:stop],
        index=_slice_index(batch.index, start, stop),
        causal=batch.causal if isinstance(batch.causal, bool) else batch.causal[start:stop],
        kv_starts=batch.kv_starts[start:stop] if batch.kv_starts is not None else None,
        slot_mapping=batch.slot_mapping[tokens] if batch.slot_mapping is not None else None,
        qo_indptr_host=batch.qo_indptr_host[offsets] if batch.qo_indptr_host is not None else None,
        kv_lens_host=batch.kv_lens_host[start:stop] if batch.kv_lens_host is not None else None,
        token_rows=batch.token_rows[tokens] - start if batch.token_rows is not None else None,
        tree=None,
    )


def _slice_index(index: KVIndex, start: int, stop: int) -> KVIndex:
    return replace(
        index,
        page_table=index.page_table[start:stop] if index.page_table is not None else None,
        kv_indptr=index.kv_indptr[start : stop + 1] if index.kv_indptr is not None else None,
        row_ids=index.row_ids[start:stop] if index.row_ids is not None else None,
    )
