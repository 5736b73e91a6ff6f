"""What this plugin declares: `fa3` and `fa4`, one row for each build that holds them, as data.

In: nothing. Out: offers. Imports only `backstamp`; the factories are in `backend.py`, imported when one is built. Every
fact of a row was read in that build: its flags (`flash_attn_config.CONFIG`), the symbols and checks of its image.
"""

from __future__ import annotations

from dataclasses import replace

from backstamp.declarations import Alias, Offer, PageSizes
from backstamp.hookspecs import hookimpl

__all__ = ["backstamp_aliases", "backstamp_offers"]

#: Equal dims: any multiple of 8 up to 256 runs, padded to the next tile. Source: hopper/flash_api_stable.cpp,
#: `round_up_headdim` and the check of `alignment`.
SAME_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)
#: Unlike dims are images of their own, which a build may leave out.
UNLIKE_DIMS = ((192, 128), (64, 256), (64, 512))
LATENT_DIMS = ((576, 512),)

# FA3 as its authors build it, everything on. Source: hopper/flash_api_stable.cpp at 01d6dd19; no index has the wheel
FLASH_ATTN_3 = Offer(
    kernel="fa3",
    factory="backstamp_fa3.backend:build_flash_attn_3",
    family="mha",
    device="cuda",
    # images are sm_90a: no other chip runs them
    archs=("9.0",),
    runtimes=("cuda>=12.3",),
    requires=("flash-attn-3>=3.0.0", "torch>=2.11"),
    phases=frozenset({"prefill", "decode", "verify"}),
    dtypes=frozenset({"fp16", "bf16"}),
    head_dims=(*SAME_DIMS, *UNLIKE_DIMS),
    # "page_block_size can be arbitrary": flash_attn_with_kvcache
    page_sizes=PageSizes(preferred=64, multiple_of=1),
    kv_forms=frozenset({"paged", "ragged"}),
    index_forms=frozenset({"page_table"}),
    prefix=True,
    mask_format="internal_causal",
    # no tree mask: a chain is verified by the causal rule
    features=frozenset({"window", "softcap", "non_causal", "lse", "topk", "cross", "encoder"}),
    # split counts follow the host's bounds and a schedule made on the device: nothing of the host is frozen
    graph="any",
    plan="device",
    # ahead of the Triton kernels by half in prefill on Hopper (docs/performance.md)
    priority=60,
)

# CONFIG of the wheel: no softcap (FLASHATTENTION_DISABLE_SOFTCAP), no unlike head dims (DISABLE_HDIMDIFF64, 192); sinks
# are an argument of its own, "must have dtype bfloat16". The image needs libcudart.so.13 and torch's stable ABI
TOKENSPEED_FA3 = replace(
    FLASH_ATTN_3,
    factory="backstamp_fa3.backend:build_tokenspeed_fa3",
    requires=("tokenspeed-fa3>=3.0.0.post20260810", "torch>=2.11"),
    runtimes=("cuda>=13.0,<14",),
    head_dims=SAME_DIMS,
    features=FLASH_ATTN_3.features - {"softcap"} | {"sinks"},
    sink_dtypes=frozenset({"bf16"}),
    sink_conversion="any",
    priority=62,
)

# CONFIG of the wheel: no paged KV (FLASHATTENTION_DISABLE_PAGEDKV), no window (DISABLE_LOCAL), no fp16 (DISABLE_FP16).
# Keys in no cache are a prefill without a prefix, and no draft: nothing it could decode from
FA3_FWD = replace(
    FLASH_ATTN_3,
    factory="backstamp_fa3.backend:build_fa3_fwd",
    requires=("fa3-fwd>=0.0.3", "torch>=2.11"),
    runtimes=("cuda>=13.0,<14",),
    phases=frozenset({"prefill"}),
    draft_phases=frozenset(),
    dtypes=frozenset({"bf16"}),
    kv_forms=frozenset({"ragged"}),
    index_forms=frozenset(),
    prefix=False,
    features=frozenset({"softcap", "non_causal", "lse", "cross", "encoder"}),
    priority=61,
)

# SGLang's own build, everything on and sinks besides ("must have dtype bfloat16"). It needs libcudart.so.13 and the C++
# symbols of the torch it names in its metadata
SGLANG_KERNEL = replace(
    FLASH_ATTN_3,
    factory="backstamp_fa3.backend:build_sglang_kernel",
    requires=("sglang-kernel>=0.4.10", "torch>=2.14.1"),
    runtimes=("cuda>=13.0,<14",),
    features=FLASH_ATTN_3.features | {"sinks"},
    sink_dtypes=frozenset({"bf16"}),
    sink_conversion="any",
    priority=59,
)
# its name until 0.3.21, the last: torch 2.9.1 by its README, and libcudart.so.12, which a torch of CUDA 13 has not
SGL_KERNEL = replace(
    SGLANG_KERNEL,
    factory="backstamp_fa3.backend:build_sgl_kernel",
    requires=("sgl-kernel>=0.3.21", "torch>=2.9.1,<2.10", "nvidia-cuda-runtime-cu12>=12.3"),
    runtimes=("cuda>=12.3",),
    priority=58,
)

# Absorbed MLA: the rotary part is q (64), the latent part q_v (512), and the cache holds both in one row. Only builds
# with the (64, 512) image; a window was never asked of them by a caller
MLA = {
    "family": "mla",
    "head_dims": LATENT_DIMS,
    "kv_forms": frozenset({"paged"}),
    "features": frozenset({"softcap", "non_causal", "lse", "topk"}),
    "sink_dtypes": frozenset({"same"}),
    "sink_conversion": "no",
}
FLASH_ATTN_3_MLA = replace(FLASH_ATTN_3, **MLA)  # type: ignore[arg-type]
SGLANG_KERNEL_MLA = replace(SGLANG_KERNEL, **MLA)  # type: ignore[arg-type]
SGL_KERNEL_MLA = replace(SGL_KERNEL, **MLA)  # type: ignore[arg-type]

# MUSA's FA3, as SGLang 0.5.23 calls it (srt/hardware_backend/musa/attention/flashattention_backend.py:739-874): from a
# caller, not from the library. Pages of 64 are that caller's default (srt/arg_groups/overrides.py:1363)
MUSA = replace(
    FLASH_ATTN_3,
    factory="backstamp_fa3.backend:build_musa",
    requires=("mate",),
    runtimes=(),
    device="musa",
    archs=("3.1",),
    head_dims=(128,),
    page_sizes=PageSizes(preferred=64, exact=(64,)),
    kv_forms=frozenset({"paged"}),
    dtypes=frozenset({"bf16"}),
    features=frozenset({"window", "softcap", "non_causal", "lse", "topk", "sinks"}),
    sink_dtypes=frozenset({"bf16"}),
    sink_conversion="any",
    # its schedule is made by a call of its own each step, outside any graph
    graph="never",
    priority=50,
)

# FA4 on Hopper: one split only ("SplitKV not supported on SM 9.0"), fp16 and bf16, no fp8. A page as long as a tile of
# keys is loaded whole, unused slots and all, and those may hold NaN: pages stay below the shortest tile, 96
FA4_HOPPER = Offer(
    kernel="fa4",
    factory="backstamp_fa3.backend:build_tokenspeed_fa4",
    family="mha",
    device="cuda",
    archs=("9.0",),
    # nvidia-cutlass-dsl 4.8, "CUDA Toolkit 12.9 or CUDA Toolkit 13.4": its quick start guide; 10.3 begins there too
    runtimes=("cuda>=12.9",),
    requires=("tokenspeed-fa4>=4.0.0.post20260923", "nvidia-cutlass-dsl>=4.8", "torch>=2.11"),
    phases=frozenset({"prefill", "decode", "verify"}),
    dtypes=frozenset({"fp16", "bf16"}),
    # "Paged KV does not support irregular head dim" (flash_fwd_sm90.py); and of 96 it loads 160 slots into a tile of
    # 144 (`_tile_size_fwd_sm90`; paged_kv.py, 32 rows a pass), over the stage behind it
    head_dims=(64, 128, 192, (192, 128)),
    page_sizes=PageSizes(preferred=64, exact=(1, 2, 4, 8, 16, 32, 64)),
    kv_forms=frozenset({"paged", "ragged"}),
    index_forms=frozenset({"page_table"}),
    prefix=True,
    mask_format="internal_causal",
    features=frozenset({"window", "softcap", "sinks", "non_causal", "lse", "topk", "cross", "encoder"}),
    # `_LEARNABLE_SINK_DTYPES`; betas before b19 read bf16 alone
    sink_dtypes=frozenset({"bf16", "fp16", "fp32"}),
    # what is compiled follows the shape of the batch: steps of one shape, compiled before they are captured
    graph="uniform",
    plan="device",
    # behind FA3 on this chip by 7% in prefill, and without splits in decode (anchors, one H200)
    priority=35,
)
# `_validate_head_dims`: up to 128, and (192, 128); 256 has a kernel of its own without `seqused_k`
FA4_BLACKWELL = replace(FA4_HOPPER, archs=("10.0", "10.3"), head_dims=(64, 96, 128, (192, 128)), priority=55)
FLASH_ATTN_4 = {
    "factory": "backstamp_fa3.backend:build_flash_attn_4",
    "requires": ("flash-attn-4>=4.0.0b36", "nvidia-cutlass-dsl>=4.6.2", "torch>=2.11"),
}
FLASH_ATTN_4_HOPPER = replace(FA4_HOPPER, priority=34, **FLASH_ATTN_4)  # type: ignore[arg-type]
FLASH_ATTN_4_BLACKWELL = replace(FA4_BLACKWELL, priority=54, **FLASH_ATTN_4)  # type: ignore[arg-type]


@hookimpl
def backstamp_offers() -> tuple[Offer, ...]:
    """The rows of the kernels `fa3` and `fa4`."""
    fa3 = (FLASH_ATTN_3, TOKENSPEED_FA3, FA3_FWD, SGLANG_KERNEL, SGL_KERNEL)
    mla = (FLASH_ATTN_3_MLA, SGLANG_KERNEL_MLA, SGL_KERNEL_MLA)
    return (*fa3, *mla, MUSA, FA4_HOPPER, FA4_BLACKWELL, FLASH_ATTN_4_HOPPER, FLASH_ATTN_4_BLACKWELL)


@hookimpl
def backstamp_aliases() -> tuple[Alias, ...]:
    """None: a kernel's own name is its alias."""
    return ()
