"""Case 2, vllm #48277 and #48326: a plugin that failed to load is never the same as one that is absent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from backstamp.declared import Declared, declared_to_json
from backstamp.errors import PluginFailed, StrictViolation
from backstamp.policy import Policy
from backstamp.testing.dists import cpu_offer, write_plugin
from tests.sites import along, ask, command, fresh_site

WARNED = ("accel", "accel-kernels", "3.4", "ModuleNotFoundError: No module named 'accel_runtime'")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A broken accelerator plugin beside one that runs anywhere."""
    for folder in fresh_site(tmp_path, monkeypatch):
        package = write_plugin(folder, "anywhere", kernel="anywhere", carries_json=True)
        anywhere = replace(cpu_offer("anywhere", package), device="any")
        (folder / package / "backstamp.json").write_text(declared_to_json(Declared(offers=(anywhere,))), "utf-8")
        write_plugin(folder, "accel-kernels", entry="accel", version="3.4", source="import accel_runtime")
        yield folder


def test_auto_serves_with_a_warning_that_carries_the_cause(site: Path) -> None:
    """vllm #48277: the host has the accelerator, the plugin is broken, and the plan says who and why."""
    plan = ask(along(site), host="h100")
    assert plan.phase("decode").kernel == "anywhere"
    (warning,) = [item for item in plan.warnings if item.code == "failed"]
    assert [word for word in WARNED if word not in warning.text] == []


def test_strict_mode_is_an_error(site: Path) -> None:
    """vllm #48277: strict refuses to start on what is left."""
    with pytest.raises(StrictViolation) as caught:
        ask(along(site), host="h100", policy=Policy(strict=True))
    assert [word for word in WARNED if word not in caught.value.message] == []


def test_asking_for_it_chains_the_first_cause(site: Path) -> None:
    """vllm #48326: the exception itself is kept."""
    with pytest.raises(PluginFailed) as caught:
        ask(along(site), "accel", host="h100")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


@pytest.mark.parametrize("arguments", [("list",), ("explain", "accel", "--host", "h100"), ("doctor",)])
def test_the_explanation_says_failed_never_absent(site: Path, arguments: tuple[str, ...]) -> None:
    """vllm #48277: listing, explaining and examining all name it with its cause."""
    child = command(*arguments, path=site)
    said = child.stdout + child.stderr
    assert "No module named 'accel_runtime'" in said
    assert "accel-kernels" in said
    assert "not installed" not in " ".join(line for line in said.splitlines() if "accel" in line)
