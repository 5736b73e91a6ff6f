"""Case 49, vllm #8893, #32611, #14910; numba #548: nothing in the parent starts a driver, and who does is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from backstamp.testing.dists import PLUGIN_SOURCE, write_plugin
from tests.sites import command, python

#: A kernel library whose import starts a driver, and counts.
DRIVER = "import os\nwith open(os.environ['COUNT_FILE'], 'a') as file:\n    file.write(f'{os.getpid()}\\n')\n"
BACKEND = """\
import fake_driver
from backstamp.factories import Built

class Backend:
    def plan(self, batch):
        return batch

    def forward(self, q, kv, layer, state):
        return q

def build(request):
    return Built(request.kernel, Backend())
"""
FORKED = """\
import os
import backstamp as b

def starts():
    return open(os.environ["COUNT_FILE"]).read().split()

catalogue = b.build_catalogue(b.discover())
asked = b.Requests(attention_backend="driven")
plan = b.resolve(b.make_launch(asked), b.EngineFacts(), b.default_model(), b.load_host("epyc"), catalogue)
b.this_host("cpu")
assert starts() == [], starts()
child = os.fork()
if child == 0:
    built = b.build(plan, b.RunnerShape(), catalogue)
    kernel = b.read_stamp(built.objects["decode", 0]).kernel
    os._exit(0 if kernel == "driven" and starts() == [str(os.getpid())] else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert starts() == [str(child)], starts()
"""


def test_import_discover_and_resolve_start_no_driver_and_a_forked_child_builds(tmp_path: Path) -> None:
    """vllm #8893: the parent's count stays 0; the child, forked afterwards, starts the driver once and builds."""
    site = tmp_path / "site-packages"
    package = write_plugin(site, "driven", kernel="driven", carries_json=True)
    (site / package / "backend.py").write_text(BACKEND, "utf-8")
    (site / "fake_driver.py").write_text(DRIVER, "utf-8")
    count = tmp_path / "count"
    count.write_text("", "utf-8")
    child = python(FORKED, site, COUNT_FILE=str(count))
    assert child.returncode == 0, child.stderr


TOUCHES = {
    "loads-cuda": ("import ctypes\ntry:\n    ctypes.CDLL('libcuda.so.1')\nexcept OSError:\n    pass\n", "libcuda.so.1"),
    "loads-nvml": (
        "import ctypes\ntry:\n    ctypes.CDLL('libnvidia-ml.so.1')\nexcept OSError:\n    pass\n",
        "nvidia-ml",
    ),
    "loads-hip": (
        "import ctypes\ntry:\n    ctypes.CDLL('/opt/x/libamdhip64.so')\nexcept OSError:\n    pass\n",
        "amdhip",
    ),
    "opens-node": ("try:\n    open('/dev/nvidiactl')\nexcept OSError:\n    pass\n", "/dev/nvidiactl"),
    "opens-kfd": ("import os\ntry:\n    os.open('/dev/kfd', os.O_RDWR)\nexcept OSError:\n    pass\n", "/dev/kfd"),
}


@pytest.mark.parametrize("touch", TOUCHES)
def test_doctor_names_a_plugin_that_touches_a_driver_when_imported(tmp_path: Path, touch: str) -> None:
    """vllm #14910, numba #548: the fault names plugin, distribution and what was touched, failed or not."""
    site = tmp_path / "site-packages"
    lines, word = TOUCHES[touch]
    package = write_plugin(site, "eager", kernel="eager", carries_json=True)
    source = lines + PLUGIN_SOURCE.format(kernel="eager", package=package)
    (site / package / "plugin.py").write_text(source, "utf-8")
    (site / package / "backend.py").write_text(BACKEND, "utf-8")
    child = command("doctor", path=site)
    (line,) = [line for line in child.stdout.splitlines() if "touches a driver" in line]
    assert line.startswith("fault")
    assert "eager (eager 1.0)" in line
    assert word in line
    assert child.returncode == 1


def test_doctor_names_a_plugin_module_that_imports_a_heavy_library(tmp_path: Path) -> None:
    """vllm #32611: plugin.py is declarations; whoever asks about a machine would import torch with it."""
    site = tmp_path / "site-packages"
    package = write_plugin(site, "wide", kernel="wide", carries_json=True)
    (site / "torch").mkdir()
    (site / "torch" / "__init__.py").write_text("", "utf-8")
    source = "import torch\n" + PLUGIN_SOURCE.format(kernel="wide", package=package)
    (site / package / "plugin.py").write_text(source, "utf-8")
    (site / package / "backend.py").write_text("", "utf-8")
    child = command("doctor", path=site)
    (line,) = [line for line in child.stdout.splitlines() if "imports torch" in line]
    assert "wide (wide 1.0)" in line
