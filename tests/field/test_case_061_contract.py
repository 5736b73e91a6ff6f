"""Case 61, vllm-ascend #7058, #9305, #9672, vllm #57566: the plugin contract has a version, and a plugin that needs
another one is told so instead of failing at an import."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from backstamp import API_VERSION, API_VERSIONS
from backstamp.catalogue import build_catalogue
from backstamp.discovery import discover
from backstamp.errors import PluginFailed
from backstamp.testing.dists import PLUGIN_SOURCE, write_plugin
from tests.sites import along, ask, fresh_site

MUST_NOT_RUN = "raise SystemExit('imported')"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A good plugin, and room for another."""
    for folder in fresh_site(tmp_path, monkeypatch):
        write_plugin(folder, "good-kernels", kernel="good")
        yield folder


def test_a_plugin_for_another_contract_is_refused_by_name_and_not_imported(site: Path) -> None:
    """vllm-ascend #7058: the error holds what is needed, what this core has, plugin name and version; others work."""
    write_plugin(site, "acme", version="7.1", source=MUST_NOT_RUN, requires=("numpy", "backstamp>=2,<3"))
    catalogue = along(site)
    with pytest.raises(PluginFailed) as caught:
        ask(catalogue, "acme")
    assert f"needs contract backstamp>=2,<3, this core has {API_VERSION}" in caught.value.found
    assert "plugin acme (acme 7.1)" in caught.value.message
    assert ask(catalogue, "good").phase("decode").kernel == "good"


@pytest.mark.parametrize("requires", [(), ("numpy>=1",), ("backstamp",), ("backstamp-cpu>=0.2",)])
def test_a_plugin_that_declares_no_contract_is_refused_and_not_imported(site: Path, requires: tuple[str, ...]) -> None:
    """vllm #57566: a name without a range promises nothing."""
    write_plugin(site, "acme", source=MUST_NOT_RUN, requires=requires)
    (failure,) = along(site).failures
    assert "declares no contract" in failure.cause
    assert "plugin acme (acme 1.0)" in failure.cause


def test_a_plugin_of_the_contract_before_is_read_as_it_was_meant(site: Path) -> None:
    """vllm-ascend #9305: 0.1 had a default for the mask format; such rows still resolve, with a note until when."""
    source = PLUGIN_SOURCE.format(kernel="older", package="older").replace('mask_format="internal_causal",', "")
    write_plugin(site, "older", source=source, requires=("backstamp>=0.1,<0.2",))
    discovery = discover([str(site)])
    assert [offer.mask_format for offer in discovery.found[1].declared.offers] == ["internal_causal"]
    assert discovery.found[1].contract == API_VERSIONS[1]
    (note,) = discovery.notes
    assert "plugin older (older 1.0): written for contract 0.1, which is read until backstamp 0.3" in note
    assert ask(build_catalogue(discovery), "older").phase("decode").kernel == "older"


def test_the_same_rows_by_the_present_contract_are_refused(site: Path) -> None:
    """vllm-ascend #9672: whoever asks for 0.2 gets 0.2's rules."""
    source = PLUGIN_SOURCE.format(kernel="newer", package="newer").replace('mask_format="internal_causal",', "")
    write_plugin(site, "newer", source=source)
    (failure,) = along(site).failures
    assert "mask_format is empty" in failure.cause
