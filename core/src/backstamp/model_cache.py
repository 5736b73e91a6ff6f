"""The dtype a checkpoint was quantised to keep its KV cache in.

In: the `Fields` of a whole config. Out: a canonical name, or None where the checkpoint leaves the cache alone. It
reads no scales and settles nothing for a host.

Sources, as vLLM 0.32 reads them: compressed-tensors (`kv_cache_scheme`), ModelOpt (the same, or `kv_cache_quant_algo`
beside it or under the `quantization` of hf_quant_config.json), Quark (`kv_cache_group`, whose layers carry the dtype).

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from backstamp.model_fields import LANGUAGE_PARTS, Fields

__all__ = ["kv_cache_dtype"]

_FP8: Final = "e4m3fn"
_ALGORITHMS: Final = {"fp8": _FP8, "fp8_e4m3": _FP8, "float8_e4m3fn": _FP8, "fp8_e5m2": "e5m2"}


def kv_cache_dtype(outer: Fields) -> str | None:
    """What the config fixes: "e4m3fn", another word of the checkpoint's in lower case, or None.

    Raises:
        BadModel: the scheme is there and cannot be read.
    """
    for name in ("quantization_config", "compression_config"):
        part = outer.part(name)
        if part is not None and (said := _of_quantization(part)) is not None:
            return said
    for name in LANGUAGE_PARTS:
        # a composite may quantise its language model alone
        inner = outer.data.get(name)
        if isinstance(inner, Mapping):
            return kv_cache_dtype(Fields(f"{outer.who}, {name}", inner))
    return None


def _of_quantization(part: Fields) -> str | None:
    scheme = part.part("kv_cache_scheme")
    if scheme is not None:
        bits, kind = scheme.whole("num_bits"), scheme.text("type") or "float"
        return _FP8 if (bits, kind) == (8, "float") else f"{kind}{bits}"
    nested = part.part("quantization")
    algorithm = part.text("kv_cache_quant_algo") or (nested.text("kv_cache_quant_algo") if nested else None)
    if algorithm is None:
        algorithm = _of_quark(part)
    return None if algorithm is None else _ALGORITHMS.get(algorithm.lower(), algorithm.lower())


def _of_quark(part: Fields) -> str | None:
    """Quark names the layers that write the cache, and quantises their outputs."""
    export = part.part("export")
    names = export.words("kv_cache_group") if export is not None else None
    layers = part.part("layer_quant_config")
    if not names or layers is None:
        return None
    for name in names:
        layer = layers.part(name)
        outputs = layer.part("output_tensors") if layer is not None else None
        if outputs is not None:
            return outputs.text("dtype")
    return None
