"""What a built linear-attention kernel is handed, held against the row it was built for: in factory, `plan`, `forward`.

In: a `BuildRequest` of the linear slot, then `LinearBatch`, tensors, gates and `StatePool`. Out: nothing, or an
`UnsupportedBatch` that names the field, what the row takes and what came, before any launch. It reads shapes, dtypes,
devices and host numbers; never a value on a device, and it imports no torch.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from backstamp.attention import LayerSpec
from backstamp.errors import UnsupportedBatch
from backstamp.factories import BuildRequest
from backstamp.linear import linear_attn_backends_of_request
from backstamp.linear_contract import ComputedGates, LinearBatch, RawGates, StatePool
from backstamp.row_checks import DTYPE_NAMES, Fault, device_fault, dtype_name, dtype_text, serves_dims

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LinearForm", "check_linear_batch", "check_linear_build", "check_linear_call", "linear_refusal"]

#: What becomes of a row's states: its slot is updated once, each token's state goes to a slot of its own, or to a
#: place of its own in `intermediate`.
LinearForm: TypeAlias = Literal["slots", "slot_table", "intermediate"]

_WHOLE: Final = ("torch.int32", "torch.int64")
_FLOATS: Final = ("fp16", "bf16", "fp32")


def linear_refusal(request: BuildRequest, field: str, needed: str, found: str, phase: str = "") -> UnsupportedBatch:
    """The refusal of one field by one built linear kernel."""
    phases = phase or ", ".join(request.phases)
    who = f"{request.role} {phases} linear-attention kernel {request.kernel!r} ({request.family})"
    return UnsupportedBatch(who, needed=f"{field}: {needed}", found=found)


def check_linear_build(request: BuildRequest) -> None:
    """Hold what an object is to be built for against its row and its runner, before anything is allocated.

    Raises:
        Unstamped: the runner carries no `linear_attn_backends`.
        UnsupportedBatch: a dtype or state layout the row does not have, or a layer it does not serve.
    """
    linear_attn_backends_of_request(request)
    offer = request.offer
    if request.dtype not in offer.dtypes:
        raise linear_refusal(request, "dtype", " or ".join(sorted(offer.dtypes)), request.dtype)
    if request.layout not in offer.state_layouts:
        raise linear_refusal(request, "state layout", " or ".join(offer.state_layouts), repr(request.layout))
    for layer in request.layers:
        for field, needed, found in _layer_faults(request, layer):
            raise linear_refusal(request, field, needed, found)


def check_linear_batch(request: BuildRequest, batch: LinearBatch, *, capture: bool = False) -> LinearForm:
    """Hold one step against the row and answer where its states go.

    Raises:
        UnsupportedBatch: the first field that does not fit.
    """
    for field, needed, found in _batch_faults(request, batch, capture):
        raise linear_refusal(request, field, needed, found, batch.phase)
    if batch.phase != "verify":
        return "slots"
    return "slot_table" if batch.slot_table is not None else "intermediate"


def check_linear_call(
    request: BuildRequest,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: RawGates | ComputedGates,
    layer: LayerSpec,
    batch: LinearBatch,
    *,
    pool: StatePool,
    slots: Tensor,
    out: Tensor | None = None,
) -> None:
    """Hold one layer's tensors against the row: shapes as in `LinearBackend.forward`.

    Raises:
        UnsupportedBatch: the first field that does not fit.
    """
    for field, needed, found in (
        *_layer_faults(request, layer),
        *_token_faults(request, q, k, v, out, layer, batch),
        *_gate_faults(request, gates, layer, batch),
        *_state_faults(request, pool, slots, layer, batch),
    ):
        raise linear_refusal(request, field, needed, found, f"{batch.phase} layer {layer.layer_id}")


def _layer_faults(request: BuildRequest, layer: LayerSpec) -> Iterator[Fault]:
    if not serves_dims(request.offer, layer.head_dim, layer.v_head_dim):
        dims = ", ".join(str(dims) for dims in request.offer.head_dims)
        yield f"head_dim of layer {layer.layer_id}", dims, f"{layer.head_dim} and {layer.v_head_dim}"
    if layer.num_qo_heads < 1 or layer.num_kv_heads % layer.num_qo_heads:
        needed = f"a multiple of the {layer.num_qo_heads} key heads"
        yield f"value heads (num_kv_heads) of layer {layer.layer_id}", needed, str(layer.num_kv_heads)


def _batch_faults(request: BuildRequest, batch: LinearBatch, capture: bool) -> Iterator[Fault]:
    offer, rows = request.offer, batch.num_rows
    if batch.phase not in request.phases:
        yield "phase", " or ".join(request.phases), batch.phase
    if batch.num_rows > request.max_rows or batch.num_tokens > request.max_tokens:
        needed = f"at most {request.max_rows} rows and {request.max_tokens} tokens, as built"
        yield "num_rows and num_tokens", needed, f"{batch.num_rows} and {batch.num_tokens}"
    if capture and (offer.graph == "never" or batch.phase == "prefill"):
        yield "capture", "a step outside CUDA graphs", "a captured one"
    tensors = (("qo_indptr", batch.qo_indptr, rows + 1), ("slots", batch.slots, rows))
    for field, tensor, size in tensors:
        yield from _whole_faults(request, field, tensor, size)
    if (
        dtype_text(batch.has_state.dtype) != "torch.bool"
        or batch.has_state.dim() != 1
        or batch.has_state.shape[0] < rows
    ):
        yield "has_state", f"[{rows}] torch.bool", f"{list(batch.has_state.shape)} {batch.has_state.dtype}"
    yield from _step_faults("has_state", batch.has_state)
    yield from device_fault(request, "has_state", batch.has_state)
    host = batch.qo_indptr_host
    if host is None and "host_lens" in offer.inputs | offer.phase_inputs.get(batch.phase, frozenset()):
        yield "qo_indptr_host", f"[{rows + 1}] on the CPU: the row declares the input host_lens", "None"
    if host is not None and (host.device.type != "cpu" or host.dim() != 1 or host.shape[0] < rows + 1):
        yield "qo_indptr_host", f"[{rows + 1}] on the CPU", f"{list(host.shape)} on {host.device}"
    if batch.phase == "verify":
        yield from _verify_faults(request, batch)
        return
    for field, value in (
        ("slot_table", batch.slot_table),
        ("num_accepted", batch.num_accepted),
        ("intermediate", batch.intermediate),
        ("parents", batch.parents),
    ):
        if value is not None:
            yield field, f"None in {batch.phase}", "a tensor"


def _verify_faults(request: BuildRequest, batch: LinearBatch) -> Iterator[Fault]:
    rows = batch.num_rows
    if (batch.slot_table is None) is (batch.intermediate is None):
        found = "neither" if batch.slot_table is None else "both"
        yield "verify", "slot_table with num_accepted, or intermediate", found
    if batch.slot_table is not None:
        if batch.num_accepted is None:
            yield "num_accepted", f"[{rows}] beside slot_table", "None"
        else:
            yield from _whole_faults(request, "num_accepted", batch.num_accepted, rows)
        yield from _whole_faults(request, "slot_table", batch.slot_table, rows, dims=2)
        if batch.parents is not None:
            yield "parents", "None beside slot_table: its tokens are a chain", "a tensor"
    if batch.intermediate is not None:
        if batch.intermediate.dim() != 5 or batch.intermediate.shape[0] < rows:
            yield "intermediate", f"[n, S, HV, ., .] with n of at least {rows}", str(list(batch.intermediate.shape))
        yield from device_fault(request, "intermediate", batch.intermediate)
    if batch.parents is not None:
        if "tree_mask" not in request.offer.features:
            yield "parents", "None: the row declares no tree_mask", "a tree"
        yield from _whole_faults(request, "parents", batch.parents, rows, dims=2)
    # both are [., S, ...]: a token past S would have nowhere to leave its state
    width = [
        at.shape[1] for at in (batch.slot_table, batch.intermediate, batch.parents) if at is not None and at.dim() > 1
    ]
    if width:
        yield from _longest_faults(batch, min(width))


def _longest_faults(batch: LinearBatch, most: int) -> Iterator[Fault]:
    """Every row by itself: a long one beside a short one would write into the places of the row after it."""
    if batch.qo_indptr_host is not None:
        lens: list[int] = batch.qo_indptr_host[: batch.num_rows + 1].diff().tolist()
        if max(lens, default=0) > most:
            yield "qo_indptr_host", f"at most {most} tokens a row, a place for the state after each", str(lens)
    elif batch.max_q_len is None or batch.max_q_len > most:
        needed = f"at most {most}, a place for the state after each token of a row, where no host offsets are given"
        yield "max_q_len", needed, str(batch.max_q_len)


def _whole_faults(request: BuildRequest, field: str, tensor: Tensor, size: int, dims: int = 1) -> Iterator[Fault]:
    if dtype_text(tensor.dtype) not in _WHOLE or tensor.dim() != dims or tensor.shape[0] < size:
        yield field, f"{dims} dimensions of at least {size} whole numbers", f"{list(tensor.shape)} {tensor.dtype}"
    yield from _step_faults(field, tensor)
    yield from device_fault(request, field, tensor)


def _step_faults(field: str, tensor: Tensor) -> Iterator[Fault]:
    """Kernels count entries of a row in steps of one."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        yield field, "a last stride of 1", str(tensor.stride(-1))


def _token_faults(
    request: BuildRequest, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, layer: LayerSpec, batch: LinearBatch
) -> Iterator[Fault]:
    keys = (batch.num_tokens, layer.num_qo_heads, layer.head_dim)
    values = (batch.num_tokens, layer.num_kv_heads, layer.v_head_dim)
    for field, tensor, wanted in (("q", q, keys), ("k", k, keys), ("v", v, values), ("out", out, values)):
        if tensor is None:
            continue
        if tuple(tensor.shape) != wanted or tensor.stride(-1) != 1:
            found = f"{list(tensor.shape)} with a last stride of {tensor.stride(-1) if tensor.dim() else 0}"
            yield field, f"{list(wanted)} with a last stride of 1", found
        if dtype_name(tensor) != request.dtype:
            yield field, f"{request.dtype}, as built", dtype_name(tensor)
        yield from device_fault(request, field, tensor)


def _gate_faults(
    request: BuildRequest, gates: RawGates | ComputedGates, layer: LayerSpec, batch: LinearBatch
) -> Iterator[Fault]:
    """A gated delta net has one decay a value head, Kimi delta attention one a key channel of it."""
    heads, tokens = (layer.num_kv_heads,), (batch.num_tokens, layer.num_kv_heads)
    channels = (layer.head_dim,) if request.family == "kda" else ()
    wanted: tuple[tuple[str, Tensor, tuple[int, ...]], ...]
    if isinstance(gates, ComputedGates):
        wanted = (("gates.g", gates.g, tokens + channels), ("gates.beta", gates.beta, tokens))
    else:
        flat = (layer.num_kv_heads * layer.head_dim,)
        bias = flat if channels and tuple(gates.dt_bias.shape) == flat else heads + channels
        wanted = (
            ("gates.a", gates.a, tokens + channels),
            ("gates.b", gates.b, tokens),
            ("gates.A_log", gates.A_log, heads),
            ("gates.dt_bias", gates.dt_bias, bias),
        )
        bound = gates.lower_bound
        if bound is not None and "bounded_gates" not in request.offer.features:
            yield "gates.lower_bound", "None: the row declares no bounded_gates", str(bound)
        elif bound is not None and bound >= 0:
            yield "gates.lower_bound", "a number below 0", str(bound)
    for field, tensor, shape in wanted:
        if tuple(tensor.shape) != shape or dtype_name(tensor) not in _FLOATS:
            yield field, f"{list(shape)}, fp16, bf16 or fp32", f"{list(tensor.shape)} {dtype_name(tensor)}"
        yield from device_fault(request, field, tensor)


def _state_faults(
    request: BuildRequest, pool: StatePool, slots: Tensor, layer: LayerSpec, batch: LinearBatch
) -> Iterator[Fault]:
    if pool.order != request.layout:
        # with K == V a swapped pair has the right shape and wrong values
        yield "pool.order", f"{request.layout!r}, as built", repr(pool.order)
    value, key = layer.v_head_dim, layer.head_dim
    inner = (layer.num_kv_heads, value, key) if pool.order == "vk" else (layer.num_kv_heads, key, value)
    states = [("pool.ssm", pool.ssm, 1)]
    if batch.intermediate is not None:
        states.append(("intermediate", batch.intermediate, 2))
    for field, tensor, lead in states:
        if tensor.dim() != lead + 3 or tuple(tensor.shape[lead:]) != inner or tensor.stride(-1) != 1:
            places = ", ".join(["N", "S"][:lead])
            needed = f"[{places}, {', '.join(map(str, inner))}] with a last stride of 1"
            yield field, needed, f"{list(tensor.shape)} with strides {list(tensor.stride())}"
        if str(tensor.dtype) not in DTYPE_NAMES or dtype_name(tensor) not in _FLOATS:
            yield field, "fp16, bf16 or fp32", str(tensor.dtype)
        yield from device_fault(request, field, tensor)
    yield from _whole_faults(request, "slots", slots, batch.num_rows)
