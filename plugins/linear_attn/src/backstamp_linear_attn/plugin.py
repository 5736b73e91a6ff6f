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
ROWS_KDA = replace(ROWS_GDN, family="kda")

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
PREFILL_KDA = replace(PREFILL_GDN, family="kda")

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
    requires=("flashinfer-python>=0.7.4,<0.8", "nvidia-cutlass-dsl>=4.8", "torch>=2.11"),
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


@hookimpl
def backstamp_offers() -> tuple[Offer, ...]:
    """The rows of the kernels `triton` and `flashinfer` of the linear slot."""
    return (
        *ON_CUDA,
        *ON_ROCM,
        FLASHINFER_PREFILL,
        FLASHINFER_PREFILL_SM100,
        FLASHINFER_PREFILL_OTHER,
        FLASHINFER_ROWS,
        FLASHINFER_ROWS_SM100,
        FLASHINFER_ROWS_SM120,
    )


@hookimpl
def backstamp_aliases() -> tuple[Alias, ...]:
    """The full-attention layers of a hybrid model: FA3 where it runs, Triton on other GPUs, AMX on CPUs."""
    return (Alias(key="hybrid_linear_attn", kernels=("fa3", "triton", "intel_amx")),)
