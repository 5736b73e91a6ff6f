"""One layer's call of a built kernel, held against the row it was built for, before anything is launched.

In: the tensors of `AttentionBackend.forward`. Out: nothing, or the refusal of the first field that does not fit.
Never reads a value on a device, and imports no torch.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Final

from backstamp.attention import Batch, LayerSpec, PagedKV, RaggedKV
from backstamp.factories import BuildRequest
from backstamp.row_checks import (
    Fault,
    device_fault,
    dtype_name,
    head_faults,
    index_form,
    layer_faults,
    refusal,
    vector_faults,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["check_call"]

#: Families whose values lie inside their keys.
_LATENT: Final = frozenset({"mla", "sparse_mla"})
#: The family whose `kv.v` is a second cache, of compressed entries, in the layers that have one.
_COMPRESSED: Final = "csa"
#: Families none of whose layers ever reads every key: some compressed layers do.
_SPARSE: Final = frozenset({"sparse_mla"})


def check_call(
    request: BuildRequest,
    q: Tensor,
    kv: PagedKV | None,
    layer: LayerSpec,
    batch: Batch,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    new: RaggedKV | None = None,
    q_rope: Tensor | None = None,
    indices: Tensor | None = None,
) -> None:
    """Hold one layer's tensors against the row: shapes as in `AttentionBackend.forward`.

    Raises:
        UnsupportedBatch: the first field that does not fit.
    """
    # a layer the object was built for was held to the row then; its sinks may have been moved since
    own = any(layer is built for built in request.layers)
    # one after the other: each may lean on what those before it found right
    for field, needed, found in chain(
        head_faults(request, layer) if own else layer_faults(request, layer),
        _causal_faults(layer, batch),
        _query_faults(request, q, q_rope, layer, batch),
        _output_faults(request, q, out, lse, layer, batch),
        _key_faults(request, kv, new, layer, batch),
        _selection_faults(request, indices, batch),
    ):
        raise refusal(request, field, needed, found, phase=f"{batch.phase} layer {layer.layer_id}")


def _causal_faults(layer: LayerSpec, batch: Batch) -> Iterator[Fault]:
    """A layer that looks both ways over a causal step would silently lose half of its keys."""
    # one query a row sees every key up to itself either way; which rows of a tensor are causal nobody reads here
    if layer.attn_type != "decoder" and batch.max_q_len > 1 and batch.causal is not False:
        found = "a causal step" if batch.causal is True else "an answer a row"
        yield "causal", f"False for {layer.attn_type} attention", found


def _query_faults(
    request: BuildRequest, q: Tensor, q_rope: Tensor | None, layer: LayerSpec, batch: Batch
) -> Iterator[Fault]:
    parts = [("q", q, layer.head_dim)]
    if q_rope is not None:
        if request.family not in _LATENT:
            yield "q_rope", "None: only a latent cache has a rotary part of its own", str(list(q_rope.shape))
        # swapped or otherwise cut, two parts of the right sum still are another query
        parts = [("q", q, layer.v_head_dim), ("q_rope", q_rope, layer.head_dim - layer.v_head_dim)]
    for field, tensor, width in parts:
        wanted = (batch.num_tokens, layer.num_qo_heads, width)
        if tuple(tensor.shape) != wanted:
            yield field, str(list(wanted)), str(list(tensor.shape))
        if dtype_name(tensor) != request.dtype:
            yield field, f"{request.dtype}, as built", dtype_name(tensor)
        if tensor.stride(-1) != 1:
            yield field, "a last stride of 1", str(tensor.stride(-1))
        yield from device_fault(request, field, tensor)


def _output_faults(
    request: BuildRequest, q: Tensor, out: Tensor | None, lse: Tensor | None, layer: LayerSpec, batch: Batch
) -> Iterator[Fault]:
    if out is not None:
        wanted = (batch.num_tokens, layer.num_qo_heads, layer.v_head_dim)
        if tuple(out.shape) != wanted or out.dtype != q.dtype:
            yield "out", f"{list(wanted)} {q.dtype}", f"{list(out.shape)} {out.dtype}"
        if out.stride(-1) != 1:
            yield "out", "a last stride of 1", str(out.stride(-1))
        yield from device_fault(request, "out", out)
    if lse is None:
        return
    if "lse" not in request.offer.features:
        yield "lse", "None: the row declares no LSE", "a tensor to write"
    if layer.sinks is not None:
        yield "lse", "a layer without sinks; add the sink after the merge", "a layer with sinks"
    if tuple(lse.shape) != (batch.num_tokens, layer.num_qo_heads) or str(lse.dtype) != "torch.float32":
        yield "lse", f"[{batch.num_tokens}, {layer.num_qo_heads}] torch.float32", f"{list(lse.shape)} {lse.dtype}"
    yield from device_fault(request, "lse", lse)


def _key_faults(
    request: BuildRequest, kv: PagedKV | None, new: RaggedKV | None, layer: LayerSpec, batch: Batch
) -> Iterator[Fault]:
    offer = request.offer
    if kv is None and new is None:
        yield "kv", "a cache, or `new` keys and values", "neither"
    elif kv is None and "ragged" not in offer.kv_forms:
        yield "kv", "a cache: the row reads no ragged keys", "None"
    elif kv is not None and "paged" not in offer.kv_forms:
        yield "kv", "None: the row reads no paged cache", "a cache"
    elif kv is not None and new is not None and not offer.features & {"split_kv", "fused_write"}:
        yield "new", "keys in the cache, or all of them in `new`", "both"
    if kv is not None:
        if index_form(offer, batch.index) == "none":
            yield "index", f"one of {', '.join(sorted(offer.index_forms))} beside a cache", "none of them"
        yield from _cache_faults(request, kv, layer)
    if new is not None:
        yield from _new_faults(request, new, layer, batch)


def _new_faults(request: BuildRequest, new: RaggedKV, layer: LayerSpec, batch: Batch) -> Iterator[Fault]:
    for field, tensor, dim in (("new.k", new.k, layer.head_dim), ("new.v", new.v, layer.v_head_dim)):
        if tensor.dim() != 3 or tuple(tensor.shape[1:]) != (layer.num_kv_heads, dim) or tensor.stride(-1) != 1:
            found = f"{list(tensor.shape)} with strides {list(tensor.stride())}"
            yield field, f"[N, {layer.num_kv_heads}, {dim}] with a last stride of 1", found
        if dtype_name(tensor) != request.dtype:
            yield field, f"{request.dtype}, as built", dtype_name(tensor)
        yield from device_fault(request, field, tensor)
    if new.v.shape[0] != new.k.shape[0]:
        yield "new.v", f"{new.k.shape[0]} tokens, as many as new.k", str(new.v.shape[0])
    yield from vector_faults(request, "new.kv_indptr", new.kv_indptr, batch.num_rows + 1, "torch.int32")


def _cache_faults(request: BuildRequest, kv: PagedKV, layer: LayerSpec) -> Iterator[Fault]:
    if kv.layout != request.layout:
        yield "kv.layout", f"{request.layout!r}, as built", repr(kv.layout)
        return
    for field, tensor in (("kv.k", kv.k), ("kv.v", kv.v)):
        if tensor is not None:
            yield from device_fault(request, field, tensor)
    if kv.layout != "rows":
        # what the bytes of a packed form mean is its kernel's own business
        return
    stored = request.dtype if request.kv_dtype == "same" else request.kv_dtype
    if request.family != _COMPRESSED and (kv.v is None) is not (request.family in _LATENT):
        yield "kv.v", "None" if kv.v is not None else "a tensor", "a tensor" if kv.v is not None else "None"
    for field, tensor, dim in (("kv.k", kv.k, layer.head_dim), ("kv.v", kv.v, layer.v_head_dim)):
        if tensor is None:
            continue
        # a page of compressed entries holds fewer than it has tokens: how many, their kernel checks
        entries = tensor.shape[1] if tensor is kv.v and request.family == _COMPRESSED else request.page_size
        wanted = (entries, layer.num_kv_heads, dim)
        if tensor.dim() != 4 or tuple(tensor.shape[1:]) != wanted or tensor.stride(-1) != 1:
            found = f"{list(tensor.shape)} with strides {list(tensor.stride())}"
            yield field, f"[P, {', '.join(map(str, wanted))}] with a last stride of 1", found
        if dtype_name(tensor) != stored:
            yield field, f"{stored}, as built", dtype_name(tensor)
    if request.family != _COMPRESSED and kv.v is not None and kv.v.shape[0] != kv.k.shape[0]:
        yield "kv.v", f"{kv.k.shape[0]} pages, as many as kv.k", str(kv.v.shape[0])
    if kv.k_sf is not None or kv.v_sf is not None:
        yield "kv.k_sf and kv.v_sf", "None", "block scale factors"
    for field, scale in (("kv.k_scale", kv.k_scale), ("kv.v_scale", kv.v_scale)):
        if stored == request.dtype and scale is not None and not (isinstance(scale, float) and scale == 1.0):
            yield field, f"None or 1.0 for a cache of {stored}", "a scale"
        if scale is not None and not isinstance(scale, (int, float)):
            if not scale.is_floating_point():
                yield field, "a float or floating numbers", str(scale.dtype)
            yield from device_fault(request, field, scale)


def _selection_faults(request: BuildRequest, indices: Tensor | None, batch: Batch) -> Iterator[Fault]:
    if indices is None:
        if request.family in _SPARSE:
            yield "indices", f"[{batch.num_tokens}, topk] i32: a sparse layer never runs dense", "None"
        return
    if request.family not in _SPARSE and "indices" not in request.offer.features:
        yield "indices", "None: the row reads every key", str(list(indices.shape))
    elif indices.dim() != 2 or indices.shape[0] != batch.num_tokens or str(indices.dtype) != "torch.int32":
        yield "indices", f"[{batch.num_tokens}, topk] torch.int32", f"{list(indices.shape)} {indices.dtype}"
    elif indices.stride(1) != 1 and indices.shape[1] > 1:
        yield "indices", "a last stride of 1", str(indices.stride(1))
    yield from device_fault(request, "indices", indices)
