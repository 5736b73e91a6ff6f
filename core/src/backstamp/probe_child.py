"""What the probing child process runs, and how its answer is read: it imports torch and asks each runtime.

In: nothing. Out: `CHILD`, the text of a program for `python -c` that prints one line of JSON, and `read_answer`. A
runtime that fails to answer is a reason in the answer, never the end of it.

.. versionadded:: 0.1
"""

from __future__ import annotations

import json
from typing import Final, get_args

from backstamp.host import Accelerator, Device

__all__ = ["CHILD", "MARK", "read_answer"]

#: What the answer's line begins with.
MARK: Final = "BACKSTAMP-DEVICES "

#: Archs are spelled as profiles spell them: "9.0", "gfx942", "ascend910b", "3.1", "pvc".
CHILD: Final = f"""
import os, sys
# python -c puts the current directory first, where a file named torch.py would be taken for torch
sys.path[:] = [entry for entry in sys.path if entry and os.path.abspath(entry) != os.getcwd()]
import json, re, torch
answer = {{"devices": [], "runtimes": {{}}, "reasons": {{}}}}

def add(kind, index, arch, name):
    answer["devices"].append([kind, index, arch, name])

def ask_cuda():
    hip = torch.version.hip
    kind = "rocm" if hip else "cuda"
    for other in ("cuda", "rocm"):
        answer["reasons"][other] = f"torch {{torch.__version__}} is built without {{other}}"
    if not hip and not torch.version.cuda:
        return
    answer["runtimes"][kind] = ".".join(hip.split(".")[:2]) if hip else torch.version.cuda
    answer["reasons"][kind] = f"torch {{torch.__version__}} sees none"
    torch.cuda.init()
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        add(kind, index, facts.gcnArchName.split(":")[0] if hip else f"{{facts.major}}.{{facts.minor}}", facts.name)

def ask_npu():
    import torch_npu
    for index in range(torch.npu.device_count()):
        name = torch.npu.get_device_name(index)
        # Ascend910B3 is a speed grade of ascend910b
        found = re.match(r"ascend\\d+[a-z]?", name.lower())
        add("npu", index, found.group() if found else name.lower(), name)

def ask_musa():
    import torch_musa
    answer["runtimes"]["musa"] = str(torch.version.musa)
    for index in range(torch.musa.device_count()):
        major, minor = torch.musa.get_device_capability(index)
        add("musa", index, f"{{major}}.{{minor}}", torch.musa.get_device_name(index))

def ask_xpu():
    for index in range(torch.xpu.device_count()):
        name = torch.xpu.get_device_name(index)
        add("xpu", index, "pvc" if "GPU Max" in name else name.lower().replace(" ", "-"), name)

for kind, ask in (("cuda", ask_cuda), ("npu", ask_npu), ("musa", ask_musa), ("xpu", ask_xpu)):
    try:
        ask()
    except Exception as cause:
        reason = f"{{type(cause).__name__}}: {{cause}}"
        for name in ("rocm", "cuda") if kind == "cuda" else (kind,):
            if kind != "cuda" or name in answer["runtimes"]:
                answer["reasons"][name] = reason
print({MARK!r} + json.dumps(answer))
"""


def read_answer(stdout: str) -> tuple[tuple[Accelerator, ...], dict[str, str], dict[str, str]]:
    """What the child printed: devices, runtimes, and a reason for each kind it found none of.

    Raises:
        ValueError: there is no answer among the lines, or it is not one.
    """
    lines = [line for line in stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        raise ValueError("it printed no answer")
    answer = json.loads(lines[-1].removeprefix(MARK))
    devices = tuple(Accelerator(*item) for item in answer["devices"])
    if any(item.device not in get_args(Device) for item in devices):
        raise ValueError(f"it named an unknown device in {answer['devices']!r}")
    return devices, dict(answer["runtimes"]), dict(answer["reasons"])
