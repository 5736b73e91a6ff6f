"""MLA prefill for one of our names: this step's up-projected keys, then parts of the cache, by a resolved kernel.

In: vLLM's questions about a name, then a step's metadata and each layer's `q, k [T, H, Dk]`, `v [T, H, Dv]`. Out:
answers from the declared rows; outputs, and LSE as vLLM merges it. It reads no cache and projects nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.backends.mla.prefill.base import MLADimensions, MLAPrefillBackend

from backstamp.attention import Batch, KVIndex, RaggedKV
from backstamp.declarations import Offer
from backstamp.errors import BackstampError
from backstamp.row_checks import DTYPE_NAMES, serves_dims
from backstamp_vllm.mla_runner import BuiltPrefill, prefill_offers, prefill_runner_of

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.attention.mla_attention import MLACommonPrefillMetadata

__all__ = ["OfferedPrefill", "class_of"]


class OfferedPrefill(MLAPrefillBackend):
    """The MLA prefill backend of one name; `name` is set by the class made for it."""

    name: ClassVar[str]

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype) -> bool:
        """Whether every row takes queries of this dtype."""
        return cls._all(lambda offer: DTYPE_NAMES.get(str(dtype)) in offer.dtypes)

    @classmethod
    def supports_mla_dimensions(cls, mla_dimensions: MLADimensions) -> bool:
        """Whether every row takes heads of these sizes."""
        head_dim = mla_dimensions.qk_nope_head_dim + mla_dimensions.qk_rope_head_dim
        return cls._all(lambda offer: serves_dims(offer, head_dim, mla_dimensions.v_head_dim))

    @classmethod
    def is_available(cls) -> bool:
        """Yes: what is missing is told with the plan, in our words."""
        return True

    @classmethod
    def validate_configuration(cls, *args: object, **config: object) -> list[str]:
        """Every reason why this name cannot serve: the resolver's, or vLLM's own questions where there is a plan."""
        try:
            prefill_runner_of(get_current_vllm_config()).check_layers()
        except BackstampError as refusal:
            return [str(refusal)]
        return super().validate_configuration(*args, **config)

    def supports_out(self) -> bool:
        """Kernels write where they are told to."""
        return True

    def __init__(
        self,
        num_heads: int,
        scale: float,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        vllm_config: VllmConfig,
    ) -> None:
        """Resolve the model's plan, once for all its layers: a refusal comes before any weight is read.

        Raises:
            BackstampError: as `prefill_runner_of`, and as `PrefillRunner.check_layers`.
        """
        super().__init__(num_heads, scale, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, vllm_config)
        self.runner = prefill_runner_of(vllm_config)
        # vLLM has made the layer around it
        self.runner.check_layers()

    def clone(self) -> OfferedPrefill:
        """The one a metadata builder plans with, and whose calls serve every layer: the kernel is built for it."""
        made = super().clone()
        assert isinstance(made, OfferedPrefill)
        made._layer, made._backend = self.built()
        return made

    def built(self) -> BuiltPrefill:
        """The kernel of layers like this one, built once."""
        device = torch.empty(0, device=current_platform.device_type).device
        dims = (self.qk_nope_head_dim + self.qk_rope_head_dim, self.v_head_dim)
        return self.runner.build(self.num_heads, float(self.scale), dims, str(device))

    def prepare_metadata(self, prefill_metadata: MLACommonPrefillMetadata) -> None:
        """Plan a step: its new tokens, and each part of what the cache holds of their prompts.

        Raises:
            UnsupportedBatch: the step asks for what a kernel does not declare.
        """
        super().prepare_metadata(prefill_metadata)
        starts, host = prefill_metadata.query_start_loc, prefill_metadata.query_lens_cpu
        longest = prefill_metadata.max_query_len
        self._new_tokens = self._backend.plan(_batch(starts, starts, host, host, longest, longest, causal=True))
        context = prefill_metadata.chunked_context
        self._parts = {
            chunk.index: self._backend.plan(
                _batch(
                    chunk.query_start_loc,
                    chunk.cu_seq_lens,
                    None if host is None else host[chunk.request_slice],
                    chunk.seq_lens,
                    chunk.max_query_len,
                    chunk.max_seq_len,
                    causal=False,
                )
            )
            for chunk in (context.chunks if context is not None else ())
        }

    def run_prefill_new_tokens(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        return_softmax_lse: bool,
        out: Tensor | None = None,
        output_scale: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend this step's tokens among themselves: `out [T, H, Dv]`, and LSE `[H, T]` where it is asked for."""
        assert output_scale is None, "supports_quant_output says no"
        starts = self._prefill_metadata.query_start_loc
        out, lse = self._run(self._new_tokens, starts, q, k, v, out, return_softmax_lse)
        return out if lse is None else (out, lse)

    def run_prefill_context_chunk(
        self,
        chunk: MLACommonPrefillMetadata.ContextChunk,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attend one part of what came before, all of which every token of its row sees."""
        out, lse = self._run(self._parts[chunk.index], chunk.cu_seq_lens, q, k, v, out, True)
        assert lse is not None, "it was asked for"
        return out, lse

    def _run(
        self, state: object, key_starts: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, with_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        tokens, heads = q.shape[:2]
        out = q.new_empty(tokens, heads, self.v_head_dim) if out is None else out
        lse = torch.empty(heads, tokens, dtype=torch.float32, device=q.device) if with_lse else None
        new = RaggedKV(k=k, v=v, kv_indptr=key_starts)
        self._backend.forward(
            q, None, self._layer, state, out=out, lse=None if lse is None else lse.transpose(0, 1), new=new
        )
        return out, lse

    @classmethod
    def _all(cls, holds: Callable[[Offer], bool]) -> bool:
        offers = prefill_offers(cls.name)
        # no row on this host is no answer to build on
        return bool(offers) and all(holds(offer) for offer in offers)


def _batch(
    query_starts: Tensor,
    key_starts: Tensor,
    query_lens: Tensor | None,
    key_lens: Tensor | None,
    max_q_len: int,
    max_kv_len: int,
    *,
    causal: bool,
) -> Batch:
    """Rows whose keys lie in no cache; lengths on the host where vLLM has them."""
    host = None if query_lens is None else torch.nn.functional.pad(query_lens.cumsum(0, dtype=torch.int32), (1, 0))
    rows = query_starts.shape[0] - 1
    return Batch(
        phase="prefill",
        causal=causal,
        num_rows=rows,
        num_tokens=int(query_starts[-1]) if host is None else int(host[-1]),
        max_q_len=max_q_len,
        max_kv_len=max_kv_len,
        qo_indptr=query_starts,
        kv_lens=key_starts.diff(),
        index=KVIndex(page_size=1),
        qo_indptr_host=host,
        kv_lens_host=None if key_lens is None else key_lens.to(torch.int32),
    )


@cache
def class_of(name: str) -> type[OfferedPrefill]:
    """A class for each name: vLLM tells backends apart by where their class lies."""

    def get_name() -> str:
        return name

    body = {
        # where vLLM looks it up again
        "__module__": "backstamp_vllm.offered_prefill",
        "__qualname__": name,
        "__doc__": f"Backstamp's {name}, for MLA prefill.",
        "name": name,
        # vLLM calls it without the class
        "get_name": staticmethod(get_name),
    }
    return type(name, (OfferedPrefill,), body)
