"""Shares of split keys come together as one softmax, however many there are, whatever an unseen one holds."""

from __future__ import annotations

import pytest
import torch

from backstamp_triton import tile_launch
from backstamp_triton.backend import TritonAttention
from backstamp_triton.combine import combine_splits
from backstamp_triton.configs import merged_at_once, overlaps_launches
from tests.plugins.triton.cases import Case, build_attention, make
from tests.plugins.triton.recorders import Recorder


def _merged(parts, lse2, sinks, at_once):
    """Outputs and natural-log LSE of shares `[T, H, S, D]` and their base-2 LSE `[T, H, S]`."""
    tokens, heads, splits, dim = parts.shape
    out, lse = torch.empty(tokens, heads, dim), torch.empty(tokens, heads)
    combine_splits[(tokens, heads)](
        parts, lse2, out, lse, sinks, splits, *out.stride()[:2], *lse.stride(),
        V_DIM=dim, BLOCK_V=1 << (dim - 1).bit_length(), BLOCK_S=at_once, OVERLAP=False,
    )  # fmt: skip
    return out, lse


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(("splits", "at_once"), [(2, 2), (3, 4), (7, 2), (9, 4)])
def test_shares_are_weighted_by_what_they_saw(splits, at_once, with_sinks):
    """One pass over all shares, or several: as in float64; an unseen share may hold NaN, and all may be unseen."""
    g = torch.Generator().manual_seed(splits)
    parts = torch.randn(3, 2, splits, 24, generator=g)
    lse2 = torch.randn(3, 2, splits, generator=g) * 20
    lse2[0, :, 0] = lse2[1, 0, -1] = lse2[2, 1] = float("-inf")
    parts[lse2 == float("-inf")] = float("nan")
    sinks = torch.tensor([0.5, -2.0]) if with_sinks else None
    out, lse = _merged(parts, lse2, sinks, at_once)
    natural = lse2.double() * torch.log(torch.tensor(2.0, dtype=torch.float64))
    total = torch.logsumexp(natural, -1)
    below = total if sinks is None else torch.logaddexp(total, sinks.double()[None, :].expand(3, 2))
    seen = torch.where(torch.isinf(natural)[..., None], 0.0, parts.double())
    truth = (seen * torch.exp(natural - below[..., None]).nan_to_num(0.0)[..., None]).sum(2)
    torch.testing.assert_close(out.double(), truth, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), total, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("arch", "overlaps"),
    [("8.0", False), ("8.9", False), ("9.0", True), ("12.1", True), ("gfx950", False), ("interpreter", False)],
)
def test_a_merge_is_launched_early_where_it_can_wait_on_the_device(arch, overlaps, monkeypatch):
    """Both kernels and the launch agree: one that does not wait would read shares that are not yet written."""
    monkeypatch.setattr(TritonAttention, "_find_chip", lambda self, device: (arch, 132))
    tile, merge = Recorder(tile_launch.attend_tile), Recorder(tile_launch.combine_splits)
    monkeypatch.setattr(tile_launch, "attend_tile", tile)
    monkeypatch.setattr(tile_launch, "combine_splits", merge)
    drawn = make(Case("split", ((1, 5000),), heads=(2, 1), dims=(128, 128), phase="decode", dtype="bf16"))
    backend = build_attention(drawn.request).backend
    backend.forward(drawn.q, drawn.kv, drawn.layer, backend.plan(drawn.batch))
    assert overlaps_launches(arch) is overlaps
    assert tile.launches[0]["OVERLAP"] is merge.launches[0]["OVERLAP"] is overlaps
    assert merge.launches[0].get("launch_pdl", False) is overlaps


@pytest.mark.parametrize(("splits", "dim", "at_once"), [(2, 128, 2), (33, 128, 64), (128, 128, 64), (40, 512, 16)])
def test_the_merge_loads_what_registers_hold(splits, dim, at_once):
    """All shares at once where they fit 8192 numbers."""
    assert merged_at_once(splits, dim) == at_once
