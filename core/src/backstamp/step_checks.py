"""What a built kernel is handed, held against the row it was built for: in the factory, in `plan`, in `forward`.

In: a `BuildRequest`, then the call contract's batch, tensors and layer. Out: nothing, or an `UnsupportedBatch` that
names the field, what the declared row takes and what came, before any launch. A mask, a sink or a softcap is never
dropped. It reads shapes, dtypes, devices and host numbers; never a value on a device, and it imports no torch.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from backstamp.attention import Batch, TreeMask
from backstamp.call_checks import check_call
from backstamp.factories import BuildRequest
from backstamp.row_checks import (
    Fault,
    IndexForm,
    check_build,
    device_fault,
    dtype_text,
    forms_of,
    index_form,
    refusal,
    vector_faults,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["IndexForm", "check_batch", "check_build", "check_call", "refusal"]

_BOOL: Final = "torch.bool"
_I32: Final = "torch.int32"
_I64: Final = "torch.int64"
_TREE_KINDS: Final = ("full", "qlen", "packed")


def check_batch(
    request: BuildRequest, batch: Batch, *, capture: bool = False, row_causal: bool = False, left_padding: bool = False
) -> IndexForm:
    """Hold one step against the row and answer the form of index it carries, the row's own order among several.

    `row_causal` and `left_padding` say that the kernel reads a `causal` tensor and `kv_starts`.

    Raises:
        UnsupportedBatch: the first field that does not fit.
    """
    form = index_form(request.offer, batch.index)
    for field, needed, found in _batch_faults(request, batch, form, capture, row_causal, left_padding):
        raise refusal(request, field, needed, found, phase=batch.phase)
    if form == "none" and "ragged" not in request.offer.kv_forms:
        needed = f"one of {', '.join(sorted(request.offer.index_forms))}"
        raise refusal(request, "index", needed, ", ".join(forms_of(batch.index)) or "none", phase=batch.phase)
    return form


def _batch_faults(
    request: BuildRequest, batch: Batch, form: IndexForm, capture: bool, row_causal: bool, left_padding: bool
) -> Iterator[Fault]:
    offer = request.offer
    if batch.phase not in request.phases:
        yield "phase", f"one of {', '.join(request.phases)}", batch.phase
    if capture and offer.graph == "never":
        yield "capture", "no CUDA graph, as declared", "a step to capture"
    if batch.num_rows > request.max_rows:
        yield _too_many("num_rows", request.max_rows, batch.num_rows)
    if batch.num_tokens > request.max_tokens:
        yield _too_many("num_tokens", request.max_tokens, batch.num_tokens)
    if batch.max_kv_len > request.max_kv_len:
        yield _too_many("max_kv_len", request.max_kv_len, batch.max_kv_len)
    if batch.causal is not True:
        yield from _causal_faults(request, batch, row_causal)
    if batch.kv_starts is not None and not left_padding:
        yield "kv_starts", "rows without left padding", "kv_starts"
    inputs = offer.inputs | offer.phase_inputs.get(batch.phase, frozenset())
    if "host_lens" in inputs:
        missing = batch.qo_indptr_host is None or batch.kv_lens_host is None
        if missing or not batch.host_exact:
            needed = "exact qo_indptr_host and kv_lens_host"
            yield "host_lens", needed, "none" if missing else "upper bounds (host_exact False)"
    if "token_rows" in inputs and batch.token_rows is None:
        yield "token_rows", f"[{batch.num_tokens}] torch.int32", "None"
    if batch.tree is not None:
        yield from _tree_faults(request, batch, batch.tree)
    yield from _length_faults(request, batch, inputs)
    if batch.index.page_size != request.page_size and forms_of(batch.index):
        yield "page_size", f"{request.page_size} tokens, as built", str(batch.index.page_size)
    yield from _index_faults(request, batch, form)


def _too_many(field: str, most: int, found: int) -> Fault:
    return field, f"at most {most}, as built", str(found)


def _causal_faults(request: BuildRequest, batch: Batch, row_causal: bool) -> Iterator[Fault]:
    free = "non_causal" in request.offer.features
    if isinstance(batch.causal, bool):
        # one query a row sees every key up to itself either way
        if not batch.causal and batch.max_q_len > 1 and not free:
            yield "causal", "True", "a step without the causal rule"
    elif not (row_causal and free):
        yield "causal", "one answer for all rows", f"a tensor {list(batch.causal.shape)}"
    else:
        yield from vector_faults(request, "causal", batch.causal, batch.num_rows, _I32)


def _length_faults(request: BuildRequest, batch: Batch, inputs: frozenset[str]) -> Iterator[Fault]:
    """The vectors of lengths, offsets and slots that the kernel, or its host half, will read."""
    rows, tokens = batch.num_rows, batch.num_tokens
    yield from vector_faults(request, "qo_indptr", batch.qo_indptr, rows + 1, _I32)
    yield from vector_faults(request, "kv_lens", batch.kv_lens, rows, _I32)
    if batch.kv_starts is not None:
        yield from vector_faults(request, "kv_starts", batch.kv_starts, rows, _I32)
    if batch.token_rows is not None and "token_rows" in inputs:
        yield from vector_faults(request, "token_rows", batch.token_rows, tokens, _I32)
    if batch.qo_indptr_host is not None:
        yield from vector_faults(request, "qo_indptr_host", batch.qo_indptr_host, rows + 1, _I32, host=True)
    if batch.kv_lens_host is not None:
        yield from vector_faults(request, "kv_lens_host", batch.kv_lens_host, rows, _I32, host=True)
    if batch.slot_mapping is not None and "fused_write" in request.offer.features:
        yield from vector_faults(request, "slot_mapping", batch.slot_mapping, tokens, _I64)


def _tree_faults(request: BuildRequest, batch: Batch, tree: TreeMask) -> Iterator[Fault]:
    if "tree_mask" not in request.offer.features:
        yield "tree", "a step without a tree mask", f"a tree mask of kind {tree.kind}"
    elif tree.kind not in _TREE_KINDS:
        yield "tree.kind", ", ".join(_TREE_KINDS), repr(tree.kind)
    elif tree.kind == "qlen":
        shape, rows = tree.buffer.shape, batch.num_rows
        if len(shape) != 3 or shape[0] < rows or min(shape[1:]) < batch.max_q_len or str(tree.buffer.dtype) != _BOOL:
            needed = f"[{rows}, S, S] {_BOOL} with S of at least {batch.max_q_len}"
            yield "tree.buffer", needed, f"{list(shape)} {tree.buffer.dtype}"
        yield from device_fault(request, "tree.buffer", tree.buffer)
    elif tree.indptr is None:
        yield "tree.indptr", f"a start per row for kind {tree.kind!r}", "None"
    else:
        dtype = "torch.uint8" if tree.kind == "packed" else _BOOL
        yield from vector_faults(request, "tree.buffer", tree.buffer, 0, dtype)
        yield from vector_faults(request, "tree.indptr", tree.indptr, batch.num_rows, _I32, _I64)


def _index_faults(request: BuildRequest, batch: Batch, form: IndexForm) -> Iterator[Fault]:
    """Shapes, dtypes and devices of the index the kernel will read; a form is chosen because its tensors are there."""
    index, rows = batch.index, batch.num_rows
    if form == "page_table" and index.page_table is not None:
        yield from _table_faults(request, "index.page_table", index.page_table, rows)
    elif form == "csr" and index.kv_indptr is not None and index.kv_indices is not None:
        yield from vector_faults(request, "index.kv_indptr", index.kv_indptr, rows + 1, _I32, _I64)
        yield from vector_faults(request, "index.kv_indices", index.kv_indices, 0, _I32, _I64)
    elif form == "indirect" and index.table is not None and index.row_ids is not None:
        yield from _table_faults(request, "index.table", index.table, 0)
        yield from vector_faults(request, "index.row_ids", index.row_ids, rows, _I32, _I64)


def _table_faults(request: BuildRequest, field: str, table: Tensor, rows: int) -> Iterator[Fault]:
    shape = table.shape
    if dtype_text(table.dtype) not in (_I32, _I64) or len(shape) != 2 or shape[0] < rows:
        yield field, f"2 dimensions of at least {rows} whole numbers", f"{list(shape)} {table.dtype}"
    elif shape[1] > 1 and table.stride(1) != 1:
        yield field, "a last stride of 1", str(table.stride(1))
    yield from device_fault(request, field, table)
