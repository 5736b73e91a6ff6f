"""Site folders on the path for one test, and the questions put to what lies in them."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from backstamp.catalogue import Catalogue, build_catalogue
from backstamp.declarations import Role
from backstamp.discovery import discover
from backstamp.engine import EngineFacts
from backstamp.launch import Requests, make_launch
from backstamp.model import default_model
from backstamp.plan import Plan
from backstamp.policy import Policy
from backstamp.resolution import resolve
from backstamp.testing.hosts import described_host
from tests.children import ordinary_environment


def fresh_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A site folder on the path; modules imported from the test's folder are forgotten afterwards."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    importlib.invalidate_caches()


def along(*paths: Path) -> Catalogue:
    """The catalogue of what is installed along a path."""
    return build_catalogue(discover([str(path) for path in paths]))


def ask(
    catalogue: Catalogue,
    key: str | None = None,
    *,
    host: str = "epyc",
    policy: Policy | None = None,
    libraries: dict[str, str] | None = None,
    role: Role = "target",
    **requests: object,
) -> Plan:
    """Resolve the default model on a described host."""
    launch = make_launch(Requests(attention_backend=key, **requests), policy=policy, role=role)
    facts = described_host(host, libraries=libraries)
    return resolve(launch, EngineFacts(), default_model(), facts, catalogue, role=role)


def python(
    program: str, path: Path | None = None, *arguments: str, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program in a fresh interpreter; `path` comes first on its module path."""
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        env={**ordinary_environment(path), **environment},
        cwd=cwd if cwd is not None else os.getcwd(),
        check=False,
        timeout=120,
    )


def command(*arguments: str, path: Path | None = None, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the `backstamp` command in a fresh interpreter, on a wide terminal without colours."""
    program = "from backstamp.cli import main; main()"
    return python(program, path, *arguments, cwd=cwd, COLUMNS="400", NO_COLOR="1")
