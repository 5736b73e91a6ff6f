"""MLA prefill by tensors: vLLM's CPU runs MLA without chunked prefill and prefix caching, so what came before a step's
tokens is driven here, with metadata that vLLM's own function plans."""

from __future__ import annotations

import pytest
import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonPrefillMetadata,
    build_mla_chunked_context_metadata,
)

from backstamp_vllm.mla_prefill import OfferedPrefill, class_of

HEADS, NOPE, ROPE, VALUES = 4, 32, 64, 48


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_starts: list[int], k_starts: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention row by row in float64: `[T, H, Dv]`, and natural-log LSE `[H, T]`."""
    outs, lses = [], []
    for row in range(len(q_starts) - 1):
        mine, keys = slice(q_starts[row], q_starts[row + 1]), slice(k_starts[row], k_starts[row + 1])
        logits = torch.einsum("qhd,khd->hqk", q[mine].double(), k[keys].double()) * SCALE
        before = logits.shape[2] - logits.shape[1]
        logits = logits.masked_fill(torch.ones(logits.shape[1:]).triu(before + 1).bool(), float("-inf"))
        outs.append(torch.einsum("hqk,khd->qhd", logits.softmax(-1), v[keys].double()))
        lses.append(logits.logsumexp(-1))
    return torch.cat(outs), torch.cat(lses, dim=1)


SCALE = 0.11
#: Tokens of this step and before it, by row; the second row has nothing before.
NOW, BEFORE = (5, 17, 1, 30), (64, 0, 19, 7)


def drawn(generator: torch.Generator, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values as vLLM hands them over: keys are joined, values are a part of a wider tensor."""
    q, k = (torch.randn(tokens, HEADS, NOPE + ROPE, generator=generator) for _ in range(2))
    return q, k, torch.randn(tokens, HEADS, NOPE + VALUES, generator=generator)[..., NOPE:]


def starts_of(lens: tuple[int, ...]) -> torch.Tensor:
    """Exclusive offsets."""
    return torch.nn.functional.pad(torch.tensor(lens, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0))


def prepared(config: VllmConfig, before: tuple[int, ...] | None) -> OfferedPrefill:
    """A backend as a metadata builder has it, with one step planned."""
    made = class_of("TORCH_NATIVE")(HEADS, SCALE, 512, NOPE, ROPE, VALUES, config).clone()
    starts = starts_of(NOW)
    chunks = None
    if before is not None:
        chunks = build_mla_chunked_context_metadata(
            context_lens_cpu=torch.tensor(before, dtype=torch.int32),
            prefill_query_start_loc_cpu=starts,
            chunked_prefill_workspace=torch.empty(48, 512 + ROPE),
            chunked_prefill_workspace_size=48,
            block_size=16,
            align_chunk_to_block=True,
            device=torch.device("cpu"),
            dcp_world_size=1,
            dcp_local_block_size=1,
            dcp_virtual_block_size=1,
        )
    step = MLACommonPrefillMetadata(
        block_table=torch.zeros(len(NOW), 8, dtype=torch.int32),
        query_start_loc=starts,
        max_query_len=max(NOW),
        chunked_context=chunks,
        query_lens_cpu=torch.tensor(NOW, dtype=torch.int32),
        prefill_backend=made,
    )
    made.prepare_metadata(step)
    return made


@pytest.mark.parametrize("with_lse", [False, True])
def test_new_tokens_see_one_another_causally(with_lse: bool, latent_config: VllmConfig) -> None:
    """Rows of 1 to 30 tokens, written where vLLM says, against float64."""
    made = prepared(latent_config, None)
    q, k, v = drawn(torch.Generator().manual_seed(0), sum(NOW))
    starts = starts_of(NOW).tolist()
    wanted, wanted_lse = reference(q, k, v, starts, starts)
    out = torch.full((sum(NOW), HEADS, VALUES), float("nan"))
    answer = made.run_prefill_new_tokens(q, k, v, with_lse, out=out)
    if with_lse:
        answer, lse = answer
        torch.testing.assert_close(lse.double(), wanted_lse, atol=1e-5, rtol=1e-5)
    assert answer is out
    torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)


def test_parts_of_a_prompt_merge_to_the_whole(latent_config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM cuts what came before into parts of its workspace, within rows too: merged by LSE they are the whole."""
    monkeypatch.setattr(latent_config.cache_config, "enable_prefix_caching", True)
    made = prepared(latent_config, BEFORE)
    generator = torch.Generator().manual_seed(1)
    q, k, v = drawn(generator, sum(NOW))
    _, old_k, old_v = drawn(generator, sum(BEFORE))
    starts, old_starts = starts_of(NOW).tolist(), starts_of(BEFORE).tolist()
    out, lse = made.run_prefill_new_tokens(q, k, v, True)
    # log-weighted sums, a token and head each
    weighted, total = out.double() * lse.double().exp().T[..., None], lse.double().exp().T
    chunks = made._prefill_metadata.chunked_context.chunks
    assert len(chunks) > 2
    for chunk in chunks:
        rows = range(chunk.request_slice.start, chunk.request_slice.stop)
        at = [
            slice(old_starts[row] + start, old_starts[row] + start + length)
            for row, start, length in zip(rows, chunk.starts.tolist(), chunk.seq_lens.tolist(), strict=True)
        ]
        keys, values = (torch.cat([old[part] for part in at]) for old in (old_k, old_v))
        part, part_lse = made.run_prefill_context_chunk(chunk, q[chunk.token_slice], keys, values)
        weight = part_lse.double().exp().T
        weighted[chunk.token_slice] += part.nan_to_num().double() * weight[..., None]
        total[chunk.token_slice] += weight
    for row, (mine, old) in enumerate(zip(NOW, BEFORE, strict=True)):
        ours = slice(starts[row], starts[row] + mine)
        theirs = slice(old_starts[row], old_starts[row] + old)
        keys, values = torch.cat([old_k[theirs], k[ours]]), torch.cat([old_v[theirs], v[ours]])
        whole, _ = reference(q[ours], keys, values, [0, mine], [0, old + mine])
        torch.testing.assert_close((weighted / total[..., None])[ours], whole, atol=1e-5, rtol=1e-5)
