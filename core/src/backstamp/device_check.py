"""Whether a plan's device is the runner's, and on this machine, before any factory runs.

In: a plan and the runner's device string. Out: nothing, or an error. It looks for device nodes and starts no driver.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from backstamp.errors import NoDevice
from backstamp.plan import Plan

__all__ = ["check_device", "torch_device"]

#: What torch calls the devices that host facts name otherwise.
_TORCH_NAMES: Final[Mapping[str, str]] = {"rocm": "cuda"}


def torch_device(device: str) -> str:
    """The torch device string of host facts' first device, for example "cuda:0" for rocm."""
    name = _TORCH_NAMES.get(device, device)
    return name if name == "cpu" else f"{name}:0"


def check_device(plan: Plan, device: str) -> None:
    """Refuse to build a plan for a machine that is not this one.

    Raises:
        NoDevice: the runner's device is another kind, or this machine has no device node of the plan's kind.
    """
    who = f"{plan.role} of {plan.model}, resolved for {plan.host}"
    fix = f"Build on a machine like {plan.host}, or resolve for this one"
    wanted = _TORCH_NAMES.get(plan.device, plan.device)
    if device.partition(":")[0] != wanted:
        raise NoDevice(who, needed=f"a {plan.device} device", found=f"a runner on {device!r}", fix=fix)
    if plan.device == "cpu":
        return
    # probing costs imports that a build without a device does not need
    from backstamp.device_nodes import device_nodes

    found, looked_for = device_nodes(plan.device)
    if not found:
        raise NoDevice(who, needed=f"a {plan.device} device", found=f"no device: {looked_for}", fix=fix)
