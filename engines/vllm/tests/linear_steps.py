"""A gated delta net of a worker, driven through steps of ours beside vLLM's own op for the CPU.

In: a worker that serves a hybrid model in bfloat16, the only dtype of vLLM's op. Out: how far our layer's outputs are
from vLLM's own, step by step. Steps are planned by the worker's own metadata builder.
"""

from __future__ import annotations

import torch

__all__ = ["ROWS", "distances"]

#: Rows of each step as (tokens before, tokens now), at most `serve_once.CHUNK` a step: fresh prompts, then two that
#: decode beside one that goes on and a fresh one, then all four that decode.
ROWS = (
    ((0, 5), (0, 40), (0, 1)),
    ((5, 1), (40, 1), (1, 9), (0, 33)),
    ((6, 1), (41, 1), (10, 1), (33, 1)),
)


def distances(worker: object) -> list[float]:
    """For each step, the largest distance of any layer, by the largest of vLLM's own outputs."""
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.mamba.ops.cpu.gdn_attention import _cpu_gdn_attention_nonspec

    from backstamp_vllm.linear import BackstampGatedDeltaNet, BackstampLinearBackend

    runner = worker.model_runner
    # any of them: one kernel serves all
    group, *_ = [group for groups in runner.attn_groups for group in groups if group.backend is BackstampLinearBackend]
    context = runner.vllm_config.compilation_config.static_forward_context
    layers = [layer for layer in context.values() if isinstance(layer, BackstampGatedDeltaNet)]
    draw = torch.Generator().manual_seed(0)
    caches = {}
    for layer in layers:
        # what a slot held before is no state of a fresh row
        caches[layer.prefix] = [
            tuple(torch.randn(part.shape, generator=draw).to(part.dtype) for part in layer.kv_cache) for _ in range(2)
        ]
    found = []
    for rows in ROWS:
        common = _common(rows)
        step = group.get_metadata_builder(0).build(0, common)
        tokens, furthest = common.num_actual_tokens, 0.0
        for layer in layers:
            heads = layer.spec.num_kv_heads
            qkv = torch.randn(tokens, layer.conv_dim, generator=draw).bfloat16()
            b, a = (torch.randn(tokens, heads, generator=draw).bfloat16() for _ in range(2))
            outs = [torch.zeros(tokens, heads, layer.head_v_dim, dtype=torch.bfloat16) for _ in range(2)]
            held = layer.kv_cache
            layer.kv_cache = caches[layer.prefix][0]
            _cpu_gdn_attention_nonspec(layer, step, qkv.clone(), b, a, outs[0])
            layer.kv_cache = caches[layer.prefix][1]
            with set_forward_context({layer.prefix: step}, runner.vllm_config):
                layer._forward_core(qkv.clone(), b, a, outs[1])
            layer.kv_cache = held
            own, ours = (out.float() for out in outs)
            furthest = max(furthest, ((own - ours).abs().max() / own.abs().max()).item())
        found.append(furthest)
    return found


def _common(rows: tuple[tuple[int, int], ...]) -> object:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    lens = torch.tensor([before + now for before, now in rows], dtype=torch.int32)
    now = torch.tensor([now for _, now in rows], dtype=torch.int32)
    starts = torch.nn.functional.pad(now.cumsum(0, dtype=torch.int32), (1, 0))
    # a row's states are in one slot, whichever page its tokens are in
    table = torch.arange(1, len(rows) + 1, dtype=torch.int32)[:, None].repeat(1, 4)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lens,
        num_reqs=len(rows),
        num_actual_tokens=int(now.sum()),
        max_query_len=int(now.max()),
        max_seq_len=int(lens.max()),
        block_table_tensor=table,
        slot_mapping=torch.arange(int(now.sum())),
        seq_lens_cpu_upper_bound=lens,
    )
