"""The launch table: block sizes, warps, stages and splits of a tile, per chip.

In: an arch as host facts spell it, element size, head dims, rows to cover. Out: a `TileConfig` that fits the chip's
shared memory. The launcher and the ahead-of-time checks read the same table. No torch, no triton.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

__all__ = [
    "SHARED_BYTES",
    "TileConfig",
    "head_parts",
    "merged_at_once",
    "overlaps_launches",
    "pack_heads",
    "prefill_block",
    "resident_tiles",
    "shared_bytes",
    "split_count",
    "tile_bytes",
    "tile_config",
]

#: Shared memory one program may use, in bytes.
#: Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; AMD CDNA 3 and CDNA 4 ISA
#: guides (LDS). Archs not listed: see `shared_bytes`.
SHARED_BYTES: dict[str, int] = {
    "8.0": 163 * 1024,
    "8.6": 99 * 1024,
    "8.7": 163 * 1024,
    "8.9": 99 * 1024,
    "9.0": 227 * 1024,
    "10.0": 227 * 1024,
    "10.3": 227 * 1024,
    "12.0": 99 * 1024,
    "12.1": 99 * 1024,
    "gfx942": 64 * 1024,
    "gfx950": 160 * 1024,
    # Triton's interpreter on a CPU: small blocks, so that small tests cross block borders
    "interpreter": 1 << 30,
}

#: Archs whose matrix units take 64 or more rows and whose shared memory holds them.
LARGE_TILE_ARCHS = frozenset({"9.0", "10.0", "10.3"})

#: Keys of a block by head dims: two blocks of keys and values and 128 queries fill a Hopper chip's shared memory.
PREFILL_BLOCKS = {(64, 64): 128, (128, 128): 128, (256, 256): 64}


@dataclass(frozen=True, slots=True)
class TileConfig:
    """One launch shape: `block_m` queries by `block_n` keys a step, warps, and key blocks in flight."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def head_parts(dim: int) -> tuple[int, int]:
    """Split a head dim into two powers of two (80: 64 and 16); the second is 0 where one will do.

    A dim that is no such sum answers (0, 1), parts no kernel takes.
    """
    first = 1 << (dim.bit_length() - 1)
    rest = dim - first
    return (0, 1) if rest & (rest - 1) else (first, rest)


def pack_heads(arch: str, itemsize: int, group: int, v_in_k: bool) -> int:
    """How many query heads of one key head share a tile: an even share of at most 16, or of 64 over a latent cache.

    A latent cache has one key head for all queries, so each further tile reads every key again.
    """
    most = 64 if v_in_k and arch in LARGE_TILE_ARCHS and itemsize == 2 else 16
    blocks = -(-group // most)
    return -(-group // blocks)


def tile_config(
    arch: str, itemsize: int, head_dim: int, v_head_dim: int, rows: int, v_in_k: bool, one_token: bool
) -> TileConfig:
    """The launch shape for tiles of up to `rows` queries (tokens times packed heads); it holds one token at least.

    `one_token`: no row has more than one, as in decode.

    Measured on one H200 (triton 3.6): blocks of 128 keys against 64 are worth 13% in prefill; in decode four tiles of
    two warps and 64 keys on a multiprocessor read 2 to 5% faster than two tiles of four warps and 128.
    """
    if arch == "interpreter":
        return TileConfig(block_m=16, block_n=16, num_warps=1, num_stages=1)
    widest = max(head_dim, v_head_dim)
    if itemsize == 4:
        # plain multiply-add in registers: small tiles
        config = TileConfig(16 if widest > 128 or rows <= 16 else 32, 32 if widest <= 128 else 16, 4, 1)
    elif v_in_k:
        # a latent of 512 keeps its accumulator in registers: few rows, short blocks
        config = TileConfig(64, 64, 8, 2) if arch in LARGE_TILE_ARCHS and rows > 16 else TileConfig(16, 32, 4, 2)
    elif one_token and rows <= 16 and widest <= 128 and arch in LARGE_TILE_ARCHS:
        config = TileConfig(16, 64, 2, 3)
    elif rows <= 64:
        block_n = 128 if rows <= 32 and widest <= 128 else 64
        config = TileConfig(16 if rows <= 16 else 32 if rows <= 32 else 64, block_n, 4, 3)
    elif arch in LARGE_TILE_ARCHS:
        config = TileConfig(128, 128 if widest <= 128 else 64, 8, 3 if widest <= 128 else 2)
    else:
        config = TileConfig(128, 64 if widest <= 128 else 32, 4 if widest <= 64 else 8, 2)
    if arch.startswith("gfx"):
        # the AMD pipeliner keeps one stage in registers
        config = replace(config, num_stages=min(config.num_stages, 2))
    # copies in flight hide more than long blocks do, down to blocks of 32
    while tile_bytes(arch, config, itemsize, head_dim, v_head_dim, v_in_k) > shared_bytes(arch):
        block_n, stages = config.block_n, config.num_stages
        if block_n > 64 or (block_n > 32 and stages <= 2) or (block_n > 16 and stages == 1):
            config = replace(config, block_n=block_n // 2)
        elif stages > 1:
            config = replace(config, num_stages=stages - 1)
        else:
            break
    return config


def prefill_block(arch: str, itemsize: int, head_dim: int, v_head_dim: int) -> int:
    """Keys of one block of the Hopper prefill kernel; 0 where the chip, the dtype or the head dims are not its own."""
    return PREFILL_BLOCKS.get((head_dim, v_head_dim), 0) if arch == "9.0" and itemsize == 2 else 0


def overlaps_launches(arch: str) -> bool:
    """Whether a kernel may be launched while the one before it ends, and wait on the device for its results.

    Source: PTX ISA, `griddepcontrol`: sm_90 and later.
    """
    return arch[:1].isdigit() and float(arch) >= 9.0


def merged_at_once(splits: int, v_head_dim: int) -> int:
    """Shares that the merge loads together: a power of two, 64 registers a thread of four warps at most."""
    wide = 1 << (v_head_dim - 1).bit_length()
    return min(max(1, 8192 // wide), 1 << (splits - 1).bit_length())


def shared_bytes(arch: str) -> int:
    """Shared memory one program may use; an arch the table does not know gets the least its vendor's chips have."""
    if arch in SHARED_BYTES:
        return SHARED_BYTES[arch]
    amd = arch.startswith("gfx")
    return min(size for known, size in SHARED_BYTES.items() if known.startswith("gfx") is amd)


def tile_bytes(arch: str, config: TileConfig, itemsize: int, head_dim: int, v_head_dim: int, v_in_k: bool) -> int:
    """Shared memory of one tile: key and value blocks in flight, and the queries where matrix units read them there.

    Elsewhere queries pass through shared memory once, before the loop, to registers.
    """
    keys = config.num_stages * config.block_n * (head_dim + (0 if v_in_k else v_head_dim)) * itemsize
    queries = config.block_m * head_dim * itemsize
    resident = arch in LARGE_TILE_ARCHS and config.block_m >= 64 and itemsize == 2
    return keys + queries if resident else max(keys, queries)


def resident_tiles(arch: str, config: TileConfig, itemsize: int, head_dim: int, v_head_dim: int, v_in_k: bool) -> int:
    """How many tiles one multiprocessor holds at once: registers allow eight full warps, shared memory may allow less.

    A narrow tile of three stages keeps one block of keys and values there: page ids fill the first stage, registers the
    last. Source: shared memory and best split counts of the compiled kernels on one H200, triton 3.6.
    """
    in_flight = replace(config, num_stages=max(1, config.num_stages - 2))
    size = tile_bytes(arch, in_flight, itemsize, head_dim, v_head_dim, v_in_k)
    return max(1, min(shared_bytes(arch) // size, 8 // config.num_warps))


@functools.lru_cache(maxsize=4096)
def split_count(tiles: int, blocks: int, places: int, most: int) -> int:
    """How many programs share one tile's `blocks` key blocks, from host sizes alone.

    `places` tiles run at once; a program costs about two blocks more than the keys it reads, and shares cost a merge.
    Where shares are uneven, programs with less leave their part of the memory to the others. Picks the count, at most
    `most`, with the least time.
    """
    best, best_time = 1, float("inf")
    for splits in range(1, max(1, min(most, blocks, 128)) + 1):
        waves = -(-tiles * splits // places)
        merge = 0.0 if splits == 1 else 1.0 + splits / 32
        share = (-(-blocks // splits) + blocks / splits) / 2
        time = waves * (share + 2) + merge
        if time < best_time:
            best, best_time = splits, time
    return best
