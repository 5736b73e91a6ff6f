"""What this plugin declares: our own Triton attention, as data.

In: nothing. Out: offers. Imports only `backstamp`; the kernels are in `tile.py` and `combine.py`, the factories in
`backend.py`, imported when one is built.
"""

from __future__ import annotations

from dataclasses import replace

from backstamp.declarations import Alias, Offer, PageSizes
from backstamp.hookspecs import hookimpl

__all__ = ["backstamp_aliases", "backstamp_offers"]

HEAD_DIMS = (64, 80, 96, 128, 192, 256)

MHA_CUDA = Offer(
    kernel="triton",
    factory="backstamp_triton.backend:build_attention",
    family="mha",
    device="cuda",
    archs=("8.0", "8.6", "8.7", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1"),
    # compiled on the host it runs on, for that host's chip: a newer chip needs a newer Triton, not a new image
    forward_archs="any",
    phases=frozenset({"prefill", "decode", "verify"}),
    dtypes=frozenset({"fp16", "bf16", "fp32"}),
    head_dims=tuple((qk, v) for qk in HEAD_DIMS for v in HEAD_DIMS),
    page_sizes=PageSizes(preferred=16, multiple_of=1),
    kv_forms=frozenset({"paged", "ragged"}),
    index_forms=frozenset({"page_table", "csr", "indirect"}),
    prefix=True,
    mask_format="internal_causal",
    features=frozenset({"window", "softcap", "sinks", "tree_mask", "topk", "non_causal", "lse", "cross", "encoder"}),
    # loaded as stored, added in fp32
    sink_dtypes=frozenset({"fp16", "bf16", "fp32"}),
    graph="any",
    plan="device",
    # below the hand-written libraries, above PyTorch's own
    priority=40,
    # what these kernels were compiled and run with: the interpreter and ahead-of-time tests, one H200
    requires=("triton>=3.6", "torch>=2.11"),
)

# the latent cache of absorbed MLA: values are the first 512 numbers of each key
MLA_CUDA = replace(
    MHA_CUDA,
    family="mla",
    factory="backstamp_triton.backend:build_mla",
    head_dims=((576, 512),),
    kv_forms=frozenset({"paged"}),
    features=frozenset({"window", "softcap", "sinks", "tree_mask", "topk", "non_causal", "lse"}),
)

# compiled ahead of time for both, run on neither: no claim beyond the two
MHA_ROCM = replace(MHA_CUDA, device="rocm", archs=("gfx942", "gfx950"), forward_archs="no")
MLA_ROCM = replace(MLA_CUDA, device="rocm", archs=("gfx942", "gfx950"), forward_archs="no")
# PyTorch's ROCm wheels have shipped Triton under a name of its own
MHA_ROCM_WHEEL = replace(MHA_ROCM, requires=("pytorch-triton-rocm>=3.6", "torch>=2.11"))
MLA_ROCM_WHEEL = replace(MLA_ROCM, requires=("pytorch-triton-rocm>=3.6", "torch>=2.11"))


@hookimpl
def backstamp_offers() -> tuple[Offer, ...]:
    """The rows of the kernel `triton`."""
    return (MHA_CUDA, MLA_CUDA, MHA_ROCM, MLA_ROCM, MHA_ROCM_WHEEL, MLA_ROCM_WHEEL)


@hookimpl
def backstamp_aliases() -> tuple[Alias, ...]:
    """None: a kernel's own name is its alias."""
    return ()
