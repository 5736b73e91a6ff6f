"""What the tile kernel asks of tensors beyond the shared checks: it reads and writes them by bare address.

In: a batch or a layer's tensors that `backstamp.step_checks` has let through. Out: nothing, or an `UnsupportedBatch`.
It reads shapes, strides, types and devices; never a value on a device.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from backstamp.attention import Batch, KVIndex, LayerSpec, PagedKV, RaggedKV
from backstamp.factories import BuildRequest
from backstamp.row_checks import Fault, device_fault
from backstamp.step_checks import IndexForm, refusal

__all__ = ["check_layer_tensors", "check_step_tensors"]

_INTEGERS = (torch.int32, torch.int64)
_INDEX_FIELDS = ("page_table", "kv_indptr", "kv_indices", "table", "row_ids")


def check_step_tensors(request: BuildRequest, batch: Batch, form: IndexForm) -> None:
    """Hold a step's tensors to how the kernel addresses them.

    Raises:
        UnsupportedBatch: half an index, a tensor of a row's numbers that is too short, has gaps or is no integer, or a
            tree the kernel would read past the end of.
    """
    for field, needed, found in (
        *_index_faults(batch.index, form),
        *_row_faults(request, batch),
        *_tree_faults(request, batch),
    ):
        raise refusal(request, field, needed, found, phase=batch.phase)


def check_layer_tensors(
    request: BuildRequest,
    kv: PagedKV | None,
    layer: LayerSpec,
    batch: Batch,
    form: IndexForm,
    *,
    out: Tensor | None,
    lse: Tensor | None,
    new: RaggedKV | None,
) -> None:
    """Hold a call's tensors to how the kernel addresses them.

    Raises:
        UnsupportedBatch: a cache in a step that names no pages, keys or outputs with gaps between their numbers, more
            keys than values, or a tensor elsewhere than the object.
    """
    for field, needed, found in _call_faults(request, kv, layer, batch, form, out, lse, new):
        raise refusal(request, field, needed, found, phase=f"{batch.phase} layer {layer.layer_id}")


def _call_faults(
    request: BuildRequest,
    kv: PagedKV | None,
    layer: LayerSpec,
    batch: Batch,
    form: IndexForm,
    out: Tensor | None,
    lse: Tensor | None,
    new: RaggedKV | None,
) -> Iterator[Fault]:
    if kv is not None and form == "none":
        yield "index", "page_table, kv_indptr with kv_indices, or table with row_ids", "none"
    if out is not None and out.stride(-1) != 1:
        yield "out", "a last stride of 1", str(out.stride(-1))
    for field, tensor in (("lse", lse), ("kv.v", None if kv is None else kv.v), ("sinks", layer.sinks)):
        if tensor is not None:
            yield from device_fault(request, field, tensor)
    if layer.sinks is not None:
        yield from _dense_fault("sinks", layer.sinks)
    if new is not None:
        for field, tensor in (("new.k", new.k), ("new.v", new.v)):
            if tensor.stride(-1) != 1:
                yield field, "a last stride of 1", str(tensor.stride(-1))
        if new.v.shape[0] != new.k.shape[0]:
            yield "new.v", f"a value for each of {new.k.shape[0]} keys", str(new.v.shape[0])
        yield from _numbers_faults(request, "new.kv_indptr", new.kv_indptr, batch.num_rows + 1)


def _index_faults(index: KVIndex, form: IndexForm) -> Iterator[Fault]:
    given = {
        "page_table": (("page_table", index.page_table),),
        "csr": (("kv_indptr", index.kv_indptr), ("kv_indices", index.kv_indices)),
        "indirect": (("table", index.table), ("row_ids", index.row_ids)),
        "none": (),
    }[form]
    for name, tensor in given:
        assert tensor is not None, "the form was chosen because its tensors are there"
        yield from _dense_fault(f"index.{name}", tensor)
    if form == "none":
        fields = (index.page_table, index.kv_indptr, index.kv_indices, index.table, index.row_ids)
        halves = [name for name, tensor in zip(_INDEX_FIELDS, fields, strict=True) if tensor is not None]
        if halves:
            needed = "page_table, kv_indptr with kv_indices, or table with row_ids"
            yield "index", needed, f"only {', '.join(halves)}"


def _row_faults(request: BuildRequest, batch: Batch) -> Iterator[Fault]:
    yield from _dense_fault("qo_indptr", batch.qo_indptr)
    yield from _dense_fault("kv_lens", batch.kv_lens)
    if batch.kv_starts is not None:
        yield from _numbers_faults(request, "kv_starts", batch.kv_starts, batch.num_rows)
    if not isinstance(batch.causal, bool):
        yield from _numbers_faults(request, "causal", batch.causal, batch.num_rows)


def _tree_faults(request: BuildRequest, batch: Batch) -> Iterator[Fault]:
    tree, rows = batch.tree, batch.num_rows
    if tree is None:
        return
    yield from _dense_fault("tree.buffer", tree.buffer)
    yield from device_fault(request, "tree.buffer", tree.buffer)
    if tree.kind == "qlen":
        if tree.buffer.shape[0] < rows:
            yield "tree.buffer", f"a mask for each of {rows} rows", str(list(tree.buffer.shape))
        return
    if tree.buffer.dim() != 1:
        yield "tree.buffer", f"a flat tensor for kind {tree.kind!r}", str(list(tree.buffer.shape))
    assert tree.indptr is not None, "the shared checks ask for it"
    yield from _numbers_faults(request, "tree.indptr", tree.indptr, rows)


def _numbers_faults(request: BuildRequest, field: str, tensor: Tensor, size: int) -> Iterator[Fault]:
    """Faults of `[size]` or more integers in a row."""
    if tensor.dtype not in _INTEGERS or tensor.dim() != 1 or tensor.shape[0] < size:
        yield field, f"[{size}] torch.int32 or torch.int64", f"{list(tensor.shape)} {tensor.dtype}"
    yield from _dense_fault(field, tensor)
    yield from device_fault(request, field, tensor)


def _dense_fault(field: str, tensor: Tensor) -> Iterator[Fault]:
    if tensor.dim() and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        yield field, "a last stride of 1", str(tensor.stride(-1))
