"""Gated delta nets of a hybrid model on the resolved linear kernels: the layer that takes the place of vLLM's own.

In: a layer's projected tokens and gates, its states in vLLM's cache, the step as `linear_step` planned it. Out: outputs
in vLLM's own buffer, states updated in place. Projections, convolution and output norm stay vLLM's. Where no linear
kernel was asked for, the layer is vLLM's in all it does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast

import torch
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d import causal_conv1d_fn_cpu
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend

from backstamp.attention import LayerSpec, RawGates, StatePool
from backstamp.errors import Refused
from backstamp_vllm.facts import asks_for_linear
from backstamp_vllm.linear_step import LinearMetadata, LinearMetadataBuilder
from backstamp_vllm.names import is_ours
from backstamp_vllm.runner import EngineRunner, runner_of

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig
    from vllm.config import VllmConfig

__all__ = ["BackstampGatedDeltaNet", "check_layers", "replace_layer"]


class BackstampLinearBackend(GDNAttentionBackend):
    """vLLM's planning of a gated delta net, and ours on top."""

    @staticmethod
    def get_builder_cls() -> type[LinearMetadataBuilder]:
        """The step side."""
        return LinearMetadataBuilder


class BackstampGatedDeltaNet(QwenGatedDeltaNetAttention):
    """One gated delta net; `runner` is None where vLLM's own kernels serve it."""

    runner: EngineRunner | None

    def __init__(
        self,
        config: PreTrainedConfig,
        vllm_config: VllmConfig,
        prefix: str = "",
        gqa_interleaved_layout: bool = False,
        reduce_results: bool = True,
    ) -> None:
        """Resolve the model's plan, once for all its layers: a refusal comes before any weight is read.

        Raises:
            BackstampError: as `runner_of`.
        """
        super().__init__(config, vllm_config, prefix, gqa_interleaved_layout, reduce_results)
        current = get_current_vllm_config()
        asked = is_ours(current.attention_config.backend) and asks_for_linear(current)
        self.runner = runner_of(current) if asked else None
        if asked:
            # the way through an opaque op to `_forward_core`, on every platform; the others have kernels inlined
            self._forward_method = self.forward_cuda
        self.spec = LayerSpec(
            layer_id=self.layer_idx,
            num_qo_heads=self.num_k_heads // self.tp_size,
            num_kv_heads=self.num_v_heads // self.tp_size,
            head_dim=self.head_k_dim,
            v_head_dim=self.head_v_dim,
            scale=self.head_k_dim**-0.5,
        )

    def get_attn_backend(self) -> type[GDNAttentionBackend]:
        """What plans this layer's steps."""
        if self.runner is None:
            return cast("type[GDNAttentionBackend]", super().get_attn_backend())
        return BackstampLinearBackend

    def _forward_core(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
        """Convolve and recur: `mixed_qkv [T, 2 * H * K + HV * V]`, `a, b [T, HV]` to `core_attn_out [T, HV, V]`.

        Tokens of padding are left as they come, zeros.
        """
        if self.runner is None:
            super()._forward_core(mixed_qkv, b, a, core_attn_out)
            return
        by_layer = get_forward_context().attn_metadata
        step = by_layer.get(self.prefix) if isinstance(by_layer, dict) else None
        if step is None or not step.num_actual_tokens:
            # a run that only measures memory
            return
        assert isinstance(step, LinearMetadata)
        tokens = self._convolve(mixed_qkv[: step.num_actual_tokens], step)
        q, k, v = self._heads(tokens)
        pool = self._pool(self.runner)
        for part in step.parts:
            backend = self.runner.linear_backend(part.batch.phase, self.layer_idx)
            at = part.tokens
            gates = RawGates(a=a[at], b=b[at], A_log=self.A_log, dt_bias=self.dt_bias)
            backend.forward(
                q[at],
                k[at],
                v[at],
                gates,
                self.spec,
                part.states[id(backend)],
                pool=pool,
                slots=part.batch.slots,
                out=core_attn_out[at],
            )

    def _convolve(self, tokens: Tensor, step: LinearMetadata) -> Tensor:
        """vLLM's own short convolution, over its own windows."""
        states = self.kv_cache[0] if is_conv_state_dim_first() else self.kv_cache[0].transpose(-1, -2)
        slots, starts = step.non_spec_state_indices_tensor, step.non_spec_query_start_loc
        assert slots is not None, "nothing speculates"
        if tokens.device.type == "cpu":
            # the ops of vLLM's own path are for bf16 alone, and pack the weight where the CPU has them
            weight = getattr(self.conv1d, "_cpu_unpacked_conv_weight", self.conv1d.weight)
            seen = step.has_initial_state
            return causal_conv1d_fn_cpu(
                tokens.transpose(0, 1),
                weight.view(weight.shape[0], -1),
                self.conv1d.bias,
                states,
                starts,
                cache_indices=slots,
                # a step of decode rows alone says nothing: each has a state
                has_initial_state=slots.ge(0) if seen is None else seen,
                activation=self.activation,
            ).transpose(0, 1)
        weight = self.conv1d.weight.view(self.conv1d.weight.shape[0], -1)
        if step.num_prefills:
            return causal_conv1d_fn(
                tokens.transpose(0, 1),
                weight,
                self.conv1d.bias,
                activation=self.activation,
                conv_states=states,
                has_initial_state=step.has_initial_state,
                cache_indices=slots,
                query_start_loc=starts,
                metadata=step,
            ).transpose(0, 1)
        return causal_conv1d_update(
            tokens,
            states,
            weight,
            self.conv1d.bias,
            self.activation,
            conv_state_indices=slots[: step.num_actual_tokens],
            validate_data=True,
        )

    def _heads(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys `[T, H, K]` and values `[T, HV, V]` of convolved tokens."""
        width = self.key_dim // self.tp_size
        parts = torch.split(tokens, [width, width, self.value_dim // self.tp_size], dim=-1)
        dims = (self.head_k_dim, self.head_k_dim, self.head_v_dim)
        # vLLM's convolution answers channel by channel
        return tuple(part.reshape(part.shape[0], -1, dim).contiguous() for part, dim in zip(parts, dims, strict=True))

    def _pool(self, runner: EngineRunner) -> StatePool:
        """vLLM's states `[N, HV, V, K]` in the order the plan settled on: nobody else reads them."""
        ssm = self.kv_cache[1]
        order = cast('Literal["vk", "kv"]', dict(runner.plan.layouts)["linear"])
        if order == "kv":
            slots, heads, value_dim, key_dim = ssm.shape
            ssm = ssm.view(slots, heads, key_dim, value_dim)
        return StatePool(ssm=ssm, order=order)


def replace_layer() -> None:
    """Have vLLM make our layer where a model asks for its own; another plugin's replacement stays.

    For processes whose config asks for one of our names alone.
    """
    name = QwenGatedDeltaNetAttention.__name__
    if name not in op_registry_oot:
        PluggableLayer.register_oot(BackstampGatedDeltaNet, name=name)


def check_layers(config: VllmConfig) -> None:
    """Hold the recurrent layers vLLM has made so far against what was asked: a linear key may not end as another's.

    Raises:
        Refused: a layer that is not ours.
    """
    for name, layer in config.compilation_config.static_forward_context.items():
        if isinstance(layer, MambaBase) and not isinstance(layer, BackstampGatedDeltaNet):
            raise Refused(
                f"backstamp-vllm, linear attention of {name}",
                needed="a gated delta net of Qwen3-Next or Qwen3.5, in a process that vLLM spawned",
                found=f"vLLM's {type(layer).__name__}",
                fix="Leave linear_attn_backend out, or set VLLM_WORKER_MULTIPROC_METHOD=spawn and "
                "VLLM_ENABLE_V1_MULTIPROCESSING=1",
            )
