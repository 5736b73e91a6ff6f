"""Warnings stay errors, except those of the engine itself; and the checkpoints of tests without a server."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """SGLang and what it imports warn of their own deprecations while they are imported."""
    config.addinivalue_line("filterwarnings", r"ignore:::(sglang|torch|transformers|importlib|<frozen)\b.*")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint; SGLang has loaded its plugins."""
    from sglang.srt.plugins import load_plugins

    from engines.sglang.tests.models import write_models

    load_plugins()
    return write_models(tmp_path_factory.mktemp("models"))["full"]


@pytest.fixture(scope="session")
def hybrid(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with gated delta nets."""
    from engines.sglang.tests.models import write_hybrid

    return write_hybrid(tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="session")
def sinks(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a GPT-OSS."""
    from engines.sglang.tests.models import write_sinks

    return write_sinks(tmp_path_factory.mktemp("sinks"))
