"""A kernel of a distribution that is not ours, installed for real, runs without a line that knows Transformers."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import backstamp_transformers
from engines.transformers.tests.small_models import generate, small_model

ACME = Path(__file__).parents[3] / "tests" / "third_party" / "acme-attention"


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """acme-attention, installed by pip into a folder of its own."""
    # a copy: building leaves its traces beside the sources
    shutil.copytree(ACME, tmp_path / "source")
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    command = [sys.executable, "-m", "pip", "install", *options, "--target", tmp_path / "site", tmp_path / "source"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    monkeypatch.syspath_prepend(str(tmp_path / "site"))


@pytest.mark.usefixtures("acme")
def test_an_installed_third_party_key_serves_generate() -> None:
    """Its key is asked for by name, its stamp names its distribution, and its tokens are `eager`'s."""
    model = small_model("gemma3")
    wanted = generate(model)
    with backstamp_transformers.use(model, "acme") as handle:
        assert generate(model) == wanted
        assert {stamp.plugin.distribution for stamp in handle.stamps.values()} == {"acme-attention"}
