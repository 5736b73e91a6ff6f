"""The page list kernel compiles for every kind of chip, once for all addresses and sizes; no GPU is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.children import ordinary_environment
from tests.plugins.flashinfer import ahead
from tests.plugins.flashinfer.ahead import ARCHS, FORMS


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict:
    """The answer of a child process; Triton would keep this process's interpreter setting."""
    cache = tmp_path_factory.mktemp("triton-cache")
    environment = {**ordinary_environment(), "TRITON_CACHE_DIR": str(cache)}
    child = subprocess.run(
        [sys.executable, str(Path(ahead.__file__))], capture_output=True, text=True, env=environment, check=False
    )
    assert child.returncode == 0, child.stderr[-4000:]
    return json.loads(child.stdout)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("arch", ARCHS)
def test_the_kernel_compiles(arch, form, compiled):
    """Machine code for the chip is there."""
    assert compiled["code"][f"{arch} {form}"] > 0


def test_no_argument_is_compiled_for(compiled):
    """Code at hand is found by form and dtypes alone: an address or a stride that Triton looked at would be missed."""
    assert compiled["looked_at"] == []
