"""What the flashinfer plugin declares, and that its factories answer it."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

import backstamp_flashinfer
from backstamp.catalogue import build_catalogue
from backstamp.declarations import Offer
from backstamp.discovery import discover
from backstamp.engine import EngineFacts
from backstamp.errors import BackstampError
from backstamp.factories import Built
from backstamp.launch import Requests, make_launch
from backstamp.model import LayerGroup, ModelFacts, default_model
from backstamp.plan import Plan
from backstamp.resolution import resolve
from backstamp.testing.hosts import described_host
from backstamp_flashinfer.plugin import backstamp_aliases, backstamp_offers
from tests.libraries.fake import FakeLibrary
from tests.plugins.flashinfer.steps import LATENT, LAYER, MIXED, draw, request_of

ROWS = backstamp_offers()


@pytest.mark.parametrize("offer", ROWS, ids=["mha", "mha-sinks", "mla", "mha-thor", "mha-sinks-thor", "mla-thor"])
def test_every_row_is_built_by_its_factory(library: FakeLibrary, offer: Offer) -> None:
    """The factory answers the row's own kernel name."""
    module, _, name = offer.factory.partition(":")
    step = draw(MIXED, LATENT if offer.family == "mla" else LAYER)
    built = getattr(importlib.import_module(module), name)(request_of(step, offer))
    assert isinstance(built, Built)
    assert built.kernel == offer.kernel == "flashinfer"
    built.backend.plan(step.batch)  # type: ignore[union-attr]


def test_the_kernel_needs_no_alias() -> None:
    """A kernel's own name is a key."""
    assert backstamp_aliases() == ()


def test_the_version_the_calls_were_read_in_is_the_floor(library: FakeLibrary) -> None:
    """The recorded signatures, the row and the distribution's extra agree."""
    assert library.version == "0.7.4"
    for offer in ROWS:
        assert offer.requires[0] == f"flashinfer-python>={library.version},<0.8"
        assert offer.companions == ("flashinfer-cubin", "flashinfer-jit-cache")
    assert version("backstamp-flashinfer")


def test_the_declarations_on_disk_have_every_row() -> None:
    """`backstamp.json` is what discovery reads."""
    text = (Path(backstamp_flashinfer.__file__).parent / "backstamp.json").read_text("utf-8")
    assert len(json.loads(text)["offers"]) == len(ROWS)


def test_declaring_imports_neither_torch_nor_the_library() -> None:
    """Any machine can ask what the plugin offers."""
    names = "{'torch', 'flashinfer', 'backstamp_flashinfer.attention', 'backstamp_flashinfer.mla'}"
    code = f"import sys, backstamp_flashinfer.plugin; sys.exit(bool({names} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def resolved(host: str, libraries: dict[str, str] | None = None, model: ModelFacts | None = None) -> Plan:
    """A plan with this kernel in every phase."""
    launch = make_launch(Requests(attention_backend="flashinfer"))
    catalogue = build_catalogue(discover())
    where = described_host(host, libraries=libraries)
    return resolve(launch, EngineFacts(), default_model() if model is None else model, where, catalogue)


@pytest.mark.parametrize("host", ["a100", "l40s", "h100", "h200", "b200", "gb300", "thor", "rtx5090", "gb10"])
def test_cuda_hosts_from_sm80_resolve(host: str) -> None:
    """Every chip the FA2 templates are compiled for."""
    assert resolved(host).phase("decode").kernel == "flashinfer"


@pytest.mark.parametrize(("host", "said"), [("t4", "7.5"), ("mi300x", "cuda"), ("epyc", "cuda")])
def test_other_hosts_are_refused(host: str, said: str) -> None:
    """By what they lack."""
    with pytest.raises(BackstampError) as caught:
        resolved(host)
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"flashinfer-python": "0.7.3"}, "flashinfer-python>=0.7.4"),
        ({"flashinfer-python": "0.8.0"}, "flashinfer-python>=0.7.4,<0.8"),
        ({"flashinfer-cubin": "0.7.5"}, "flashinfer-cubin"),
        ({"flashinfer-jit-cache": "0.7.3"}, "flashinfer-jit-cache"),
        ({"triton": "3.5.1"}, "triton>=3.6"),
    ],
    ids=["old", "new", "cubin", "jit-cache", "triton"],
)
def test_libraries_apart_are_refused_with_both_versions(changed: dict[str, str], said: str) -> None:
    """A floor, a ceiling, and companions of another version than the library's own."""
    together = {"flashinfer-python": "0.7.4", "torch": "2.11.0", "triton": "3.6.0"}
    named = {"flashinfer-cubin": "0.7.4", "flashinfer-jit-cache": "0.7.4+cu130"}
    assert resolved("h100", together).running
    assert resolved("h100", together | named).running
    with pytest.raises(BackstampError) as caught:
        resolved("h100", together | named | changed)
    assert said in caught.value.message
    assert next(iter(changed.values())) in caught.value.message


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"head_dim": 96, "v_head_dim": 96}, "96"),
        ({"softcap": 30.0, "sinks": "fp32"}, "softcap"),
    ],
    ids=["head-dim", "softcap-and-sinks"],
)
def test_a_layer_the_library_does_not_serve_is_refused(facts: dict[str, object], said: str) -> None:
    """Sinks are a module of their own, compiled without soft-capping."""
    whole = default_model()
    layer = replace(whole.groups[0].facts, **facts)  # type: ignore[arg-type]
    model = replace(whole, layers=((layer,),), groups=(LayerGroup("main", layer, (0,)),))
    with pytest.raises(BackstampError) as caught:
        resolved("h100", model=model)
    assert said in caught.value.message
