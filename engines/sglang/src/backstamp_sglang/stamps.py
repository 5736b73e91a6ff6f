"""What really runs, read from inside a scheduler process.

In: SGLang's model runner, a target's or a draft's. Out: its attention layers with the stamps they carry, as JSON;
nothing in it comes from a request.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend

from backstamp.declarations import Half, Phase
from backstamp.stamp import read_stamp
from backstamp_sglang.backend import BackstampAttnBackend
from backstamp_sglang.drafts import DraftLoop

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.model_executor.model_runner import ModelRunner

__all__ = ["linear_stamps_of", "stamps_of"]


def stamps_of(runner: ModelRunner) -> dict[int, dict[str, dict[str, object]]]:
    """The stamp of every layer in every phase that runs; none where SGLang's own backend does."""
    found: dict[int, dict[str, dict[str, object]]] = {}
    for phase, backend in _serving(runner):
        for layer_id, part in backend.parts[phase].items():
            found.setdefault(layer_id, {})[phase] = read_stamp(part.serving.backend).as_json(phase)
    return found


def linear_stamps_of(runner: ModelRunner) -> dict[str, dict[str, object]]:
    """The stamp of what serves gated delta nets in each phase; none where SGLang's own kernels do."""
    whole = runner.attn_backend
    if not isinstance(whole, HybridLinearAttnBackend):
        return {}
    # its module imports kernels that a model without recurrences does not need
    from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend

    from backstamp_sglang.linear import LinearKernel

    if not isinstance(whole.linear_attn_backend, GDNAttnBackend):
        return {}
    dispatcher = whole.linear_attn_backend.kernel_dispatcher
    kernels: dict[Phase, object] = {"prefill": dispatcher.extend_kernel, "decode": dispatcher.decode_kernel}
    ours = {phase: kernel.kernel for phase, kernel in kernels.items() if isinstance(kernel, LinearKernel)}
    return {phase: read_stamp(kernel).as_json(phase) for phase, kernel in ours.items()}


def _serving(runner: ModelRunner) -> Iterator[tuple[Phase, BackstampAttnBackend]]:
    """What SGLang calls in each phase: every phase but decode is its prefill half's, and a draft decodes in a loop."""
    extends, decodes = _half_of(runner.attn_backend, "prefill"), _half_of(runner.attn_backend, "decode")
    if isinstance(extends, BackstampAttnBackend):
        yield from ((phase, extends) for phase in extends.parts if phase not in ("decode", "draft_decode"))
    if isinstance(decodes, BackstampAttnBackend) and "decode" in decodes.parts:
        yield "decode", decodes
    if runner.is_draft_worker and isinstance(runner.draft_attn_backend, DraftLoop):
        yield "draft_decode", runner.draft_attn_backend.attn_backends[0]


def _half_of(backend: AttentionBackend, half: Half) -> AttentionBackend:
    """What SGLang calls for one half: it composes a pair of two backends, and a hybrid model's full layers of one."""
    while not isinstance(backend, BackstampAttnBackend):
        if isinstance(backend, HybridAttnBackend):
            backend = backend.prefill_backend if half == "prefill" else backend.decode_backend
        elif backend.attn_backend_list:
            backend = backend.attn_backend_list[0]
        else:
            break
    return backend
