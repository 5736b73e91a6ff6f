"""What this plugin declares: FlashInfer's batch wrappers over a paged cache, as data.

In: nothing. Out: offers. Imports only `backstamp`; the bindings are in `attention.py` and `mla.py`, the factories in
`backend.py`, imported when one is built.
"""

from __future__ import annotations

from dataclasses import replace

from backstamp.declarations import Alias, Offer, PageSizes
from backstamp.hookspecs import hookimpl

__all__ = ["backstamp_aliases", "backstamp_offers"]

MHA = Offer(
    kernel="flashinfer",
    factory="backstamp_flashinfer.backend:build_attention",
    family="mha",
    device="cuda",
    # the FA2 templates that every chip runs need SM80; each image is compiled for the chip it runs on.
    # Source: flashinfer 0.7.4 jit/attention/modules.py:_fa2_head_dim_nvcc_flags, compilation_context.py
    archs=("8.0", "8.6", "8.7", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1"),
    # "Supported CUDA Versions: 12.9, 13.0, and 13.4", which no arch above exceeds. Source: its README
    runtimes=("cuda>=12.9",),
    phases=frozenset({"prefill", "decode", "verify"}),
    dtypes=frozenset({"fp16", "bf16"}),
    # what the library builds ahead of time for both of its backends. Source: aot.py:get_default_config
    head_dims=(64, 128, 256),
    # pages are looked up token by token. Source: page.cuh:protective_get_kv_offset, hopper/sparse_mainloop.cuh
    page_sizes=PageSizes(preferred=16, multiple_of=1),
    kv_forms=frozenset({"paged", "ragged"}),
    # the library reads CSR; `plan` gathers its page list out of any of the three
    index_forms=frozenset({"csr", "page_table", "indirect"}),
    prefix=True,
    mask_format="internal_causal",
    # Source: prefill.py (plan: custom_mask, causal, window_left, logits_soft_cap; run: lse), decode.py
    features=frozenset({"window", "softcap", "tree_mask", "topk", "non_causal", "lse", "encoder"}),
    # plan() "cannot be used in Cuda Graph"; use_cuda_graph fixes rows and buffers. Source: prefill.py, decode.py (plan)
    graph="uniform",
    plan="host",
    inputs=frozenset({"host_lens"}),
    # 0.7.4 is the version these calls were read in, and 0.8 may change them
    # page lists are gathered by a Triton kernel of our own
    requires=("flashinfer-python>=0.7.4,<0.8", "triton>=3.6", "torch>=2.11"),
    # kernels of another version are refused or ignored by the library. Source: jit/env.py:_check_cubin_version
    companions=("flashinfer-cubin", "flashinfer-jit-cache"),
)

# a variant of the same kernels, compiled without soft-capping and blind to custom masks.
# Source: attention/_core.py:BatchAttentionWithAttentionSinkWrapper, jit/attention/variants.py
MHA_SINKS = replace(
    MHA,
    kv_forms=frozenset({"paged"}),
    features=frozenset({"window", "sinks", "topk", "non_causal"}),
    # read as float. Source: attention/_core.py:_sink_jit_args
    sink_dtypes=frozenset({"fp32"}),
    sink_conversion="lossless",
)

# absorbed MLA over the latent cache. Source: mla/_batch_mla/_backends/_fa_common.py:_validate_generated_fa_plan:
# SM80 or newer, FA3 on SM90; its shared memory fits every chip listed above
MLA = replace(
    MHA,
    factory="backstamp_flashinfer.backend:build_mla",
    family="mla",
    head_dims=((576, 512),),
    kv_forms=frozenset({"paged"}),
    features=frozenset({"topk", "non_causal", "lse"}),
)


ROWS = (MHA, MHA_SINKS, MLA)
# Thor is 11.0 from CUDA 13.0 on; before, nvcc called it 10.1. Source: CUDA 13.0 release notes
THOR = tuple(replace(row, archs=("11.0",), runtimes=("cuda>=13.0",)) for row in ROWS)


@hookimpl
def backstamp_offers() -> tuple[Offer, ...]:
    """The rows of the kernel `flashinfer`."""
    return (*ROWS, *THOR)


@hookimpl
def backstamp_aliases() -> tuple[Alias, ...]:
    """None: a kernel's own name is its alias."""
    return ()
