"""The launch table: every shape it answers is one the kernel can run on that chip."""

from __future__ import annotations

import itertools

import pytest

from backstamp_triton.configs import (
    SHARED_BYTES,
    head_parts,
    pack_heads,
    resident_tiles,
    shared_bytes,
    split_count,
    tile_bytes,
    tile_config,
)

ARCHS = [arch for arch in SHARED_BYTES if arch != "interpreter"] + ["13.0"]
DIMS = [*itertools.product((64, 80, 96, 128, 192, 256), repeat=2), (576, 512)]


@pytest.mark.parametrize("arch", ARCHS)
def test_a_tile_holds_at_least_one_token(arch):
    """A tile narrower than the heads packed into it would write nothing: all groups, dims, dtypes and lengths."""
    for dims, itemsize, group, tokens in itertools.product(DIMS, (2, 4), range(1, 130), (1, 2, 5, 4096)):
        mla = dims == (576, 512)
        pack = pack_heads(arch, itemsize, group, mla)
        config = tile_config(arch, itemsize, *dims, pack * tokens, mla, tokens == 1)
        assert config.block_m >= pack, (dims, itemsize, group, tokens)
        assert config.block_m >= 16
        assert config.block_n >= 16
        assert -(-group // pack) * pack >= group


@pytest.mark.parametrize("arch", ARCHS)
def test_keys_values_and_queries_fit_shared_memory(arch):
    """Whatever the dims, dtype and length, the table gives up stages and block length until a tile fits."""
    for dims, itemsize, rows in itertools.product(DIMS, (2, 4), (4, 20, 60, 4096)):
        shape = (itemsize, *dims)
        mla = dims == (576, 512)
        config = tile_config(arch, *shape, rows, mla, rows <= 16)
        assert tile_bytes(arch, config, *shape, mla) <= shared_bytes(arch), (shape, rows)
        assert resident_tiles(arch, config, *shape, mla) >= 1


def test_an_unlisted_chip_is_held_to_the_least_its_vendor_has():
    """A chip newer than the table may have less than the best, never less than the least."""
    assert shared_bytes("13.0") == 99 * 1024
    assert shared_bytes("gfx1250") == 64 * 1024


@pytest.mark.parametrize(
    ("dim", "parts"), [(64, (64, 0)), (80, (64, 16)), (96, (64, 32)), (192, (128, 64)), (576, (512, 64))]
)
def test_head_dims_are_split_in_two_powers_of_two(dim, parts):
    """No declared head dim pads its tiles."""
    assert head_parts(dim) == parts


def test_a_dim_of_three_parts_is_answered_with_parts_no_kernel_takes():
    """112 is 64 + 32 + 16."""
    assert head_parts(112) == (0, 1)


def test_a_full_chip_is_not_split():
    """Tiles enough for every place read their keys alone."""
    assert split_count(264, 64, 264, 100) == 1


def test_a_lone_row_is_split_within_its_bounds():
    """One long row fills the chip, and never asks for more than the workspace holds or one share a block."""
    assert split_count(8, 2048, 528, 100) == 66
    assert split_count(8, 1000, 264, 3) <= 3
    assert split_count(8, 4, 264, 100) == 4
    assert split_count(8, 0, 264, 0) == 1


def test_decode_tiles_of_hopper_share_a_multiprocessor():
    """Four tiles of two warps, whose copies wait side by side; a chip of less shared memory has its own shape."""
    config = tile_config("9.0", 2, 128, 128, 4, False, True)
    assert (config.block_m, config.block_n, config.num_warps) == (16, 64, 2)
    assert resident_tiles("9.0", config, 2, 128, 128, False) == 4
    assert tile_config("8.0", 2, 128, 128, 4, False, True).num_warps == 4
    assert tile_config("9.0", 2, 128, 128, 16, False, False).num_warps == 4
