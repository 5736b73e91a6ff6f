"""Schemas of torch operators become signatures that a call is bound against."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

from tests.libraries import record, record_schema
from tests.libraries.fake import signature_of

YAML = """\
- func: other(Tensor x) -> Tensor
- func: attend.out(Tensor q, Tensor(a!) out) -> Tensor(a!)
  func: attend(Tensor q, Tensor(a!) state, *, Tensor? mask=None, SymInt[]? lens=None, str layout="BSH") -> (Tensor, int)
"""


def test_a_schema_is_recorded_with_its_line_and_kinds(tmp_path: Path) -> None:
    """The overload without a suffix; what follows `*` is by name alone."""
    wheel, output = tmp_path / "acme_npu-2.1-py3-none-any.whl", tmp_path / "acme.json"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("acme/functions.yaml", YAML)
        archive.writestr("acme_npu-2.1.dist-info/METADATA", "Name: acme_npu\nVersion: 2.1\n")
    asked = [str(wheel), "acme/functions.yaml", "attend", "--module", "acme", "-o", str(output)]
    assert record_schema.main(asked) == 0
    written = json.loads(output.read_text("utf-8"))
    found = written["functions"]["acme:attend"]
    assert (written["version"], found["source"], found["line"]) == ("2.1", record.FROM_LIBRARY, 3)
    assert str(signature_of(found["parameters"])) == "(q, state, *, mask='None', lens='None', layout='\"BSH\"')"
