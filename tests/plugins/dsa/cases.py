"""Steps of sparse attention for tests: scattered latent caches, and choices of keys with everything wrong in them.

In: rows of (q_len, kv_len). Out: a `MadeStep` and `indices [T, topk]` in request space that hold duplicates of nothing,
-1, keys past the row and keys ahead of their token. Importing this module asks Triton for its interpreter.
"""

from __future__ import annotations

import os

__all__ = ["BOUNDS", "DSA", "RAGGED", "check", "chosen_keys", "dsa_layer", "latent_step", "nan_out"]

os.environ.setdefault("TRITON_INTERPRET", "1")

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from backstamp.attention import LayerSpec
from backstamp.testing.batches import MadeStep, make_batch
from backstamp.testing.reference import relative_error

#: Libraries are asked in bf16; our own kernels are run in fp16 and fp32: the interpreter multiplies bf16 wrongly.
BOUNDS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
#: Rows with and without a prefix, one without a query, one without a key, one longer than any list of choices.
RAGGED = ((5, 5), (1, 20), (0, 0), (3, 150), (0, 9))


def dsa_layer(heads: int = 4, **changes: Any) -> LayerSpec:
    """DeepSeek V3.2's absorbed layer with fewer heads."""
    fields = {"num_qo_heads": heads, "num_kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "scale": 192**-0.5}
    return LayerSpec(layer_id=3, **fields | changes)


DSA = dsa_layer()


def latent_step(rows: Sequence[tuple[int, int]] = RAGGED, layer: LayerSpec = DSA, **changes: Any) -> MadeStep:
    """A step over a latent cache; see `make_batch`."""
    q_lens, kv_lens = zip(*rows, strict=True) if rows else ((), ())
    return make_batch(q_lens, kv_lens, layer=layer, cache_form="latent", **changes)


def chosen_keys(step: MadeStep, topk: int, seed: int = 1) -> Tensor:
    """`[T, topk]` i32: some of a token's keys in any order, some that it must not see, some -1."""
    generator = torch.Generator().manual_seed(seed)
    offsets, kv_lens = step.batch.qo_indptr.tolist(), step.batch.kv_lens.tolist()
    indices = torch.full((step.batch.num_tokens, topk), -1, dtype=torch.int32)
    for row, kv_len in enumerate(kv_lens):
        for token in range(offsets[row], offsets[row + 1]):
            # two positions in three are keys of the row, ahead of the token or not; the others lie past it
            some = torch.randperm(kv_len + kv_len // 2 + 2, generator=generator)[:topk].to(torch.int32)
            some[torch.rand(len(some), generator=generator) < 0.2] = -1
            indices[token, : len(some)] = some
    return indices.to(step.q.device)


def nan_out(step: MadeStep) -> Tensor:
    """An output in which whatever is not written shows."""
    shape = (step.batch.num_tokens, step.layer.num_qo_heads, step.layer.v_head_dim)
    return torch.full(shape, float("nan"), dtype=step.q.dtype, device=step.q.device)


def check(
    step: MadeStep, out: Tensor, truth: Tensor, lse: Tensor | None = None, true_lse: Tensor | None = None
) -> None:
    """Hold an answer to the reference, token by token."""
    bound = BOUNDS[step.q.dtype]
    assert bool(torch.isfinite(out.float()).all())
    assert relative_error(out, truth) <= bound
    scale = max(1.0, float(truth.abs().max())) if truth.numel() else 1.0
    assert truth.numel() == 0 or float((out.double().cpu() - truth.double()).abs().max()) <= 8 * bound * scale
    if lse is not None and true_lse is not None:
        nothing = torch.isneginf(true_lse)
        assert torch.equal(torch.isneginf(lse.cpu()), nothing)
        assert bool((lse.double().cpu() - true_lse.double())[~nothing].abs().le(bound * 10).all())
