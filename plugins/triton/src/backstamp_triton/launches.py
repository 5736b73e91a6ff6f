"""How a step runs: blocks, tile slots and splits of one launch, from host sizes alone.

In: a layer's constants, a planned step, the chip. Out: a `Launch`, for the tile kernel or for one of Hopper's own, kept
by the step. No device value is read, so that a recorded launch serves every later step of its sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from backstamp.attention import Batch, LayerSpec
from backstamp_triton.configs import (
    TileConfig,
    merged_at_once,
    overlaps_launches,
    resident_tiles,
    split_count,
    tile_config,
)
from backstamp_triton.layers import PreparedLayer
from backstamp_triton.steps import Kind, Launch, Step

__all__ = ["PREFILL_TILE", "Chip", "launch_of"]

#: Queries of one tile of the Hopper prefill kernel.
PREFILL_TILE = 128
#: Its key blocks in flight.
PREFILL_STAGES = 2
#: Queries of one tile of the Hopper latent kernel, keys of a block, blocks in flight.
LATENT_CONFIG = TileConfig(64, 64, 4, 2)


@dataclass(frozen=True, slots=True)
class Chip:
    """What launches of one backend are cut to.

    Attributes:
        arch: the launch table's name. processors: its multiprocessors.
        dtype, itemsize: of queries, keys and values. v_in_k: values are the first numbers of each key.
        share_rows: rows of shares (tokens times query heads times splits) the workspace holds.
        share_numbers: f32 numbers it holds.
    """

    arch: str
    processors: int
    dtype: str
    itemsize: int
    v_in_k: bool
    share_rows: int
    share_numbers: int

    def most_splits(self, step: Step, known: PreparedLayer) -> int:
        """How many shares of the whole step the workspace holds."""
        rows = step.batch.num_tokens * known.spec.num_qo_heads
        return min(self.share_numbers // (rows * known.spec.v_head_dim), self.share_rows // rows)


def launch_of(kind: Kind, chip: Chip, known: PreparedLayer, step: Step) -> Launch:
    """How a layer runs in a step, by one kernel; found once for each shape of layers."""
    launch = step.launches.get((kind, known.shape))
    if launch is None:
        launch = step.launches[kind, known.shape] = _LAUNCHES[kind](chip, known, step)
    return launch


def _tile_launch(chip: Chip, known: PreparedLayer, step: Step) -> Launch:
    """One launch of the tile kernel."""
    batch, spec = step.batch, known.spec
    rows = known.pack * max(batch.max_q_len, 1)
    shape = (chip.itemsize, spec.head_dim, spec.v_head_dim)
    config = tile_config(chip.arch, *shape, rows, chip.v_in_k, step.one_token)
    tokens = config.block_m // known.pack
    if step.one_token:
        slots = row_tiles = max(batch.num_rows, batch.num_tokens)
    else:
        row_tiles, slots = _row_tiles(batch, tokens), _most_row_tiles(batch, tokens)
    tiles = row_tiles * spec.num_kv_heads * known.head_blocks
    places = chip.processors * resident_tiles(chip.arch, config, *shape, chip.v_in_k)
    splits = 1
    if step.one_token or tiles < places:
        blocks = -(-batch.max_kv_len // config.block_n)
        splits = split_count(tiles, blocks, places, chip.most_splits(step, known))
    return _launch(chip, known, config, known.pack, splits, slots, _name(chip, spec, step, config, splits))


def _prefill_launch(chip: Chip, known: PreparedLayer, step: Step) -> Launch:
    """One launch of the Hopper prefill kernel."""
    batch, spec = step.batch, known.spec
    group = spec.num_qo_heads // spec.num_kv_heads

    def tiles_of(pack: int) -> int:
        return _row_tiles(batch, PREFILL_TILE // pack) * -(-group // pack)

    # one query head a tile reads queries row by row; all that share a key head, where that leaves clearly fewer tiles,
    # as short rows beside a long one do
    pack = known.pack if tiles_of(known.pack) < 0.9 * tiles_of(1) else 1
    config = TileConfig(PREFILL_TILE, known.prefill_block, 4, PREFILL_STAGES)
    tiles = tiles_of(pack) * spec.num_kv_heads
    splits = 1
    if tiles < chip.processors:
        blocks = -(-batch.max_kv_len // config.block_n)
        splits = split_count(tiles, blocks, chip.processors, chip.most_splits(step, known))
    slots = _most_row_tiles(batch, PREFILL_TILE // pack)
    return _launch(chip, known, config, pack, splits, slots, _name(chip, spec, step, config, splits))


def _latent_launch(chip: Chip, known: PreparedLayer, step: Step) -> Launch:
    """One launch of the Hopper latent kernel."""
    batch, tokens = step.batch, LATENT_CONFIG.block_m // known.pack
    if step.one_token:
        slots = row_tiles = max(batch.num_rows, batch.num_tokens)
    else:
        row_tiles, slots = _row_tiles(batch, tokens), _most_row_tiles(batch, tokens)
    blocks = -(-batch.max_kv_len // LATENT_CONFIG.block_n)
    splits = split_count(row_tiles * known.head_blocks, blocks, chip.processors, chip.most_splits(step, known))
    what = f"latent, {known.spec.num_qo_heads} heads {step.what}{' split' if splits > 1 else ''}"
    return _launch(chip, known, LATENT_CONFIG, known.pack, splits, slots, what)


def _row_tiles(batch: Batch, tokens: int) -> int:
    """About how many tiles of `tokens` tokens the rows fill, by what the host knows of every batch.

    That is its longest row and all tokens: the others are taken at their mean, and at one tile each at least. A bound
    of a graph's steps may be far above what the longest row has.
    """
    others = max(batch.num_rows - 1, 0)
    longest = min(batch.max_q_len, batch.num_tokens)
    mean = -(-(batch.num_tokens - longest) // max(others, 1))
    return max(-(-longest // tokens) + others * -(-mean // tokens), min(batch.num_rows, batch.num_tokens))


def _most_row_tiles(batch: Batch, tokens: int) -> int:
    """How many they are at most: each row may leave its last one part empty, and the padding is one more row."""
    return -(-batch.num_tokens // tokens) + batch.num_rows + 1


def _launch(
    chip: Chip, known: PreparedLayer, config: TileConfig, pack: int, splits: int, slots: int, what: str
) -> Launch:
    at_once = merged_at_once(splits, known.spec.v_head_dim)
    return Launch(config, pack, splits, at_once, overlaps_launches(chip.arch), slots, what)


def _name(chip: Chip, spec: LayerSpec, step: Step, config: TileConfig, splits: int) -> str:
    shape = f"{chip.dtype} {spec.num_qo_heads}/{spec.num_kv_heads} heads d{spec.head_dim}x{spec.v_head_dim}"
    tile = f"tiles of {config.block_m}x{config.block_n}"
    return f"{shape} {step.what}{' split' if splits > 1 else ''}, {tile}"


#: How each kernel's launch is found.
_LAUNCHES: Final = {"tile": _tile_launch, "prefill": _prefill_launch, "latent": _latent_launch}
