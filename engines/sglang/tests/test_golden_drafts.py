"""The golden table of draft keys beside SGLang's own factory: where both answer alike, and where not, and why."""

from __future__ import annotations

import csv
import re
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution

import pytest

from backstamp.catalogue import Catalogue, build_catalogue
from backstamp.construction import RunnerShape, build
from backstamp.discovery import discover
from backstamp.draft import DraftBackendFactory
from backstamp.engine import EngineFacts
from backstamp.errors import BackstampError
from backstamp.launch import Requests, make_launch
from backstamp.model import model_from_config
from backstamp.resolution import resolve
from backstamp.stamp import read_stamp
from backstamp.testing.dists import write_distribution
from backstamp.testing.hosts import described_host
from engines.sglang.tests.drafts import own_answers
from tests.documents import ROOT
from tests.models import config
from tests.scenes import layer_specs

#: Where SGLang answers otherwise, by (key, model, host): docs/engines.md says each once more.
BUILDS_WHAT_CANNOT_RUN = {
    ("flashinfer", "mha", "mi300x"),
    ("flashinfer", "mha", "epyc"),
    ("triton", "mha", "epyc"),
    ("intel_amx", "mha", "epyc"),
    ("intel_amx", "mha", "h100"),
    ("aiter", "mha", "rx7900"),
    ("aiter", "mha", "h100"),
    ("fa3", "mha", "b200"),
    ("fa3", "mha", "rtx5090"),
    ("fa4", "mha", "mi300x"),
    ("flashmla", "mha", "h100"),
    ("flashmla", "mla", "rtx5090"),
    ("trtllm_mha", "mla", "b200"),
    ("trtllm_mha", "mha", "a100"),
    ("trtllm_mla", "mla", "h100"),
    ("dsa", "mha", "h100"),
    ("dsa", "dsv4", "h100"),
    ("dsv4", "dsa", "h100"),
    ("ascend", "mha", "h100"),
}
XQA_UNDER_ITS_FAMILYS_NAME = {("trtllm_mha", "mha", "h100"), ("trtllm_mha", "mha", "rtx5090")}
HYBRID_ELSEWHERE_IS_FA3 = {
    ("hybrid_linear_attn", "hybrid", "l40s"),
    ("hybrid_linear_attn", "hybrid", "mi300x"),
}
NO_DRAFT_OF_SGLANGS = {
    ("torch_native", "mha", "epyc"),
    ("torch_native", "mha", "h100"),
    ("torch_native", "mla", "epyc"),
    ("tokenspeed_mla", "mla", "b200"),
    ("tokenspeed_mla", "mla", "gb300"),
}


def rows() -> list[dict[str, str]]:
    """The rows of the table."""
    text = (ROOT / "tests" / "data" / "aliases.csv").read_text("utf-8")
    return list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalogue]:
    """Every first-party plugin, put on the path of this module: the suite's venv has one of them."""
    site = tmp_path_factory.mktemp("site")
    for project in sorted((ROOT / "plugins").glob("*/pyproject.toml")):
        text = project.read_text("utf-8")
        name = re.search(r'^name = "(.*)"', text, re.MULTILINE)[1]
        if not _is_installed(name):
            shutil.copytree(project.parent / "src", site, dirs_exist_ok=True)
            entry = re.search(r'plugins"\]\n(\w+ = ".*")', text)[1].replace('"', "")
            points = f"[backstamp.plugins]\n{entry}\n"
            write_distribution(site, name, requires=("backstamp>=0.2,<0.3",), entry_points=points)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        yield build_catalogue(discover())


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def ours(row: dict[str, str], catalogue: Catalogue) -> tuple[str, str]:
    """What our factory stamps, from the plugins' own factories over stand-ins of their libraries; or our refusal."""
    launch = make_launch(Requests(draft_attention_backend=row["alias"]), role="draft")
    model, host = model_from_config(config(row["model"])), described_host(row["host"])
    try:
        plan = resolve(launch, EngineFacts(), model, host, catalogue, role="draft")
    except BackstampError as refusal:
        return f"refused: {refusal}", f"refused: {refusal}"
    # it imports plugins, which are on the path in this module only
    from tests.libraries.real_factories import real_factories

    shape = RunnerShape(layers=layer_specs(model), max_rows=16, max_tokens=2048, max_pages=4096, max_kv_len=8192)
    with real_factories() as load:
        factory = DraftBackendFactory(build(plan, shape, catalogue, load=load))
    container, extend = factory.create_decode_backend(), factory.create_draft_extend_backend()
    (kernel,) = {read_stamp(item).kernel for item in (container, *container.attn_backends)}
    return kernel, read_stamp(extend).kernel


def place(row: dict[str, str]) -> tuple[str, str, str]:
    """A row's key, model and host."""
    return row["alias"], row["model"], row["host"]


def refuses(answer: str) -> bool:
    """Whether an answer is a refusal."""
    return answer.startswith("refused: ")


@pytest.mark.parametrize("row", rows(), ids=lambda row: "-".join(place(row)))
def test_a_draft_key_answers_as_sglangs_or_as_explained(
    row: dict[str, str], catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both factories, each asked for the draft's loop and its extend, on one described host."""
    own, here = own_answers(row, monkeypatch), ours(row, catalogue)
    for mine, theirs in zip(here, own, strict=True):
        if place(row) in BUILDS_WHAT_CANNOT_RUN:
            assert refuses(mine)
            assert theirs == row["alias"]
        elif place(row) in XQA_UNDER_ITS_FAMILYS_NAME:
            assert (mine, theirs) == ("xqa", "trtllm_mha")
        elif place(row) in HYBRID_ELSEWHERE_IS_FA3:
            assert (mine, theirs) == ("triton", "fa3")
        elif place(row) in NO_DRAFT_OF_SGLANGS:
            assert mine == row["alias"]
            assert theirs.startswith("refused: EAGLE is not supported")
        else:
            assert mine == theirs or (refuses(mine) and refuses(theirs))


def test_the_answers_that_are_alike_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """88 of 152 are the same kernel and 8 the same refusal; the table is ours, held by the test above."""
    kernels = refusals = 0
    for row in rows():
        for mine, theirs in zip((row["draft_decode"], row["draft_extend"]), own_answers(row, monkeypatch), strict=True):
            kernels += mine == theirs
            refusals += refuses(mine) and refuses(theirs)
    assert (2 * len(rows()), kernels, refusals) == (152, 88, 8)
