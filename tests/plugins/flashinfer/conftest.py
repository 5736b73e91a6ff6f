"""What the flashinfer tests share: the stand-in library, and the plugin's modules imported against it."""

from __future__ import annotations

import sys

import pytest

from tests.libraries.fake import FakeLibrary
from tests.plugins.flashinfer.library import make_library


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    """FlashInfer's stand-in; the plugin's modules that import the library are imported anew by whoever builds."""
    for name in ("attention", "mla", "wrappers"):
        monkeypatch.delitem(sys.modules, f"backstamp_flashinfer.{name}", raising=False)
    return make_library(monkeypatch)
