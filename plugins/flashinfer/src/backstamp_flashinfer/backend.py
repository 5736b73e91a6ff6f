"""Factories: one object for MHA, with or without sinks, and one for MLA.

In: a `BuildRequest`. Out: `Built("flashinfer", backend)`. FlashInfer is imported when one is built, never before.
"""

from __future__ import annotations

import torch

from backstamp.factories import BuildRequest, Built

__all__ = ["build_attention", "build_mla"]


def build_attention(request: BuildRequest) -> Built:
    """Build the MHA/GQA/MQA object for all asked phases. Raises an `UnsupportedBatch` for a layer it cannot serve."""
    from backstamp_flashinfer.attention import FlashInferAttention

    return Built("flashinfer", FlashInferAttention(request, hopper=_is_hopper(request.device)))


def build_mla(request: BuildRequest) -> Built:
    """Build the absorbed-MLA object. Raises an `UnsupportedBatch` for a layer it cannot serve."""
    from backstamp_flashinfer.mla import FlashInferMLA

    return Built("flashinfer", FlashInferMLA(request, hopper=_is_hopper(request.device)))


def _is_hopper(device: str) -> bool:
    """Whether the library's FA3 kernels run there. Source: flashinfer 0.7.4 utils.py:is_sm90a_supported"""
    kind = torch.device(device)
    return kind.type == "cuda" and torch.cuda.get_device_capability(kind)[0] == 9
