"""Case 65, OLMo-core #771, open-instruct #1716, unsloth #1555: what is installed is asked of distributions, never of
modules or their names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from backstamp.construction import RunnerShape, build
from backstamp.errors import BackstampError
from backstamp.probes import installed_libraries
from backstamp.stamp import read_stamp
from backstamp.testing.dists import write_distribution
from backstamp.testing.fakes import catalogue_of, fake_plugin, recording_factory
from tests.resolving import kernel
from tests.sites import ask

CATALOGUE = catalogue_of(
    fake_plugin(
        "p",
        [kernel("fa2", requires=("flash-attn>=2.5,<3",)), kernel("fa4", requires=("flash-attn-4>=4",), priority=80)],
    )
)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """flash-attn 2.8, whose package has a sub-module of the next version's name; nothing else is installed."""
    package = tmp_path / "flash_attn" / "cute"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("def _flash_attn_forward():\n    pass\n", "utf-8")
    (package / "__init__.py").write_text("", "utf-8")
    write_distribution(tmp_path, "flash-attn", version="2.8.3")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def test_a_sub_module_is_no_installation(site: Path) -> None:
    """OLMo-core #771: fa4 is unavailable, fa2 is available."""
    libraries = dict(installed_libraries())
    assert ask(CATALOGUE, host="h100", libraries=libraries).phase("decode").kernel == "fa2"
    with pytest.raises(BackstampError) as caught:
        ask(CATALOGUE, "fa4", host="h100", libraries=libraries)
    assert "flash-attn-4 is not installed" in caught.value.found


def test_with_both_installed_each_stamp_names_its_own_distribution(site: Path) -> None:
    """open-instruct #1716: nobody has to guess which one runs."""
    write_distribution(site, "flash-attn-4", version="4.0.1")
    libraries = dict(installed_libraries())
    for key, library in {"fa2": ("flash-attn", "2.8.3"), "fa4": ("flash-attn-4", "4.0.1")}.items():
        plan = ask(CATALOGUE, key, host="h100", libraries=libraries)
        built = build(plan, RunnerShape(), CATALOGUE, load=recording_factory)
        stamp = read_stamp(built.objects["decode", 0])
        assert (stamp.kernel, stamp.library) == (key, library)


def test_a_renamed_private_symbol_changes_nothing(site: Path) -> None:
    """unsloth #1555: no symbol is looked for, so that none can be missed."""
    (site / "flash_attn" / "__init__.py").write_text("def _flash_attn_forward_v2():\n    pass\n", "utf-8")
    libraries = dict(installed_libraries())
    assert ask(CATALOGUE, "fa2", host="h100", libraries=libraries).phase("decode").kernel == "fa2"
    assert "flash_attn" not in sys.modules
