"""What an operator's KV cache dtype means on a host: one canonical name.

In: the launch, the model, the host and what kernels declare. Out: "bf16", "e4m3fn" and so on, or an error that lists
the accepted names. It chooses no kernel.

.. versionadded:: 0.1
"""

from __future__ import annotations

from typing import Final

from backstamp.catalogue import Catalogue
from backstamp.errors import BadInput
from backstamp.host import HostFacts
from backstamp.launch import Launch
from backstamp.model import ModelFacts

__all__ = ["kv_dtype_of"]

#: What operators write for a cache dtype, and the canonical name. fp8_e4m3 is settled by the host.
_KV_NAMES: Final = {
    "fp16": "fp16",
    "float16": "fp16",
    "half": "fp16",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp32": "fp32",
    "float32": "fp32",
    "fp8_e5m2": "e5m2",
    "e5m2": "e5m2",
    "fp8_e4m3": "e4m3fn",
    "fp8": "e4m3fn",
    "e4m3fn": "e4m3fn",
    "e4m3fnuz": "e4m3fnuz",
}
#: gfx942 computes the fnuz form of e4m3, gfx950 and CUDA the fn form (AMD CDNA3 and CDNA4 ISA guides).
_FNUZ_ARCHS: Final = frozenset({"gfx940", "gfx941", "gfx942"})


def kv_dtype_of(launch: Launch, model: ModelFacts, host: HostFacts, catalogue: Catalogue) -> str:
    """The canonical cache dtype; "auto" is the one its checkpoint was quantised for, else the model's own.

    Raises:
        BadInput: no kernel and no convention knows the name; the accepted names are listed.
    """
    name, who = launch.kv_cache_dtype, "--kv-cache-dtype"
    if name == "auto":
        if model.kv_cache_dtype is None:
            return model.dtype
        name, who = model.kv_cache_dtype, f"--kv-cache-dtype auto, as the checkpoint of {model.name} says"
        if name == "e4m3fn":
            # a checkpoint says how many bits of each, the host which of the two forms
            name = "fp8_e4m3"
    if name in ("fp8_e4m3", "fp8") and host.arch in _FNUZ_ARCHS:
        return "e4m3fnuz"
    if name in _KV_NAMES:
        return _KV_NAMES[name]
    declared = {kv for rows in catalogue.rows.values() for row in rows for kv in row.offer.kv_dtypes - {"same"}}
    mapped = {kv for rows in catalogue.rows.values() for row in rows for kv in row.offer.kv_dtype_names}
    if name in declared | mapped:
        return name
    known = ", ".join(sorted({"auto", *_KV_NAMES, *declared, *mapped}))
    raise BadInput(who, needed=f"one of {known}", found=repr(name))
