"""What this plugin declares: TensorRT-LLM's attention kernels as flashinfer and tokenspeed-mla ship them, as data.

In: nothing. Out: offers and aliases. Imports only `backstamp`; each kernel's factory is in `backend.py`, which imports
its library when the first object is built. "Source" below is flashinfer-python 0.7.4 or tokenspeed-mla 2.0.4.
"""

from __future__ import annotations

from dataclasses import replace

from backstamp.declarations import ANY, Alias, Offer, PageSizes
from backstamp.hookspecs import hookimpl

__all__ = ["backstamp_aliases", "backstamp_offers"]

# a floor for the signatures bound here: `q_cu_seq_lens` of XQA, the explicit counter buffer of trtllm-gen
FLASHINFER = "flashinfer-python>=0.7.4,<0.8"
TOKENSPEED = "tokenspeed-mla>=2.0.4,<3"
# what each token of a step is, is written by a kernel of our own
TRITON = "triton>=3.6"
# Source: flashinfer/jit/cubin_loader.py and env.py refuse prebuilt kernels of another version
COMPANIONS = ("flashinfer-cubin", "flashinfer-jit-cache")
# "Supported CUDA Versions: 12.9, 13.0, and 13.4", which no arch below exceeds. Source: flashinfer's README. The CuTe
# DSL of tokenspeed-mla begins at 12.9 too. Source: its quick start guide, "CUDA Toolkit 12.9 or CUDA Toolkit 13.4"
CUDA = ("cuda>=12.9",)
FP8_NAMES = {"fp8": "e4m3fn", "fp8_e4m3": "e4m3fn"}
BLACKWELL = ("10.0", "10.3")

TRTLLM_MHA = Offer(
    kernel="trtllm_mha",
    factory="backstamp_trtllm.backend:build_trtllm_mha",
    family="mha",
    device="cuda",
    # Source: decode.py, `backend == "auto"`: trtllm-gen is what major version 10 gets; 12 and 9 get XQA
    archs=BLACKWELL,
    runtimes=CUDA,
    phases=frozenset({"prefill", "decode", "verify"}),
    dtypes=frozenset({"bf16", "fp16"}),
    head_dims=(64, 128, 256),
    # Source: kernelParams.h, numTokensPerPage is a power of two; these are the sizes its own tests and callers use
    page_sizes=PageSizes(preferred=64, exact=(16, 32, 64)),
    index_forms=frozenset({"page_table"}),
    prefix=True,
    mask_format="internal_causal",
    # Source: no softcap and no custom mask among the arguments of either function; `topk` is rows of one query
    features=frozenset({"window", "sinks", "lse", "topk"}),
    # Source: trtllm_fmha_kernel_launcher.cu, "attention_sinks must be a float tensor"
    sink_dtypes=frozenset({"fp32"}),
    sink_conversion="lossless",
    graph="uniform",
    plan="device",
    priority=60,
    requires=(FLASHINFER, TRITON),
    companions=COMPANIONS,
)

# Source: decode.py, `uses_bf16q_fp8kv`: bf16 queries over an e4m3 cache, widened inside; the context function has no
# such transform, so prefill is not in this row
TRTLLM_MHA_FP8 = replace(
    TRTLLM_MHA,
    phases=frozenset({"decode", "verify"}),
    draft_phases=frozenset({"draft_decode", "draft_extend"}),
    dtypes=frozenset({"bf16"}),
    kv_dtypes=frozenset({"e4m3fn"}),
    kv_dtype_names=FP8_NAMES,
)

XQA = Offer(
    kernel="xqa",
    factory="backstamp_trtllm.backend:build_xqa",
    family="mha",
    device="cuda",
    # Source: xqa.py, "XQA is only supported on SM90, SM100, SM120/SM121"; on SM100 the kernel is trtllm_mha
    archs=("9.0", "12.0", "12.1"),
    runtimes=CUDA,
    phases=frozenset({"decode", "verify"}),
    # ragged queries under a draft mask (`q_cu_seq_lens`), so it extends drafts too; it has no prefill
    draft_phases=frozenset({"draft_decode", "draft_extend"}),
    dtypes=frozenset({"bf16", "fp16"}),
    # Source: jit/xqa.py takes multiples of 16; these are the padded widths mha.cu splits evenly
    head_dims=(64, 128, 256),
    # a tile of queries is what one KV head has, and no more than 32 fit. Source: mha.cu, `persistentQ`
    group_sizes=((1, 32),),
    page_sizes=PageSizes(preferred=64, exact=(16, 32, 64, 128)),
    index_forms=frozenset({"page_table"}),
    prefix=True,
    mask_format="internal_causal",
    # Source: xqa.py has no softcap and raises for LSE; the draft mask is any bits among a step's own tokens
    features=frozenset({"sinks", "tree_mask", "topk"}),
    # Source: xqa.py, sinks "Data type should be torch.float32"
    sink_dtypes=frozenset({"fp32"}),
    sink_conversion="lossless",
    graph="uniform",
    plan="device",
    # measured on an H200: behind flashinfer's tensor-core decode and our own Triton decode
    priority=36,
    requires=(FLASHINFER, TRITON),
    companions=COMPANIONS,
)

# Source: xqa.py, "tree-structured drafts are not supported with sliding window", so no row has both
XQA_WINDOW = replace(XQA, features=frozenset({"window", "sinks", "topk"}))

# Source: xqa.py, `run_sm90_fp8_mha`: elsewhere the generic kernel widens e4m3 keys to the query's dtype. On SM90 decode
# would take mha_sm90.cu, which loads whole pages and multiplies slots nobody wrote by zero: a NaN there would show
XQA_FP8 = replace(
    XQA, archs=("12.0", "12.1"), kv_dtypes=frozenset({"e4m3fn"}), kv_dtype_names=FP8_NAMES, dtypes=frozenset({"bf16"})
)
XQA_WINDOW_FP8 = replace(XQA_FP8, features=XQA_WINDOW.features)

FMHA_V2 = Offer(
    kernel="fmha_v2",
    factory="backstamp_trtllm.backend:build_fmha_v2",
    family="mha",
    device="cuda",
    # Source: jit/attention/modules.py, gen_fmha_v2_module: supported_major_versions=[9, 12]
    archs=("9.0", "12.0", "12.1"),
    runtimes=CUDA,
    phases=frozenset({"prefill"}),
    draft_phases=frozenset(),
    # Source: fmha_v2_run.cu: fp16 kernels accumulate in fp16, so they are not declared
    dtypes=frozenset({"bf16"}),
    # Source: fmha_library.py, the head sizes generated for both SM90 and SM120
    head_dims=(64, 128, 256),
    page_sizes=PageSizes(preferred=64, exact=(16, 32, 64, 128)),
    index_forms=frozenset({"page_table"}),
    prefix=True,
    mask_format="internal_causal",
    # Source: prefill.py: softcap for every layout but SEPARATE_Q_K_V; statistics only for CONTIGUOUS_Q_KV
    features=frozenset({"window", "softcap", "sinks"}),
    # Source: fmha_v2_run.cu, `float* attention_sinks`
    sink_dtypes=frozenset({"fp32"}),
    sink_conversion="lossless",
    inputs=frozenset({"host_lens"}),
    priority=30,
    requires=(FLASHINFER, TRITON),
    companions=COMPANIONS,
)

TRTLLM_MLA = replace(
    TRTLLM_MHA,
    kernel="trtllm_mla",
    factory="backstamp_trtllm.backend:build_trtllm_mla",
    family="mla",
    # Source: trtllm_gen_backend.py, output is bf16 and pages are of 32 or 64 tokens
    dtypes=frozenset({"bf16"}),
    head_dims=((576, 512),),
    # Source: trtllm_gen_backend.py, "does not support 64 < num_heads_q < 128"
    group_sizes=((1, 64), 128),
    page_sizes=PageSizes(preferred=64, exact=(32, 64)),
    features=frozenset({"lse", "topk"}),
    sink_dtypes=frozenset({"same"}),
    sink_conversion="no",
)

# up-projected keys and values of this step alone: for engines that split MLA prefill off
TRTLLM_MLA_RAGGED = replace(
    TRTLLM_MLA,
    phases=frozenset({"prefill"}),
    draft_phases=frozenset(),
    # Source: prefill.py, trtllm_ragged_attention_deepseek, "Supported: (192, 192, 128)"
    head_dims=((192, 128),),
    group_sizes=ANY,
    kv_forms=frozenset({"ragged"}),
    prefix=False,
    features=frozenset({"lse"}),
    # which rows are empty is told from host lengths
    inputs=frozenset({"host_lens"}),
    plan="host",
    graph="never",
    requires=(FLASHINFER,),
)

CUTEDSL_MLA = replace(
    TRTLLM_MLA,
    kernel="cutedsl_mla",
    factory="backstamp_trtllm.backend:build_cutedsl_mla",
    # a tile holds 128 rows
    group_sizes=((1, 128),),
    phases=frozenset({"decode"}),
    draft_phases=frozenset({"draft_decode"}),
    # Source: monolithic/mla_decode_fp16.py, can_implement: fp16 runs too, but the functional output is bf16; pages
    # divide 128 and are not of one token
    page_sizes=PageSizes(preferred=64, exact=(16, 32, 64, 128)),
    requires=(FLASHINFER, "nvidia-cutlass-dsl>=4.8", TRITON),
    priority=45,
)

TOKENSPEED_MLA = replace(
    TRTLLM_MLA,
    kernel="tokenspeed_mla",
    factory="backstamp_trtllm.backend:build_tokenspeed_mla",
    # a tile holds 128 rows
    group_sizes=((1, 128),),
    # Source: mla_decode.py, `local_visible_lens` takes bf16 and fp8 only
    dtypes=frozenset({"bf16"}),
    # Source: mla_decode_fp16.py, can_implement: pages divide 128 and are not of one token
    page_sizes=PageSizes(preferred=64, exact=(16, 32, 64, 128)),
    requires=(TOKENSPEED, TRITON),
    companions=(),
    priority=48,
)

TOKENSPEED_MLA_RAGGED = replace(
    TRTLLM_MLA_RAGGED,
    kernel="tokenspeed_mla",
    factory="backstamp_trtllm.backend:build_tokenspeed_mla",
    requires=(TOKENSPEED,),
    companions=(),
    priority=48,
)


@hookimpl
def backstamp_offers() -> tuple[Offer, ...]:
    """The rows above."""
    return (
        TRTLLM_MHA,
        TRTLLM_MHA_FP8,
        XQA,
        XQA_WINDOW,
        XQA_FP8,
        XQA_WINDOW_FP8,
        FMHA_V2,
        TRTLLM_MLA,
        TRTLLM_MLA_RAGGED,
        CUTEDSL_MLA,
        TOKENSPEED_MLA,
        TOKENSPEED_MLA_RAGGED,
    )


@hookimpl
def backstamp_aliases() -> tuple[Alias, ...]:
    """`trtllm_mha` is XQA with FMHA v2 where trtllm-gen has no images; `cutedsl_mla` decodes, and trtllm_mla the rest.

    The other kernels are their own keys.
    """
    return (
        Alias(key="trtllm_mha", kernels=("trtllm_mha", "xqa", "fmha_v2")),
        Alias(key="cutedsl_mla", kernels=("cutedsl_mla", "trtllm_mla")),
    )
