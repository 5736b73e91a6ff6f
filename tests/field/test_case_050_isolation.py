"""Case 50, xarray #5136, vllm-ascend #3403, torch-spyre #3659, SDV #1816: one broken plugin takes nobody else down."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from backstamp.errors import PluginFailed
from backstamp.testing.dists import write_plugin
from tests.sites import along, ask, command, fresh_site

NATIVE = "raise ImportError('attn.so: undefined symbol: _ZN2at4_ops')"
BAD = {
    "bad_import": ("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
    "bad_attr": (None, "AttributeError"),
    "bad_native": (NATIVE, "ImportError: attn.so: undefined symbol: _ZN2at4_ops"),
    "exits": ("raise SystemExit(3)", "SystemExit: 3"),
}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """One good plugin and four bad ones."""
    for folder in fresh_site(tmp_path, monkeypatch):
        write_plugin(folder, "good-kernels", kernel="good")
        for name, (source, _) in BAD.items():
            package = f"{name}_kernels"
            target = f"{package}.plugin:Missing" if source is None else None
            write_plugin(folder, f"{name}-kernels", entry=name, source=source, target=target)
        yield folder


def test_the_good_one_works(site: Path) -> None:
    """xarray #5136: by auto and when asked for."""
    catalogue = along(site)
    assert ask(catalogue).phase("decode").kernel == "good"
    assert ask(catalogue, "good").phase("decode").kernel == "good"


def test_each_bad_one_is_listed_with_distribution_entry_and_text(site: Path) -> None:
    """vllm-ascend #3403: no generic text hides the real cause."""
    listed = json.loads(command("list", "--json", path=site).stdout)
    failures = {item["name"]: item for item in listed["failures"]}
    assert sorted(failures) == sorted(BAD)
    for name, (_, text) in BAD.items():
        assert failures[name]["distribution"] == f"{name}-kernels"
        assert text in failures[name]["cause"]
    entries = {failure.plugin.name: failure.entry for failure in along(site).failures}
    assert entries["bad_attr"] == "bad_attr_kernels.plugin:Missing"


@pytest.mark.parametrize("name", BAD)
def test_asking_for_a_bad_one_chains_its_first_cause(site: Path, name: str) -> None:
    """SDV #1816, torch-spyre #3659: the exception is the plugin's own."""
    catalogue = along(site)
    with pytest.raises(PluginFailed) as caught:
        ask(catalogue, name)
    assert caught.value.__cause__ is next(item.error for item in catalogue.failures if item.plugin.name == name)
    assert type(caught.value.__cause__).__name__ in BAD[name][1]
    assert f"{name}-kernels" in caught.value.message
