"""What this plugin declares: AITER's attention on AMD's data-centre chips, as data.

In: nothing. Out: offers. Imports only `backstamp`; the kernel library is imported by `backend.py` when one is built.
"""

from __future__ import annotations

from dataclasses import replace

from backstamp.declarations import Alias, Offer, PageSizes
from backstamp.hookspecs import hookimpl

__all__ = ["backstamp_aliases", "backstamp_offers"]

# every paged step through one function, whose sources are the comments below
# Source: ROCm/aiter 02c43589, aiter/ops/triton/attention/unified_attention.py; its kernel at 04678497
PAGED = Offer(
    kernel="aiter",
    factory="backstamp_aiter.backend:build_paged",
    family="mha",
    device="rocm",
    # the chips its configurations and our caller know; RDNA lacks the registers and shared memory they ask for
    # Source: SGLang 0.5.23, aiter_backend.py; ROCm/aiter issue 5229
    archs=("gfx942", "gfx950"),
    # the oldest ROCm a released wheel was built for. Source: ROCm/aiter, releases v0.1.14.post1 to v0.1.27
    runtimes=("rocm>=7.0",),
    # the first release read to have the module under this path with `sinks`
    # Source: vllm-project/vllm pull request 43817
    requires=("amd-aiter>=0.1.14",),
    phases=frozenset({"prefill", "decode", "verify"}),
    dtypes=frozenset({"fp16", "bf16"}),
    # any size is padded to a power of two; these are the ones models have
    head_dims=(64, 80, 96, 128, 192, 256),
    # the block table is read token by token, so a tile may straddle pages
    page_sizes=PageSizes(preferred=16, exact=(1, 16, 32, 64, 128)),
    prefix=True,
    # `assert causal`: one query a row apart, nothing looks ahead. No LSE is returned, no row has a mask of its own
    features=frozenset({"window", "softcap", "sinks", "alibi", "topk"}),
    # loaded as stored, then widened to fp32
    sink_dtypes=frozenset({"fp16", "bf16", "fp32"}),
    mask_format="internal_causal",
    # nothing is read back from the device; decode and verify are captured by the caller
    # Source: SGLang 0.5.23, aiter_backend.py:4222
    graph="uniform",
    plan="device",
    # Source: SGLang 0.5.23, aiter_backend.py:3416, without draft tokens
    fill_value=1,
    # above our Triton kernels, which were compiled for these chips and never run on them
    priority=60,
)

# absorbed MLA over slots of single tokens, whatever the page size: pages are counted out in `plan`
# Source: ROCm/aiter 000edf30, aiter/mla.py, mla_decode_fwd; SGLang 0.5.23, aiter_backend.py:1472 and :296
LATENT_DECODE = replace(
    PAGED,
    family="mla",
    factory="backstamp_aiter.backend:build_latent_decode",
    phases=frozenset({"decode"}),
    dtypes=frozenset({"bf16"}),
    head_dims=((576, 512),),
    # what the caller takes as it is. Source: SGLang 0.5.23, aiter_backend.py:584-610
    group_sizes=(16, 128),
    page_sizes=PageSizes(preferred=1, exact=(1, 16, 32, 64, 128)),
    index_forms=frozenset({"page_table", "csr", "indirect"}),
    features=frozenset({"topk"}),
    sink_dtypes=frozenset({"same"}),
    inputs=frozenset({"host_lens"}),
    graph="never",
    plan="host",
    fill_value=0,
)
# Source: ROCm/aiter 000edf30, aiter/mla.py, mla_prefill_fwd; SGLang 0.5.23, aiter_backend.py:3970
LATENT_PREFILL = replace(
    LATENT_DECODE,
    factory="backstamp_aiter.backend:build_latent_prefill",
    phases=frozenset({"prefill"}),
    features=frozenset(),
)


@hookimpl
def backstamp_offers() -> tuple[Offer, ...]:
    """The rows of the kernel `aiter`."""
    return (PAGED, LATENT_DECODE, LATENT_PREFILL)


@hookimpl
def backstamp_aliases() -> tuple[Alias, ...]:
    """None: a kernel's own name is its alias."""
    return ()
