"""Device nodes: which kinds of accelerator this machine could have, without asking any driver.

In: this machine's file system. Out: kinds of device and a `Probe` each. It opens nothing.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from backstamp.host import Device, Probe

__all__ = ["device_nodes", "kinds_with_nodes"]

#: Device nodes whose presence makes asking worth a child process; /dev/dxg is WSL's, /dev/nvmap Jetson's.
_NODES: Final[Mapping[Device, tuple[str, ...]]] = {
    "cuda": ("/dev/nvidiactl", "/dev/nvidia0", "/dev/nvmap", "/dev/dxg"),
    "rocm": ("/dev/kfd",),
    "npu": ("/dev/davinci_manager", "/dev/davinci0"),
    "musa": ("/dev/mtgpu.0",),
}
#: PCI vendor of Intel's render nodes: a node of another vendor is no xpu.
_INTEL: Final = "0x8086"


def device_nodes(kind: str) -> tuple[bool, str]:
    """Whether this machine has a device node of a kind, and which were looked for or found."""
    probes: list[Probe] = []
    found = kind in kinds_with_nodes(probes)
    return found, next((probe.reason for probe in probes if probe.name == f"{kind} device node"), f"no {kind} known")


def kinds_with_nodes(probes: list[Probe]) -> list[Device]:
    """The kinds of device this machine has nodes of, with a probe for each kind."""
    kinds: list[Device] = []
    for kind, nodes in _NODES.items():
        here = [node for node in nodes if Path(node).exists()]
        probes.append(Probe(f"{kind} device node", bool(here), here[0] if here else f"none of {', '.join(nodes)}"))
        if here:
            kinds.append(kind)
    render = [path for path in sorted(Path("/sys/class/drm").glob("renderD*")) if _vendor(path) == _INTEL]
    reason = f"/dev/dri/{render[0].name}" if render else "no Intel render node under /sys/class/drm"
    probes.append(Probe("xpu device node", bool(render), reason))
    return [*kinds, "xpu"] if render else kinds


def _vendor(node: Path) -> str:
    try:
        return (node / "device" / "vendor").read_text("utf-8").strip()
    except OSError:
        return ""
