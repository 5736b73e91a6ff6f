"""tokenspeed-mla's launch of ragged MLA prefill.

In: nothing. Out: a `Launch` for `ragged.RaggedPrefill`.
"""

from __future__ import annotations

from tokenspeed_mla import tokenspeed_mla_prefill
from torch import Tensor

from backstamp.attention import LayerSpec, RaggedKV
from backstamp_trtllm.ragged_steps import RaggedStep

__all__ = ["tokenspeed_ragged"]


def tokenspeed_ragged(
    q: Tensor, new: RaggedKV, layer: LayerSpec, state: RaggedStep, out: Tensor, lse: Tensor | None
) -> None:
    """Attend into `out`; its LSE is natural already, and always a tensor of its own."""
    rows = state.batch.num_rows
    answer = tokenspeed_mla_prefill(
        query=q,
        key=new.k,
        value=new.v,
        seq_lens=state.batch.kv_lens[:rows],
        cum_seq_lens=new.kv_indptr[: rows + 1],
        max_seq_len=state.max_kv_len,
        batch_size=rows,
        softmax_scale=layer.scale,
        is_causal=True,
        return_lse=lse is not None,
        cum_seq_lens_q=state.batch.qo_indptr[: rows + 1],
        max_seq_len_q=state.max_q_len,
        out=out,
    )
    if lse is not None:
        lse.copy_(answer[1])
