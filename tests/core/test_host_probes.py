"""Probing this machine: the driver stays untouched, every failed probe keeps its reason, answers are read as they come.

This suite runs on machines without an accelerator; what only such a machine shows skips elsewhere and says so.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from backstamp.errors import BadHost
from backstamp.host import Accelerator, HostFacts, Probe, parse_host, record_host, this_host
from backstamp.probe_child import CHILD, MARK, read_answer
from backstamp.probes import (
    compare_orders,
    cpu_features,
    found_probes,
    installed_libraries,
    read_driver,
    read_management,
)

#: Where any of these is, what only a machine without an accelerator shows does not hold.
NODES = [Path(node) for node in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/dxg", "/dev/davinci0")]
without_accelerator = pytest.mark.skipif(any(node.exists() for node in NODES), reason="needs no accelerator")

COMPUTE = Accelerator("cuda", 0, "10.3", "NVIDIA GB300")
DISPLAY = Accelerator("cuda", 1, "12.0", "NVIDIA RTX PRO 6000")


@pytest.fixture(scope="module")
def here() -> HostFacts:
    """This machine, asked once."""
    return this_host()


def test_asking_for_the_cpu_asks_no_accelerator() -> None:
    """vllm #4858: the device asked for decides, not what a build or a node says."""
    facts = this_host("cpu")
    assert (facts.device, facts.devices) == ("cpu", ())
    assert set(dict(facts.runtimes)) <= {"cpus", "threads"}
    assert [probe.reason for probe in facts.probes if probe.name == "accelerators"] == [
        "not asked: the CPU was asked for"
    ]


def test_the_cpu_is_described_by_the_kernel(here: HostFacts) -> None:
    """Arch, flags and libraries of the machine the tests run on."""
    assert here.cpu_arch in ("x86_64", "aarch64", platform.machine().lower())
    assert here.cpu_features == cpu_features()
    assert here.libraries == installed_libraries()


@pytest.mark.parametrize(
    ("variables", "threads"),
    [
        ({}, None),
        ({"OMP_NUM_THREADS": "4"}, "4"),
        ({"OMP_NUM_THREADS": "4", "MKL_NUM_THREADS": "2"}, "2"),
        ({"OMP_NUM_THREADS": ""}, None),
    ],
    ids=["unset", "omp", "mkl", "empty"],
)
def test_a_cpu_is_so_many_cores_and_threads(
    variables: dict[str, str], threads: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One core of a machine is another machine to time kernels on; torch's threads are those its environment sets."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 5, 7}, raising=False)
    told = {"cpus": "3"} if threads is None else {"cpus": "3", "threads": threads}
    assert dict(this_host("cpu").runtimes) == told
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert dict(this_host("cpu").runtimes)["cpus"] == "12"


@without_accelerator
def test_a_machine_without_an_accelerator_is_its_cpu_with_every_reason_kept(here: HostFacts) -> None:
    """vllm #14195: one line a probe, never a debug log nobody sees."""
    assert (here.device, here.arch, here.origin) == ("cpu", here.cpu_arch, "runtime")
    failed = {probe.name: probe.reason for probe in here.probes if not probe.ok}
    assert failed["cuda device node"] == "none of /dev/nvidiactl, /dev/nvidia0, /dev/nvmap, /dev/dxg"
    assert {"rocm device node", "npu device node", "musa device node"} <= set(failed)
    assert all(reason and "\n" not in reason for reason in failed.values())


@without_accelerator
def test_a_device_that_is_not_here_is_refused_with_its_own_reasons() -> None:
    """The reasons are those of the device asked for."""
    with pytest.raises(BadHost) as caught:
        this_host("rocm")
    assert caught.value.found == "no accelerator"
    assert "rocm device node: none of /dev/kfd" in caught.value.considered
    assert "cuda" not in caught.value.considered


def test_an_unknown_device_word_is_refused_before_anything_is_asked() -> None:
    """`--device cuad` is a typo, not a machine without cuad."""
    with pytest.raises(BadHost) as caught:
        this_host("cuad")
    assert (caught.value.found, caught.value.fix) == ("'cuad'", "Did you mean 'cuda'?")


@pytest.mark.parametrize("asked", ["None", "'cpu'"], ids=["any", "cpu"])
def test_probing_loads_no_torch_and_no_driver_here(asked: str) -> None:
    """vllm #8893: a parent that touched the driver breaks the workers it forks."""
    code = (
        f"import sys; from backstamp.host import this_host; this_host({asked});"
        "print(sorted({'torch', 'triton', 'numpy'} & set(sys.modules)));"
        "maps = open('/proc/self/maps').read() if sys.platform == 'linux' else '';"
        "print([name for name in ('libcuda', 'libamdhip', 'libnvidia-ml') if name in maps])"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.split() == ["[]", "[]"]


def test_a_described_host_needs_no_probing_modules() -> None:
    """Asking about another machine starts no subprocess machinery and reads no metadata."""
    code = (
        "import sys; from backstamp.host import load_host; load_host('h100');"
        "print(sorted({'subprocess', 'importlib_metadata', 'torch'} & set(sys.modules)))"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == "[]"


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("0", False), (None, False)])
def test_the_interpreter_is_read_when_probing(
    monkeypatch: pytest.MonkeyPatch, value: str | None, expected: bool
) -> None:
    """TRITON_INTERPRET=1 and nothing else."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if value is not None:
        monkeypatch.setenv("TRITON_INTERPRET", value)
    assert this_host("cpu").triton_interpreter is expected


def test_this_machine_recorded_reads_back_equal() -> None:
    """`backstamp hosts record`, whatever the machine."""
    text = record_host("cpu")
    facts = parse_host(json.loads(text), "file")
    assert facts == this_host("cpu")
    assert facts.to_json() == text


def test_the_child_answers_on_any_machine_with_torch(tmp_path: Path) -> None:
    """A build without a runtime is a reason, and a file named torch.py beside the caller is not torch."""
    (tmp_path / "torch.py").write_text("raise SystemExit('not torch')", "utf-8")
    child = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True, cwd=tmp_path)
    devices, runtimes, reasons = read_answer(child.stdout)
    assert "torch_npu" in reasons["npu"]
    assert all(item.device in ("cuda", "rocm", "xpu") for item in devices)
    assert bool(devices) <= bool(runtimes)


@pytest.mark.skipif(not Path("/dev/nvidia0").exists(), reason="needs an NVIDIA GPU")
def test_an_nvidia_gpu_is_found_and_numbered_by_the_runtime() -> None:
    """The facts carry the device, its number and who gave it; the CPU stays askable beside it."""
    facts = this_host("cuda")
    assert (facts.device, facts.device_index, facts.origin) == ("cuda", 0, "runtime")
    assert facts.arch.replace(".", "").isdigit()
    assert facts.devices[0].name == facts.device_name
    assert dict(facts.runtimes)["cuda"]
    assert {"cuda", "device order"} <= {probe.name for probe in facts.probes if probe.ok}
    with pytest.raises(BadHost) as caught:
        this_host("cuda", 99)
    assert facts.device_name in caught.value.found


def answer(**changes: object) -> str:
    """A child's output with other lines around the answer."""
    whole = {"devices": [["cuda", 0, "9.0", "NVIDIA H200"]], "runtimes": {"cuda": "13.0"}, "reasons": {}, **changes}
    return f"a warning\n{MARK}{json.dumps(whole)}\n"


def test_an_answer_is_found_among_other_lines() -> None:
    """Libraries print at import; the answer is the marked line."""
    devices, runtimes, _ = read_answer(answer())
    assert (devices, runtimes) == ((Accelerator("cuda", 0, "9.0", "NVIDIA H200"),), {"cuda": "13.0"})


@pytest.mark.parametrize(
    "stdout",
    ["", "a warning\n", f"{MARK}{{\n", answer(devices=[["gpu", 0, "9.0", "x"]])],
    ids=["nothing", "no-answer", "cut", "unknown-device"],
)
def test_what_is_no_answer_is_an_error(stdout: str) -> None:
    """A child that died half-way gives no devices, and never half of them."""
    with pytest.raises(ValueError, match=r"answer|Expecting|unknown device"):
        read_answer(stdout)


def test_a_kind_with_nodes_that_torch_does_not_see_keeps_torchs_reason() -> None:
    """A CPU build of torch on a machine with a card is a reason, not silence."""
    reasons = {"rocm": "torch 2.13.0 is built without rocm", "npu": "first line\nsecond line"}
    assert found_probes(("cuda", "rocm", "npu", "musa"), (COMPUTE, DISPLAY), reasons) == [
        Probe("cuda", True, "2 found"),
        Probe("rocm", False, "torch 2.13.0 is built without rocm"),
        Probe("npu", False, "first line second line"),
        Probe("musa", False, "torch sees none"),
    ]


def test_the_management_tool_numbers_by_line() -> None:
    """`nvidia-smi` prints name and capability, in bus order."""
    assert read_management("NVIDIA RTX PRO 6000, 12.0\nNVIDIA GB300, 10.3\n") == (
        Accelerator("cuda", 0, "12.0", "NVIDIA RTX PRO 6000"),
        Accelerator("cuda", 1, "10.3", "NVIDIA GB300"),
    )
    assert read_management("") == ()


def test_two_numberings_that_disagree_are_told() -> None:
    """vllm #53834: the management tool's device 0 is the display card, the runtime's is the compute card."""
    management = read_management("NVIDIA RTX PRO 6000, 12.0\nNVIDIA GB300, 10.3\n")
    probe = compare_orders((COMPUTE, DISPLAY), management)
    assert not probe.ok
    assert "device 0 is NVIDIA GB300 (10.3) to the runtime, NVIDIA RTX PRO 6000 (12.0)" in probe.reason


def test_two_numberings_that_agree_are_told_too() -> None:
    """And a runtime that sees a part of the devices is no disagreement."""
    management = read_management("NVIDIA GB300, 10.3\nNVIDIA RTX PRO 6000, 12.0\n")
    assert compare_orders((COMPUTE, DISPLAY), management).ok
    assert compare_orders((COMPUTE,), management).reason == "the runtime sees 1 of 2 devices of the management tool"


def test_library_names_are_canonical_and_the_first_on_the_path_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """importlib_metadata #410: one distribution seen twice is the one an import would take."""
    for folder, names in {
        "first": {"Flash_Attn_3-3.0.1.dist-info": "", "own.egg-info": "Name: Own.Kernels\nVersion: 7.1\n\nName: no\n"},
        "second": {"flash_attn_3-2.0.dist-info": "", "half_removed.egg-info": "", "triton-9.9+cu.dist-info": ""},
    }.items():
        for name, text in names.items():
            (tmp_path / folder / name).mkdir(parents=True)
            if text:
                (tmp_path / folder / name / "PKG-INFO").write_text(text, "utf-8")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "first"), str(tmp_path / "second")])
    assert installed_libraries() == (("flash-attn-3", "3.0.1"), ("own-kernels", "7.1"), ("triton", "9.9+cu"))


def test_a_missing_torch_is_a_failed_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without torch says so in one line."""
    # loaded while it can still be found
    assert this_host("cpu").probes[0].ok
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert this_host("cpu").probes[0] == Probe("torch", False, "not installed")


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu\nGCC version:  gcc 12.3.0",
            "570.86.15",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build", "580.65.06"),
        ("6.12.12\n", "6.12.12"),
        ("", ""),
    ],
    ids=["nvidia", "nvidia-open", "amdgpu", "empty"],
)
def test_the_driver_is_a_runtime_with_a_version(text: str, version: str) -> None:
    """Times are kept by it: a driver compiles what a kernel left as PTX, and schedules all of them."""
    assert read_driver(text) == version
