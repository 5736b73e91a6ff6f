"""One layer as the tile kernel takes it: heads packed, head dims in parts, scales in base two.

In: a `LayerSpec` at build time. Out: its constants, or an `UnsupportedBatch` for a layer the kernel cannot serve.
"""

from __future__ import annotations

from dataclasses import dataclass

from backstamp.attention import LayerSpec
from backstamp_triton.configs import head_parts, pack_heads
from backstamp_triton.steps import refuse

__all__ = ["PreparedLayer", "prepare_layer"]

LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class PreparedLayer:
    """One layer's constants, computed once; layers of equal `shape` (Hq, Hk, Dk, Dv) share launches."""

    spec: LayerSpec
    shape: tuple[int, int, int, int]
    pack: int
    head_blocks: int
    dims: tuple[int, int, int, int]
    logit_scale: float
    softcap_log2: float | None
    window_left: int | None


def prepare_layer(who: str, arch: str, itemsize: int, spec: LayerSpec, v_in_k: bool) -> PreparedLayer:
    """Check one layer and compute its constants. Raises an `UnsupportedBatch` naming what it cannot serve."""
    if spec.alibi is not None:
        raise refuse(who, "alibi", "None", "slopes")
    if spec.scale <= 0:
        raise refuse(who, "scale", "a positive number", str(spec.scale))
    if spec.softcap < 0:
        raise refuse(who, "softcap", "0.0 or more", str(spec.softcap))
    if spec.num_kv_heads < 1 or spec.num_qo_heads % spec.num_kv_heads:
        raise refuse(who, "num_qo_heads", f"a multiple of {spec.num_kv_heads} key heads", str(spec.num_qo_heads))
    for name, dim in (("head_dim", spec.head_dim), ("v_head_dim", spec.v_head_dim)):
        if any(part and part < 16 for part in head_parts(dim)):
            raise refuse(who, name, "one or two powers of two, each at least 16", str(dim))
    if v_in_k and spec.v_head_dim != head_parts(spec.head_dim)[0]:
        raise refuse(who, "v_head_dim", f"{head_parts(spec.head_dim)[0]} of {spec.head_dim}", str(spec.v_head_dim))
    group = spec.num_qo_heads // spec.num_kv_heads
    pack = pack_heads(arch, itemsize, group, v_in_k)
    softcap = spec.softcap or None
    return PreparedLayer(
        spec=spec,
        shape=(spec.num_qo_heads, spec.num_kv_heads, spec.head_dim, spec.v_head_dim),
        pack=pack,
        head_blocks=-(-group // pack),
        dims=head_parts(spec.head_dim) + head_parts(spec.v_head_dim),
        logit_scale=spec.scale * LOG2_E if softcap is None else spec.scale / softcap,
        softcap_log2=None if softcap is None else softcap * LOG2_E,
        window_left=spec.window_left if spec.window_left >= 0 else None,
    )
