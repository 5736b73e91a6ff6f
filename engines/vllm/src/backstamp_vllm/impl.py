"""The layer side: one attention layer's calls, from vLLM's tensors to a built backend's `forward`.

In: a layer's numbers at construction, then queries, its cache and the step's metadata. Out: outputs in vLLM's own
buffer. It copies neither keys nor values: a kernel reads vLLM's cache through views.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.config import get_current_vllm_config
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backend import AttentionImpl, AttentionLayer, AttentionType

from backstamp.attention import LayerSpec, PagedKV
from backstamp.errors import Refused
from backstamp_vllm.runner import Halves, runner_of
from backstamp_vllm.step import StepMetadata

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BackstampImpl"]


class BackstampImpl(AttentionImpl[StepMetadata]):
    """One attention layer; it is bound when its KV group is known, before the first step that attends."""

    halves: Halves
    _spec: LayerSpec
    _group: int
    _kv: PagedKV

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Resolve the model's plan, once for all its layers: a refusal comes before any weight is read.

        Raises:
            BackstampError: as `runner_of`. Refused: a layer that its model's config does not tell of.
        """
        if attn_type != AttentionType.DECODER:
            raise Refused("backstamp-vllm", needed="decoder layers", found=str(attn_type))
        if alibi_slopes is not None:
            raise Refused("backstamp-vllm", needed="layers without slopes", found="alibi slopes")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.sliding_window, self.logits_soft_cap, self.sinks = sliding_window, logits_soft_cap or 0.0, sinks
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.runner = runner_of(get_current_vllm_config())
        self._cache: Tensor | None = None

    def bind(self, spec: LayerSpec, halves: Halves, group: int) -> None:
        """Say which layer this is, what serves it, and which of its KV group's planned parts are its own."""
        self._spec, self.halves, self._group = spec, halves, group

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: StepMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend: `query [T, Hq, D]` to `output [T, Hq, Dv]`, both padded; pad outputs stay as they are."""
        if attn_metadata is None:
            # a run that only measures memory
            return output.zero_()
        kv = self._views(kv_cache)
        for part in attn_metadata.parts[self._group]:
            part.backend.forward(query[part.tokens], kv, self._spec, part.state, out=output[part.tokens])
        return output

    def do_kv_cache_update(
        self, layer: AttentionLayer, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Store this step's keys and values at their slots, as plain rows; slot -1 is not written."""
        kv = self._views(kv_cache)
        assert kv.v is not None, "a cache of keys and values"
        if kv_cache.device.type == "cpu":
            # vLLM's own writer for the CPU packs keys for its own kernel
            _write_rows(key, value, kv.k, kv.v, slot_mapping)
            return
        from vllm import _custom_ops as ops

        # the model's own dtype, by whichever name it was asked for
        scales = (layer._k_scale, layer._v_scale)
        ops.reshape_and_cache_flash(key, value, kv.k, kv.v, slot_mapping, "auto", *scales)

    def _views(self, kv_cache: Tensor) -> PagedKV:
        """vLLM's `[P, Hk, page, Dk + Dv]` as the contract's `[P, page, Hk, D]`, made once for each cache bound."""
        if kv_cache is not self._cache:
            rows = kv_cache.transpose(1, 2)
            k, v = rows[..., : self.head_size], rows[..., self.head_size :]
            # a stride of a dimension of size 1 may be anything, and TMA reads it
            k, v = canonicalize_singleton_dim_strides(k), canonicalize_singleton_dim_strides(v)
            self._cache, self._kv = kv_cache, PagedKV(k=k, v=v)
        return self._kv


def _write_rows(key: Tensor, value: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    written = (slots >= 0).nonzero().flatten()
    pages, offsets = slots[written] // k.shape[1], slots[written] % k.shape[1]
    k[pages, offsets] = key[written]
    v[pages, offsets] = value[written]
