"""What the flashinfer plugin declares, and that its factories answer it."""

from __future__ import annotations

import importlib
import json
from importlib.metadata import version
from pathlib import Path

import pytest

import backstamp_flashinfer
from backstamp.declarations import Offer
from backstamp.factories import Built
from backstamp_flashinfer.plugin import backstamp_aliases, backstamp_offers
from tests.libraries.fake import FakeLibrary
from tests.plugins.flashinfer.steps import LATENT, LAYER, MIXED, draw, request_of

ROWS = backstamp_offers()


@pytest.mark.parametrize("offer", ROWS, ids=["mha", "mha-sinks", "mla"])
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
