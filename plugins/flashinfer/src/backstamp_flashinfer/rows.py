"""The host half of a step: what `plan` tells the library about each row.

In: a `Batch` with exact host mirrors. Out: `HostRows`, tensors on the CPU. Never reads a device value.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from backstamp.attention import Batch
from backstamp.factories import BuildRequest
from backstamp.step_checks import refusal

#: Host vectors of a step, i32: a call of numpy costs a fifth of one of torch, and a step takes thirty.
Numbers: TypeAlias = "npt.NDArray[np.int32]"

__all__ = ["HostRows", "read_rows", "read_uniform_rows", "refresh_batch", "single_row"]


class HostRows(NamedTuple):
    """Rows as the library counts them; every tensor is i32 on the CPU.

    Attributes:
        qo_indptr: `[B+1]` query offsets. num_tokens: its last entry, the tokens that belong to a row.
        kv_lens: `[B]`. page_indptr: `[B+1]` over the page list, without the slack an index may have.
        last_page_len: `[B]` tokens on each row's last page, 0 where there is none.
        num_pages, max_pages: pages of all rows, and of the longest. max_q_len: tokens of the longest row.
        q_len: tokens of every row where all are alike, else None.
    """

    qo_indptr: Tensor
    kv_lens: Tensor
    page_indptr: Tensor
    last_page_len: Tensor
    num_tokens: int
    num_pages: int
    max_pages: int
    max_q_len: int
    q_len: int | None


def read_rows(request: BuildRequest, batch: Batch, *, paged: bool) -> HostRows:
    """Read a step of any shape; in a paged one in which token i is the only one of row i, `q_len` is 1."""
    qo_indptr, kv_lens = _mirrors(batch)
    rows = _uniform(request, batch, qo_indptr, kv_lens) if paged and batch.num_tokens == batch.num_rows else None
    # a copy: layers may read it after the engine has written the next step's
    return rows or _host_rows(request, qo_indptr.copy(), kv_lens, None)


def read_uniform_rows(request: BuildRequest, batch: Batch) -> HostRows:
    """Read a step whose rows all own the same number of tokens, pad rows included, as a recorded graph needs it.

    Raises:
        UnsupportedBatch: a row with another number of tokens, or tokens that are not where a uniform step has them.
    """
    qo_indptr, kv_lens = _mirrors(batch)
    rows = _uniform(request, batch, qo_indptr, kv_lens)
    if rows is None:
        needed = f"{batch.num_tokens} tokens shared evenly by {batch.num_rows} rows, in a step to capture or replay"
        raise refusal(request, "qo_indptr_host", needed, str(qo_indptr.tolist()), phase=batch.phase)
    return rows


def single_row(request: BuildRequest, tokens: int) -> HostRows:
    """A step of one prompt and nothing before it."""
    return _host_rows(request, np.array([0, tokens], np.int32), np.array([tokens], np.int32), None)


def refresh_batch(request: BuildRequest, old: Batch, new: Batch) -> Batch:
    """The new batch with the recorded tree's tensors, which get the new values.

    Raises:
        UnsupportedBatch: another shape than the recorded one.
    """
    for field, needed, found in (
        ("num_rows", old.num_rows, new.num_rows),
        ("num_tokens", old.num_tokens, new.num_tokens),
        ("causal", old.causal, new.causal),
        ("tree", old.tree and old.tree.kind, new.tree and new.tree.kind),
    ):
        if needed != found:
            raise refusal(request, field, f"{needed}, as recorded", str(found), phase=new.phase, fix="Plan a new state")
    if new.max_kv_len > old.max_kv_len:
        found = str(new.max_kv_len)
        raise refusal(request, "max_kv_len", f"at most {old.max_kv_len}, as recorded", found, phase=new.phase)
    if old.tree is None or new.tree is None:
        # the two are of one kind, None here
        return new if new.max_kv_len == old.max_kv_len else replace(new, max_kv_len=old.max_kv_len)
    pairs = [("tree.buffer", old.tree.buffer, new.tree.buffer)]
    if old.tree.indptr is not None and new.tree.indptr is not None:
        pairs.append(("tree.indptr", old.tree.indptr, new.tree.indptr))
    # a mask over other lengths, or of shorter rows, lies at the start of the recorded one
    pairs = [(name, target[tuple(map(slice, source.shape))], source) for name, target, source in pairs]
    for target, source in [(pair[1], pair[2]) for pair in pairs if _moved(request, *pair, phase=new.phase)]:
        target.copy_(source)
    return replace(new, tree=old.tree, max_kv_len=old.max_kv_len)


def _moved(request: BuildRequest, name: str, target: Tensor, source: Tensor, *, phase: str) -> bool:
    """Whether new values lie elsewhere: what the engine keeps at a fixed address is up to date already.

    Raises:
        UnsupportedBatch: more than was recorded, or its address under other strides, where the two share memory.
    """
    if target.shape != source.shape:
        needed = f"at most {list(target.shape)}, as recorded"
        raise refusal(request, name, needed, str(list(source.shape)), phase=phase, fix="Plan a new state")
    if target.numel() == 0 or target.data_ptr() != source.data_ptr():
        return True
    strides = zip(target.shape, target.stride(), source.stride(), strict=True)
    if any(size > 1 and planned != found for size, planned, found in strides):
        needed = f"strides {target.stride()} at the recorded address, or another address"
        raise refusal(request, name, needed, f"strides {source.stride()}", phase=phase, fix="Plan a new state")
    return False


def _mirrors(batch: Batch) -> tuple[Numbers, Numbers]:
    """`[B+1]` query offsets, in the engine's own memory, and `[B]` lengths, in ours."""
    starts, lens = batch.qo_indptr_host, batch.kv_lens_host
    assert starts is not None, "check_batch asks for exact host lengths"
    assert lens is not None, "check_batch asks for exact host lengths"
    rows = batch.num_rows
    # a pad row may carry a negative length
    return starts.numpy()[: rows + 1], np.maximum(lens.numpy()[:rows], 0)


def _uniform(request: BuildRequest, batch: Batch, qo_indptr: Numbers, kv_lens: Numbers) -> HostRows | None:
    """The rows of a step that own equal, consecutive shares of all tokens; pad rows may own none of theirs."""
    if batch.num_rows == 0 or batch.num_tokens % batch.num_rows:
        return None
    length = batch.num_tokens // batch.num_rows
    even = np.arange(batch.num_rows + 1, dtype=np.int32)
    if length != 1:
        even *= length
    # as bytes: a comparison by numbers costs ten times as much
    if qo_indptr.tobytes() != even.tobytes():
        owned = qo_indptr[1:] - qo_indptr[:-1]
        in_place = (owned == length) & (qo_indptr[:-1] == even[:-1])
        if not (in_place | (owned == 0)).all():
            return None
        # a row without queries gets its share of pad tokens, which see nothing
        kv_lens = np.where(owned > 0, kv_lens, 0)
    return _host_rows(request, even, kv_lens, length)


def _host_rows(request: BuildRequest, qo_indptr: Numbers, kv_lens: Numbers, q_len: int | None) -> HostRows:
    """Count the pages of i32 offsets and lengths that nobody else will write."""
    size = request.page_size
    pages, last = np.divmod(kv_lens + (size - 1), size)
    page_indptr = np.zeros(len(qo_indptr), np.int32)
    np.add.accumulate(pages, out=page_indptr[1:])
    # 1 to a page, but 0 of no page
    last += 1
    np.minimum(last, kv_lens, out=last)
    longest = q_len
    if longest is None:
        longest = int((qo_indptr[1:] - qo_indptr[:-1]).max()) if len(kv_lens) else 0
    return HostRows(
        qo_indptr=torch.from_numpy(qo_indptr),
        kv_lens=torch.from_numpy(kv_lens),
        page_indptr=torch.from_numpy(page_indptr),
        last_page_len=torch.from_numpy(last),
        num_tokens=qo_indptr.item(-1),
        num_pages=page_indptr.item(-1),
        max_pages=int(pages.max()) if len(pages) else 0,
        max_q_len=longest,
        q_len=q_len,
    )
