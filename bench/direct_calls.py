"""What a built backend's `forward` comes down to: the same library call on the same tensors, without us.

In: a built backend and its step. Out: a call, and how it was found. Launches of Triton kernels and calls of registered
operators are recorded while `forward` runs once, and repeated as they were; the other libraries are called by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from built import Serving
from linear_peers import linear_peers
from peers import attention_peers
from steps import AttentionStep, LinearStep

__all__ = ["Direct", "direct_call", "direct_plan"]

#: The peer that is a kernel's own library, by (kernel, family).
_PEERS = {
    ("flashinfer", "mla"): "flashinfer MLA, fa3",
    ("flashmla", "mla"): "flash_mla dense",
    ("dsa", "sparse_mla"): "flash_mla sparse",
    ("flashinfer", "gdn"): "flashinfer",
    ("triton", "gdn"): "fla chunk",
    ("triton", "kda"): "fla chunk",
    ("flashkda", "kda"): "flash_kda",
}


class Direct(NamedTuple):
    """The library's own call, and in a word or two what it is."""

    run: Callable[[], object]
    what: str


def direct_call(serving: Serving, kernel: str, step: AttentionStep | LinearStep) -> Direct | None:
    """The call under a backend's `forward`; None where nothing here knows it."""
    state = serving.plan()
    serving.forward(state)
    if serving.library == "triton":
        launches = _recorded_launches(lambda: serving.forward(state))
        return Direct(lambda: [call() for call in launches], f"{len(launches)} launches") if launches else None
    if kernel == "torch_native":
        plain = isinstance(step, AttentionStep) and step.shape.work == "decode"
        return Direct(_gather_and_attend(step, serving.out), "gather and SDPA") if plain else None
    if serving.library == "torch":
        # compiled or explicit, in more calls than one
        return None
    if kernel == "flashinfer" and serving.offer.family == "mha" and step.shape.phase == "decode":
        return Direct(_flashinfer_decode(step, serving.out)[0], "wrapper.run")
    operators = _recorded_operators(lambda: serving.forward(state))
    if operators:
        return Direct(lambda: [call() for call in operators], f"{len(operators)} operators")
    named = _PEERS.get((kernel, serving.offer.family))
    peers = linear_peers(step.shape) if isinstance(step, LinearStep) else attention_peers(step.shape)
    peer = next((one for one in peers if named is not None and one.kernel.startswith(named)), None)
    return Direct(peer.prepare(step).run, peer.kernel) if peer is not None else None


def direct_plan(serving: Serving, kernel: str, step: AttentionStep | LinearStep) -> Direct | None:
    """The library's own planning of a step; None where it has none."""
    if kernel == "flashinfer" and serving.offer.family == "mha" and step.shape.phase == "decode":
        return Direct(_flashinfer_decode(step, serving.out)[1], "wrapper.plan")
    return None


def _recorded_launches(run: Callable[[], object]) -> list[Callable[[], object]]:
    """Every launch of a Triton kernel, to be repeated through the same function with the same arguments."""
    from triton.runtime.jit import JITFunction

    launches: list[Callable[[], object]] = []
    launch = JITFunction.run

    def record(self: Any, *arguments: Any, **named: Any) -> Any:
        launches.append(lambda: launch(self, *arguments, **named))
        return launch(self, *arguments, **named)

    JITFunction.run = record
    try:
        run()
    finally:
        JITFunction.run = launch
    return launches


def _recorded_operators(run: Callable[[], object]) -> list[Callable[[], object]]:
    """Every call of an operator that is not torch's own."""
    calls: list[Callable[[], object]] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function.namespace not in ("aten", "prim", "prims", "profiler"):
                calls.append(lambda: function(*args, **(kwargs or {})))
            return function(*args, **(kwargs or {}))

    with Recorder():
        run()
    return calls


def _gather_and_attend(step: AttentionStep, out: Tensor) -> Callable[[], object]:
    """What `torch_native` does for rows of one length: an index a token, SDPA with a folded head group."""
    shape, index = step.shape, step.batch.index
    assert shape.uniform, "rows of one length are one group"
    assert step.kv is not None, "a step with a cache"
    assert index.page_table is not None, "every paged step has it"
    rows, (_, kv_len) = len(shape.rows), shape.rows[0]
    positions = torch.arange(kv_len, device=step.q.device)
    pages = index.page_table[:, positions // index.page_size].long().flatten()
    offsets = (positions % index.page_size).repeat(rows)
    keys, values, scale = step.kv.k, step.kv.v, step.layer.scale
    heads, kv_heads = shape.heads

    def run() -> object:
        k = keys[pages, offsets].view(rows, kv_len, kv_heads, -1).transpose(1, 2)
        v = values[pages, offsets].view(rows, kv_len, kv_heads, -1).transpose(1, 2)
        q = step.q.view(rows, kv_heads, heads // kv_heads, -1)
        answer = scaled_dot_product_attention(q, k, v, scale=scale)
        out.copy_(answer.reshape(rows, heads, -1))
        return out

    return run


def _flashinfer_decode(step: AttentionStep, out: Tensor) -> tuple[Callable[[], object], Callable[[], object]]:
    """`run` and `plan` of the library's decode wrapper, planned from host lengths as we plan it."""
    import flashinfer

    assert step.kv is not None, "a step with a cache"
    index, (heads, kv_heads), (dim, _) = step.batch.index, step.shape.heads, step.shape.dims
    workspace = torch.zeros(128 << 20, device=step.q.device, dtype=torch.uint8)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    lens = step.batch.kv_lens_host
    assert lens is not None, "every step has them"
    assert index.kv_indptr is not None, "every paged step has it"
    last, indptr = (lens - 1) % index.page_size + 1, index.kv_indptr.cpu()
    dtypes = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16, "sm_scale": step.layer.scale}

    def plan() -> object:
        return wrapper.plan(indptr, index.kv_indices, last, heads, kv_heads, dim, index.page_size, **dtypes)

    plan()
    caches = (step.kv.k, step.kv.v)
    return lambda: wrapper.run(step.q, caches, out=out), plan
