"""The launch table of the portable kernels: blocks, warps, stages and splits, per chip.

In: an arch as host facts spell it, element size, rows to cover. Out: a `SparseConfig` that fits the chip's shared
memory. The launchers and the ahead-of-time checks read the same table. No torch, no triton.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "HOPPER",
    "HOPPER_REGISTERS",
    "INTERPRETER",
    "SHARED_BYTES",
    "SparseConfig",
    "attend_config",
    "logits_config",
    "share_count",
]

#: The name of Triton's interpreter on a CPU in this table.
INTERPRETER = "interpreter"
#: Shared memory one program may use, in bytes.
#: Source: CUDA C++ Programming Guide, technical specifications by compute capability; AMD CDNA 3 and CDNA 4 guides.
SHARED_BYTES = {
    **dict.fromkeys(("8.0", "8.7"), 163 * 1024),
    **dict.fromkeys(("8.6", "8.9", "12.0", "12.1"), 99 * 1024),
    **dict.fromkeys(("9.0", "10.0", "10.3"), 227 * 1024),
    "gfx942": 64 * 1024,
    "gfx950": 160 * 1024,
    INTERPRETER: 1 << 30,
}
#: Archs whose matrix units take 64 rows and whose shared memory holds them beside the keys.
LARGE_TILE_ARCHS = frozenset({"9.0", "10.0", "10.3"})


@dataclass(frozen=True, slots=True)
class SparseConfig:
    """One launch shape: `block_h` heads by `block_n` keys a step, warps, and key blocks in flight."""

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int


#: The shape of `hopper.py`, which its layouts are written for, and the registers of each of its twelve warps at launch.
HOPPER = SparseConfig(64, 64, 4, 2)
HOPPER_REGISTERS = 168


def attend_config(arch: str, itemsize: int, num_qo_heads: int) -> SparseConfig:
    """The launch shape of sparse attention over a latent of 512 and a rotary part of 64."""
    if arch == INTERPRETER:
        return SparseConfig(16, 32, 1, 1)
    if itemsize == 4:
        return SparseConfig(16, 16, 4, 1)
    if arch in LARGE_TILE_ARCHS and num_qo_heads > 16:
        # 64 keys fit SM100 with Triton 3.9 and take 345 KiB there with Triton 3.6
        return SparseConfig(64, 64 if arch == "9.0" else 32, 8, 2)
    return SparseConfig(16, 32, 4, 1 if _shared(arch) < 80 * 1024 else 2)


def logits_config(arch: str, itemsize: int) -> SparseConfig:
    """The launch shape of the indexer's logits; `block_h` is not used: a program holds all of a token's heads."""
    if arch == INTERPRETER:
        return SparseConfig(16, 32, 1, 1)
    return SparseConfig(16, 32 if itemsize == 4 else 64, 4, 1 if itemsize == 4 or _shared(arch) < 80 * 1024 else 2)


def share_count(programs: int, processors: int, blocks: int) -> int:
    """How many programs share one token's keys, from host sizes alone: enough to fill the chip once."""
    wanted = -(-processors // max(1, programs))
    return max(1, min(wanted, blocks // 4, 16))


def _shared(arch: str) -> int:
    """Shared memory of an arch; one the table does not know gets the least its vendor's chips have."""
    amd = arch.startswith("gfx")
    known = (size for name, size in SHARED_BYTES.items() if name.startswith("gfx") is amd)
    return SHARED_BYTES.get(arch) or min(known)
