"""Numbers: our own sparse attention in Triton's interpreter against the reference, over every form of index."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backstamp.testing.requests import request_for
from backstamp.testing.sparse_reference import reference_sparse
from backstamp_dsa.backend import build_dsa_triton
from backstamp_dsa.plugin import DSA_TRITON
from backstamp_dsa.portable import hopper_kernel, suits_hopper
from tests.plugins.dsa.cases import DSA, RAGGED, check, chosen_keys, dsa_layer, latent_step, nan_out

DECODE = ((1, 1), (1, 40), (0, 0), (1, 200), (1, 16))
CASES = {
    "prefill": {"rows": RAGGED},
    "prefill-fp32-page1-csr": {"rows": RAGGED, "dtype": torch.float32, "page_size": 1, "index_form": "csr"},
    "prefill-20-heads-indirect": {"rows": ((2, 30), (3, 3)), "index_form": "indirect", "heads": 20, "page_size": 64},
    "prefill-non-causal-is-decode": {"rows": DECODE, "causal": False},
    "decode-split": {"rows": ((1, 300), (1, 2)), "phase": "decode", "heads": 2, "topk": 256},
    "decode-split-fp32": {"rows": ((1, 200),), "phase": "decode", "dtype": torch.float32, "topk": 200},
    "verify": {"rows": ((4, 4), (4, 40)), "phase": "verify", "pad_tokens": 3},
    "draft-extend": {"rows": ((2, 30), (1, 1), (0, 3)), "phase": "draft_extend", "topk": 1},
    "draft-decode": {"rows": ((1, 30), (1, 31)), "phase": "draft_decode", "index_form": "csr"},
}  # fmt: skip


def drawn(rows, heads=4, topk=40, dtype=torch.float16, **changes):
    """A step and its choices."""
    step = latent_step(rows, dsa_layer(heads), dtype=dtype, **changes)
    return step, chosen_keys(step, topk)


def built(step, **changes):
    """The portable object for a step's dtype and pages."""
    dtype = {torch.float16: "fp16", torch.float32: "fp32"}[step.q.dtype]
    page_size = step.batch.index.page_size
    return build_dsa_triton(request_for(DSA_TRITON, (step.layer,), dtype=dtype, page_size=page_size, **changes)).backend


@pytest.mark.parametrize("case", CASES)
def test_attention_over_chosen_keys_agrees_with_the_reference(case):
    """Choices that are -1, past a row or ahead of a token are masked; slots nobody may read hold NaN."""
    step, indices = drawn(**CASES[case])
    backend, out = built(step), nan_out(step)
    lse = torch.full(out.shape[:2], float("nan"))
    state = backend.plan(step.batch)
    assert backend.forward(step.q, step.kv, step.layer, state, out=out, lse=lse, indices=indices) is out
    check(step, out, *_truth(step, indices, lse))


def _truth(step, indices, lse):
    truth, true_lse = reference_sparse(step.q, step.kv, step.layer, step.batch, indices)
    return truth, lse, true_lse


def test_a_rotary_part_may_come_apart():
    """`q_rope` is the last 64 numbers of the same query."""
    step, indices = drawn(RAGGED)
    backend, out = built(step), nan_out(step)
    latent, rope = step.q[..., :512].contiguous(), step.q[..., 512:].contiguous()
    backend.forward(latent, step.kv, DSA, backend.plan(step.batch), out=out, q_rope=rope, indices=indices)
    check(step, out, reference_sparse(step.q, step.kv, DSA, step.batch, indices)[0])


def test_a_cache_of_pages_apart_is_read_by_its_strides():
    """Pages of an interleaved pool lie further apart than a page is long."""
    step, indices = drawn(RAGGED)
    wide = torch.full((step.kv.k.shape[0], 40, 1, 576), float("nan"), dtype=step.q.dtype)
    wide[:, :16] = step.kv.k
    apart = replace(step.kv, k=wide[:, :16])
    backend, out = built(step), nan_out(step)
    backend.forward(step.q, apart, DSA, backend.plan(step.batch), out=out, indices=indices)
    check(step, out, reference_sparse(step.q, step.kv, DSA, step.batch, indices)[0])


@pytest.mark.parametrize("rows", [(), ((0, 0),), ((0, 9), (0, 0))])
def test_a_step_without_tokens_returns_at_once(rows):
    """Nothing is launched and nothing is read."""
    step = latent_step(rows, dtype=torch.float16)
    backend = built(step)
    indices = torch.empty(0, 8, dtype=torch.int32)
    out = backend.forward(step.q, step.kv, DSA, backend.plan(step.batch), indices=indices)
    assert out.shape == (0, 4, 512)


def test_a_planned_state_takes_other_values_at_its_own_addresses():
    """A replay reads the tensors of the first plan, renewed in place."""
    first, _ = drawn(((1, 30), (1, 40)), phase="decode")
    second, indices = drawn(((1, 12), (1, 40)), phase="decode", seed=7)
    backend = built(first)
    state = backend.plan(first.batch, capture=True)
    tensors = (state.batch.kv_lens, state.batch.index.page_table)
    grown = torch.full_like(first.batch.index.page_table, -1)
    grown[:, : second.batch.index.page_table.shape[1]] = second.batch.index.page_table[:, : grown.shape[1]]
    again = replace(second.batch, index=replace(second.batch.index, page_table=grown))
    assert backend.plan(again, state=state) is state
    assert state.batch.kv_lens is tensors[0]
    assert state.batch.index.page_table is tensors[1]
    out = nan_out(second)
    backend.forward(second.q, second.kv, DSA, state, out=out, indices=indices)
    check(second, out, reference_sparse(second.q, second.kv, DSA, second.batch, indices)[0])


@pytest.mark.parametrize(("arch", "there"), [("9.0", True), ("8.0", False), ("10.0", False), ("gfx942", False)])
def test_only_sm90_has_the_kernel_written_for_it(arch, there):
    """Its copies and products are that chip's own; others run the tile kernel."""
    assert (hopper_kernel(arch) is not None) is there


def test_the_hopper_kernel_takes_rows_it_can_copy_by_16_bytes():
    """Two-byte numbers, a latent of 512 and 64, aligned addresses and strides; anything else is the tile kernel's."""
    q, rows = torch.zeros(3, 4, 576, dtype=torch.bfloat16), torch.zeros(2, 4, 1, 576, dtype=torch.bfloat16)
    wide, layer = torch.zeros(3, 4, 600, dtype=torch.bfloat16), dsa_layer(4)
    assert suits_hopper(q, None, rows, layer)
    assert suits_hopper(q[..., :512], q[..., 512:], rows, layer)
    assert not suits_hopper(q.float(), None, rows.float(), layer)
    assert not suits_hopper(q, None, rows, replace(layer, head_dim=512))
    assert not suits_hopper(wide[..., :576], None, rows, layer)
    assert not suits_hopper(q[..., :512], wide[..., 512:576], rows, layer)
    assert not suits_hopper(q, None, torch.zeros(8 * 584, dtype=torch.bfloat16).view(2, 4, 1, 584)[..., :576], layer)
    odd = torch.zeros(q.numel() + 8, dtype=torch.bfloat16)[1:][: q.numel()].view_as(q)
    assert not suits_hopper(odd, None, rows, layer)
    assert not suits_hopper(
        q, None, torch.zeros(8 * 576 + 8, dtype=torch.bfloat16)[1:][: 8 * 576].view(2, 4, 1, 576), layer
    )


class _Recorder:
    """Stands where the kernel for SM90 would, and notes its grid and settings."""

    def __init__(self) -> None:
        self.launches = []

    def __getitem__(self, grid):
        return lambda *given, **settings: self.launches.append((grid, given, settings))


def test_a_suited_call_is_launched_once_and_never_by_both_kernels():
    """One program a token and 64 heads, blocks of one token side by side, shares where the chip is not full."""
    step, indices = drawn(((1, 300),), phase="decode", heads=100, topk=256)
    backend, out = built(step), nan_out(step)
    backend._kernels["triton"]._sparse._hopper = recorder = _Recorder()
    backend.forward(step.q, step.kv, step.layer, backend.plan(step.batch), out=out, indices=indices)
    ((grid, given, settings),) = recorder.launches
    assert grid == (2, 1, 1)
    assert given[6] is out
    assert (settings["HEADS"], settings["SPLIT"]) == (100, False)
    assert out.isnan().all()
