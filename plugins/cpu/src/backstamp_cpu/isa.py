"""Whether oneDNN can run bf16 products on this CPU's AMX tiles: asked once, when `intel_amx` is built.

In: this process and its environment. Out: nothing, or a refusal that says what stands in the way. Runs no product.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from backstamp.errors import BadInput

__all__ = ["AMX_LIMITS", "MAX_ISA_VARIABLES", "check_amx", "limit_of"]

#: oneDNN's limit on the instruction sets it dispatches to, and the name it had as DNNL.
#: Source: oneDNN developer guide, "CPU Dispatcher Control".
MAX_ISA_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
#: The limits that leave AMX in bf16 in reach. A name oneDNN does not know limits nothing; it is refused all the same,
#: because whoever set it meant a limit.
AMX_LIMITS = frozenset(
    {
        "ALL",
        "DEFAULT",
        "AVX512_CORE_AMX",
        "AVX512_CORE_AMX_FP16",
        "AVX10_1_512_AMX",
        "AVX10_1_512_AMX_FP16",
        "AVX10_2_512_AMX_2",
        "AVX10_2_AMX_2",
    }
)


def check_amx(who: str) -> None:
    """Refuse where oneDNN would take another path.

    Raises:
        BadInput: torch without oneDNN or with it switched off, a limit on its instruction sets, or no AMX tiles.
    """
    if not torch.backends.mkldnn.is_available():
        raise BadInput(who, needed="a torch built with oneDNN", found=f"torch {torch.__version__} without it")
    if not torch.backends.mkldnn.enabled:
        fix = "Set torch.backends.mkldnn.enabled = True"
        raise BadInput(who, needed="oneDNN enabled", found="torch.backends.mkldnn.enabled = False", fix=fix)
    limit = limit_of(os.environ)
    if limit is not None:
        fix = f"Unset {limit.split('=')[0]} before the process starts"
        raise BadInput(who, needed="AMX among the instruction sets oneDNN may use", found=limit, fix=fix)
    # private in torch 2.11 to 2.13; the public get_capabilities() is younger than our floor. `_init_amx` asks Linux for
    # the tile registers, which a sandbox or an old kernel may refuse on a CPU that has them
    if not (torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()):
        found = f"none that torch may use ({torch.backends.cpu.get_cpu_capability()})"
        needed = "a CPU with amx_tile and amx_bf16, and the system's leave to use the tiles"
        raise BadInput(who, needed=needed, found=found)


def limit_of(environment: Mapping[str, str]) -> str | None:
    """The variable that keeps oneDNN off AMX, as "NAME=VALUE", or None; the newer name counts where both are set."""
    for name in MAX_ISA_VARIABLES:
        value = environment.get(name)
        if value is not None:
            return None if value.upper() in AMX_LIMITS else f"{name}={value}"
    return None
