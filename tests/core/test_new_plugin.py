"""`backstamp new`: what it writes, and the names and folders it refuses before it writes anything."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import backstamp
from backstamp.errors import BadInput, UnsupportedBatch
from backstamp.factories import BuildRequest
from backstamp.new_plugin import write_plugin_project
from backstamp.testing.batches import SMALL_LAYER
from backstamp.testing.dists import write_plugin
from tests.core.test_cli import backstamp as command

#: Short enough to be joined, long enough to be wrapped, and one that packaging writes otherwise.
NAMES = ["zx", "acme-attention", "Our_Very.Fast-kernels-of-2026-for-every-machine-there-is"]


@pytest.mark.parametrize("name", NAMES)
def test_a_new_project_is_all_of_one_name(name: str, tmp_path: Path) -> None:
    """No file keeps the template's name, in its text or its path, and every file is there."""
    made = write_plugin_project(name, tmp_path / "new")
    distribution = re.sub(r"[-_.]+", "-", name).lower()
    assert (made.distribution, made.package) == (distribution, distribution.replace("-", "_"))
    files = {path.relative_to(made.folder).as_posix(): path for path in made.folder.rglob("*") if path.is_file()}
    assert sorted(files) == list(made.files)
    assert set(files) == {
        ".github/workflows/backstamp.yml",
        ".gitignore",
        "LICENSE",
        "README.md",
        "pyproject.toml",
        f"src/{made.package}/__init__.py",
        f"src/{made.package}/backend.py",
        f"src/{made.package}/backstamp.json",
        f"src/{made.package}/plugin.py",
        "tests/test_conformance.py",
    }
    texts = {path: file.read_text("utf-8") for path, file in files.items()}
    assert ("acme" in "".join(texts.values())) is ("acme" in name)
    for path, names in {
        "pyproject.toml": [f'name = "{distribution}"', f'"{made.package}.plugin"'],
        "tests/test_conformance.py": [f'"{distribution}"'],
        "README.md": [f"backstamp check {distribution}", f"--attention-backend {made.package}"],
    }.items():
        assert all(part in texts[path] for part in names), path


@pytest.mark.parametrize("name", NAMES)
def test_a_new_project_is_clean_by_the_defaults_of_ruff(name: str, tmp_path: Path) -> None:
    """Its author has no settings yet; a longer or a shorter name must wrap or join no line."""
    made = write_plugin_project(name, tmp_path / "new")
    for check in (("check",), ("format", "--check")):
        program = [sys.executable, "-m", "ruff", *check, "--isolated", "--no-cache", str(made.folder)]
        done = subprocess.run(program, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_new_project_speaks_the_contract_of_this_core(tmp_path: Path) -> None:
    """Its range holds this version's contract and ends before the next."""
    text = (write_plugin_project("zx", tmp_path / "new").folder / "pyproject.toml").read_text("utf-8")
    major, minor = map(int, backstamp.API_VERSION.split("."))
    ranges = set(re.findall(r'"backstamp(?:\[[\w,]+\])?(>=[^"]*)"', text))
    assert ranges == {f">={major}.{minor},<{major}.{minor + 1}"}


@pytest.mark.parametrize(
    ("changes", "layer", "needed"),
    [
        ({"dtype": "e4m3fn"}, {}, "dtype: bf16 or fp16 or fp32"),
        ({"layout": "packed"}, {}, "layout: rows"),
        ({}, {"window_left": 7}, "window: a kernel that declares 'window'"),
        ({}, {"softcap": 30.0}, "softcap: a kernel that declares 'softcap'"),
    ],
)
def test_a_new_projects_factory_builds_nothing_its_row_does_not_declare(
    changes: dict[str, str], layer: dict[str, float], needed: str, tmp_path: Path
) -> None:
    """A layer's window would else be dropped in silence: a call holds only layers the build did not know."""
    made = write_plugin_project("zx", tmp_path / "new")
    modules = {name: runpy.run_path(str(made.folder / "src" / "zx" / f"{name}.py")) for name in ("plugin", "backend")}
    asked = {"dtype": "fp32", "layout": "rows", "layers": (replace(SMALL_LAYER, **layer),), **changes}
    sizes = {"page_size": 16, "max_rows": 4, "max_tokens": 64, "max_pages": 8, "max_kv_len": 64}
    runner = {"family": "mha", "phases": ("prefill",), "role": "target", "kv_dtype": "same", "device": "cpu"}
    request = BuildRequest(kernel="zx_naive", offer=modules["plugin"]["NAIVE"], **runner, **sizes, **asked)
    with pytest.raises(UnsupportedBatch) as caught:
        modules["backend"]["build"](request)
    assert caught.value.needed == needed


@pytest.mark.parametrize(
    ("name", "needed", "found"),
    [
        ("a b", "a distribution's name", "'a b'"),
        ("", "a distribution's name", "''"),
        ("-x", "a distribution's name", "'-x'"),
        ("x/../y", "a distribution's name", "'x/../y'"),
        ("x\n::error::y", "a distribution's name", "x"),
        ("3d-attention", "a name whose package Python can import", "3d_attention"),
        ("import", "a name whose package Python can import", "import"),
        ("x" * 81, "at most 80 characters", "81"),
        ("backstamp", "a name of your own", "backstamp, which is Backstamp's"),
        ("Backstamp_Triton", "a name of your own", "backstamp-triton, which is Backstamp's"),
        ("backstamp-sglang", "a name of your own", "backstamp-sglang, which is Backstamp's"),
        ("torch-native", "a key of your own", "torch_native, which is backstamp-cpu's"),
        ("fa3", "a key of your own", "fa3, which is backstamp-fa3's"),
        ("PyYAML", "a name that is free", "pyyaml"),
        ("json", "a package that is free", "json, which can be imported already"),
        ("yaml", "a package that is free", "yaml, which can be imported already"),
    ],
)
def test_a_name_that_is_none_or_is_taken_is_refused(name: str, needed: str, found: str, tmp_path: Path) -> None:
    """And nothing is written."""
    with pytest.raises(BadInput) as caught:
        write_plugin_project(name, tmp_path / "new")
    assert caught.value.needed.startswith(needed)
    assert found in caught.value.found
    assert list(tmp_path.iterdir()) == []


def test_a_key_of_an_installed_plugin_is_refused(tmp_path: Path) -> None:
    """Two plugins that claim one key poison it for both."""
    write_plugin(tmp_path / "site-packages", "other-plugin", kernel="fast_naive")
    status, out, _ = command("new", "fast", "--json", path=tmp_path / "site-packages", cwd=tmp_path)
    assert status == 2
    assert json.loads(out)["error"]["found"] == "fast_naive, which an installed plugin has"


def test_a_folder_that_holds_something_is_refused_and_left_alone(tmp_path: Path) -> None:
    """A second run never writes over what an author changed; an empty folder is as good as a new one."""
    folder = tmp_path / "new"
    folder.mkdir()
    made = write_plugin_project("zx", folder)
    changed = folder / "src" / "zx" / "backend.py"
    changed.write_text("mine", "utf-8")
    (tmp_path / "file").write_text("", "utf-8")
    for taken, found in ((folder, "not empty"), (tmp_path / "file", "a file")):
        with pytest.raises(BadInput, match=found):
            write_plugin_project("zx", taken)
    assert changed.read_text("utf-8") == "mine"
    assert len(made.files) == 10


def test_the_command_writes_beside_where_it_is_run(tmp_path: Path) -> None:
    """./NAME, though a folder of that name is there and on the path; what to do next is said."""
    (tmp_path / "zx").mkdir()
    status, out, err = command("new", "zx", path=tmp_path, cwd=tmp_path, columns=200)
    assert status == 0, err
    assert (tmp_path / "zx" / "src" / "zx" / "plugin.py").is_file()
    assert "backstamp check zx" in out
    status, out, _ = command("new", "zy", "--path", "deep/er", "--json", cwd=tmp_path)
    assert status == 0
    assert json.loads(out)["folder"] == "deep/er"
    assert (tmp_path / "deep" / "er" / "pyproject.toml").is_file()
