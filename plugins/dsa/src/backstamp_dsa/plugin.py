"""What this plugin declares: sparse and dense latent attention over sgl-flash-mla, and our own portable kernels.

In: nothing. Out: offers and one deprecated alias. Imports only `backstamp`; the factories are in `backend.py`, imported
when one is built. Where the calls are bound only as a caller makes them, the row says so.
"""

from __future__ import annotations

from dataclasses import replace

from backstamp.declarations import ANY, Alias, Offer, PageSizes
from backstamp.hookspecs import hookimpl

__all__ = ["backstamp_aliases", "backstamp_offers"]

# 1.0.0 is the first release with `use_legacy`, without which its Hopper kernels and head dim 576 are out of reach
FLASH_MLA = "sgl-flash-mla>=1.0"
# its stable-ABI images load beside any torch of 2.10 or newer (its README); slots are found by a Triton kernel
LIBRARY = (FLASH_MLA, "torch>=2.11", "triton>=3.6")
# both of its images need libcudart.so.13 (readelf -d cuda.abi3.so, _C_legacy.abi3.so)
CUDA_13 = ("cuda>=13.0,<14",)
# what the portable kernels were compiled and run with: the interpreter and ahead-of-time tests
TRITON = ("triton>=3.6", "torch>=2.11")
# what an operator may ask of dsa's insides, in the values of SGLang 0.5.23 (arg_groups/fields/exec_.py:299,341) that
# something here implements; `flashmla_auto` is whichever of the library's two calls reads the cache
INSIDES = ("dsa_prefill_backend", "dsa_decode_backend")

FLASHMLA = Offer(
    kernel="flashmla",
    factory="backstamp_dsa.backend:build_flashmla",
    family="mla",
    device="cuda",
    # csrc/api/dense_decode.cpp: "Dense decode MLA is only supported on SM90a architecture"
    archs=("9.0",),
    runtimes=CUDA_13,
    phases=frozenset({"prefill", "decode", "verify"}),
    # the wheel holds both: run_flash_splitkv_mla_kernel<half_t | bfloat16_t, 576 | 512>
    dtypes=frozenset({"bf16", "fp16"}),
    head_dims=((576, 512), (512, 512)),
    # dense_decode.cpp: "Currently page_block_size must be 64"
    page_sizes=PageSizes(preferred=64, exact=(64,)),
    index_forms=frozenset({"page_table"}),
    prefix=True,
    mask_format="internal_causal",
    features=frozenset({"lse", "non_causal", "topk"}),
    # launches are cut by query length: prefill rows differ in it, and only the host can say how
    phase_inputs={"prefill": frozenset({"host_lens"})},
    # a schedule is made from the key lengths before each replay
    graph="uniform",
    plan="host",
    priority=72,
    requires=(FLASH_MLA, "torch>=2.11", "triton>=3.6"),
)

# `flash_mla_sparse_fwd` over plain rows, in every phase
DSA_ROWS = Offer(
    kernel="dsa",
    factory="backstamp_dsa.backend:build_dsa",
    family="sparse_mla",
    device="cuda",
    # images in the wheel: sm_90a, sm_100a, sm_103a; csrc/api/sparse_prefill.cpp takes SM90a and SM100f
    archs=("9.0", "10.0", "10.3"),
    runtimes=CUDA_13,
    phases=frozenset({"prefill", "decode", "verify"}),
    dtypes=frozenset({"bf16"}),
    head_dims=((576, 512),),
    # its kernels have tiles of 64 and of 128 query heads; fewer are padded
    group_sizes=((1, 128),),
    page_sizes=PageSizes(preferred=64, multiple_of=1),
    index_forms=frozenset({"page_table", "csr", "indirect"}),
    prefix=True,
    mask_format="internal_causal",
    features=frozenset({"indices", "lse", "topk"}),
    # nothing between `plan` and the end of a step reads a device value; SGLang captures these calls
    graph="any",
    plan="device",
    priority=75,
    requires=LIBRARY,
    sub_settings=dict.fromkeys(INSIDES, frozenset({"flashmla_sparse", "flashmla_auto", "triton"})),
)

# `flash_mla_with_kvcache` with indices over the packed cache, in every phase
DSA_PACKED = replace(
    DSA_ROWS,
    factory="backstamp_dsa.backend:build_dsa_packed",
    kv_dtypes=frozenset({"fp8_ds_mla"}),
    kv_dtype_names={"fp8_e4m3": "fp8_ds_mla", "fp8": "fp8_ds_mla", "fp8_ds_mla": "fp8_ds_mla"},
    layouts=("fp8_ds_mla",),
    # the format is defined for pages of 64 tokens (SGLang 0.5.23, dsa_backend.py:3340)
    page_sizes=PageSizes(preferred=64, exact=(64,)),
    sub_settings=dict.fromkeys(INSIDES, frozenset({"flashmla_kv", "flashmla_auto"})),
)

# our own kernels: every arch Triton compiles for
DSA_TRITON = replace(
    DSA_ROWS,
    factory="backstamp_dsa.backend:build_dsa_triton",
    archs=("8.0", "8.6", "8.7", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1"),
    # compiled on the host it runs on, for that host's chip
    forward_archs="any",
    runtimes=(),
    group_sizes=ANY,
    dtypes=frozenset({"bf16", "fp16", "fp32"}),
    priority=40,
    requires=TRITON,
    sub_settings=dict.fromkeys(INSIDES, frozenset({"triton"})),
)
# compiled ahead of time for both, run on neither
DSA_TRITON_ROCM = replace(DSA_TRITON, device="rocm", archs=("gfx942", "gfx950"), forward_archs="no")
# PyTorch's ROCm wheels have shipped Triton under a name of its own
DSA_TRITON_ROCM_WHEEL = replace(DSA_TRITON_ROCM, requires=("pytorch-triton-rocm>=3.6", "torch>=2.11"))

# DeepSeek V4: a window of plain entries and compressed ones behind it, under one page table of 256-token pages
DSV4_CUDA = replace(
    DSA_ROWS,
    kernel="dsv4",
    factory="backstamp_dsa.backend:build_dsv4",
    family="csa",
    head_dims=((512, 512),),
    # SGLang 0.5.23, deepseek_v4_backend.py:1257: "the system hardcodes page_size=256"; 128 divides it
    page_sizes=PageSizes(preferred=256, multiple_of=128),
    features=frozenset({"window", "sinks", "indices", "topk"}),
    # flash_mla_interface.py: attn_sink is torch.float32
    sink_dtypes=frozenset({"fp32"}),
    sub_settings={},
)
DSV4_CUDA_PACKED = replace(
    DSV4_CUDA,
    factory="backstamp_dsa.backend:build_dsv4_packed",
    kv_dtypes=frozenset({"fp8_dsv4"}),
    kv_dtype_names={"fp8_e4m3": "fp8_dsv4", "fp8": "fp8_dsv4", "fp8_dsv4": "fp8_dsv4"},
    layouts=("fp8_dsv4",),
)
# from a caller, not from the library: SGLang 0.5.23, hip_flash_mla.py:132
DSV4_ROCM = replace(
    DSV4_CUDA,
    factory="backstamp_dsa.backend:build_dsv4_rocm",
    device="rocm",
    # hip_flash_mla.py:174: aiter_sparse needs gfx950
    archs=("gfx950",),
    # the oldest ROCm a released wheel was built for. Source: ROCm/aiter, releases v0.1.14.post1 to v0.1.27
    runtimes=("rocm>=7.0",),
    group_sizes=ANY,
    graph="never",
    # 0.1.19 is the newest release known to lack the gfx950 kernel (vllm-project/vllm 41820, 14 August 2026); which one
    # took a second cache first was not read, so the factory looks at what is installed
    requires=("amd-aiter>0.1.19", "torch>=2.11", "triton>=3.6"),
)
DSV4_ROCM_PACKED = replace(
    DSV4_ROCM,
    kv_dtypes=DSV4_CUDA_PACKED.kv_dtypes,
    kv_dtype_names=DSV4_CUDA_PACKED.kv_dtype_names,
    layouts=DSV4_CUDA_PACKED.layouts,
)
# from a caller, not from the library: SGLang 0.5.23, ascend_dsv4_backend.py:54,2105,2177
DSV4_NPU = replace(
    DSV4_CUDA,
    factory="backstamp_dsa.backend:build_dsv4_npu",
    device="npu",
    archs=("ascend910b",),
    runtimes=(),
    group_sizes=ANY,
    # c128 pages hold a multiple of 16 entries (dsv4_memory_pool.py:273), and pages are shared: 16 * 128
    page_sizes=PageSizes(preferred=2048, multiple_of=2048),
    index_forms=frozenset({"page_table"}),
    graph="never",
    plan="host",
    # the operators are a wheel of their own, custom_ops-1.0, on no index, over a CANN package without a distribution
    # Source: SGLang 0.5.23, hardware_backend/npu/utils.py:211; its scripts/ci/npu/npu_ci_install_dependency.sh
    requires=("torch-npu>=2.11", "custom-ops>=1.0", "torch>=2.11"),
)


@hookimpl
def backstamp_offers() -> tuple[Offer, ...]:
    """The rows of `flashmla`, `dsa` and `dsv4`."""
    return (
        FLASHMLA,
        DSA_ROWS,
        DSA_PACKED,
        DSA_TRITON,
        DSA_TRITON_ROCM,
        DSA_TRITON_ROCM_WHEEL,
        DSV4_CUDA,
        DSV4_CUDA_PACKED,
        DSV4_ROCM,
        DSV4_ROCM_PACKED,
        DSV4_NPU,
    )


@hookimpl
def backstamp_aliases() -> tuple[Alias, ...]:
    """The old name of `dsa`; a kernel's own name is its alias."""
    return (Alias(key="nsa", kernels=("dsa",), deprecated="dsa"),)
