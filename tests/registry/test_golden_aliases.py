"""The golden alias table: what each key builds, as stamps of built objects and their steps, or why it is refused.

The objects are the plugins' own, built by their real factories over stand-ins of the kernel libraries.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

from backstamp.catalogue import build_catalogue
from backstamp.construction import RunnerShape, build
from backstamp.discovery import discover
from backstamp.draft import DraftBackendFactory
from backstamp.engine import EngineFacts
from backstamp.errors import BackstampError
from backstamp.launch import Requests, make_launch
from backstamp.model import model_from_config
from backstamp.resolution import resolve
from backstamp.stamp import read_stamp
from backstamp.testing.hosts import described_host
from tests.libraries.real_factories import real_factories
from tests.models import config
from tests.scenes import layer_specs

TABLE = Path(__file__).parent.parent / "data" / "aliases.csv"


def rows() -> list[dict[str, str]]:
    """The rows of the table."""
    return list(csv.DictReader(line for line in TABLE.read_text("utf-8").splitlines() if not line.startswith("#")))


def test_the_table_is_whole() -> None:
    """A row that is lost would pass in silence; every key but the misspelt one is somebody's."""
    assert len(rows()) == 76
    keys = set(build_catalogue(discover()).keys("attention"))
    assert {row["alias"] for row in rows()} - keys == {"flashinfr"}


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row['alias']}-{row['model']}-{row['host']}")
def test_a_draft_key_builds_what_the_table_says(row: dict[str, str]) -> None:
    """Stamps of the container, of every step and of the draft-extend backend, or a refusal that names the reason."""
    launch = make_launch(Requests(draft_attention_backend=row["alias"]), role="draft")
    model = model_from_config(config(row["model"]))
    catalogue = build_catalogue(discover())
    host = described_host(row["host"])
    if row["draft_decode"].startswith("refused"):
        with pytest.raises(BackstampError) as caught:
            resolve(launch, EngineFacts(), model, host, catalogue, role="draft")
        assert row["draft_decode"].split(": ")[1].lower() in caught.value.message.lower()
        return
    plan = resolve(launch, EngineFacts(), model, host, catalogue, role="draft")
    runner = RunnerShape(layers=layer_specs(model), max_rows=16, max_tokens=2048, max_pages=4096, max_kv_len=8192)
    with real_factories() as load:
        factory = DraftBackendFactory(build(plan, runner, catalogue, load=load))
    container, extend = factory.create_decode_backend(), factory.create_draft_extend_backend()
    stamps = [read_stamp(item) for item in (container, *container.attn_backends)]
    assert {stamp.kernel for stamp in stamps} == {row["draft_decode"]}
    assert len(container.attn_backends) == plan.num_steps - 1
    assert read_stamp(extend).kernel == row["draft_extend"]
    for leaf in (*container.attn_backends, extend):
        assert type(leaf).__module__.partition(".")[0] == f"backstamp_{read_stamp(leaf).plugin.name}"


def test_nothing_bound_to_a_stand_in_outlives_it() -> None:
    """Later tests import the plugins and the libraries that they would have without this module."""
    before = {name: module for name, module in sys.modules.items() if name.startswith("backstamp_")}
    catalogue = build_catalogue(discover())
    with real_factories() as load:
        for rows_of_kernel in catalogue.rows.values():
            load(rows_of_kernel[0], catalogue)
        assert "__fake__" in vars(sys.modules["flashinfer"])
    assert {name: module for name, module in sys.modules.items() if name.startswith("backstamp_")} == before
    assert not [name for name, module in sys.modules.items() if "__fake__" in vars(module)]
