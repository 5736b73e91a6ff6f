"""Which commit a run of the bench says it measured."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.bench_modules import bench_modules


@pytest.fixture
def checkout():
    """What says it."""
    with bench_modules("checkout") as (module,):
        yield module.checkout


@pytest.fixture
def repository(tmp_path: Path):
    """A checkout with code and a record, and git in it."""
    for name in ("core/a.py", "bench/results/gpu.json", "docs/page.md"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("1", "utf-8")

    def git(*arguments: str) -> str:
        who = ("-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false")
        command = ["git", "-C", str(tmp_path), *who, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    return tmp_path, git


def test_a_run_has_its_commit(checkout, repository) -> None:
    """As git names it."""
    root, git = repository
    assert checkout(root) == {"commit": git("rev-parse", "HEAD"), "dirty": False}


@pytest.mark.parametrize(
    ("name", "dirty"),
    [("core/a.py", True), ("core/new.py", True), ("bench/results/gpu.json", False), ("docs/page.md", False)],
)
def test_code_that_was_changed_since_is_told(checkout, repository, name: str, dirty: bool) -> None:
    """The record itself changes with every figure, and is no code."""
    root, _ = repository
    (root / name).write_text("2", "utf-8")
    assert checkout(root)["dirty"] is dirty


def test_without_git_there_is_no_commit(checkout, repository, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nor in a copy that lies in a checkout of something else."""
    nothing = {"commit": "", "dirty": False}
    assert checkout(tmp_path_factory.mktemp("plain")) == nothing
    assert checkout(repository[0] / "core") == nothing


def test_where_git_is_not_installed_there_is_no_commit(checkout, repository, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU may have none."""
    monkeypatch.setenv("PATH", "")
    assert checkout(repository[0]) == {"commit": "", "dirty": False}
