"""What a built backend's `forward` and `plan` come down to: the same library calls on the same tensors, without us.

In: a built backend and its step. Out: a call, and how it was found. Launches of Triton kernels, calls of flashinfer's
wrappers and of registered operators are recorded while the backend runs once, and repeated as they were; libraries with
one public function for the work are called through it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from built import Serving
from linear_peers import linear_peers
from peers import attention_peers
from steps import AttentionStep, LinearStep

__all__ = ["Direct", "direct_call", "direct_plan", "recorded"]

#: The peer that is a kernel's own library, by (kernel, family).
_PEERS = {
    ("fa3", "mha"): "FA3 paged",
    ("flashmla", "mla"): "flash_mla dense",
    ("dsa", "sparse_mla"): "flash_mla sparse",
    ("flashinfer", "gdn"): "flashinfer",
    ("triton", "gdn"): "fla chunk",
    ("triton", "kda"): "fla chunk",
    ("flashkda", "kda"): "flash_kda",
}
_WRAPPERS = (
    ("flashinfer.decode", "BatchDecodeWithPagedKVCacheWrapper"),
    ("flashinfer.prefill", "BatchPrefillWithPagedKVCacheWrapper"),
    ("flashinfer.prefill", "BatchPrefillWithRaggedKVCacheWrapper"),
    ("flashinfer.mla", "BatchMLAPagedAttentionWrapper"),
    ("flashinfer.attention", "BatchAttentionWithAttentionSinkWrapper"),
)


class Direct(NamedTuple):
    """The library's own call, and in a word or two what it is."""

    run: Callable[[], object]
    what: str


def direct_call(serving: Serving, kernel: str, step: AttentionStep | LinearStep) -> Direct | None:
    """The call under a backend's `forward`; None where nothing here knows it."""
    # what compiles is done with it; a step's first layer is launched by the library itself, later ones by its code
    serving.forward(serving.plan())
    state = serving.plan()

    def forward() -> object:
        return serving.forward(state)

    if serving.library == "triton":
        from triton.runtime.jit import JITFunction

        return _all(recorded(forward, [(JITFunction, "run")]), "launches")
    if kernel == "torch_native":
        plain = isinstance(step, AttentionStep) and step.shape.work == "decode"
        return Direct(_gather_and_attend(step, serving.out), "gather and SDPA") if plain else None
    if serving.library == "torch":
        # compiled or explicit, in more calls than one
        return None
    if wrapped := _all(recorded(forward, _wrapper_methods("run")), "wrapper.run"):
        return wrapped
    named = _PEERS.get((kernel, serving.offer.family))
    peers = linear_peers(step.shape) if isinstance(step, LinearStep) else attention_peers(step.shape)
    peer = next((one for one in peers if named is not None and one.kernel.startswith(named)), None)
    if peer is not None:
        return Direct(peer.prepare(step).run, peer.kernel)
    return _all(_recorded_operators(forward), "operators")


def direct_plan(serving: Serving) -> Direct | None:
    """The library's own planning of a step; None where it has none."""
    return _all(recorded(serving.plan, _wrapper_methods("plan")), "wrapper.plan")


def recorded(run: Callable[[], object], methods: Sequence[tuple[type, str]]) -> list[Callable[[], object]]:
    """Every call of these methods while `run` runs, to be repeated on the same object with the same arguments."""
    calls: list[Callable[[], object]] = []
    inside = False

    def recording(method: Callable[..., object]) -> Callable[..., object]:
        def record(self: object, *arguments: object, **named: object) -> object:
            nonlocal inside
            # what a recorded call does inside is a part of it
            if inside:
                return method(self, *arguments, **named)
            calls.append(lambda: method(self, *arguments, **named))
            inside = True
            try:
                return method(self, *arguments, **named)
            finally:
                inside = False

        return record

    originals = [(of, name, of.__dict__[name]) for of, name in methods]
    try:
        for of, name, method in originals:
            setattr(of, name, recording(method))
        run()
    finally:
        for of, name, method in originals:
            setattr(of, name, method)
    return calls


def _all(calls: Sequence[Callable[[], object]], what: str) -> Direct | None:
    return Direct(lambda: [call() for call in calls], f"{len(calls)} {what}") if calls else None


def _wrapper_methods(name: str) -> list[tuple[type, str]]:
    """One method of each of flashinfer's wrappers that has its own, of those a backend may have imported."""
    modules = [(sys.modules.get(module), of) for module, of in _WRAPPERS]
    classes = [getattr(module, of) for module, of in modules if module is not None]
    return [(of, name) for of in classes if name in of.__dict__]


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
