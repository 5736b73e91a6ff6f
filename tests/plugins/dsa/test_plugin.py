"""The declarations: what the rows say is what the factories build, and what a row lacks is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

from backstamp.declarations import PHASES
from backstamp.errors import NotInstalled, UnsupportedBatch
from backstamp.testing.batches import make_tree
from backstamp.testing.requests import request_for
from backstamp_dsa.configs import SHARED_BYTES
from backstamp_dsa.plugin import DSV4_NPU, DSV4_ROCM, backstamp_aliases, backstamp_offers
from tests.libraries.fake import FakeLibrary
from tests.plugins.dsa.cases import dsa_layer, latent_step
from tests.plugins.dsa.flash_mla import install
from tests.plugins.dsa.test_npu import ATTEND, METADATA

OFFERS = backstamp_offers()
LIBRARIES = Path(__file__).parents[2] / "libraries"


def name_of(offer):
    """A row's place in the table."""
    return f"{offer.kernel}-{offer.device}-{offer.layouts[0]}-{offer.requires[0]}"


@pytest.fixture
def libraries(monkeypatch):
    """Every library of the rows, none of them real."""
    for module in ("dsa_library", "csa_cuda", "csa_rocm", "csa_npu", "flashmla"):
        monkeypatch.delitem(sys.modules, f"backstamp_dsa.{module}", raising=False)
    install(monkeypatch)
    FakeLibrary("amd-aiter-dsv4", monkeypatch)
    for module in ("torch_npu", "custom_ops"):
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    operators = torch.library.Library("custom", "FRAGMENT")
    for schema in (METADATA, ATTEND):
        operators.define(schema)
    yield
    operators._destroy()


def layer_of(offer):
    """A layer of the row's family."""
    head_dim, v_head_dim = offer.head_dims[0]
    return dsa_layer(16, head_dim=head_dim, v_head_dim=v_head_dim, window_left=127 if offer.family == "csa" else -1)


def built(offer, **changes):
    """What the row's factory answers."""
    module, name = offer.factory.split(":")
    fields = {"dtype": "bf16", "kv_dtype": min(offer.kv_dtypes)} | changes
    return getattr(import_module(module), name)(request_for(offer, (layer_of(offer),), **fields))


def test_declaring_imports_no_library():
    """Any machine can ask what the plugin offers."""
    code = "import sys, backstamp_dsa.plugin; sys.exit(bool({'torch', 'triton', 'flash_mla'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("offer", OFFERS, ids=name_of)
def test_the_factory_answers_the_declared_name(libraries, offer):
    """Construction compares the built name with the declared one."""
    answer = built(offer)
    assert answer.kernel == offer.kernel
    assert dict(answer.settings) == {}


@pytest.mark.parametrize("offer", OFFERS, ids=name_of)
def test_every_phase_is_served_by_one_object(libraries, offer):
    """The draft phases follow their halves."""
    assert offer.all_phases == frozenset(PHASES)
    backend = built(offer).backend
    for phase in PHASES:
        step = latent_step(((1, 9),), layer_of(offer), phase=phase, page_size=offer.page_sizes.preferred)
        assert backend.plan(step.batch) is not None


#: What no row declares: trees, left padding, one causal answer a row, and a page of another size.
WRONG = {
    "tree": lambda step: {"tree": make_tree([2], [9], "qlen")},
    "kv_starts": lambda step: {"kv_starts": torch.zeros(1, dtype=torch.int32)},
    "causal": lambda step: {"causal": torch.ones(1, dtype=torch.int32)},
    "page_size": lambda step: {"index": replace(step.batch.index, page_size=17)},
    "kv_lens": lambda step: {"kv_lens": step.batch.kv_lens.long()},
    "max_kv_len": lambda step: {"max_kv_len": 10**6},
}


@pytest.mark.parametrize("field", WRONG)
@pytest.mark.parametrize("offer", OFFERS, ids=name_of)
def test_a_step_a_row_does_not_declare_is_refused(libraries, offer, field):
    """In `plan`, before any launch."""
    backend = built(offer).backend
    step = latent_step(((2, 9),), layer_of(offer), page_size=offer.page_sizes.preferred)
    with pytest.raises(UnsupportedBatch, match=field):
        backend.plan(replace(step.batch, **WRONG[field](step)))


@pytest.mark.parametrize("offer", OFFERS, ids=name_of)
def test_a_sparse_row_refuses_a_step_without_the_causal_rule(libraries, offer):
    """`flashmla` alone reads every key both ways."""
    backend = built(offer).backend
    step = latent_step(((2, 9),), layer_of(offer), page_size=offer.page_sizes.preferred, causal=False)
    if offer.kernel == "flashmla":
        assert backend.plan(step.batch) is not None
        return
    with pytest.raises(UnsupportedBatch, match="causal"):
        backend.plan(step.batch)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("dtype", {"dtype": "e4m3fn"}),
        ("kv_dtype", {"kv_dtype": "nvfp4"}),
        ("page_size", {"page_size": 17}),
        ("layout", {"layout": "nvfp4"}),
    ],
)
@pytest.mark.parametrize("offer", OFFERS, ids=name_of)
def test_a_build_a_row_does_not_declare_is_refused(libraries, offer, field, changes):
    """In the factory. A page size of any number is what the rows over plain slots take."""
    if field == "page_size" and offer.page_sizes.multiple_of == 1:
        assert built(offer, **changes).kernel == offer.kernel
        return
    with pytest.raises(UnsupportedBatch, match=field):
        built(offer, **changes)


@pytest.mark.parametrize("offer", OFFERS, ids=name_of)
@pytest.mark.parametrize(
    ("field", "changes"), [("head_dim", {"head_dim": 192}), ("softcap", {"softcap": 30.0}), ("alibi", {"alibi": 1})]
)
def test_a_layer_a_row_does_not_declare_is_refused(libraries, offer, field, changes):
    """A softcap or a slope is never dropped."""
    if field == "alibi":
        changes = {"alibi": torch.ones(16)}
    layer = replace(layer_of(offer), **changes)
    module, name = offer.factory.split(":")
    request = request_for(offer, (layer,), dtype="bf16", kv_dtype=min(offer.kv_dtypes))
    with pytest.raises(UnsupportedBatch, match=field):
        getattr(import_module(module), name)(request)


def test_every_arch_of_our_own_kernels_has_a_line_in_the_launch_table():
    """A declared chip is never held to another chip's shared memory."""
    own = [offer for offer in OFFERS if offer.factory.endswith("build_dsa_triton")]
    assert len(own) == 3
    assert all(set(offer.archs) <= set(SHARED_BYTES) for offer in own)


def test_rows_bound_from_a_caller_say_so_in_their_records():
    """What no library could be read for is not told as read."""
    record = json.loads((LIBRARIES / "amd-aiter-dsv4.json").read_text("utf-8"))
    assert {found["source"] for found in record["functions"].values()} == {"from a caller, not from the library"}
    record = json.loads((LIBRARIES / "sgl-flash-mla.json").read_text("utf-8"))
    assert {found["source"] for found in record["functions"].values()} == {"from the library"}
    assert record["version"] == "1.0.0"


def test_the_old_name_is_a_deprecated_alias():
    """`nsa` is `dsa`, and says so."""
    (alias,) = backstamp_aliases()
    assert (alias.key, alias.kernels, alias.deprecated) == ("nsa", ("dsa",), "dsa")


def test_a_package_of_operators_without_ours_is_no_package(monkeypatch):
    """Its version says nothing about what it holds."""
    monkeypatch.delitem(sys.modules, "backstamp_dsa.csa_npu", raising=False)
    for module in ("torch_npu", "custom_ops"):
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    with pytest.raises(NotInstalled, match="custom_ops without npu_sparse_attn_sharedkv and"):
        built(DSV4_NPU)


def test_an_amd_aiter_without_a_second_cache_is_refused(libraries, monkeypatch):
    """The function is older than the argument: without this, the first layer with compressed entries would fail."""

    def older(q, unified_kv, kv_indices, kv_indptr, attn_sink, softmax_scale, kv_splits=None):
        raise AssertionError("called")

    monkeypatch.setattr(sys.modules["aiter.ops.triton.attention.pa_decode_sparse"], "pa_decode_sparse", older)
    with pytest.raises(NotInstalled, match=r"needs an amd-aiter whose pa_decode_sparse takes extra_cache"):
        built(DSV4_ROCM)
