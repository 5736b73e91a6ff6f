"""A kernel of a distribution that is not ours, installed for real, runs without a line that knows Transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

import backstamp_transformers
from engines.transformers.tests.small_models import generate, small_model
from tests.third_party.installing import install_third_parties


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """acme-attention, installed by pip into a folder of its own."""
    monkeypatch.syspath_prepend(str(install_third_parties(tmp_path, "acme-attention")))


@pytest.mark.usefixtures("acme")
def test_an_installed_third_party_key_serves_generate() -> None:
    """Its key is asked for by name, its stamp names its distribution, and its tokens are `eager`'s."""
    model = small_model("gemma3")
    wanted = generate(model)
    with backstamp_transformers.use(model, "acme") as handle:
        assert generate(model) == wanted
        assert {stamp.plugin.distribution for stamp in handle.stamps.values()} == {"acme-attention"}
