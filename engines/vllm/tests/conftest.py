"""Warnings stay errors, except those of the engine itself."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """vLLM and what it imports warn of their own deprecations while they are imported."""
    config.addinivalue_line("filterwarnings", r"ignore:::(vllm|torch|transformers|importlib)\b.*")
