"""What a declared row takes of a build and of a layer: the part that the checks of a step and of a call share.

In: a `BuildRequest` and its layers. Out: faults as (field, needed, found), or a refusal of them. It reads shapes,
dtypes and host numbers; never a value on a device, and it imports no torch.

.. versionadded:: 0.2
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from backstamp.attention import KVIndex, LayerSpec
from backstamp.declarations import Offer
from backstamp.errors import UnsupportedBatch
from backstamp.factories import BuildRequest

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = [
    "DTYPE_NAMES",
    "Fault",
    "IndexForm",
    "check_build",
    "device_fault",
    "dtype_name",
    "dtype_text",
    "forms_of",
    "head_faults",
    "index_form",
    "layer_faults",
    "refusal",
    "serves_dims",
    "vector_faults",
]

#: Which form of `KVIndex` a step carries; "none" where its keys lie in no cache.
IndexForm: TypeAlias = Literal["page_table", "csr", "indirect", "none"]
_FORMS: Final[tuple[IndexForm, ...]] = ("page_table", "csr", "indirect")
#: (field, what the row takes, what came).
Fault: TypeAlias = "tuple[str, str, str]"

#: torch's names of dtypes, and the canonical ones of declarations.
DTYPE_NAMES: Final = {
    "torch.float16": "fp16",
    "torch.bfloat16": "bf16",
    "torch.float32": "fp32",
    "torch.float8_e4m3fn": "e4m3fn",
    "torch.float8_e4m3fnuz": "e4m3fnuz",
    "torch.float8_e5m2": "e5m2",
}


def refusal(
    request: BuildRequest, field: str, needed: str, found: str, *, phase: str = "", fix: str = ""
) -> UnsupportedBatch:
    """The refusal of one field by one built kernel."""
    who = f"{request.role} {phase or ', '.join(request.phases)} attention kernel {request.kernel!r} ({request.family})"
    return UnsupportedBatch(who, needed=f"{field}: {needed}", found=found, fix=fix)


def serves_dims(offer: Offer, head_dim: int, v_head_dim: int) -> bool:
    """Whether a row takes keys and values of these head dims."""
    pairs = [dims if isinstance(dims, tuple) else (dims, dims) for dims in offer.head_dims]
    return ("any", "any") in pairs or (head_dim, v_head_dim) in pairs


def check_build(request: BuildRequest) -> None:
    """Hold what an object is to be built for against its row, before anything is allocated.

    Raises:
        UnsupportedBatch: a dtype, KV dtype, page size or layout the row does not have, or a layer it does not serve;
            all faults are named.
    """
    faults = [*_request_faults(request), *(fault for layer in request.layers for fault in layer_faults(request, layer))]
    if faults:
        fields, needed, found = zip(*faults, strict=True)
        wanted = "; ".join(f"{name}: {text}" for name, text in zip(fields[1:], needed[1:], strict=True))
        raise refusal(request, fields[0], needed[0] + (f"; {wanted}" if wanted else ""), "; ".join(found))


def dtype_name(tensor: Tensor) -> str:
    """The canonical name of a tensor's dtype; torch's own where declarations have none."""
    text = dtype_text(tensor.dtype)
    return DTYPE_NAMES.get(text, text)


@functools.cache
def dtype_text(dtype: torch.dtype) -> str:
    """torch's name of a dtype, `torch.int32`; kept, because each step asks for a dozen."""
    return str(dtype)


def device_fault(request: BuildRequest, field: str, tensor: Tensor) -> Sequence[Fault]:
    """The fault of a tensor on another kind of device than the object was built for, or on another one of them."""
    if _is_on(request.device, tensor.device):
        return ()
    return ((f"{field} device", request.device, str(tensor.device)),)


@functools.cache
def _is_on(asked: str, device: torch.device) -> bool:
    """Whether a device is the one that was asked for, of any number where none was; kept: torch spells types slowly."""
    kind, _, number = asked.partition(":")
    return device.type == kind and (not number or device.index is None or device.index == int(number))


def vector_faults(
    request: BuildRequest, field: str, tensor: Tensor, size: int, *dtypes: str, host: bool = False
) -> Sequence[Fault]:
    """The faults of a vector that a kernel reads `size` numbers of, one after the other; `host` wants it on the CPU."""
    asked = "cpu" if host else request.device
    fits = dtype_text(tensor.dtype) in dtypes and tensor.dim() == 1 and tensor.numel() >= size
    faults: list[Fault] = []
    # of a vector: a stride of 1, or nothing to step over
    if fits and tensor.is_contiguous() and _is_on(asked, tensor.device):
        return faults
    if not fits:
        faults.append((field, f"[{size}] {' or '.join(dtypes)}", f"{list(tensor.shape)} {tensor.dtype}"))
    elif not tensor.is_contiguous():
        faults.append((field, f"[{size}] with a stride of 1", f"a stride of {tensor.stride(0)}"))
    if not _is_on(asked, tensor.device):
        faults.append((f"{field} device", asked, str(tensor.device)))
    return faults


def forms_of(index: KVIndex) -> list[IndexForm]:
    """The forms of index a step carries."""
    return [form for form in _FORMS if _carries(index, form)]


def index_form(offer: Offer, index: KVIndex) -> IndexForm:
    """The form of index a row reads of those a step carries."""
    for form in _FORMS:
        if form in offer.index_forms and _carries(index, form):
            return form
    return "none"


def _carries(index: KVIndex, form: IndexForm) -> bool:
    if form == "page_table":
        return index.page_table is not None
    if form == "csr":
        return index.kv_indptr is not None and index.kv_indices is not None
    return index.table is not None and index.row_ids is not None


def _request_faults(request: BuildRequest) -> Iterator[Fault]:
    offer = request.offer
    if request.dtype not in offer.dtypes:
        yield "dtype", " or ".join(sorted(offer.dtypes)), request.dtype
    own = request.kv_dtype in ("same", request.dtype) and "same" in offer.kv_dtypes
    if not own and request.kv_dtype not in offer.kv_dtypes:
        yield "kv_dtype", " or ".join(sorted(offer.kv_dtypes)), request.kv_dtype
    if "paged" in offer.kv_forms and not offer.page_sizes.accepts(request.page_size):
        yield "page_size", f"{offer.page_sizes.describe()} tokens", str(request.page_size)
    if request.layout not in offer.layouts:
        yield "layout", " or ".join(offer.layouts), request.layout


def layer_faults(request: BuildRequest, layer: LayerSpec) -> Iterator[Fault]:
    """What a layer needs and the row does not declare."""
    offer = request.offer
    if not serves_dims(offer, layer.head_dim, layer.v_head_dim):
        dims = ", ".join(str(dims) for dims in offer.head_dims)
        yield f"head_dim of layer {layer.layer_id}", dims, f"{layer.head_dim} and {layer.v_head_dim}"
    if layer.num_kv_heads < 1 or layer.num_qo_heads % layer.num_kv_heads:
        needed = f"a multiple of {layer.num_kv_heads} KV heads"
        yield f"num_qo_heads of layer {layer.layer_id}", needed, str(layer.num_qo_heads)
    wanted = {
        "window": layer.window_left >= 0,
        "softcap": layer.softcap != 0.0,
        "sinks": layer.sinks is not None,
        "alibi": layer.alibi is not None,
        "encoder": layer.attn_type == "encoder",
        "cross": layer.attn_type == "cross",
    }
    for feature, needed_by_layer in wanted.items():
        if needed_by_layer and feature not in offer.features:
            yield feature, f"a kernel that declares {feature!r}", f"layer {layer.layer_id} with {feature}"
    yield from head_faults(request, layer)
    if layer.sinks is not None and "sinks" in offer.features and offer.sink_conversion == "no":
        found = dtype_name(layer.sinks)
        if found not in offer.sink_dtypes and not (found == request.dtype and "same" in offer.sink_dtypes):
            yield "sinks", " or ".join(sorted(offer.sink_dtypes)), found


def head_faults(request: BuildRequest, layer: LayerSpec) -> Iterator[Fault]:
    """The faults of a layer's numbers a head: one sink or slope of each query head, where the kernel reads it."""
    for field, tensor in (("sinks", layer.sinks), ("alibi", layer.alibi)):
        if tensor is None or field not in request.offer.features:
            continue
        name = str(tensor.dtype)
        # slopes are fp32 in the contract; which floats its sinks may be is the row's to say
        floating = name == "torch.float32" if field == "alibi" else tensor.is_floating_point()
        if tuple(tensor.shape) != (layer.num_qo_heads,) or not floating:
            kind = "torch.float32" if field == "alibi" else "floating"
            yield field, f"[{layer.num_qo_heads}] {kind}", f"{list(tensor.shape)} {name}"
        else:
            yield from vector_faults(request, field, tensor, layer.num_qo_heads, name)
