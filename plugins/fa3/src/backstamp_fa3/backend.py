"""Factories: which build is imported, and how it is called.

In: a `BuildRequest` made for one declared row. Out: `Built("fa3" or "fa4", backend)`. A library is imported here and
nowhere else, when one of its kernels is built.
"""

from __future__ import annotations

import importlib

import torch

from backstamp.factories import BuildRequest, Built
from backstamp.row_checks import check_build
from backstamp_fa3.attention import FlashAttention
from backstamp_fa3.cute import CuteFunction
from backstamp_fa3.mate import MateFunctions
from backstamp_fa3.ops import OpName, load

__all__ = [
    "build_fa3_fwd",
    "build_flash_attn_3",
    "build_flash_attn_4",
    "build_musa",
    "build_sgl_kernel",
    "build_sglang_kernel",
    "build_tokenspeed_fa3",
    "build_tokenspeed_fa4",
]

#: The shortest tile of keys of any FA3 kernel: a page of a multiple of it may be loaded whole. Source: hopper/
#: tile_size.h, `tile_size_fwd_sm90`; hopper/flash_api_stable.cpp, `get_pagedkv_tma`.
SHORTEST_TILE_TOKENS = 64
#: Source: flash_attn/cute/interface.py, `_LEARNABLE_SINK_DTYPES`.
FA4_SINK_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

FLASH_ATTN_3 = OpName("flash_attn_interface", "flash_attn_3", has_sinks=False)
#: Another build of the same package, with an argument more.
TOKENSPEED_FA3 = OpName("flash_attn_interface", "flash_attn_3", has_sinks=True)
FA3_FWD = OpName("fa3_fwd_interface", "fa3_fwd", has_sinks=False)
SGL_KERNEL = OpName("sgl_kernel.flash_attn", "sgl_kernel", has_sinks=True)
SGLANG_KERNEL = OpName(
    "sgl_kernel.flash_attn", "sgl_kernel", has_sinks=True, extras={"sparse_mask_fine": None, "only_qv": False}
)


def build_flash_attn_3(request: BuildRequest) -> Built:
    """FA3 of flash-attn-3. Raises an `UnsupportedBatch` for what the row does not declare."""
    return _fa3(request, FLASH_ATTN_3)


def build_tokenspeed_fa3(request: BuildRequest) -> Built:
    """FA3 of tokenspeed-fa3. Raises an `UnsupportedBatch` for what the row does not declare."""
    return _fa3(request, TOKENSPEED_FA3)


def build_fa3_fwd(request: BuildRequest) -> Built:
    """FA3 of fa3-fwd, ragged keys only. Raises an `UnsupportedBatch` for what the row does not declare."""
    return _fa3(request, FA3_FWD)


def build_sglang_kernel(request: BuildRequest) -> Built:
    """FA3 of sglang-kernel. Raises an `UnsupportedBatch` for what the row does not declare."""
    return _fa3(request, SGLANG_KERNEL)


def build_sgl_kernel(request: BuildRequest) -> Built:
    """FA3 of sgl-kernel. Raises an `UnsupportedBatch` for what the row does not declare."""
    return _fa3(request, SGL_KERNEL)


def build_musa(request: BuildRequest) -> Built:
    """FA3 on MUSA. Raises an `UnsupportedBatch` for what the row does not declare."""
    check_build(request)
    interface = importlib.import_module("flash_attn_interface")
    library = MateFunctions(interface.flash_attn_with_kvcache, interface.get_scheduler_metadata)
    # what it leaves for a row without keys, no caller shows
    return Built("fa3", FlashAttention(request, library, keyless=True))


def build_tokenspeed_fa4(request: BuildRequest) -> Built:
    """FA4 of tokenspeed-fa4. Raises an `UnsupportedBatch` for what the row does not declare."""
    return _fa4(request)


def build_flash_attn_4(request: BuildRequest) -> Built:
    """FA4 of flash-attn-4. Raises an `UnsupportedBatch` for what the row does not declare."""
    return _fa4(request)


def _fa3(request: BuildRequest, name: OpName) -> Built:
    check_build(request)
    return Built("fa3", FlashAttention(request, load(name), whole_pages=SHORTEST_TILE_TOKENS))


def _fa4(request: BuildRequest) -> Built:
    check_build(request)
    interface = importlib.import_module("flash_attn.cute.interface")
    # "SplitKV not supported on SM 9.0" (flash_attn/cute/interface.py)
    splits = 1 if request.offer.archs == ("9.0",) else 0
    library = CuteFunction(interface.flash_attn_varlen_func, splits)
    # a row without keys is masked as if it had a tile of them (`n_block` of -1, flash_attn/cute/flash_fwd_sm90.py)
    return Built("fa4", FlashAttention(request, library, keyless=True, sink_dtypes=FA4_SINK_DTYPES))
