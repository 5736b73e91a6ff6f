"""trtllm-gen's launch of ragged MLA prefill.

In: a `BuildRequest`. Out: a `Launch` for `ragged.RaggedPrefill`.
"""

from __future__ import annotations

from flashinfer.prefill import trtllm_ragged_attention_deepseek
from torch import Tensor

from backstamp.attention import LayerSpec, RaggedKV
from backstamp.factories import BuildRequest
from backstamp_trtllm.launches import LN2, zeros
from backstamp_trtllm.ragged import Launch
from backstamp_trtllm.ragged_steps import RaggedStep
from backstamp_trtllm.workspaces import WORKSPACE_BYTES

__all__ = ["trtllm_ragged"]


def trtllm_ragged(request: BuildRequest) -> Launch:
    """The launch, with a workspace of its own."""
    workspace = zeros(WORKSPACE_BYTES, request.device)

    def launch(q: Tensor, new: RaggedKV, layer: LayerSpec, state: RaggedStep, out: Tensor, lse: Tensor | None) -> None:
        batch = state.batch
        trtllm_ragged_attention_deepseek(
            query=q,
            key=new.k,
            value=new.v,
            workspace_buffer=workspace,
            seq_lens=batch.kv_lens[: batch.num_rows],
            max_q_len=state.max_q_len,
            max_kv_len=state.max_kv_len,
            bmm1_scale=layer.scale,
            bmm2_scale=1.0,
            o_sf_scale=1.0,
            batch_size=batch.num_rows,
            window_left=-1,
            cum_seq_lens_q=batch.qo_indptr[: batch.num_rows + 1],
            cum_seq_lens_kv=new.kv_indptr[: batch.num_rows + 1],
            enable_pdl=None,
            is_causal=True,
            return_lse=lse is not None,
            out=out,
            lse=lse,
            backend="trtllm-gen",
            # with these it leaves rows without queries or keys out of the launch, which is undefined for them
            q_seq_lens_cpu=state.q_lens_host,
            kv_seq_lens_cpu=state.kv_lens_host,
        )
        if lse is not None:
            # Source: lse.cuh writes base-2 logarithms
            lse.mul_(LN2)

    return launch
