"""Case 9, tokenspeed #135: two layers each held a fallback for an unset field, and the lower one named NVIDIA's."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import backstamp
from backstamp.construction import RunnerShape, build
from backstamp.errors import Unresolved
from backstamp.first_party import FIRST_PARTY
from backstamp.testing.fakes import catalogue_of, fake_plugin, recording_factory
from tests.resolving import kernel

CORE = Path(backstamp.__file__).parent
#: Where a kernel may be named at all, and why.
NAMED = {
    "first_party.py": "who owns which name, to say what to install",
    "linear.py": "mission section 4: unset linear phases, and what an unset verify follows",
    "auto_choice.py": "the key of hybrid models' auto list",
    "phase_choice.py": "the parent of the dsa sub-settings",
    "hostfit.py": "the library whose interpreter runs on a CPU",
    "doctor.py": "a library whose version is shown",
    "measurements.py": "a library whose version a record of times holds",
    "tune_record.py": "the same",
    "testing/conformance/imports.py": "modules that no declaration imports",
}


@pytest.mark.parametrize("key", [None, "", "triton", {"prefill": None}], ids=str)
@pytest.mark.parametrize("load", [None, recording_factory], ids=["real", "fake"])
def test_building_what_nobody_resolved_is_refused(key: object, load: object) -> None:
    """The build step has no default of its own: it says to run the resolver."""
    catalogue = catalogue_of(fake_plugin("p", [kernel("triton")]))
    with pytest.raises(Unresolved, match="Run the resolver first") as caught:
        build(key, RunnerShape(), catalogue, load=load)
    assert repr(key) in caught.value.found


def test_there_is_one_default_table() -> None:
    """No module beside those listed names a first-party kernel, so none can hold a fallback."""
    named: dict[str, set[str]] = {}
    for path in sorted(CORE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and node.value in FIRST_PARTY:
                named.setdefault(path.relative_to(CORE).as_posix(), set()).add(node.value)
    assert set(named) == set(NAMED), named
    assert named["linear.py"] <= {"triton", "flashinfer"}
    assert named["phase_choice.py"] == {"dsa"}
