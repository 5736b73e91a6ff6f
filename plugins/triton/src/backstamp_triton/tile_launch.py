"""The host's half of the tile kernel and of the merge of its shares: tensors and strides in the kernel's order.

In: a call the backend has checked, with its `Launch`. Out: outputs and LSE written. Nothing here reads a device value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from backstamp.relaunch import alignments
from backstamp.relaunch import launch as relaunch
from backstamp_triton.combine import combine_splits
from backstamp_triton.tile import attend_tile

if TYPE_CHECKING:
    from torch import Tensor

    from backstamp.attention import LayerSpec
    from backstamp_triton.layers import PreparedLayer
    from backstamp_triton.steps import Launch, Step

__all__ = ["attend_tiles", "merge_shares", "sink_dtype"]


def attend_tiles(
    q: Tensor,
    q_rope: Tensor | None,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    shares: tuple[Tensor, Tensor] | None,
    index: tuple[str, Tensor | None, Tensor | None, int],
    known: PreparedLayer,
    step: Step,
    launch: Launch,
) -> None:
    """Attend one layer of one step; `index` is its form, page ids, per-row tensor and page size (0: ragged)."""
    batch, spec = step.batch, known.spec
    form, page_ids, page_rows, page_size = index
    part, part_lse = (None, None) if shares is None else shares
    tree = batch.tree
    tree_bytes = None if tree is None else tree.buffer.view(torch.uint8)
    tree_strides = (0, 0) if tree_bytes is None or step.tree != "qlen" else tree_bytes.stride()[:2]
    # one call for all strides of a tensor: each costs a fifth of a microsecond, in every layer
    q_strides, k_strides, v_strides, out_strides = q.stride(), k.stride(), v.stride(), out.stride()
    q_rope_strides = (0, 0) if q_rope is None else q_rope.stride()[:2]
    lse_strides = (0, 0) if lse is None else lse.stride()
    like = (
        *("tile", form, page_size, known.shape, known.window_left, known.softcap_log2 is None),
        *(q_strides, q_rope_strides, k_strides, v_strides, out_strides, lse_strides),
        *(alignments(q, q_rope, k, v, out, lse, spec.sinks, page_rows), sink_dtype(spec)),
    )
    relaunch(
        attend_tile,
        launch.codes,
        like,
        (launch.slots, spec.num_kv_heads * known.head_blocks, launch.splits),
        (
            q,
            q_rope,
            k,
            v,
            out,
            lse,
            part,
            part_lse,
            spec.sinks,
            batch.qo_indptr,
            batch.kv_lens,
            batch.kv_starts,
            batch.causal if step.causal == "rows" else None,
            page_ids,
            page_rows,
            tree_bytes,
            None if tree is None else tree.indptr,
            batch.num_rows,
            batch.num_tokens,
            0 if page_ids is None else page_ids.stride(0),
            *q_strides[:2],
            *q_rope_strides,
            *k_strides[:2],
            k_strides[-2],
            *v_strides[:2],
            v_strides[-2],
            *out_strides[:2],
            *lse_strides,
            *tree_strides,
            known.logit_scale,
            known.softcap_log2,
            known.window_left,
        ),
        lambda: _tile_constants(known, step, launch, form, page_size),
        num_warps=launch.config.num_warps,
        num_stages=launch.config.num_stages,
    )


def _tile_constants(known: PreparedLayer, step: Step, launch: Launch, form: str, page_size: int) -> dict[str, object]:
    """What the tile kernel is compiled for, in its own order."""
    spec, (d0, d1, v0, v1) = known.spec, known.dims
    return {
        "GROUP": spec.num_qo_heads // spec.num_kv_heads,
        "PACK": launch.pack,
        "D0": d0,
        "D1": d1,
        "V0": v0,
        "V1": v1,
        "V_IN_K": known.v_in_k,
        "PAGE_SIZE": max(page_size, 1),
        "INDEX": form,
        "CAUSAL": step.causal,
        "TREE": step.tree,
        "ONE_TOKEN": step.one_token,
        "SPLIT": launch.splits > 1,
        "OVERLAP": launch.overlap,
        "BLOCK_M": launch.config.block_m,
        "BLOCK_N": launch.config.block_n,
    }


def merge_shares(
    shares: tuple[Tensor, Tensor],
    out: Tensor,
    lse: Tensor | None,
    known: PreparedLayer,
    step: Step,
    launch: Launch,
) -> None:
    """Merge the shares of every token and head."""
    spec = known.spec
    out_strides, lse_strides = out.stride(), (0, 0) if lse is None else lse.stride()
    relaunch(
        combine_splits,
        launch.codes,
        ("merge", spec.v_head_dim, out_strides, lse_strides, alignments(out, lse, spec.sinks), sink_dtype(spec)),
        (step.batch.num_tokens, spec.num_qo_heads, 1),
        (*shares, out, lse, spec.sinks, launch.splits, *out_strides[:2], *lse_strides),
        lambda: {
            "V_DIM": spec.v_head_dim,
            "BLOCK_V": 1 << (spec.v_head_dim - 1).bit_length(),
            "BLOCK_S": launch.merged_at_once,
            "OVERLAP": launch.overlap,
        },
        num_warps=4,
        # an option of NVIDIA's compiler alone
        **({"launch_pdl": True} if launch.overlap else {}),
    )


def sink_dtype(spec: LayerSpec) -> torch.dtype | None:
    """The dtype of a layer's sinks, which its group may have of any: code for one reads another's wrongly."""
    return None if spec.sinks is None else spec.sinks.dtype
