"""The Hopper prefill kernel's launches: the right work comes to it, and the cache is described rightly.

The chip is not here: numbers are checked on one by `bench/kernels.py --check`.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from backstamp_triton import prefill_hopper, prefill_launch, tile_launch
from backstamp_triton.backend import TritonAttention
from tests.plugins.triton.cases import Case, build_attention, make
from tests.plugins.triton.recorders import Recorder

PLACES = ("head_rows", "head_cols", "page_stride")
#: 256 tokens over 8 heads, four to a key head, in pages of 16.
LONG = Case("long", ((200, 200), (56, 500)), heads=(8, 2), dims=(128, 128), dtype="bf16")


@pytest.fixture
def hopper(monkeypatch):
    """Backends built as on an H100, whose three kernels are recorded: prefill, tile, merge."""
    kernels = prefill_hopper.attend_prefill, tile_launch.attend_tile, tile_launch.combine_splits
    recorders = tuple(Recorder(kernel) for kernel in kernels)
    monkeypatch.setattr(TritonAttention, "_find_chip", lambda self, device: ("9.0", 132))
    monkeypatch.setattr(prefill_hopper, "attend_prefill", recorders[0])
    monkeypatch.setattr(tile_launch, "attend_tile", recorders[1])
    monkeypatch.setattr(tile_launch, "combine_splits", recorders[2])
    return recorders


def _attend(case: Case):
    drawn = make(case)
    backend = build_attention(drawn.request).backend
    state = backend.plan(drawn.batch)
    backend.forward(drawn.q, drawn.kv, drawn.layer, state, q_rope=drawn.q_rope)
    return drawn


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dims": (64, 64)},
        {"dims": (256, 256)},
        {"dtype": "fp16"},
        {"causal": False},
        {"causal": (1, 0)},
        {"window_left": 40},
        {"softcap": 30.0},
        {"sinks": True},
        {"pad_tokens": 5},
        {"index": "csr"},
        {"index": "indirect"},
        {"cache": "interleaved"},
        {"cache": "heads_first"},
        {"page_size": 8},
        {"page_size": 256},
        {"phase": "verify"},
        {"rows": ((16, 200), (9, 500)), "phase": "verify"},
    ],
    ids=str,
)
def test_long_queries_go_to_the_prefill_kernel(changes, hopper):
    """Every layout and feature it declares to take is launched there, and the tile kernel is left alone."""
    prefill, tile, _ = hopper
    _attend(dataclasses.replace(LONG, **changes))
    assert len(prefill.launches) == 1
    assert tile.launches == []


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "fp32"},
        {"dims": (96, 96)},
        {"dims": (128, 64)},
        {"page_size": 4},
        {"page_size": 24},
        {"starts": (3, 0)},
        {"rows": ((1, 200), (1, 500)), "phase": "decode"},
        {"rows": ((15, 200), (9, 500)), "phase": "verify"},
        {"rows": ((17, 200), (9, 500)), "phase": "verify", "tree": "qlen"},
    ],
    ids=str,
)
def test_what_the_prefill_kernel_lacks_goes_to_the_tile_kernel(changes, hopper):
    """Another dtype, head dim or page, left padding, trees, and tiles that would lie mostly empty."""
    prefill, tile, _ = hopper
    _attend(dataclasses.replace(LONG, **changes))
    assert prefill.launches == []
    assert len(tile.launches) == 1


def test_another_chip_keeps_the_tile_kernel(hopper, monkeypatch):
    """The kernel's instructions are those of SM90 alone: SM100 has others."""
    monkeypatch.setattr(TritonAttention, "_find_chip", lambda self, device: ("10.0", 148))
    _attend(LONG)
    prefill, tile, _ = hopper
    assert (len(prefill.launches), len(tile.launches)) == (0, 1)


def test_a_cache_of_uneven_strides_keeps_the_tile_kernel(hopper):
    """Pages that are no whole number of rows apart are no matrix: a descriptor would read other keys."""
    drawn = make(LONG)
    k, v = (
        torch.zeros(half.shape[0], half[0].numel() + 8, dtype=half.dtype)[:, : half[0].numel()].view(half.shape)
        for half in (drawn.kv.k, drawn.kv.v)
    )
    backend = build_attention(drawn.request).backend
    backend.forward(drawn.q, dataclasses.replace(drawn.kv, k=k, v=v), drawn.layer, backend.plan(drawn.batch))
    prefill, tile, _ = hopper
    assert (len(prefill.launches), len(tile.launches)) == (0, 1)


@pytest.mark.parametrize("cache", ["rows", "interleaved", "heads_first"])
def test_a_descriptor_finds_every_key_and_value(cache, hopper):
    """Row and column as the kernel computes them are the cache's own number, for each layout of pages."""
    drawn = _attend(dataclasses.replace(LONG, cache=cache))
    (launch,) = hopper[0].launches
    for half, name in ((drawn.kv.k, "k"), (drawn.kv.v, "v")):
        descriptor = launch[f"{name}_desc"]
        head_rows, head_cols, page_stride = (launch[f"{name}_{place}"] for place in PLACES)
        for page, n, head in ((0, 0, 0), (3, 5, 1), (half.shape[0] - 1, 15, 1)):
            row, column = page * page_stride + n + head * head_rows, head * head_cols
            assert row < descriptor.shape[0]
            assert column + 128 <= descriptor.shape[1]
            found = descriptor.base.address + (row * descriptor.strides[0] + column) * half.element_size()
            assert found == half[page, n, head].data_ptr()
        assert list(descriptor.block_shape) == [launch["ROWS"], 64]


@pytest.mark.parametrize(
    ("shape", "strides", "address", "taken"),
    [
        ((5, 16, 2, 128), (4096, 256, 128, 1), 0, True),
        ((0, 16, 2, 128), (4096, 256, 128, 1), 0, False),
        ((0, 2, 128), (256, 128, 1), 0, False),
        ((5, 16, 2, 128), (4096, 256, 128, 1), 8, False),
        ((5, 16, 2, 128), (4096 + 64, 260, 130, 1), 0, False),
        ((5, 16, 2, 128), (2048, 128, 64, 1), 0, False),
        ((5, 16, 2, 128), (8192, 512, 256, 2), 0, False),
        ((5, 16, 2, 128), (4104, 256, 128, 1), 0, False),
        ((1 << 27, 16, 1, 128), (2048, 128, 128, 1), 0, False),
        ((1 << 26, 16, 1, 128), (2048, 128, 128, 1), 0, True),
    ],
    ids=[
        "plain", "no-pages", "no-keys", "address-8", "rows-of-520-bytes", "rows-overlap", "every-other-number",
        "pages-no-whole-rows-apart", "2^31-rows", "2^30-rows",
    ],
)  # fmt: skip
def test_a_cache_that_no_descriptor_holds_keeps_the_tile_kernel(shape, strides, address, taken):
    """16-byte addresses and rows, whole rows from page to page, coordinates in 32 bits, and something to read."""
    view = prefill_launch._view(address, torch.bfloat16, shape, strides, 16)
    assert (view is not None) is taken


#: What a launch is given for a change of its case.
GIVEN = [
    ({}, {"CAUSAL": "yes", "INDEX": "page_table", "window_left": None, "softcap_log2": None, "sinks_ptr": None}),
    ({"causal": False}, {"CAUSAL": "no"}),
    ({"window_left": 40}, {"window_left": 40}),
    ({"index": "csr"}, {"INDEX": "csr"}),
    ({"dims": (64, 64)}, {"DK": 64, "DV": 64}),
    ({"page_size": 256}, {"PAGE_SIZE": 256, "ROWS": 128}),
]


@pytest.mark.parametrize(("changes", "given"), GIVEN, ids=str)
def test_a_launch_is_given_what_its_case_says(changes, given, hopper):
    """Constants of the layer and the step, each under the kernel's own name for it."""
    _attend(dataclasses.replace(LONG, **changes))
    (launch,) = hopper[0].launches
    assert {name: launch[name] for name in given} == given


def test_a_launch_is_given_the_tensors_of_its_call(hopper):
    """Queries, outputs, LSE, lengths and pages by address and stride, none in another's place."""
    drawn = make(dataclasses.replace(LONG, index="csr", causal=(1, 0), softcap=30.0))
    backend = build_attention(drawn.request).backend
    tokens, heads = drawn.batch.num_tokens, 8
    out = torch.empty(tokens, heads + 1, 128, dtype=torch.bfloat16)[:, 1:]
    lse = torch.empty(heads, tokens).T
    backend.forward(drawn.q, drawn.kv, drawn.layer, backend.plan(drawn.batch), out=out, lse=lse)
    (launch,) = hopper[0].launches
    batch, index = drawn.batch, drawn.batch.index
    for name, tensor in (
        ("q_ptr", drawn.q),
        ("out_ptr", out),
        ("lse_ptr", lse),
        ("qo_indptr", batch.qo_indptr),
        ("kv_lens", batch.kv_lens),
        ("causal_rows", batch.causal),
        ("page_ids", index.kv_indices),
        ("page_rows", index.kv_indptr),
    ):
        assert launch[name] is tensor, name
    for name, tensor in (("q", drawn.q), ("out", out), ("lse", lse)):
        assert (launch[f"{name}_stride_t"], launch[f"{name}_stride_h"]) == tensor.stride()[:2], name
    assert (launch["num_rows"], launch["num_tokens"]) == (2, tokens)
    assert launch["logit_scale"] == pytest.approx(128**-0.5 / 30.0)
    assert launch["softcap_log2"] == pytest.approx(30.0 * 1.4426950408889634)
    # a table of pages is read by rows
    assert launch["page_ids_stride"] == index.kv_indices.stride(0)


def test_sinks_are_the_launchs_where_no_merge_follows(hopper):
    """In a split step the merge has them, once."""
    drawn = _attend(dataclasses.replace(LONG, sinks=True, rows=((2500, 2500),)))
    assert hopper[0].launches[0]["sinks_ptr"] is drawn.layer.sinks
    split = _attend(dataclasses.replace(LONG, sinks=True, rows=((128, 20000),)))
    assert hopper[2].launches[-1]["sinks_ptr"] is split.layer.sinks


def test_few_tiles_share_their_keys(hopper):
    """A short step over a long prefix would leave multiprocessors idle: its keys are split, and shares are merged."""
    prefill, _, merge = hopper
    _attend(dataclasses.replace(LONG, rows=((128, 20000),)))
    (launch,) = prefill.launches
    splits = launch["num_splits"]
    assert splits > 1
    assert launch["part_ptr"] is not None
    assert launch["grid"] == (132, 1, 1)
    assert merge.launches[0]["num_splits"] == splits


def test_many_tiles_keep_their_keys_and_programs_stay(hopper):
    """Enough tiles fill the chip by themselves: no share, one program a multiprocessor."""
    prefill, _, merge = hopper
    _attend(dataclasses.replace(LONG, rows=((2500, 2500),)))
    (launch,) = prefill.launches
    assert (launch["num_splits"], launch["part_ptr"], merge.launches) == (1, None, [])
    assert launch["grid"] == (132, 1, 1)


@pytest.mark.parametrize(("q_len", "pack"), [(40, 4), (96, 4), (127, 1), (128, 1), (130, 4), (600, 1)])
def test_heads_share_a_tile_that_one_head_leaves_part_empty(q_len, pack, hopper):
    """A tile is one head's where its queries fill it, or nearly; else the heads of a key head share it."""
    _attend(dataclasses.replace(LONG, rows=((q_len, 500),)))
    (launch,) = hopper[0].launches
    assert launch["PACK"] == pack
    assert launch["HEADS"] == 8 // pack


def test_short_rows_beside_a_long_one_share_tiles(hopper):
    """A tile a head of each decoding row would be a hundred times the work of its one query."""
    long = ((600, 600),)
    for rows in (long, long + ((1, 300),) * 12):
        _attend(dataclasses.replace(LONG, rows=rows))
    assert [launch["PACK"] for launch in hopper[0].launches] == [1, 4]


@pytest.mark.parametrize("tokens", [16, 24, 32])
def test_shares_are_counted_for_the_tiles_that_rows_fill(tokens, hopper):
    """Eight rows of one tile each and eight key heads, 64 tiles: two shares fill the chip, more take a second round.

    Half-empty tiles are tiles: all tokens over a tile's would count half as many, and share keys twice as often.
    """
    _attend(dataclasses.replace(LONG, rows=((tokens, 2000),) * 8, heads=(32, 8), phase="verify"))
    (launch,) = hopper[0].launches
    assert (launch["PACK"], launch["num_splits"]) == (4, 2)


def test_a_bound_far_above_the_queries_hides_no_tiles(hopper):
    """The host may know of a graph's steps no more than their longest row ever: a row still is one tile at least."""
    drawn = make(dataclasses.replace(LONG, rows=((16, 2000),) * 8, heads=(32, 8), phase="verify"))
    backend = build_attention(drawn.request).backend
    for bound in (16, 4096):
        state = backend.plan(dataclasses.replace(drawn.batch, max_q_len=bound))
        backend.forward(drawn.q, drawn.kv, drawn.layer, state)
    assert [launch["num_splits"] for launch in hopper[0].launches] == [2, 2]


def test_the_tile_kernel_counts_them_likewise(hopper):
    """Drafts of five tokens in tiles of eight: 256 tiles of 32 rows, which fill the chip without shares."""
    _attend(dataclasses.replace(LONG, rows=((5, 2000),) * 32, heads=(32, 8), phase="verify"))
    assert len(hopper[1].launches) == 1
    assert hopper[2].launches == []


def test_shares_are_merged_by_powers_of_two(hopper):
    """A block of another size does not compile, whatever number of shares a step has."""
    for kv_len in range(600, 3000, 300):
        _attend(dataclasses.replace(LONG, rows=((128, kv_len),)))
    merges = [(launch["num_splits"], launch["BLOCK_S"]) for launch in hopper[2].launches]
    assert {splits for splits, _ in merges} - {2, 4, 8, 16}
    assert all(block & (block - 1) == 0 and splits <= block < 2 * splits for splits, block in merges if splits <= 16)


def test_a_page_is_copied_in_pieces_that_lie_in_it():
    """Whole pages up to a block, a block of a larger page; 0 where no box of whole swizzles fits."""
    assert [prefill_launch.piece_rows(page, 128) for page in (0, 8, 16, 128, 256, 4, 24, 100)] == [
        128, 8, 16, 128, 128, 0, 0, 0,
    ]  # fmt: skip
