"""One layer as the tile kernel takes it: heads packed, head dims in parts, scales in base two.

In: a `LayerSpec` the declared row serves. Out: its constants, or an `UnsupportedBatch` for numbers the kernel cannot
take.
"""

from __future__ import annotations

from dataclasses import dataclass

from backstamp.attention import LayerSpec
from backstamp.factories import BuildRequest
from backstamp.step_checks import refusal
from backstamp_triton.configs import head_parts, pack_heads, prefill_block

__all__ = ["PreparedLayer", "prepare_layer"]

LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class PreparedLayer:
    """One layer's constants, computed once; layers of equal `shape` (Hq, Hk, Dk, Dv) share launches.

    `features` names those that are compiled in; `v_in_k` says that values are the first numbers of each key;
    `prefill_block` counts the keys of one block of the Hopper prefill kernel (0: not its layer).
    """

    spec: LayerSpec
    shape: tuple[int, int, int, int]
    pack: int
    head_blocks: int
    dims: tuple[int, int, int, int]
    logit_scale: float
    softcap_log2: float | None
    window_left: int | None
    features: str
    v_in_k: bool
    prefill_block: int


def prepare_layer(request: BuildRequest, arch: str, itemsize: int, spec: LayerSpec, v_in_k: bool) -> PreparedLayer:
    """Compute the constants of a layer that its row serves.

    Raises:
        UnsupportedBatch: a scale or softcap below what the kernel's logarithms take.
    """
    if spec.scale <= 0:
        raise refusal(request, f"scale of layer {spec.layer_id}", "a positive number", str(spec.scale))
    if spec.softcap < 0:
        raise refusal(request, f"softcap of layer {spec.layer_id}", "0.0 or more", str(spec.softcap))
    group = spec.num_qo_heads // spec.num_kv_heads
    pack = pack_heads(arch, itemsize, group, v_in_k)
    softcap = spec.softcap or None
    features = {"window": spec.window_left >= 0, "softcap": bool(softcap), "sinks": spec.sinks is not None}
    return PreparedLayer(
        spec=spec,
        shape=(spec.num_qo_heads, spec.num_kv_heads, spec.head_dim, spec.v_head_dim),
        pack=pack,
        head_blocks=-(-group // pack),
        dims=head_parts(spec.head_dim) + head_parts(spec.v_head_dim),
        logit_scale=spec.scale * LOG2_E if softcap is None else spec.scale / softcap,
        softcap_log2=None if softcap is None else softcap * LOG2_E,
        window_left=spec.window_left if spec.window_left >= 0 else None,
        features=" ".join(name for name, there in features.items() if there),
        v_in_k=v_in_k,
        prefill_block=0 if v_in_k else prefill_block(arch, itemsize, spec.head_dim, spec.v_head_dim),
    )
