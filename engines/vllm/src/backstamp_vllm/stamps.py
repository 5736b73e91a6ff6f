"""What really runs, read from inside a worker.

In: a vLLM worker. Out: its attention layers with the stamps they carry, as JSON; nothing in it comes from a request.
"""

from __future__ import annotations

from vllm.model_executor.layers.attention import Attention

from backstamp.stamp import read_stamp
from backstamp_vllm.impl import BackstampImpl

__all__ = ["stamps_of"]


def stamps_of(worker: object) -> dict[str, dict[str, dict[str, object]]]:
    """The stamp of each half of every attention layer: `llm.collective_rpc(stamps_of)`.

    Layers that run one of vLLM's own backends have none. A function is sent to workers only where
    `VLLM_ALLOW_INSECURE_SERIALIZATION=1` allows it.
    """
    context = worker.model_runner.vllm_config.compilation_config.static_forward_context  # type: ignore[attr-defined]
    found: dict[str, dict[str, dict[str, object]]] = {}
    for name, layer in context.items():
        if isinstance(layer, Attention) and isinstance(layer.impl, BackstampImpl):
            halves = layer.impl.halves
            found[name] = {
                "prefill": read_stamp(halves.prefill).as_json("prefill"),
                "decode": read_stamp(halves.decode).as_json("decode"),
            }
    return found
