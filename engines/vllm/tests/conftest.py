"""What suites share: checkpoints, launches, vLLM's log. Warnings stay errors, except those of the engine itself."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def pytest_configure(config: pytest.Config) -> None:
    """vLLM and what it imports warn of their own deprecations while they are imported."""
    config.addinivalue_line("filterwarnings", r"ignore:::(vllm|torch|transformers|importlib)\b.*")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The checkpoints of attention alone, written once."""
    from engines.vllm.tests.models import write_models

    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def config(models: dict[str, Path]) -> VllmConfig:
    """vLLM's config of a launch that asks for a key."""
    from vllm.engine.arg_utils import EngineArgs

    asked = EngineArgs(
        model=str(models["full"]),
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=256,
        attention_backend="torch_native",
    )
    return asked.create_engine_config()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What Backstamp says in vLLM's log."""
    caplog.set_level(logging.INFO, "vllm.backstamp")
    return caplog


@pytest.fixture(scope="session")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The MLA checkpoint, written once."""
    from engines.vllm.tests.models import write_latent

    return write_latent(tmp_path_factory.mktemp("latent"))


@pytest.fixture
def latent_config(latent: Path) -> Iterator[VllmConfig]:
    """vLLM's config of a launch that asks for MLA prefill; the platform's members are given back after."""
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum
    from vllm.v1.attention.backends.mla.prefill.selector import _auto_select_mla_prefill_backend

    from backstamp_vllm.names import offer_names
    from engines.vllm.tests.models import prefill_config

    offer_names()
    yield prefill_config(latent, "torch_native")
    for member in (MLAPrefillBackendEnum.CPU, MLAPrefillBackendEnum.ZEN_CPU):
        member.clear_override()
    _auto_select_mla_prefill_backend.cache_clear()
