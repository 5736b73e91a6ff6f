"""Factories: which object serves a request, by kernel and by the form its keys come in.

In: a `BuildRequest`. Out: `Built(kernel, backend)`. Each kernel's module imports its library when it is first built:
flashinfer for all but tokenspeed_mla, so that neither library has to be installed for the other's kernels.
"""

from __future__ import annotations

from backstamp.factories import BuildRequest, Built

__all__ = [
    "build_cutedsl_mla",
    "build_fmha_v2",
    "build_tokenspeed_mla",
    "build_trtllm_mha",
    "build_trtllm_mla",
    "build_xqa",
]


def build_trtllm_mha(request: BuildRequest) -> Built:
    """trtllm-gen for MHA and GQA."""
    from backstamp_trtllm.gen_mha import GenAttention

    return Built("trtllm_mha", GenAttention(request))


def build_xqa(request: BuildRequest) -> Built:
    """XQA: every phase but prefill."""
    from backstamp_trtllm.xqa import XqaAttention

    return Built("xqa", XqaAttention(request))


def build_fmha_v2(request: BuildRequest) -> Built:
    """FMHA v2: prefill."""
    from backstamp_trtllm.fmha_v2 import FmhaV2Prefill

    return Built("fmha_v2", FmhaV2Prefill(request))


def build_trtllm_mla(request: BuildRequest) -> Built:
    """trtllm-gen for MLA: absorbed over the latent cache, or ragged where the row reads no cache."""
    if "ragged" in request.offer.kv_forms:
        from backstamp_trtllm.ragged import RaggedPrefill
        from backstamp_trtllm.ragged_trtllm import trtllm_ragged

        return Built("trtllm_mla", RaggedPrefill(request, trtllm_ragged(request)))
    from backstamp_trtllm.latent import LatentAttention

    return Built("trtllm_mla", LatentAttention(request, "trtllm-gen"))


def build_cutedsl_mla(request: BuildRequest) -> Built:
    """CuTe DSL's MLA decode."""
    from backstamp_trtllm.latent import LatentAttention

    return Built("cutedsl_mla", LatentAttention(request, "cute-dsl"))


def build_tokenspeed_mla(request: BuildRequest) -> Built:
    """tokenspeed-mla: absorbed over the latent cache, or ragged where the row reads no cache."""
    if "ragged" in request.offer.kv_forms:
        from backstamp_trtllm.ragged import RaggedPrefill
        from backstamp_trtllm.ragged_tokenspeed import tokenspeed_ragged

        return Built("tokenspeed_mla", RaggedPrefill(request, tokenspeed_ragged))
    from backstamp_trtllm.tokenspeed import TokenspeedMla

    return Built("tokenspeed_mla", TokenspeedMla(request))
