"""The golden alias table: what each key builds, as stamps of built objects and their steps, or why it is refused."""

from __future__ import annotations

import csv
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
from backstamp.testing.fakes import recording_factory
from backstamp.testing.hosts import described_host
from tests.models import config

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
    factory = DraftBackendFactory(build(plan, RunnerShape(), catalogue, load=recording_factory))
    container = factory.create_decode_backend()
    stamps = [read_stamp(item).kernel for item in (container, *container.attn_backends)]
    assert set(stamps) == {row["draft_decode"]}
    assert len(container.attn_backends) == plan.num_steps - 1
    assert read_stamp(factory.create_draft_extend_backend()).kernel == row["draft_extend"]
