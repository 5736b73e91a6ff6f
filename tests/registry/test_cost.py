"""What the registry may load, and when: nothing at import, no plugin code at discovery, one plugin at build."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from backstamp.testing.dists import write_plugin
from tests.children import ordinary_environment

BACKEND = """\
from backstamp.factories import Built


class Backend:
    def plan(self, batch):
        return batch

    def forward(self, q, kv, layer, state):
        return q


def build(request):
    return Built(request.kernel, Backend())
"""


def loaded_by(program: str, path: Path | None = None) -> set[str]:
    """The modules a fresh interpreter holds after a program."""
    report = "import sys, json; sys.stdout.write(json.dumps(sorted(sys.modules)))"
    environment = ordinary_environment(path)
    child = subprocess.run(
        [sys.executable, "-c", f"{program}\n{report}"], capture_output=True, text=True, env=environment, check=False
    )
    assert child.returncode == 0, child.stderr
    return set(json.loads(child.stdout))


def test_import_loads_nothing_beside_itself() -> None:
    """`import backstamp` costs less than importing pluggy, because it imports neither it nor anything else."""
    heavy = {"pluggy", "packaging", "importlib_metadata", "torch", "typer", "rich", "json", "dataclasses"}
    assert not heavy & (loaded_by("import backstamp") - loaded_by("pass"))


def test_core_never_imports_torch_or_a_kernel_library() -> None:
    """Discover, resolve for another machine and explain without torch in the process."""
    program = (
        "import backstamp as b\n"
        "c = b.build_catalogue(b.discover())\n"
        "h = b.this_host()\n"
        "p = b.resolve(b.make_launch(b.Requests()), b.EngineFacts(), b.default_model(), b.load_host('h100'), c)\n"
        "assert p.phase('decode').kernel, p\n"
        "p.as_json()\n"
    )
    assert not {"torch", "triton", "transformers"} & loaded_by(program)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Two plugins as wheels carry them, with backends that really build."""
    folder = tmp_path / "site-packages"
    for name in ("left", "right"):
        package = write_plugin(folder, name, kernel=name, carries_json=True)
        (folder / package / "backend.py").write_text(BACKEND, "utf-8")
    return folder


RESOLVE = (
    "import backstamp as b\n"
    "c = b.build_catalogue(b.discover())\n"
    "asked = b.Requests(attention_backend='left')\n"
    "p = b.resolve(b.make_launch(asked), b.EngineFacts(), b.default_model(), b.load_host('epyc'), c)\n"
)


def test_discovery_and_resolve_import_no_plugin(site: Path) -> None:
    """rdflib #952, networkx #7672: with backstamp.json present no plugin code runs before a build."""
    assert not {name for name in loaded_by(RESOLVE, site) if name.partition(".")[0] in ("left", "right")}


def test_building_one_key_imports_exactly_one_plugin(site: Path) -> None:
    """The plugin whose kernel is built is imported and validated; the other one is not touched."""
    program = (
        RESOLVE + "s = b.build(p, b.RunnerShape(), c)\nassert b.read_stamp(s.objects['decode', 0]).kernel == 'left'\n"
    )
    loaded = loaded_by(program, site)
    assert {"left.plugin", "left.backend"} <= loaded
    assert not {name for name in loaded if name.partition(".")[0] == "right"}


def test_stale_declarations_are_refused_at_build(site: Path) -> None:
    """A wheel whose backstamp.json and plugin.py differ would be stamped with what nobody declared."""
    path = site / "left" / "plugin.py"
    path.write_text(path.read_text("utf-8").replace('"bf16", "fp32"', '"bf16"'), "utf-8")
    program = RESOLVE + (
        "try:\n    b.build(p, b.RunnerShape(), c)\n"
        "except b.BackstampError as error:\n    assert 'backstamp.json' in error.message, error\n"
        "else:\n    raise SystemExit('a stale declaration was built')\n"
    )
    loaded_by(program, site)


def test_no_plugin_module_of_ours_imports_a_kernel_library() -> None:
    """plugin.py is declarations: whoever asks about a machine from a laptop imports nothing but backstamp."""
    program = "from backstamp.discovery import import_plugin\nimport_plugin('{}.plugin')"
    for package in ("backstamp_cpu", "backstamp_triton"):
        assert not {"torch", "triton", "numpy"} & loaded_by(program.format(package))
