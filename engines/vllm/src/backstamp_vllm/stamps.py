"""What really runs, read from inside a worker.

In: a vLLM worker. Out: its attention and linear layers with the stamps they carry, as JSON; nothing in it comes from
a request.
"""

from __future__ import annotations

from vllm.model_executor.layers.attention import Attention, MLAAttention

from backstamp.stamp import read_stamp
from backstamp_vllm.impl import BackstampImpl
from backstamp_vllm.linear import BackstampGatedDeltaNet
from backstamp_vllm.mla_prefill import OfferedPrefill

__all__ = ["stamps_of"]


def stamps_of(worker: object) -> dict[str, dict[str, dict[str, object]]]:
    """The stamp of each half of every layer that runs a kernel of ours: `llm.collective_rpc(stamps_of)`.

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
        elif isinstance(layer, BackstampGatedDeltaNet) and layer.runner is not None:
            found[name] = {
                phase: read_stamp(layer.runner.linear_backend(phase, layer.layer_idx)).as_json(phase)
                for phase in ("prefill", "decode")
            }
        elif isinstance(layer, MLAAttention) and isinstance(layer.prefill_backend, OfferedPrefill):
            found[name] = {"prefill": read_stamp(layer.prefill_backend.built().backend).as_json("prefill")}
    return found
