"""The factories: one `BuildRequest` to one `Built`. Each imports its own library, when it is asked to build.

A factory names the kernel it built and never answers another one.
"""

from __future__ import annotations

from backstamp.factories import BuildRequest, Built

__all__ = [
    "build_fla_prefill",
    "build_flashinfer_prefill",
    "build_flashinfer_rows",
    "build_flashkda_prefill",
    "build_triton_rows",
]

# four libraries, any of which may be missing: a row is accepted where its own is there


def build_triton_rows(request: BuildRequest) -> Built:
    """Build `triton` for decode and verify: our own recurrent kernel.

    Raises:
        Unstamped: the runner carries no `linear_attn_backends`.
        UnsupportedBatch: a dtype, state layout or layer the row does not have; a CPU without Triton's interpreter.
    """
    from backstamp_linear_attn.rows import TritonRows

    return Built("triton", TritonRows(request))


def build_fla_prefill(request: BuildRequest) -> Built:
    """Build `triton` for prefill: fla-core's chunked kernels.

    Raises:
        Unstamped, UnsupportedBatch: as `build_triton_rows`.
    """
    from backstamp_linear_attn.fla_prefill import FlaPrefill

    return Built("triton", FlaPrefill(request))


def build_flashinfer_prefill(request: BuildRequest) -> Built:
    """Build `flashinfer` for prefill of a gated delta net.

    Raises:
        Unstamped, UnsupportedBatch: as `build_triton_rows`.
    """
    from backstamp_linear_attn.flashinfer_prefill import GdnPrefill

    return Built("flashinfer", GdnPrefill(request))


def build_flashinfer_rows(request: BuildRequest) -> Built:
    """Build `flashinfer` for decode and verify of a gated delta net.

    Raises:
        Unstamped, UnsupportedBatch: as `build_triton_rows`.
    """
    from backstamp_linear_attn.flashinfer_rows import GdnRows

    return Built("flashinfer", GdnRows(request))


def build_flashkda_prefill(request: BuildRequest) -> Built:
    """Build `flashkda` for prefill of Kimi delta attention with a bounded decay.

    Raises:
        Unstamped, UnsupportedBatch: as `build_triton_rows`.
    """
    from backstamp_linear_attn.flashkda_prefill import KdaPrefill

    return Built("flashkda", KdaPrefill(request))
