"""The stand-in itself: a call the library would refuse is refused, and what was recorded is what the file says."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from tests.libraries import fake, record

LIBRARY = """
class Wrapper:
    def __init__(self, workspace, layout="NHD", *, backend="auto"):
        pass

    def run(self, q, kv, /, out=None):
        pass


def attend(q, *rest, scale=1.0, **more):
    pass
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> fake.FakeLibrary:
    """A recorded library of three functions."""
    (tmp_path / "acme").mkdir()
    (tmp_path / "acme" / "ops.py").write_text(LIBRARY, "utf-8")
    (tmp_path / "acme-2.1.dist-info").mkdir()
    (tmp_path / "acme-2.1.dist-info" / "METADATA").write_text("Name: acme-kernels\nVersion: 2.1\n", "utf-8")
    paths = ["acme.ops:Wrapper.__init__", "acme.ops:Wrapper.run", "acme.ops:attend"]
    assert record.main([str(tmp_path), "-o", str(tmp_path / "acme-kernels.json"), *paths]) == 0
    monkeypatch.setattr(fake, "FOLDER", tmp_path)
    return fake.FakeLibrary("acme-kernels", monkeypatch)


def test_a_record_keeps_version_file_and_line(library: fake.FakeLibrary, tmp_path: Path) -> None:
    """Who reads the record can look the function up."""
    functions = json.loads((tmp_path / "acme-kernels.json").read_text("utf-8"))["functions"]
    assert library.version == "2.1"
    assert functions["acme.ops:Wrapper.run"] == {
        "source": record.FROM_LIBRARY,
        "file": "acme/ops.py",
        "line": 6,
        "parameters": [
            ["self", "POSITIONAL_ONLY", None],
            ["q", "POSITIONAL_ONLY", None],
            ["kv", "POSITIONAL_ONLY", None],
            ["out", "POSITIONAL_OR_KEYWORD", "None"],
        ],
    }


def test_a_call_is_remembered_by_parameter_name(library: fake.FakeLibrary) -> None:
    """Methods and functions alike."""
    library.on("acme.ops:Wrapper.run", lambda self, q, kv, out=None: q + kv)
    ops = importlib.import_module("acme.ops")
    assert ops.Wrapper(b"", backend="fa2").run(1, 2) == 3
    assert library.called("acme.ops:Wrapper.__init__") == [{"workspace": b"", "backend": "fa2"}]
    assert library.called("acme.ops:Wrapper.run") == [{"q": 1, "kv": 2}]


def test_an_argument_the_library_does_not_take_is_a_type_error(library: fake.FakeLibrary) -> None:
    """The binding would fail on the machine that has the library."""
    wrapper = importlib.import_module("acme.ops").Wrapper
    with pytest.raises(TypeError, match="unexpected keyword argument 'stream'"):
        wrapper(b"", stream=1)
    with pytest.raises(TypeError, match="missing a required"):
        wrapper(b"").run(1)


def test_a_function_nobody_gave_a_behaviour_fails_the_test(library: fake.FakeLibrary) -> None:
    """A stand-in that answers None would let a binding pass that drops the answer."""
    with pytest.raises(AssertionError, match=r"acme\.ops:attend was called"):
        importlib.import_module("acme.ops").attend(1, 2, scale=2.0, other=3)
