"""Warnings stay errors, except those of the engine itself; and what its processes are given to import."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """SGLang and what it imports warn of their own deprecations while they are imported."""
    config.addinivalue_line("filterwarnings", r"ignore:::(sglang|torch|transformers|importlib|<frozen)\b.*")
