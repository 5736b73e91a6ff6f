"""The step side: vLLM's metadata builder of one KV group, which plans each step once for all layers of the group.

In: a KV group's layers and page size, then each step's common metadata. Out: `StepMetadata`. It builds the backends
when the group is known: after weights, before the first step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata

from backstamp.attention import LayerSpec
from backstamp_vllm.impl import BackstampImpl
from backstamp_vllm.runner import Halves, halves_of
from backstamp_vllm.step import StepMetadata, batch_of, plan_parts

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec

__all__ = ["BackstampMetadataBuilder"]


class BackstampMetadataBuilder(AttentionMetadataBuilder[StepMetadata]):
    """One KV group's builder; layers that the plan gives unlike backends are planned apart."""

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = {
            name: layer
            for name, layer in get_layers_from_vllm_config(vllm_config, Attention).items()
            if isinstance(layer.impl, BackstampImpl)
        }
        runner = layers[layer_names[0]].impl.runner
        specs = {name: _spec_of(name, layer) for name, layer in layers.items()}
        backends = runner.build(tuple(specs.values()), kv_cache_spec.block_size, str(device))
        self._page_size = kv_cache_spec.block_size
        self._parts: list[Halves] = []
        for name in layer_names:
            halves = halves_of(backends, specs[name].layer_id)
            if halves not in self._parts:
                self._parts.append(halves)
            layers[name].impl.bind(specs[name], halves, self._parts.index(halves))
        if any(halves.prefill is not halves.decode for halves in self._parts):
            # then vLLM puts decode rows first, where a step can be split without a copy
            self._init_reorder_batch_threshold(1)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> StepMetadata:
        """Plan one step.

        Raises:
            UnsupportedBatch: the step asks for what a kernel does not declare.
        """
        batch = batch_of(common_attn_metadata, self._page_size)
        return StepMetadata([plan_parts(halves, batch) for halves in self._parts])


def _spec_of(name: str, layer: Attention) -> LayerSpec:
    """A layer as a kernel needs to know it, from vLLM's own numbers: those of this rank."""
    impl, target = layer.impl, layer.kv_sharing_target_layer_name
    return LayerSpec(
        layer_id=extract_layer_index(name),
        num_qo_heads=impl.num_heads,
        num_kv_heads=impl.num_kv_heads,
        head_dim=layer.head_size,
        v_head_dim=layer.head_size_v,
        scale=impl.scale,
        # vLLM's window counts the token itself
        window_left=-1 if impl.sliding_window is None else impl.sliding_window - 1,
        softcap=impl.logits_soft_cap,
        sinks=impl.sinks,
        shares_kv_of=None if target is None else extract_layer_index(target),
    )
