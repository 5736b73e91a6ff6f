"""What cannot be served ends vLLM's start with our reasons, before weights load."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.vllm.tests.serving import Served, serve
from tests.documents import install_documented_plugin


@pytest.fixture(scope="module")
def model(models: dict[str, Path]) -> Path:
    """A checkpoint that would load."""
    return models["full"]


def assert_refused(served: Served, *said: str) -> None:
    """The start failed, said why, and had read no weight."""
    assert served.status != 0
    assert not served.tokens
    for text in said:
        assert text in served.log, served.log[-4000:]
    assert "Loading weights took" not in served.log


def test_an_unknown_name_is_vllms_own_error_with_our_names(model: Path, tmp_path: Path) -> None:
    """vLLM parses the flag; what it lists holds every key."""
    served = serve(tmp_path, model, attention_backend="no_such_kernel")
    assert_refused(served, "Unknown attention backend: 'NO_SUCH_KERNEL'", "TORCH_NATIVE", "BACKSTAMP_FLASHINFER")


def test_an_unknown_key_is_refused(model: Path, tmp_path: Path) -> None:
    """A key asked for through `--additional-config`."""
    asked = {"backstamp": {"decode_attention_backend": "no_such_kernel"}}
    served = serve(tmp_path, model, attention_backend="CUSTOM", additional_config=asked)
    assert_refused(served, "UnknownKey", "'no_such_kernel'", "--decode-attention-backend")


def test_a_model_that_no_kernel_serves_is_refused(model: Path, tmp_path: Path) -> None:
    """float32 is no dtype of AMX: every reason is told."""
    served = serve(tmp_path, model, attention_backend="intel_amx")
    assert_refused(served, "Refused", "intel_amx", "got fp32")


def test_a_kernel_of_a_plugin_that_is_not_installed_is_refused(model: Path, tmp_path: Path) -> None:
    """A known key has a name wherever its plugin is not: the error says what to install."""
    served = serve(tmp_path, model, attention_backend="fa3")
    assert_refused(served, "NotInstalled", "backstamp-fa3")


def test_a_worker_that_lacks_the_plugin_is_refused(model: Path, tmp_path: Path) -> None:
    """The process that was asked has the plugin, the ones it spawns do not: the plugin is named."""
    site = install_documented_plugin(tmp_path / "site-packages", lambda text: text)
    served = serve(tmp_path, model, parent_only=site, attention_backend="acme_attention")
    assert_refused(served, "NotInstalled", "'acme_attention' in this worker", "Install acme-attention wherever")


@pytest.mark.parametrize("installed", ["editable", "wheel"])
def test_a_plugin_that_fails_to_load_is_told_with_its_cause(installed: str, model: Path, tmp_path: Path) -> None:
    """Its key stays a name; an editable plugin fails when it is discovered, a wheel's when its kernel is imported."""
    site = install_documented_plugin(tmp_path / "site-packages", lambda text: "raise RuntimeError('no luck')\n")
    if installed == "editable":
        (site / "acme_attention" / "backstamp.json").unlink()
    served = serve(tmp_path, model, site=site, attention_backend="acme_attention")
    assert_refused(served, "PluginFailed" if installed == "editable" else "FactoryImportFailed", "no luck")
