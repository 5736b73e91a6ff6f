"""Case 45, vllm #4858: the device asked for decides, not the flavour of the build that is installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from backstamp.errors import BadHost
from backstamp.host import this_host
from backstamp.testing.dists import write_distribution, write_plugin
from tests.sites import python

PROGRAM = """\
import json, sys
touched = []
def hear(event, arguments):
    if event in ("subprocess.Popen", "os.posix_spawn", "os.system", "ctypes.dlopen"):
        touched.append(event)
    if event == "open" and isinstance(arguments[0], str) and arguments[0].startswith(("/dev/nvidia", "/dev/kfd")):
        touched.append(arguments[0])
sys.addaudithook(hear)
import backstamp as b
host = b.this_host("cpu")
catalogue = b.build_catalogue(b.discover())
asked = b.Requests(attention_backend="plain")
plan = b.resolve(b.make_launch(asked), b.EngineFacts(), b.default_model(), host, catalogue)
answer = {
    "device": host.device,
    "torch": dict(host.libraries)["torch"],
    "kernel": plan.phase("decode").kernel,
    "touched": touched,
    "torch_loaded": "torch" in sys.modules,
}
print(json.dumps(answer))
"""


def test_a_cuda_build_on_a_cpu_request_is_never_asked(tmp_path: Path) -> None:
    """vllm #4858: a CUDA build is installed, the CPU is asked for: a CPU kernel, and no driver, child or torch."""
    site = tmp_path / "site-packages"
    write_plugin(site, "plain", kernel="plain", carries_json=True)
    write_distribution(site, "torch", version="2.13.0+cu130")
    child = python(PROGRAM, site)
    assert child.returncode == 0, child.stderr
    assert json.loads(child.stdout) == {
        "device": "cpu",
        "torch": "2.13.0+cu130",
        "kernel": "plain",
        "touched": [],
        "torch_loaded": False,
    }


def test_a_cuda_request_without_that_device_is_an_error() -> None:
    """vllm #4858: device 99 is on no machine these tests run on; the reasons of every probe are told."""
    with pytest.raises(BadHost) as caught:
        this_host("cuda", 99)
    assert "device cuda 99" in caught.value.who
    assert caught.value.found
