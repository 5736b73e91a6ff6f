"""Questions put to this machine: device nodes, a child process that asks torch, CPU flags, installed distributions.

In: the device asked for, if any. Out: `HostFacts` with one `Probe` a question. The calling process initialises no
driver and imports no torch: accelerators are asked in a child with a timeout, and only where a device node exists.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Final, TypedDict, cast

import importlib_metadata

from backstamp.errors import BadHost
from backstamp.host import Device, HostFacts, Probe
from backstamp.text import plain

__all__ = ["cpu_features", "installed_libraries", "probe_machine"]

_TIMEOUT_S: Final = 120.0
#: Device nodes whose presence makes asking torch worth a child process; /dev/dxg is WSL's.
_NODES: Final = {
    "cuda": ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg"),
    "rocm": ("/dev/kfd",),
    "npu": ("/dev/davinci_manager", "/dev/davinci0"),
    "musa": ("/dev/mtgpu.0",),
    "xpu": ("/dev/dri/renderD128",),
}
#: What the child runs: it imports torch, asks the runtime for its own numbering, and prints one JSON line.
_CHILD: Final = """
import json, sys, torch
answer = {"devices": [], "runtimes": {}}
if torch.version.cuda: answer["runtimes"]["cuda"] = torch.version.cuda
if getattr(torch.version, "hip", None): answer["runtimes"]["rocm"] = ".".join(torch.version.hip.split(".")[:2])
for name, module in (("npu", "torch_npu"), ("musa", "torch_musa")):
    try: __import__(module)
    except Exception: pass
hip = bool(getattr(torch.version, "hip", None))
if torch.cuda.is_available():
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        arch = facts.gcnArchName.split(":")[0] if hip else f"{facts.major}.{facts.minor}"
        answer["devices"].append(["rocm" if hip else "cuda", index, arch, facts.name])
for name in ("npu", "musa", "xpu"):
    backend = getattr(torch, name, None)
    if backend is not None and backend.is_available():
        for index in range(backend.device_count()):
            label = backend.get_device_name(index)
            answer["devices"].append([name, index, label.lower().replace(" ", ""), label])
print("BACKSTAMP" + json.dumps(answer))
"""


class _Answer(TypedDict):
    devices: list[list[object]]
    runtimes: dict[str, str]


def probe_machine(device: str | None, index: int) -> HostFacts:
    """Everything this machine says about itself.

    Raises:
        BadHost: the device asked for is not here; the message carries every failed probe's reason.
    """
    probes: list[Probe] = []
    libraries = installed_libraries()
    versions = dict(libraries)
    probes.append(_library_probe("torch", versions))
    answer = _ask_accelerators(device, versions, probes)
    found = [item for item in answer["devices"] if device in (None, item[0]) and item[1] == index]
    features = cpu_features()
    probes.append(Probe("cpu features", bool(features), f"{len(features)} flags" if features else "none reported"))
    interpreter = os.environ.get("TRITON_INTERPRET") == "1"
    if device not in (None, "cpu") and not found:
        reasons = "; ".join(f"{probe.name}: {probe.reason}" for probe in probes if not probe.ok)
        raise BadHost(
            f"device {device} {index}",
            needed=f"a {device} device {index} on this machine",
            found="none",
            considered=reasons,
            fix="Ask about another machine with --host, or leave --device out",
        )
    if device != "cpu" and found:
        kind, _, arch, label = found[0]
        return HostFacts(
            name="this host",
            device=cast("Device", kind),
            arch=str(arch),
            device_name=str(label),
            device_index=index,
            origin="runtime",
            cpu_features=features,
            runtimes=tuple(sorted(answer["runtimes"].items())),
            libraries=libraries,
            probes=tuple(probes),
            triton_interpreter=interpreter,
        )
    return HostFacts(
        name="this host",
        device="cpu",
        arch=platform.machine(),
        device_name=platform.processor() or platform.machine(),
        origin="runtime",
        cpu_features=features,
        libraries=libraries,
        probes=tuple(probes),
        triton_interpreter=interpreter,
    )


def installed_libraries() -> tuple[tuple[str, str], ...]:
    """Every installed distribution and its version, from the names of metadata folders; the first on the path wins."""
    versions: dict[str, str] = {}
    for distribution in importlib_metadata.distributions():
        folder = getattr(distribution, "_path", None)
        stem, dot, kind = (folder.name if folder is not None else "").rpartition(".")
        name, dash, version = stem.partition("-")
        if not (dot and dash and kind == "dist-info"):
            # an egg or an odd folder: its own metadata is slower and always right
            name, version = str(distribution.metadata["Name"]), distribution.version
        versions.setdefault(name.lower().replace("_", "-").replace(".", "-"), version)
    return tuple(sorted(versions.items()))


def cpu_features() -> frozenset[str]:
    """CPU flags as the kernel reports them."""
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        label, _, flags = line.partition(":")
        # x86 says flags, Arm says Features
        if label.strip() in ("flags", "Features"):
            return frozenset(flags.split())
    return frozenset()


def _library_probe(name: str, versions: dict[str, str]) -> Probe:
    return Probe(name, name in versions, versions.get(name, f"{name} is not installed"))


def _ask_accelerators(device: str | None, versions: dict[str, str], probes: list[Probe]) -> _Answer:
    """Ask torch in a child process, where a device node says there is something to ask about."""
    nothing: _Answer = {"devices": [], "runtimes": {}}
    if device == "cpu":
        probes.append(Probe("accelerators", False, "not asked: the CPU was asked for"))
        return nothing
    present = False
    for kind, nodes in _NODES.items():
        here = [node for node in nodes if Path(node).exists()]
        probes.append(Probe(f"{kind} device node", bool(here), here[0] if here else f"none of {', '.join(nodes)}"))
        present = present or bool(here)
    if not present:
        return nothing
    if "torch" not in versions:
        probes.append(Probe("accelerators", False, "torch is not installed, and it is torch that is asked"))
        return nothing
    try:
        child = subprocess.run(
            [sys.executable, "-c", _CHILD], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as cause:
        probes.append(Probe("accelerators", False, plain(f"torch in a child process: {cause}")))
        return nothing
    for line in child.stdout.splitlines():
        if line.startswith("BACKSTAMP"):
            answer = cast("_Answer", json.loads(line.removeprefix("BACKSTAMP")))
            count = len(answer["devices"])
            probes.append(Probe("accelerators", count > 0, f"{count} found" if count else "torch sees none"))
            return answer
    last = child.stderr.strip().splitlines()[-1:] or [f"exit status {child.returncode}"]
    probes.append(Probe("accelerators", False, plain(f"torch in a child process: {last[0]}")))
    return nothing
