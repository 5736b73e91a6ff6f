"""The references of sparse attention against the dense one, and packed caches against their own rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from backstamp.attention import PagedKV
from backstamp.testing.batches import SMALL_LAYER, MadeStep, make_batch
from backstamp.testing.packed_latent import FORMATS, pack, unpack
from backstamp.testing.reference import gather_row, reference_attention, relative_error
from backstamp.testing.sparse_reference import (
    reference_compressed,
    reference_indexer,
    reference_sparse,
    reference_topk,
    visible_lengths,
)

LAYER = replace(SMALL_LAYER, num_kv_heads=1, head_dim=32, v_head_dim=32)
ROWS = ((5, 5), (1, 20), (0, 0), (3, 40), (0, 9))


def latent(causal: bool = True, **changes: object) -> MadeStep:
    """A step over a cache whose values are its keys, with padding tokens."""
    q_lens, kv_lens = zip(*ROWS, strict=True)
    layer = replace(LAYER, **changes)
    return make_batch(q_lens, kv_lens, layer=layer, cache_form="latent", causal=causal, pad_tokens=2)


def every_key(step: MadeStep) -> Tensor:
    """Choices of everything, in any order, and of what must not be seen."""
    width = step.batch.max_kv_len + 3
    return torch.randperm(width).to(torch.int32).expand(step.batch.num_tokens, width).contiguous()


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "non-causal"])
def test_choosing_every_key_is_dense_attention(causal: bool) -> None:
    """Outputs and LSE, rows without tokens or keys and padding tokens included."""
    step = latent(causal)
    out, lse = reference_sparse(step.q, step.kv, step.layer, step.batch, every_key(step))
    truth, true_lse = reference_attention(step.q, step.kv, step.layer, step.batch)
    assert relative_error(out, truth) < 1e-12
    assert torch.allclose(lse, true_lse)


def test_a_query_may_come_in_two_parts() -> None:
    """As the contract has it."""
    step = latent()
    indices = every_key(step)
    whole, _ = reference_sparse(step.q, step.kv, step.layer, step.batch, indices)
    q, q_rope = step.q[..., :16], step.q[..., 16:]
    parts, _ = reference_sparse(q, step.kv, step.layer, step.batch, indices, q_rope=q_rope)
    assert torch.equal(whole, parts)


def test_what_was_not_chosen_is_not_seen() -> None:
    """One key alone is its own value; none is zeros and -inf; a key ahead of its token is none."""
    step = latent()
    indices = torch.full((step.batch.num_tokens, 3), -1, dtype=torch.int32)
    indices[5, 1] = 7
    indices[0] = torch.tensor([1, 2, 4])
    out, lse = reference_sparse(step.q, step.kv, step.layer, step.batch, indices)
    key = gather_row(step.kv.k, step.batch.index, 1, 20)[7, 0].double()
    assert torch.allclose(out[5], key.expand(4, 32))
    assert torch.allclose(lse[5], step.q[5].double() @ key * step.layer.scale)
    assert not out[0].any()
    assert bool(torch.isneginf(lse[0]).all())


def test_float32_is_as_good_as_its_name() -> None:
    """For checks that are too long for float64."""
    step = latent()
    double, _ = reference_sparse(step.q, step.kv, step.layer, step.batch, every_key(step))
    single, _ = reference_sparse(step.q, step.kv, step.layer, step.batch, every_key(step), dtype=torch.float32)
    assert single.dtype is torch.float32
    assert 0 < relative_error(single, double) < 1e-6


@pytest.mark.parametrize("sinks", [True, False], ids=["sinks", "no-sinks"])
def test_a_layer_without_compressed_entries_is_a_window(sinks: bool) -> None:
    """Dense attention with the same window and the same sink."""
    step = latent(window_left=6, sinks=torch.randn(4) if sinks else None)
    out, lse = reference_compressed(step.q, step.kv, step.layer, step.batch)
    truth, true_lse = reference_attention(step.q, step.kv, step.layer, step.batch)
    assert relative_error(out, truth) < 1e-12
    assert torch.allclose(lse, true_lse)


def test_an_entry_is_seen_once_all_its_tokens_are() -> None:
    """A window of one key, and entries that are that row's every fourth key: by hand."""
    step = latent(window_left=0)
    kv = PagedKV(k=step.kv.k, v=step.kv.k[:, 3::4])
    out, _ = reference_compressed(step.q, kv, step.layer, step.batch)
    keys = gather_row(step.kv.k, step.batch.index, 3, 40)[:, 0].double()
    # the row's second token is at position 38: nine entries end at or before it
    seen = torch.cat([keys[38:39], keys[3:36:4]])
    weights = torch.softmax(step.q[7].double() @ seen.T * step.layer.scale, -1)
    assert torch.allclose(out[7], weights @ seen)
    chosen = torch.full((step.batch.num_tokens, 2), -1, dtype=torch.int32)
    # entry 9 ends at position 39, ahead of the token
    chosen[7] = torch.tensor([9, 2])
    out, _ = reference_compressed(step.q, kv, step.layer, step.batch, chosen)
    seen = torch.stack([keys[38], keys[11]])
    weights = torch.softmax(step.q[7].double() @ seen.T * step.layer.scale, -1)
    assert torch.allclose(out[7], weights @ seen)


def test_lengths_follow_the_causal_rule() -> None:
    """A token sees up to its own position, or its whole row; padding tokens see nothing."""
    assert visible_lengths(latent().batch) == [1, 2, 3, 4, 5, 20, 38, 39, 40, 0, 0]
    assert visible_lengths(latent(causal=False).batch) == [5] * 5 + [20] + [40] * 3 + [0, 0]


def test_index_logits_are_weighted_sums_of_what_is_positive() -> None:
    """By hand for one token; -inf past what it sees."""
    step = latent()
    weights = torch.randn(step.batch.num_tokens, 4)
    logits = reference_indexer(step.q, weights, step.kv, step.batch)
    keys = gather_row(step.kv.k, step.batch.index, 3, 40)[:, 0].double()
    wanted = sum(weights[7, head].double() * (keys @ step.q[7, head].double()).clamp_min(0) for head in range(4))
    assert torch.allclose(logits[7, :39], wanted[:39])
    assert bool(torch.isneginf(logits[7, 39:]).all())


def test_the_best_come_first_and_nothing_is_minus_one() -> None:
    """A token that sees two keys chooses two."""
    logits = torch.tensor([[0.5, 2.0, float("-inf"), 1.0], [float("-inf")] * 3 + [3.0]])
    assert reference_topk(logits, 3).tolist() == [[1, 3, 0], [3, -1, -1]]


@pytest.mark.parametrize("layout", FORMATS)
def test_a_packed_cache_reads_as_its_rows(layout: str) -> None:
    """Within e4m3's half step of the greatest number of a tile; the rotary part exactly; NaN as NaN."""
    form = FORMATS[layout]
    rows = torch.randn(3, 8, 1, form.latent + form.rope).bfloat16()
    rows[1, 2] = float("nan")
    packed = pack(rows, layout)
    assert packed.shape == (3, 8, 1, form.token_bytes)
    assert packed.stride(1) == form.token_bytes
    read = unpack(packed, layout)
    assert bool(torch.isnan(read[1, 2]).all())
    rows, read = (torch.where(torch.isnan(item.float()), 0.0, item.float()) for item in (rows, read))
    assert torch.equal(read[..., form.latent :], rows[..., form.latent :])
    # three bits of mantissa
    assert bool(((read - rows).abs() <= rows.abs() / 16 + 1e-2).all())
    assert relative_error(read, rows) < 0.05


def test_bytes_lie_where_the_formats_put_them() -> None:
    """Scales between latent and rotary part in one, behind a page's numbers in the other."""
    rows = torch.zeros(1, 2, 1, 576, dtype=torch.bfloat16)
    rows[0, 1, 0, 0], rows[0, 1, 0, 575] = 448.0, 1.0
    packed = pack(rows, "fp8_ds_mla")[0, 1, 0]
    # 448 is e4m3's greatest number, 0x7e, with a scale of one
    assert packed[0] == 0x7E
    assert packed[512:516].view(torch.float32).item() == 1.0
    assert packed[654:].view(torch.bfloat16).item() == 1.0
    page = pack(rows[..., :512].contiguous(), "fp8_dsv4").flatten()
    assert page[576] == 0x7E
    assert pack(rows[..., :512].contiguous(), "fp8_dsv4").shape == (1, 2, 1, 584)
    # e8m0: 127 is one
    assert page[2 * 576 + 8] == 127
