"""vLLM prefills MLA with Backstamp's kernels: its own backend's tokens, stamps from the worker, red when broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.vllm.tests.acme import install_acme
from engines.vllm.tests.serve_once import NUM_PROMPTS
from engines.vllm.tests.serving import Served, serve
from engines.vllm.tests.test_refusals import assert_refused


@pytest.fixture(scope="module")
def own(latent: Path, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """What vLLM's own prefill answers, with this adapter installed and not asked for."""
    return serve(tmp_path_factory.mktemp("own"), latent)


def test_another_backend_is_left_alone(own: Served) -> None:
    """No override and no module of ours beside the names."""
    assert len(own.tokens) == NUM_PROMPTS, own.log[-4000:]
    assert len(set(own.tokens)) > NUM_PROMPTS // 2
    assert (own.touched or {})["overridden"] == []
    assert (own.touched or {})["modules"] == ["backstamp_vllm.names", "backstamp_vllm.unread"]
    assert "Using CPU_SDPA_MLA MLA prefill backend" in own.log


def asked_for(key: str, latent: Path, folder: Path) -> Served:
    """The same prompts by a key of MLA prefill."""
    return serve(folder, latent, site=install_acme(folder), attention_config={"mla_prefill_backend": key})


@pytest.mark.parametrize("key", ["torch_native", "acme_latent"])
def test_a_key_prefills_what_vllm_does(key: str, own: Served, latent: Path, tmp_path: Path) -> None:
    """Equal greedy tokens, the stamp in the worker, plan and stamp in the log; decode stays vLLM's."""
    served = asked_for(key, latent, tmp_path)
    assert served.tokens == own.tokens, served.log[-4000:]
    assert served.kernels("prefill") == [key] * 3
    assert (served.touched or {})["overridden"] == ["CPU"]
    assert f"Using {key.upper()} MLA prefill backend" in served.log
    assert f"MLA prefill: prefill {key} (" in served.log
    assert f"Backstamp built {key} for prefill" in served.log


@pytest.mark.parametrize("wrong", ["acme_latent_zeros", "acme_latent_no_causal"])
def test_a_wrong_prefill_is_seen(wrong: str, own: Served, latent: Path, tmp_path: Path) -> None:
    """The kernel runs: other tokens."""
    served = asked_for(wrong, latent, tmp_path)
    assert served.kernels("prefill") == [wrong] * 3
    assert len(served.tokens) == NUM_PROMPTS
    assert served.tokens != own.tokens


def test_a_key_that_is_not_installed_is_refused(latent: Path, tmp_path: Path) -> None:
    """Before weights load, with what to install."""
    served = serve(tmp_path, latent, attention_config={"mla_prefill_backend": "fa3"})
    assert_refused(served, "NotInstalled", "backstamp-fa3")
