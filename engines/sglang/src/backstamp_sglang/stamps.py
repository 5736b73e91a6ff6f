"""What really runs, read from inside a scheduler process.

In: SGLang's model runner. Out: its attention layers with the stamps they carry, as JSON; nothing in it comes from a
request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend

from backstamp.declarations import Phase
from backstamp.stamp import read_stamp
from backstamp_sglang.backend import BackstampAttnBackend

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.model_executor.model_runner import ModelRunner

__all__ = ["stamps_of"]


def stamps_of(runner: ModelRunner) -> dict[int, dict[str, dict[str, object]]]:
    """The stamp of each half of every layer; none where SGLang's own backend runs."""
    found: dict[int, dict[str, dict[str, object]]] = {}
    halves: tuple[Phase, Phase] = ("prefill", "decode")
    for half in halves:
        backend = _half_of(runner.attn_backend, half)
        if isinstance(backend, BackstampAttnBackend):
            for layer_id, part in backend.parts[half].items():
                found.setdefault(layer_id, {})[half] = read_stamp(part.serving.backend).as_json(half)
    return found


def _half_of(backend: AttentionBackend, half: Phase) -> AttentionBackend:
    """What SGLang calls for one half: it composes a pair of two backends, and a hybrid model's full layers of one."""
    while not isinstance(backend, BackstampAttnBackend):
        if isinstance(backend, HybridAttnBackend):
            backend = backend.prefill_backend if half == "prefill" else backend.decode_backend
        elif backend.attn_backend_list:
            backend = backend.attn_backend_list[0]
        else:
            return backend
    return backend
