"""Questions put to this machine: device nodes, the management tool, torch in a child process, CPU flags, libraries.

In: the device asked for, if any. Out: `HostFacts` with one `Probe` a question. The calling process initialises no
driver and imports no torch: accelerators are asked in a child with a timeout (`backstamp.probe_child`), and only where
a device node says there is one to ask about.

.. versionadded:: 0.1
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, get_args

import importlib_metadata

from backstamp.device_nodes import kinds_with_nodes
from backstamp.errors import BadHost
from backstamp.host import Accelerator, Device, HostFacts, Origin, Probe
from backstamp.probe_child import CHILD, read_answer
from backstamp.text import plain

__all__ = [
    "compare_orders",
    "cpu_features",
    "found_probes",
    "installed_libraries",
    "probe_machine",
    "read_driver",
    "read_management",
]

#: Importing torch and starting a driver from a cold disk takes tens of seconds, and this runs once a process.
_TIMEOUT_S: Final = 120.0
#: Names `platform.machine` gives on other systems.
_CPU_ARCHS: Final = {"amd64": "x86_64", "arm64": "aarch64"}
_QUERY: Final = ("--query-gpu=name,compute_cap", "--format=csv,noheader")


class _Texts(Protocol):
    def read_text(self, filename: str) -> str | None: ...


@dataclass(frozen=True, slots=True)
class _Seen:
    """Accelerators, who numbered them, and the runtimes that came with the answer."""

    devices: tuple[Accelerator, ...] = ()
    origin: Origin = "runtime"
    runtimes: tuple[tuple[str, str], ...] = ()


def probe_machine(device: Device | str | None, index: int) -> HostFacts:
    """Everything this machine says about itself.

    Raises:
        BadHost: the device asked for is not here; the message carries every failed probe's reason.
    """
    probes: list[Probe] = []
    libraries = installed_libraries()
    versions = dict(libraries)
    probes.append(Probe("torch", "torch" in versions, versions.get("torch", "not installed")))
    seen = _accelerators(device, versions, probes)
    wanted = [item for item in seen.devices if device in (None, item.device) and item.index == index]
    features = cpu_features()
    probes.append(Probe("cpu features", bool(features), f"{len(features)} flags" if features else "none reported"))
    if device not in (None, "cpu") and not wanted:
        raise _no_device(str(device), index, seen, probes)
    machine = platform.machine().lower()
    cpu_arch = _CPU_ARCHS.get(machine, machine)
    chosen = wanted[0] if wanted and device != "cpu" else None
    beside = _driver(chosen.device) if chosen is not None else _cpu_share()
    return HostFacts(
        name="this host",
        device=chosen.device if chosen is not None else "cpu",
        arch=chosen.arch if chosen is not None else cpu_arch,
        device_name=chosen.name if chosen is not None else _cpu_name() or cpu_arch,
        device_index=chosen.index if chosen is not None else 0,
        origin=seen.origin,
        cpu_arch=cpu_arch,
        cpu_features=features,
        runtimes=tuple(sorted((*seen.runtimes, *beside))),
        libraries=libraries,
        devices=seen.devices,
        probes=tuple(probes),
        triton_interpreter=os.environ.get("TRITON_INTERPRET") == "1",
    )


def installed_libraries() -> tuple[tuple[str, str], ...]:
    """Every installed distribution and its version, canonical names; the first on the path wins, as it does for an
    import."""
    versions: dict[str, str] = {}
    for distribution in importlib_metadata.distributions():
        # private, and the only way to the folder's name: it spares reading hundreds of files; without it they are read
        folder = getattr(distribution, "_path", None)
        named = _from_folder(folder.name if folder is not None else "") or _from_text(distribution)
        if named is not None:
            versions.setdefault(re.sub(r"[-_.]+", "-", named[0]).lower(), named[1])
    return tuple(sorted(versions.items()))


def cpu_features() -> frozenset[str]:
    """CPU flags as the kernel reports them; Arm's `asimd` is also known as `neon`."""
    for line in _cpuinfo():
        label, _, flags = line.partition(":")
        # x86 says flags, Arm says Features
        if label.strip() in ("flags", "Features"):
            words = frozenset(flags.split())
            return words | {"neon"} if "asimd" in words else words
    return frozenset()


def found_probes(kinds: Sequence[Device], devices: Sequence[Accelerator], reasons: Mapping[str, str]) -> list[Probe]:
    """One probe for each kind that has device nodes: how many torch sees, or why none."""
    counts = {kind: sum(item.device == kind for item in devices) for kind in kinds}
    return [
        Probe(kind, count > 0, f"{count} found" if count else plain(reasons.get(kind, "torch sees none")))
        for kind, count in counts.items()
    ]


def read_management(stdout: str) -> tuple[Accelerator, ...]:
    """NVIDIA's management tool's list, `name, capability` a line, in its own order."""
    rows = [line.rsplit(",", 1) for line in stdout.splitlines() if "," in line]
    return tuple(Accelerator("cuda", at, arch.strip(), name.strip()) for at, (name, arch) in enumerate(rows))


def compare_orders(runtime: tuple[Accelerator, ...], management: tuple[Accelerator, ...]) -> Probe:
    """Whether runtime and management number the devices alike; the runtime's numbers are the facts either way.

    Source: vLLM #53834, where gates read the display card's facts for the compute card.
    """
    name = "device order"
    if len(runtime) != len(management):
        text = f"the runtime sees {len(runtime)} of {len(management)} devices of the management tool"
        return Probe(name, True, text)
    for ours, theirs in zip(runtime, management, strict=True):
        if (ours.arch, ours.name) != (theirs.arch, theirs.name):
            text = f"device {ours.index} is {ours.name} ({ours.arch}) to the runtime, {theirs.name} ({theirs.arch})"
            return Probe(name, False, f"{text} to the management tool; the runtime's numbers are used")
    return Probe(name, True, "runtime and management tool agree")


def _accelerators(device: str | None, versions: Mapping[str, str], probes: list[Probe]) -> _Seen:
    """Ask for accelerators where device nodes say there is something to ask about."""
    if device == "cpu":
        probes.append(Probe("accelerators", False, "not asked: the CPU was asked for"))
        return _Seen()
    kinds = kinds_with_nodes(probes)
    if not kinds:
        return _Seen()
    management = _ask_management(probes) if "cuda" in kinds else ()
    if "torch" not in versions:
        probes.append(Probe("accelerators", False, "torch is not installed, and it is torch that is asked"))
        return _Seen(management, "management")
    seen = _ask_torch(kinds, probes)
    if seen is None:
        return _Seen(management, "management")
    if management and seen.devices:
        probes.append(compare_orders(seen.devices, management))
    return seen


def _ask_management(probes: list[Probe]) -> tuple[Accelerator, ...]:
    """NVIDIA's management tool: it numbers by bus, needs no torch, and initialises nothing here."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        probes.append(Probe("nvidia-smi", False, "not on the path"))
        return ()
    child = _run([tool, *_QUERY], "nvidia-smi", probes)
    if child is None:
        return ()
    devices = read_management(child.stdout)
    probes.append(Probe("nvidia-smi", bool(devices), f"{len(devices)} devices" if devices else _last_line(child)))
    return devices


def _ask_torch(kinds: list[Device], probes: list[Probe]) -> _Seen | None:
    """torch in a child process; None where it could not answer."""
    child = _run([sys.executable, "-c", CHILD], "accelerators", probes)
    if child is None:
        return None
    try:
        devices, runtimes, reasons = read_answer(child.stdout)
    except (ValueError, TypeError, KeyError) as cause:
        why = _last_line(child) if child.returncode != 0 else str(cause)
        probes.append(Probe("accelerators", False, plain(f"torch in a child process: {why}")))
        return None
    probes += found_probes(kinds, devices, reasons)
    # the runtimes of a torch that sees no device are no fact of this machine's devices
    return _Seen(devices, "runtime", tuple(sorted(runtimes.items())) if devices else ())


def _run(command: list[str], name: str, probes: list[Probe]) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        probes.append(Probe(name, False, f"no answer in {_TIMEOUT_S:.0f} s"))
    except (OSError, ValueError) as cause:
        probes.append(Probe(name, False, plain(str(cause))))
    return None


def _last_line(child: subprocess.CompletedProcess[str]) -> str:
    lines = (child.stderr.strip() or child.stdout.strip()).splitlines()
    return plain(lines[-1]) if lines else f"exit status {child.returncode}"


def _no_device(device: str, index: int, seen: _Seen, probes: list[Probe]) -> BadHost:
    # what is said of other kinds of device is no reason for this one
    others = {f"{kind} device node" for kind in get_args(Device) if kind != device}
    here = ", ".join(f"{item.device} {item.index} ({item.name})" for item in seen.devices)
    return BadHost(
        f"device {device} {index}",
        needed=f"a {device} device {index} on this machine",
        found=here or "no accelerator",
        considered="; ".join(
            f"{item.name}: {item.reason}" for item in probes if not item.ok and item.name not in others
        ),
        fix="Ask about another machine with --host, or leave --device out",
    )


#: Where the kernel says which driver is loaded; times are kept by it.
_DRIVERS: Final = {"cuda": "/proc/driver/nvidia/version", "rocm": "/sys/module/amdgpu/version"}


def read_driver(text: str) -> str:
    """The first version in what the kernel says of a driver; empty where there is none."""
    found = re.search(r"(?<![\w.])\d+(?:\.\d+)+", text)
    return found.group() if found is not None else ""


def _driver(device: str) -> tuple[tuple[str, str], ...]:
    try:
        version = read_driver(Path(_DRIVERS[device]).read_text("utf-8", errors="replace"))
    except (KeyError, OSError):
        return ()
    return (("driver", version),) if version else ()


def _cpu_share() -> tuple[tuple[str, str], ...]:
    """How much of the CPU this process has; times are kept by it. Nothing here imports torch, so that its threads are
    known only where its environment sets them."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = os.environ.get("MKL_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS")
    pairs = (("cpus", cpus), ("threads", threads))
    return tuple((name, plain(str(value))) for name, value in pairs if value)


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _cpu_name() -> str:
    for line in _cpuinfo():
        label, _, value = line.partition(":")
        if label.strip() == "model name":
            return value.strip()
    return platform.processor()


def _from_folder(folder: str) -> tuple[str, str] | None:
    """Name and version out of "name-version.dist-info"; other folders do not carry both reliably."""
    name, dash, version = folder.removesuffix(".dist-info").partition("-")
    return (name, version) if folder.endswith(".dist-info") and dash and name and version else None


def _from_text(distribution: _Texts) -> tuple[str, str] | None:
    """Name and version out of the metadata's own lines; None where a half-removed folder has none.

    A library without a version is installed all the same: "unknown" satisfies no requirement, and is told as such.
    Source: flashinfer #3044, transformers #43060.
    """
    text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    found: dict[str, str] = {}
    for line in text.splitlines():
        if not line.strip():
            break
        label, _, value = line.partition(":")
        found.setdefault(label.strip().lower(), value.strip())
    return (found["name"], found.get("version") or "unknown") if found.get("name") else None
