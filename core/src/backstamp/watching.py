"""Run in a child of `backstamp doctor`: import one plugin and report what that did to the process.

In: a plugin module and its factory modules as arguments, one secret word on standard input. Out: one line of JSON
behind that word, so that a plugin that prints, exits or pretends cannot be taken for a report. What is watched:
drivers and device nodes opened, heavy libraries imported, Backstamp objects replaced.

.. versionadded:: 0.2
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import pkgutil
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import backstamp
from backstamp.loading import import_plugin

__all__ = ["Seen", "read_report", "watch"]

#: Libraries whose loading starts or opens a driver: CUDA, NVML, HIP, HSA, ROCm SMI, CANN, MUSA, Level Zero.
_DRIVERS: Final = re.compile(
    r"lib(?:cuda|nvidia-ml|amdhip64|hsa-runtime64|hsa|rocm_smi64|rocm_smi|amd_smi|ascendcl|musa|ze_loader|ze)"
    r"(?:[-_.][\w.-]*)?\.so[\w.]*"
)
_NODES: Final = re.compile(r"/dev/(?:nvidia[\w-]*|kfd|dri/render\w*|davinci\w*|mtgpu[\w.]*|nvmap|dxg)")
#: Packages that take seconds to import or open a driver when they do.
_HEAVY: Final = re.compile(
    "torch|triton|numpy|jax|jaxlib|tensorflow|cupy|numba|transformers|vllm|sglang|flashinfer|flash_attn|xformers|aiter"
    "|torch_npu|torch_musa|tensorrt_llm|pynvml"
)


class Seen(NamedTuple):
    """What importing a plugin did: drivers opened, heavy packages imported, Backstamp objects changed."""

    drivers: tuple[str, ...] = ()
    heavy: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()


def watch(target: str, factories: Sequence[str]) -> Seen:
    """Import a plugin under watch, then see that its factory modules exist.

    Raises whatever the plugin raises; `ModuleNotFoundError` for a factory module that is nowhere.
    """
    drivers: dict[str, None] = {}

    def hear(event: str, arguments: tuple[object, ...]) -> None:
        if event in ("ctypes.dlopen", "open") and arguments and isinstance(arguments[0], (str, bytes, os.PathLike)):
            path = os.fsdecode(arguments[0])
            pattern = _NODES if event == "open" else _DRIVERS
            if pattern.fullmatch(path if event == "open" else os.path.basename(path)):
                drivers.setdefault(path)

    _load_core()
    before, here = _fingerprint(), set(sys.modules)
    sys.addaudithook(hear)
    import_plugin(target)
    heavy = tuple(sorted(name for name in set(sys.modules) - here if _HEAVY.fullmatch(name)))
    changed = tuple(sorted(name for name, value in before.items() if _fingerprint_of(name) != value))
    drivers.update(dict.fromkeys(_mapped_drivers()))
    for name in factories:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"factory module {name} does not exist")
    return Seen(tuple(drivers), heavy, changed)


def read_report(stdout: str, word: str) -> Seen | None:
    """The report in a child's output; None where it never came that far."""
    for line in stdout.splitlines():
        _, found, text = line.partition(word)
        if found:
            return Seen(*(tuple(str(item) for item in part) for part in json.loads(text)))
    return None


def _mapped_drivers() -> list[str]:
    """Drivers that were loaded past Python's eyes, by a library or a loader of its own."""
    paths: set[str] = set()
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/maps").read_text("utf-8", errors="replace").splitlines()
        paths |= {line.split(maxsplit=5)[-1].strip() for line in lines}
        for name in os.listdir("/proc/self/fd"):
            # the descriptor that listed the folder is gone by now
            with contextlib.suppress(OSError):
                paths.add(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(path for path in paths if _DRIVERS.fullmatch(os.path.basename(path)) or _NODES.fullmatch(path))


def _load_core() -> None:
    """Every module of core that needs nothing else, so that a change to any of them shows."""
    for module in pkgutil.iter_modules(backstamp.__path__, "backstamp."):
        if not module.ispkg and not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def _fingerprint() -> dict[str, int]:
    """Every public object of the Backstamp modules loaded so far, and every attribute of their classes."""
    names: dict[str, int] = {}
    for module_name in [name for name in sys.modules if name.partition(".")[0] == "backstamp"]:
        for name, value in list(vars(sys.modules[module_name]).items()):
            if name.startswith("__") or type(value).__name__ == "module":
                continue
            names[f"{module_name}:{name}"] = id(value)
            if isinstance(value, type) and value.__module__ == module_name:
                for attribute, held in list(vars(value).items()):
                    if not attribute.startswith("_abc") and attribute != "__doc__":
                        names[f"{module_name}:{name}.{attribute}"] = id(held)
    return names


def _fingerprint_of(path: str) -> int | None:
    module_name, _, dotted = path.partition(":")
    value: object = sys.modules.get(module_name)
    for part in dotted.split(".", 1):
        held = vars(value) if value is not None else {}
        if part not in held:
            return None
        value = held[part]
    return id(value)


def _main() -> None:
    word = sys.stdin.readline().strip()
    # the plugin prints to standard error: this line is the report's alone
    seen = watch(sys.argv[1], sys.argv[2:])
    sys.stdout.write(f"\n{word}{json.dumps(list(seen))}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _main()
