"""How a step runs: blocks, tile slots and splits of one launch, from host sizes alone.

In: a layer's constants, a planned step, the chip. Out: a `Launch`, for the tile kernel or for the Hopper prefill
kernel. No device value is read, so that a recorded launch serves every later step of its sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

from backstamp.attention import LayerSpec
from backstamp_triton.configs import TileConfig, resident_tiles, split_count, tile_config
from backstamp_triton.layers import PreparedLayer
from backstamp_triton.steps import Launch, Step

__all__ = ["PREFILL_TILE", "Chip", "merged_at_once", "prefill_launch", "tile_launch"]

#: Queries of one tile of the Hopper prefill kernel.
PREFILL_TILE = 128
#: Its key blocks in flight.
PREFILL_STAGES = 2


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


def tile_launch(chip: Chip, known: PreparedLayer, step: Step) -> Launch:
    """One launch of the tile kernel."""
    batch, spec = step.batch, known.spec
    rows = known.pack * max(batch.max_q_len, 1)
    shape = (chip.itemsize, spec.head_dim, spec.v_head_dim)
    config = tile_config(chip.arch, *shape, rows, chip.v_in_k)
    tokens = config.block_m // known.pack
    if step.one_token:
        slots = row_tiles = max(batch.num_rows, batch.num_tokens)
    else:
        # each row may leave its last tile part empty, and the padding tokens form one more row
        row_tiles = -(-batch.num_tokens // tokens)
        slots = row_tiles + batch.num_rows + 1
    tiles = row_tiles * spec.num_kv_heads * known.head_blocks
    places = chip.processors * resident_tiles(chip.arch, config, *shape, chip.v_in_k)
    splits = 1
    if step.one_token or tiles < places:
        blocks = -(-batch.max_kv_len // config.block_n)
        splits = split_count(tiles, blocks, places, chip.most_splits(step, known))
    return Launch(config, known.pack, splits, merged_at_once(splits), slots, _name(chip, spec, step, config, splits))


def prefill_launch(chip: Chip, known: PreparedLayer, step: Step) -> Launch:
    """One launch of the Hopper prefill kernel."""
    batch, spec = step.batch, known.spec
    # a tile of one head reads queries row by row; heads share one where a row's tokens would leave it part empty
    pack = 1 if batch.max_q_len >= PREFILL_TILE else known.pack
    config = TileConfig(PREFILL_TILE, known.prefill_block, 4, PREFILL_STAGES)
    row_tiles = -(-batch.num_tokens // (PREFILL_TILE // pack))
    group = spec.num_qo_heads // spec.num_kv_heads
    tiles = row_tiles * spec.num_kv_heads * -(-group // pack)
    splits = 1
    if tiles < chip.processors:
        blocks = -(-batch.max_kv_len // config.block_n)
        splits = split_count(tiles, blocks, chip.processors, chip.most_splits(step, known))
    slots = row_tiles + batch.num_rows + 1
    return Launch(config, pack, splits, merged_at_once(splits), slots, _name(chip, spec, step, config, splits))


def merged_at_once(splits: int) -> int:
    """Shares that the merge loads together: a power of two, few enough to stay in registers."""
    return min(16, 1 << (splits - 1).bit_length())


def _name(chip: Chip, spec: LayerSpec, step: Step, config: TileConfig, splits: int) -> str:
    shape = f"{chip.dtype} {spec.num_qo_heads}/{spec.num_kv_heads} heads d{spec.head_dim}x{spec.v_head_dim}"
    tile = f"tiles of {config.block_m}x{config.block_n}"
    return f"{shape} {step.what}{' split' if splits > 1 else ''}, {tile}"
