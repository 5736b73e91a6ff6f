"""The declarations: what the rows say is what the factories build and the tests here run."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from backstamp_triton.configs import SHARED_BYTES, head_parts
from backstamp_triton.plugin import backstamp_aliases, backstamp_offers
from tests.plugins.triton.cases import Case, make, run

OFFERS = backstamp_offers()


def test_declaring_imports_neither_torch_nor_triton():
    """Any machine can ask what the plugin offers."""
    code = "import sys, backstamp_triton.plugin; sys.exit(bool({'torch', 'triton'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("offer", OFFERS, ids=lambda offer: f"{offer.family}-{offer.device}")
def test_the_factory_is_there_and_answers_the_declared_name(offer):
    """Construction compares the built name with the declared one."""
    module, name = offer.factory.split(":")
    mla = offer.family == "mla"
    case = Case("build", ((1, 1),), mla=mla, heads=(2, 1), dims=(576, 512) if mla else (64, 64))
    built = getattr(import_module(module), name)(make(case).request)
    assert built.kernel == offer.kernel == "triton"
    assert dict(built.settings) == {}


@pytest.mark.parametrize("offer", OFFERS, ids=lambda offer: f"{offer.family}-{offer.device}")
def test_every_declared_arch_has_a_line_in_the_launch_table(offer):
    """A declared chip is never held to another chip's shared memory."""
    assert set(offer.archs) <= set(SHARED_BYTES)


def test_every_declared_head_dim_is_one_the_kernel_takes():
    """Each is a sum of at most two powers of two, none below 16."""
    for offer in OFFERS:
        assert all(part == 0 or part >= 16 for pair in offer.head_dims for dim in pair for part in head_parts(dim))


@pytest.mark.parametrize("phase", ["prefill", "decode", "verify", "draft_decode", "draft_extend"])
def test_one_object_serves_each_declared_phase(phase):
    """All five phases, the two that follow included, are answered by the object one request builds."""
    assert all(phase in offer.all_phases for offer in OFFERS)
    case = Case(phase, ((1, 9), (1, 1)), phase=phase)
    out, _ = run(case, make(case))
    assert out.isfinite().all()


def test_the_kernel_name_needs_no_alias():
    """A kernel's own name is its alias."""
    assert backstamp_aliases() == ()
