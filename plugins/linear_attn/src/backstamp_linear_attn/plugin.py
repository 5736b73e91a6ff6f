"""What this plugin declares: linear attention of hybrid models, and the key that names their full attention, as data.

In: nothing. Out: offers and one alias. Imports only `backstamp`; the kernels are behind the factories in `backend.py`.
"""

from __future__ import annotations

from dataclasses import replace

from backstamp.declarations import Alias, Offer, PageSizes
from backstamp.hookspecs import hookimpl

__all__ = ["backstamp_aliases", "backstamp_offers"]

CUDA = ("8.0", "8.6", "8.7", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1")

# decode and verify by our own kernel: the libraries' recurrent functions know no slots, pads or trees
ROWS_GDN = Offer(
    kernel="triton",
    slot="linear",
    factory="backstamp_linear_attn.backend:build_triton_rows",
    family="gdn",
    device="cuda",
    archs=CUDA,
    # compiled on the host it runs on, for that host's chip
    forward_archs="any",
    phases=frozenset({"decode", "verify"}),
    draft_phases=frozenset(),
    dtypes=frozenset({"fp16", "bf16", "fp32"}),
    head_dims=(64, 128, 256, (64, 128), (96, 192), (128, 256)),
    # a recurrence has states, no pages
    page_sizes=PageSizes(preferred=1, multiple_of=1),
    mask_format="internal_causal",
    features=frozenset({"tree_mask"}),
    state_layouts=("vk", "kv"),
    graph="any",
    plan="device",
    # a program is one head of one row, and its shape does not depend on the batch
    deterministic=True,
    priority=50,
    requires=("triton>=3.6", "torch>=2.11"),
)
ROWS_KDA = replace(ROWS_GDN, family="kda", features=ROWS_GDN.features | {"bounded_gates"})

# prefill in chunks. Source: fla-core 0.6.0 ops/gated_delta_rule/chunk.py and ops/kda/chunk.py: keys up to 256 wide, HV
# a multiple of H, states in either order (`state_v_first`); chunks are counted on the host (ops/utils/index.py)
PREFILL_GDN = replace(
    ROWS_GDN,
    factory="backstamp_linear_attn.backend:build_fla_prefill",
    phases=frozenset({"prefill"}),
    # matrix products of 16-bit tokens; fp32 was not tried
    dtypes=frozenset({"fp16", "bf16"}),
    features=frozenset(),
    graph="never",
    plan="host",
    inputs=frozenset({"host_lens"}),
    deterministic=False,
    requires=("fla-core>=0.6,<0.7", "triton>=3.6", "torch>=2.11"),
)
PREFILL_KDA = replace(PREFILL_GDN, family="kda", features=frozenset({"bounded_gates"}))

ON_CUDA = (ROWS_GDN, ROWS_KDA, PREFILL_GDN, PREFILL_KDA)


def _on_rocm(offer: Offer, triton: str) -> Offer:
    requires = tuple(text.replace("triton>", f"{triton}>") for text in offer.requires)
    return replace(offer, device="rocm", archs=("gfx942", "gfx950"), forward_archs="no", requires=requires)


# compiled ahead of time for both, run on neither; PyTorch's ROCm wheels have shipped Triton under a name of its own
ON_ROCM = tuple(_on_rocm(offer, name) for name in ("triton", "pytorch-triton-rocm") for offer in ON_CUDA)

# Source: flashinfer 0.7.4 gdn_prefill.py and gdn_kernels/delta_rule_dsl: heads of 128, 16-bit tokens, states
# [., HV, V, K] by slot, -1 for none. The kernels are written in the CuTe DSL, which is imported at the first call:
# without it the package imports and every call fails.
FLASHINFER_PREFILL = Offer(
    kernel="flashinfer",
    slot="linear",
    factory="backstamp_linear_attn.backend:build_flashinfer_prefill",
    family="gdn",
    device="cuda",
    archs=("9.0",),
    phases=frozenset({"prefill"}),
    draft_phases=frozenset(),
    dtypes=frozenset({"fp16", "bf16"}),
    head_dims=(128,),
    page_sizes=PageSizes(preferred=1, multiple_of=1),
    mask_format="internal_causal",
    state_layouts=("vk",),
    # 4.6 times fla-core on an H200
    priority=60,
    requires=("flashinfer-python>=0.7.4,<0.8", "nvidia-cutlass-dsl>=4.8", "triton>=3.6", "torch>=2.11"),
    companions=("flashinfer-cubin", "flashinfer-jit-cache"),
)
# "Blackwell GDN prefill is only supported on CUDA 13+"
FLASHINFER_PREFILL_SM100 = replace(FLASHINFER_PREFILL, archs=("10.0", "10.3"), runtimes=("cuda>=13.0",))
# there, but nobody compared it with fla-core: asked for, not chosen
FLASHINFER_PREFILL_OTHER = replace(FLASHINFER_PREFILL, archs=("8.0", "8.6", "8.7", "8.9", "12.0", "12.1"), priority=40)

# Source: flashinfer 0.7.4 gdn_decode.py: "requires SM90+"; q, k and v are rounded to bf16; fp32 states by slot, -1 for
# none; verify takes as many tokens in every row, at least two, in a chain
FLASHINFER_ROWS = replace(
    FLASHINFER_PREFILL,
    factory="backstamp_linear_attn.backend:build_flashinfer_rows",
    phases=frozenset({"decode", "verify"}),
    dtypes=frozenset({"bf16"}),
    phase_inputs={"verify": frozenset({"host_lens"})},
    # it refuses pools of another dtype than fp32, which no plan knows: asked for, not chosen
    priority=40,
)
# gates that are computed already go through the prefill kernel, which wants CUDA 13 there
FLASHINFER_ROWS_SM100 = replace(FLASHINFER_ROWS, archs=("10.0", "10.3"), runtimes=("cuda>=13.0",))
FLASHINFER_ROWS_SM120 = replace(FLASHINFER_ROWS, archs=("12.0", "12.1"))

# Source: tokenspeed-flashkda 0.0.1.post20260526 and later, flash_kda/__init__.py, and the code images of its module:
# sm_90a, sm_100a, sm_103a, sm_120a. Heads of 128, bf16 tokens and raw gates, and a decay with a bound: there is no form
# for another
FLASHKDA = Offer(
    kernel="flashkda",
    slot="linear",
    factory="backstamp_linear_attn.backend:build_flashkda_prefill",
    family="kda",
    device="cuda",
    archs=("9.0",),
    phases=frozenset({"prefill"}),
    draft_phases=frozenset(),
    dtypes=frozenset({"bf16"}),
    head_dims=(128,),
    page_sizes=PageSizes(preferred=1, multiple_of=1),
    mask_format="internal_causal",
    features=frozenset({"bounded_gates"}),
    needs=frozenset({"bounded_gates"}),
    state_layouts=("vk",),
    priority=60,
    # built against one version of torch, which no metadata says: beside another the module loads, and takes every
    # tensor for one on the CPU. Source: the line of c10/core/TensorImpl.h its assertions name
    requires=("tokenspeed-flashkda>=0.0.1.post20260526,<0.0.1.post20260810", "triton>=3.6", "torch>=2.11,<2.12"),
    runtimes=("cuda>=13.0",),
)
FLASHKDA_TORCH_2_13 = replace(
    FLASHKDA, requires=("tokenspeed-flashkda>=0.0.1.post20260810,<0.1", "triton>=3.6", "torch>=2.13,<2.14")
)
ON_FLASHKDA = (FLASHKDA, FLASHKDA_TORCH_2_13)
# code for these is in the same library, but nobody ran it: asked for, not chosen
ON_FLASHKDA_NEWER = tuple(replace(offer, archs=("10.0", "10.3", "12.0"), priority=40) for offer in ON_FLASHKDA)


@hookimpl
def backstamp_offers() -> tuple[Offer, ...]:
    """The rows of the kernels `triton`, `flashinfer` and `flashkda` of the linear slot."""
    return (
        *ON_CUDA,
        *ON_ROCM,
        FLASHINFER_PREFILL,
        FLASHINFER_PREFILL_SM100,
        FLASHINFER_PREFILL_OTHER,
        FLASHINFER_ROWS,
        FLASHINFER_ROWS_SM100,
        FLASHINFER_ROWS_SM120,
        *ON_FLASHKDA,
        *ON_FLASHKDA_NEWER,
    )


@hookimpl
def backstamp_aliases() -> tuple[Alias, ...]:
    """The full-attention layers of a hybrid model: FA3 where it runs, Triton on other GPUs, AMX on CPUs."""
    return (Alias(key="hybrid_linear_attn", kernels=("fa3", "triton", "intel_amx")),)
