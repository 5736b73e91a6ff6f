"""One planned step of a group of gated delta nets: what vLLM's own builder says of it, and each kernel's plan of it.

In: a step's common metadata. Out: `LinearMetadata`, decode rows and the rest apart. It makes no copy of vLLM's tensors
but of slots that lie apart, and holds nothing beyond its step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata, GDNAttentionMetadataBuilder

from backstamp.attention import LinearBatch
from backstamp_vllm.runner import runner_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.kv_cache_interface import MambaSpec

__all__ = ["LinearMetadata", "LinearMetadataBuilder", "LinearPart", "batches_of"]


class LinearPart(NamedTuple):
    """The decode rows of a step, or the others: their tokens, their batch and its plan by id of the backend."""

    tokens: slice
    batch: LinearBatch
    states: Mapping[int, object]


@dataclass
class LinearMetadata(GDNAttentionMetadata):
    """vLLM's metadata of a step, with the planned parts."""

    parts: tuple[LinearPart, ...] = ()


class LinearMetadataBuilder(GDNAttentionMetadataBuilder):
    """One KV group's builder."""

    # vLLM's own steps can be captured, ours are planned on the host
    _cudagraph_support = AttentionCGSupport.NEVER

    def __init__(
        self, kv_cache_spec: MambaSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = get_layers_from_vllm_config(vllm_config, MambaBase)
        self._runner = runner_of(vllm_config)
        self._layers = [extract_layer_index(name) for name in layer_names if name in layers]

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        num_accepted_tokens: torch.Tensor | None = None,
        num_decode_draft_tokens_cpu: torch.Tensor | None = None,
        fast_build: bool = False,
    ) -> LinearMetadata:
        """Plan one step.

        Raises:
            UnsupportedBatch: the step asks for what a kernel does not declare.
        """
        step = super().build(
            common_prefix_len, common_attn_metadata, num_accepted_tokens, num_decode_draft_tokens_cpu, fast_build
        )
        parts = tuple(
            LinearPart(tokens, batch, self._plan(batch))
            for tokens, batch in batches_of(step, common_attn_metadata.query_start_loc_cpu)
        )
        return LinearMetadata(**vars(step), parts=parts)

    def _plan(self, batch: LinearBatch) -> dict[int, object]:
        backends = [self._runner.linear_backend(batch.phase, layer) for layer in self._layers]
        return {key: backend.plan(batch) for key, backend in {id(each): each for each in backends}.items()}


def batches_of(step: GDNAttentionMetadata, host_starts: torch.Tensor) -> Iterator[tuple[slice, LinearBatch]]:
    """A step's decode rows, which vLLM puts first, and then its others, each a batch of its own with its tokens.

    A prompt's chunk of one token is no decode row here: its state may be another request's.
    """
    slots, starts = step.non_spec_state_indices_tensor, step.non_spec_query_start_loc
    assert slots is not None, "nothing speculates"
    assert starts is not None, "nothing speculates"
    rows, first = step.num_decodes, step.num_decode_tokens
    if rows:
        yield (
            slice(0, first),
            LinearBatch(
                phase="decode",
                num_rows=rows,
                num_tokens=first,
                qo_indptr=starts[: rows + 1],
                # a column of vLLM's block table
                slots=slots[:rows].contiguous(),
                has_state=torch.ones(rows, dtype=torch.bool, device=slots.device),
                qo_indptr_host=host_starts[: rows + 1],
                max_q_len=1,
            ),
        )
    if step.num_prefills:
        last = rows + step.num_prefills
        host = host_starts[rows : last + 1] - first
        assert step.has_initial_state is not None, "vLLM says it wherever a prompt runs"
        yield (
            slice(first, first + step.num_prefill_tokens),
            LinearBatch(
                phase="prefill",
                num_rows=step.num_prefills,
                num_tokens=step.num_prefill_tokens,
                qo_indptr=starts[rows : last + 1] - first,
                slots=slots[rows:last].contiguous(),
                has_state=step.has_initial_state[rows:last],
                qo_indptr_host=host,
                max_q_len=int(host.diff().max()),
            ),
        )
