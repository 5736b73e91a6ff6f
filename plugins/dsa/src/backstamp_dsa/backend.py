"""The factories: one a row, each importing its library when it is called.

In: a `BuildRequest`. Out: `Built` with the name of the kernel that was built, or an `UnsupportedBatch` or
`ConflictingRequest` that names what cannot be. Rows of one kernel name differ in library, cache layout and device.
"""

from __future__ import annotations

from backstamp.factories import BuildRequest, Built
from backstamp.step_checks import check_build
from backstamp_dsa.settings import Inside, read_inside

__all__ = [
    "build_dsa",
    "build_dsa_packed",
    "build_dsa_triton",
    "build_dsv4",
    "build_dsv4_npu",
    "build_dsv4_packed",
    "build_dsv4_rocm",
    "build_flashmla",
]


def build_flashmla(request: BuildRequest) -> Built:
    """Dense latent attention through sgl-flash-mla."""
    check_build(request)
    from backstamp_dsa.flashmla import FlashMla

    return Built("flashmla", FlashMla(request))


def build_dsa(request: BuildRequest) -> Built:
    """Sparse attention over plain rows, through sgl-flash-mla or, where asked, our own kernels."""
    return _dsa(request, read_inside(request, "library"), "rows")


def build_dsa_packed(request: BuildRequest) -> Built:
    """Sparse attention over the packed cache, through sgl-flash-mla."""
    return _dsa(request, read_inside(request, "library"), "packed")


def build_dsa_triton(request: BuildRequest) -> Built:
    """Sparse attention by our own kernels."""
    return _dsa(request, read_inside(request, "triton"), "rows")


def build_dsv4(request: BuildRequest) -> Built:
    """DeepSeek V4 attention over plain rows, through sgl-flash-mla."""
    check_build(request)
    from backstamp_dsa.csa import CompressedAttention
    from backstamp_dsa.csa_cuda import LibraryRowsV4

    return Built("dsv4", CompressedAttention(request, LibraryRowsV4(request)))


def build_dsv4_packed(request: BuildRequest) -> Built:
    """DeepSeek V4 attention over its packed cache, through sgl-flash-mla."""
    check_build(request)
    from backstamp_dsa.csa import CompressedAttention
    from backstamp_dsa.csa_cuda import LibraryPackedV4

    return Built("dsv4", CompressedAttention(request, LibraryPackedV4(request)))


def build_dsv4_rocm(request: BuildRequest) -> Built:
    """DeepSeek V4 attention through aiter, bound as SGLang calls it."""
    check_build(request)
    from backstamp_dsa.csa import CompressedAttention
    from backstamp_dsa.csa_rocm import AiterV4

    return Built("dsv4", CompressedAttention(request, AiterV4(request)))


def build_dsv4_npu(request: BuildRequest) -> Built:
    """DeepSeek V4 attention through the Ascend operators, bound as SGLang calls them."""
    check_build(request)
    from backstamp_dsa.csa_npu import AscendV4

    return Built("dsv4", AscendV4(request))


def _dsa(request: BuildRequest, inside: Inside, cache: str) -> Built:
    check_build(request)
    from backstamp_dsa.dsa import DsaAttention, SparseKernel

    kernels: dict[str, SparseKernel] = {}
    wanted = set(inside.by_phase.values())
    if "library" in wanted:
        from backstamp_dsa.dsa_library import LibraryPacked, LibraryRows

        kernels["library"] = LibraryRows(request) if cache == "rows" else LibraryPacked(request)
    if "triton" in wanted:
        from backstamp_dsa.portable import PortableRows

        kernels["triton"] = PortableRows(request)
    return Built("dsa", DsaAttention(request, inside, kernels))
