"""What cannot be served ends SGLang's start with our reasons, before weights load."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.sglang.tests.models import write_models
from engines.sglang.tests.serving import Served, serve
from tests.documents import install_documented_plugin


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that would load."""
    return write_models(tmp_path_factory.mktemp("models"))["full"]


def assert_refused(served: Served, *said: str) -> None:
    """The start failed, said why, and had read no weight."""
    assert served.status != 0
    assert not served.tokens
    for text in said:
        assert text in served.log, served.log[-4000:]
    assert "Load weight begin" not in served.log


def test_a_model_that_no_kernel_serves_is_refused(model: Path, tmp_path: Path) -> None:
    """float32 is no dtype of AMX: every reason is told, and SGLang falls back to nothing."""
    served = serve(tmp_path, model, attention_backend="backstamp_intel_amx")
    assert_refused(served, "Refused", "intel_amx", "got fp32")


def test_a_kernel_of_a_plugin_that_is_not_installed_is_refused(model: Path, tmp_path: Path) -> None:
    """A known key has a name wherever its plugin is not: the error says what to install."""
    served = serve(tmp_path, model, attention_backend="backstamp_fa3")
    assert_refused(served, "NotInstalled", "backstamp-fa3")


def test_a_mistyped_name_is_refused(model: Path, tmp_path: Path) -> None:
    """SGLang's `Engine` checks no names: the ones that start as ours do are checked here."""
    served = serve(tmp_path, model, attention_backend="backstamp_torch_nativ")
    assert_refused(served, "UnknownKey", "Did you mean 'torch_native'?")


def test_half_a_pair_beside_sglangs_own_is_refused(model: Path, tmp_path: Path) -> None:
    """A plan is of both halves."""
    served = serve(tmp_path, model, attention_backend="torch_native", decode_attention_backend="backstamp_torch_native")
    assert_refused(served, "Refused", "needs both halves from Backstamp, got torch_native beside it")


def test_a_scheduler_that_lacks_the_plugin_is_refused(model: Path, tmp_path: Path) -> None:
    """The process that was asked has the plugin, the ones it spawns do not: the plugin is named."""
    site = install_documented_plugin(tmp_path / "site-packages", lambda text: text)
    served = serve(tmp_path, model, parent_only=site, attention_backend="acme_attention")
    said = "in a process that SGLang spawned: needs acme-attention, which the launched process plans with"
    assert_refused(served, "Scheduler hit an exception", said, "Install acme-attention wherever")


@pytest.mark.parametrize("installed", ["editable", "wheel"])
def test_a_plugin_that_fails_to_load_is_told_with_its_cause(installed: str, model: Path, tmp_path: Path) -> None:
    """Its key stays a name; an editable plugin fails when it is discovered, a wheel's when its kernel is imported."""
    site = install_documented_plugin(tmp_path / "site-packages", lambda text: "raise RuntimeError('no luck')\n")
    if installed == "editable":
        (site / "acme_attention" / "backstamp.json").unlink()
    served = serve(tmp_path, model, site=site, attention_backend="acme_attention")
    assert_refused(served, "PluginFailed" if installed == "editable" else "FactoryImportFailed", "no luck")
