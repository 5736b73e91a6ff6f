"""The factories: one `BuildRequest` to one `Built`; the only module that imports torch-npu, when something is built.

A factory holds the request against its row first, so that a refusal needs no library.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

from backstamp.errors import NotInstalled
from backstamp.factories import BuildRequest, Built
from backstamp.linear_checks import check_linear_build, linear_refusal
from backstamp.step_checks import check_build, refusal
from backstamp_ascend.delta import DeltaPrefill, DeltaRows
from backstamp_ascend.latent import LatentAttention
from backstamp_ascend.paged import PagedAttention

__all__ = ["LATENT_HEADS", "build_delta_prefill", "build_delta_rows", "build_latent", "build_packed", "build_rows"]

#: Query heads over a latent cache. Source: torch-npu 2.14.0 _op_plugin_docs.py:8577, "query_rope".
LATENT_HEADS = (1, 2, 4, 8, 16, 32, 64, 128)


def build_packed(request: BuildRequest) -> Built:
    """Build `ascend` for paged MHA, all rows of a step in one call.

    Raises:
        UnsupportedBatch: what the row does not declare, or heads beyond the library's bounds.
    """
    return _build_paged(request, packed=True)


def build_rows(request: BuildRequest) -> Built:
    """Build `ascend` for paged MHA, a call for each row of several queries.

    Raises:
        UnsupportedBatch: as `build_packed`.
    """
    return _build_paged(request, packed=False)


def build_latent(request: BuildRequest) -> Built:
    """Build `ascend` for an absorbed latent cache.

    Raises:
        UnsupportedBatch: what the row does not declare, or a number of heads the library has no kernel for.
    """
    check_build(request)
    for layer in request.layers:
        if layer.num_kv_heads != 1:
            raise refusal(request, "num_kv_heads", "1", f"{layer.num_kv_heads} in layer {layer.layer_id}")
        if layer.num_qo_heads not in LATENT_HEADS:
            needed = f"one of {', '.join(map(str, LATENT_HEADS))}"
            raise refusal(request, "num_qo_heads", needed, f"{layer.num_qo_heads} in layer {layer.layer_id}")
    return Built("ascend", LatentAttention(request, _torch_npu(request).npu_fused_infer_attention_score_v2))


def build_delta_rows(request: BuildRequest) -> Built:
    """Build the linear `ascend` for decode and verify of a gated delta net.

    Raises:
        Unstamped: the runner carries no `linear_attn_backends`.
        UnsupportedBatch: what the row does not declare, or more heads than the library takes.
    """
    _check_delta(request, most_heads=256)
    return Built("ascend", DeltaRows(request, _torch_npu(request).npu_recurrent_gated_delta_rule))


def build_delta_prefill(request: BuildRequest) -> Built:
    """Build the linear `ascend` for prefill of a gated delta net.

    Raises:
        Unstamped, UnsupportedBatch: as `build_delta_rows`.
    """
    _check_delta(request, most_heads=64)
    return Built("ascend", DeltaPrefill(request, _torch_npu(request).npu_chunk_gated_delta_rule))


def _check_delta(request: BuildRequest, most_heads: int) -> None:
    """Source: torch-npu 2.14.0 _op_plugin_docs.py:6726 and :12085."""
    # the runner's own stamp is read there, before anything else
    check_linear_build(request)
    for layer in request.layers:
        if layer.num_kv_heads > most_heads:
            found = f"{layer.num_kv_heads} in layer {layer.layer_id}"
            raise linear_refusal(request, "value heads (num_kv_heads)", f"at most {most_heads}", found)


def _build_paged(request: BuildRequest, *, packed: bool) -> Built:
    check_build(request)
    _check_heads(request)
    return Built(
        "ascend", PagedAttention(request, _torch_npu(request).npu_fused_infer_attention_score_v2, packed=packed)
    )


def _check_heads(request: BuildRequest) -> None:
    """Source: torch-npu 2.14.0 _op_plugin_docs.py:8577, "num_key_value_heads", "N", "BSND" and "page attention"."""
    for layer in request.layers:
        share, width = layer.num_qo_heads // layer.num_kv_heads, layer.num_kv_heads * layer.head_dim
        for field, most, found in (
            ("num_qo_heads", 256, layer.num_qo_heads),
            ("query heads a KV head", 64, share),
            ("num_kv_heads * head_dim", 65535, width),
            ("num_qo_heads * head_dim", 65534, layer.num_qo_heads * layer.head_dim),
        ):
            if found > most:
                raise refusal(request, field, f"at most {most}", f"{found} in layer {layer.layer_id}")


def _torch_npu(request: BuildRequest) -> ModuleType:
    """The library, imported beside the torch it was built for: another fails in the loader, or later.

    Source: its wheels' metadata, "Requires-Dist: torch==2.14.0.*", "torch ==2.11.0+cpu".
    """
    try:
        library, torch = version("torch-npu"), version("torch")
    except PackageNotFoundError:
        # without metadata nothing says what it was built for
        library = torch = ""
    if _minor(library) != _minor(torch):
        raise NotInstalled(
            f"kernel {request.kernel!r} on {request.device}",
            needed=f"torch {_minor(library)} beside torch-npu {library}",
            found=f"torch {torch}",
            fix=f"Install torch-npu {_minor(torch)}, or the torch that torch-npu was built for",
        )
    # imported here: it loads the driver, and a described host has none
    import torch_npu

    return torch_npu


def _minor(text: str) -> str:
    return ".".join(text.split(".")[:2])
