"""What the resolver is handed is of its class, or the argument is named."""

from __future__ import annotations

import pytest

from backstamp.compiled import compile_for
from backstamp.engine import EngineFacts
from backstamp.errors import BadInput
from backstamp.launch import Requests, make_launch
from backstamp.model import default_model
from backstamp.resolution import resolve, resolve_on
from backstamp.testing.fakes import catalogue_of, fake_plugin
from backstamp.testing.hosts import described_host
from tests.resolving import kernel

CATALOGUE = catalogue_of(fake_plugin("p", [kernel("k")]))
HOST = described_host("h100")
SOUND = {"launch": make_launch(Requests()), "engine": EngineFacts(), "model": default_model()}
WRONG = [
    pytest.param("launch", None, "Launch", id="launch"),
    pytest.param("launch", Requests(), "Launch", id="requests-as-launch"),
    pytest.param("engine", {"graph": "any"}, "EngineFacts", id="engine"),
    pytest.param("model", "llama", "ModelFacts", id="model"),
    pytest.param("measurements", [], "Measurements or None", id="measurements"),
    pytest.param("role", "drfat", "target or draft", id="role"),
    pytest.param("target", "plan.json", "the target's Plan or None", id="target"),
]


@pytest.mark.parametrize(("name", "value", "needed"), WRONG)
def test_an_argument_of_another_class_is_named(name: str, value: object, needed: str) -> None:
    """On a described host and on a compiled catalogue; a role nobody has would get a plan of nothing."""
    arguments = {**SOUND, name: value}
    for call in (
        lambda: resolve(host=HOST, catalogue=CATALOGUE, **arguments),
        lambda: resolve_on(compile_for(CATALOGUE, HOST), **arguments),
    ):
        with pytest.raises(BadInput) as caught:
            call()
        assert (caught.value.who, caught.value.needed) == (f"resolve, {name}", needed)
        assert caught.value.found


@pytest.mark.parametrize(("name", "needed"), [("host", "HostFacts"), ("catalogue", "Catalogue")])
def test_a_host_or_a_catalogue_of_another_class_is_named(name: str, needed: str) -> None:
    """They are looked at before anything is compiled."""
    with pytest.raises(BadInput, match=f"resolve, {name}: needs {needed}, got 'h100'"):
        resolve(**{"host": HOST, "catalogue": CATALOGUE, **SOUND, name: "h100"})
    with pytest.raises(BadInput, match="resolve, host: needs HostCatalogue"):
        resolve_on(HOST, **SOUND)  # type: ignore[arg-type]
