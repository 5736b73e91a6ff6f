"""Discovery must be pure: reading a plugin's declarations imports no torch, no kernel library, and asks no driver.

In: a `Subject`. Out: jobs. A child process has a deny list, fake driver libraries and fake driver tools on its paths,
and an audit hook that writes down who reached for any of them; then it discovers the plugin and imports its module.

.. versionadded:: 0.2
"""

from __future__ import annotations

import ctypes.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from backstamp.installation import library_name
from backstamp.testing.conformance.subject import Job, Subject

__all__ = ["DENIED_MODULES", "DRIVER_LIBRARIES", "DRIVER_TOOLS", "import_jobs"]

#: Modules no declaration needs: torch, what compiles or loads kernels, and bindings of drivers.
DENIED_MODULES: Final = (
    *("torch", "triton", "jax", "tensorflow", "cupy", "numba", "cutlass", "tvm", "tvm_ffi", "transformers"),
    *("flashinfer", "flash_attn", "flash_attn_interface", "fla", "flash_mla", "sgl_kernel", "aiter", "torch_npu"),
    *("vllm", "sglang", "pynvml", "cuda", "amdsmi", "pyrsmi"),
)
DRIVER_LIBRARIES: Final = (
    *("libcuda.so.1", "libcudart.so", "libcudart.so.12", "libcudart.so.13", "libnvidia-ml.so.1"),
    *("libamdhip64.so", "librocm_smi64.so", "libascendcl.so", "libmusa.so", "libze_loader.so.1"),
)
DRIVER_TOOLS: Final = ("nvidia-smi", "rocm-smi", "amd-smi", "rocminfo", "npu-smi", "mthreads-gmi", "xpu-smi")
_TIMEOUT_S: Final = 120
#: Runs in the child: the deny list comes as JSON, what was reached for goes out as JSON on the last line.
_CHILD: Final = """
import json, sys
asked = json.loads(sys.argv[1])
touched = {}
denied, drivers, tools = (frozenset(asked[name]) for name in ("denied", "drivers", "tools"))

def where():
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.partition(".")[0] in asked["packages"]:
            return f"{name}, line {frame.f_lineno}"
        frame = frame.f_back
    return ""

def audit(event, arguments):
    what = None
    if event == "import" and str(arguments[0]).partition(".")[0] in denied:
        what = f"imported {str(arguments[0]).partition('.')[0]}"
    elif event == "ctypes.dlopen" and any(name in str(arguments[0]) for name in drivers):
        what = f"loaded the driver library {arguments[0]}"
    elif event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn"):
        words = " ".join(map(str, arguments[:2]))
        found = [tool for tool in tools if tool in words]
        what = f"ran {found[0]}" if found else None
    elif event == "open" and str(arguments[0]).startswith(("/dev/nvidia", "/dev/kfd", "/dev/davinci", "/proc/driver/")):
        what = f"opened {arguments[0]}"
    # what another plugin does while it is discovered, or a .pth file, is none of this one's doing
    place = where() if what is not None else ""
    if place:
        touched.setdefault(f"{what} ({place})", None)

sys.addaudithook(audit)
from backstamp.catalogue import build_catalogue
from backstamp.discovery import discover, import_plugin
found = discover()
build_catalogue(found)
error = ""
try:
    import_plugin(asked["module"])
except BaseException as cause:
    error = f"{type(cause).__name__}: {cause}"
print(json.dumps({"touched": list(touched), "error": error}))
"""


def import_jobs(subject: Subject) -> Iterator[Job]:
    """One job: what a child that only discovers reaches for."""
    fix = "Move it into backend.py, inside the factory: plugin.py imports backstamp and nothing else"
    yield Job("imports", f"plugin {subject.found.plugin.name}: discovery", lambda: _faults(subject), fix)


def _faults(subject: Subject) -> str:
    libraries = {library_name(text) for offer in subject.found.declared.offers for text in offer.requires}
    denied = sorted({*DENIED_MODULES, *(name.replace("-", "_") for name in libraries)})
    asked = {
        "module": subject.found.module,
        "packages": sorted(subject.found.packages),
        "denied": denied,
        "drivers": [name.partition(".")[0] for name in DRIVER_LIBRARIES],
        "tools": DRIVER_TOOLS,
    }
    with tempfile.TemporaryDirectory(prefix="backstamp-conformance-") as folder:
        try:
            child = subprocess.run(
                [sys.executable, "-c", _CHILD, json.dumps(asked)],
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                env=_environment(Path(folder)),
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"reading its declarations did not end within {_TIMEOUT_S} s"
    lines = child.stdout.strip().splitlines()
    if child.returncode or not lines:
        end = child.stderr.strip().splitlines()[-1:] or ["without a word"]
        return f"discovery ended its process (exit {child.returncode}): {end[0]}"
    answer = json.loads(lines[-1])
    faults = [str(touch) for touch in answer["touched"]]
    faults += [f"raised {answer['error']}"] if answer["error"] else []
    if lines[:-1]:
        faults.append(f"printed {lines[0]!r}")
    return f"reading its declarations {'; '.join(faults)}" if faults else ""


def _environment(folder: Path) -> dict[str, str]:
    """This environment with a driver that is none: libraries that load and do nothing, tools that answer nothing."""
    harmless = _harmless_library()
    for name in DRIVER_LIBRARIES if harmless is not None else ():
        shutil.copy(str(harmless), folder / name)
    for name in DRIVER_TOOLS:
        tool = folder / name
        tool.write_text("#!/bin/sh\nexit 0\n", "utf-8")
        tool.chmod(0o755)
    kept = dict(os.environ)
    for name in ("PATH", "LD_LIBRARY_PATH"):
        kept[name] = os.pathsep.join(filter(None, (str(folder), kept.get(name, ""))))
    return kept


def _harmless_library() -> Path | None:
    """A shared library of the system that does nothing when it is loaded; None where none is found."""
    name = ctypes.util.find_library("m")
    if name is None:
        return None
    for folder in ("/lib/x86_64-linux-gnu", "/lib/aarch64-linux-gnu", "/usr/lib64", "/lib64", "/usr/lib", "/lib"):
        if (Path(folder) / name).is_file():
            return Path(folder) / name
    return None
