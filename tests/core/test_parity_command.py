"""`backstamp parity`: plugins, a folder, an engine; text and JSON; and what its exit status stands for."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from backstamp.testing.dists import write_distribution, write_plugin
from tests.children import COMMAND
from tests.entry_trees import GATE, TARGET, write_tree

DRAFT = "class AcmeForCausalLMNextN: ...\nEntryClass = [AcmeForCausalLMNextN]\n"
GATED = DRAFT.replace("...", f"\n    def {GATE}(self): ...")
PAIR = """
from backstamp.declarations import EntryPair
from backstamp.hookspecs import hookimpl

@hookimpl
def backstamp_entry_classes():
    return [EntryPair(draft="acme_models.draft:Head", target="acme_models.target:Body")]
"""


def parity(
    *arguments: str, path: Path | None = None, before: str = "", columns: str = "80", cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    environment = {**os.environ, "COLUMNS": columns, "PYTHONPATH": str(path or "")}
    run = [sys.executable, "-c", f"{before}\n{COMMAND}", "parity", *arguments]
    return subprocess.run(run, capture_output=True, text=True, env=environment, timeout=120, cwd=cwd)


def answered(*arguments: str, path: Path | None = None) -> dict[str, list[dict[str, object]]]:
    """What it answers in JSON."""
    return json.loads(parity(*arguments, "--json", path=path).stdout)


def plugin_with_pair(site: Path, *, body: str, head: str) -> None:
    """A plugin that declares one pair, and the package its classes lie in, which must not be imported."""
    write_plugin(site, "acme-plugin", source=PAIR)
    never = "raise SystemExit('imported')\n"
    write_tree(site, {"acme_models/__init__.py": never})
    write_tree(site, {"acme_models/target.py": never + body, "acme_models/draft.py": never + head})
    write_distribution(site, "acme-models")


def test_a_violation_in_json_has_the_published_keys(tmp_path: Path) -> None:
    """Pairs, unpaired drafts and violations with the pair, the hook, the side, the file and the line; exit 1."""
    folder = write_tree(tmp_path, {"acme.py": TARGET, "draft.py": DRAFT})
    run = parity("--source", str(folder), "--json")
    assert run.returncode == 1, run.stderr
    found = json.loads(run.stdout)
    assert found["pairs"] == [{"draft": "AcmeForCausalLMNextN", "target": "AcmeForCausalLM", "by": "name"}]
    assert found["unpaired"] == []
    (violation,) = found["violations"]
    assert violation.items() >= {
        "draft": "AcmeForCausalLMNextN",
        "target": "AcmeForCausalLM",
        "hook": GATE,
        "missing_on": "draft",
        "file": "draft.py",
        "line": 1,
    }.items()  # fmt: skip


def test_a_violation_in_text_fits_eighty_columns(tmp_path: Path) -> None:
    """The pair, its place, the side that lacks the hook and what to do."""
    folder = write_tree(tmp_path, {"acme.py": TARGET, "draft.py": DRAFT})
    run = parity("--source", str(folder))
    assert run.returncode == 1, run.stderr
    words = " ".join(run.stdout.split())
    assert "fault: AcmeForCausalLMNextN (draft of AcmeForCausalLM)" in words
    assert f"draft.py:1: the draft needs {GATE}, which its target has, got none" in words
    assert max(map(len, run.stdout.splitlines())) <= 80


def test_annotations_are_placed_from_the_current_directory(tmp_path: Path) -> None:
    """A code host reads paths from the root of the checkout, where the command runs; elsewhere they start at DIR."""
    write_tree(tmp_path / "src" / "models", {"acme.py": TARGET, "draft.py": DRAFT})
    below = parity("--source", "src/models", "--report", "github", cwd=tmp_path)
    assert "file=src/models/draft.py,line=1" in below.stdout
    assert '"uri": "src/models/draft.py"' in parity("--source", "src/models", "--report", "sarif", cwd=tmp_path).stdout
    (tmp_path / "other").mkdir()
    beside = parity("--source", "../src/models", "--report", "github", cwd=tmp_path / "other")
    assert "file=draft.py,line=1" in beside.stdout


def test_a_pair_in_parity_passes(tmp_path: Path) -> None:
    """Exit 0, and how much was looked at."""
    run = parity("--source", str(write_tree(tmp_path, {"acme.py": TARGET, "draft.py": GATED})))
    assert run.returncode == 0, run.stdout
    assert "1 passed, 0 failed" in " ".join(run.stdout.split())


def test_nothing_paired_is_no_pass(tmp_path: Path) -> None:
    """Targets alone, however many, are nothing compared: exit 1."""
    run = parity("--source", str(write_tree(tmp_path, {"acme.py": TARGET})))
    assert run.returncode == 1
    assert "got 1 entry class(es) and no pair" in " ".join(run.stdout.split())


def test_an_unpaired_draft_is_in_every_form(tmp_path: Path) -> None:
    """In text and JSON, with why, and a report of nothing else is no pass."""
    folder = write_tree(tmp_path, {"draft.py": DRAFT})
    assert "has no target" in parity("--source", str(folder)).stdout
    (unpaired,) = answered("--source", str(folder))["unpaired"]
    assert unpaired["draft"] == "AcmeForCausalLMNextN"
    assert "acme" in str(unpaired["why"])


def test_a_report_may_go_to_a_file(tmp_path: Path) -> None:
    """`--report json=FILE`, as every check has it."""
    folder = write_tree(tmp_path / "models", {"acme.py": TARGET, "draft.py": DRAFT})
    file = tmp_path / "report.json"
    run = parity("--source", str(folder), "--report", f"json={file}")
    assert run.returncode == 1
    found = json.loads(file.read_text("utf-8"))
    assert [(item["hook"], item["file"], item["line"]) for item in found["violations"]] == [(GATE, "draft.py", 1)]
    assert found["passed"] is False


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("one", "--source", "two"), "one of DIST, --source and --engine"),
        (("--pair", "Draft"), "DRAFT=TARGET"),
        (("--gate", "hook"), "HOOK=NAME"),
        (("--engine", "tgi"), "one of sglang, vllm"),
        (("--source", "/nowhere"), "a folder of Python files"),
        (("no-such-distribution",), "a distribution with a plugin"),
    ],
    ids=["two-sources", "pair", "gate", "engine", "folder", "distribution"],
)
def test_usage_exits_2(arguments: tuple[str, ...], word: str) -> None:
    """With what was needed."""
    run = parity(*arguments)
    assert run.returncode == 2
    assert word in " ".join(run.stderr.split())


def test_without_griffe_the_extra_is_named(tmp_path: Path) -> None:
    """One clear error, and no class is taken for read."""
    folder = write_tree(tmp_path, {"acme.py": TARGET})
    run = parity("--source", str(folder), before="import sys; sys.modules['griffe'] = None")
    assert run.returncode == 1
    assert "pip install 'backstamp[parity]'" in " ".join(run.stderr.split())


def test_a_plugins_pair_is_read_from_source(tmp_path: Path) -> None:
    """An `EntryPair` pairs classes whose names say nothing; neither package is imported."""
    plugin_with_pair(tmp_path, body=f"class Body:\n    def {GATE}(self): ...\n", head="class Head: ...\n")
    run = parity("acme-plugin", "--json", path=tmp_path)
    assert run.returncode == 1, run.stderr
    found = json.loads(run.stdout)
    names = ("acme_models.draft:Head", "acme_models.target:Body")
    assert found["pairs"] == [{"draft": names[0], "target": names[1], "by": "EntryPair"}]
    (violation,) = found["violations"]
    assert (violation["draft"], violation["target"], violation["hook"]) == (*names, GATE)
    assert (violation["file"], violation["line"]) == ("acme_models/draft.py", 2)


def test_a_plugins_classes_inherit_over_installed_packages(tmp_path: Path) -> None:
    """A draft may stand on a class of another distribution."""
    body = f"class Body:\n    def {GATE}(self): ...\n"
    plugin_with_pair(tmp_path, body=body, head="from acme_base.core import Base\nclass Head(Base): ...\n")
    write_tree(tmp_path, {"acme_base/__init__.py": "", "acme_base/core.py": f"class Base:\n    {GATE} = print\n"})
    run = parity("acme-plugin", path=tmp_path)
    assert run.returncode == 0, run.stdout


def test_a_pair_that_is_not_installed_is_skipped_and_no_pass(tmp_path: Path) -> None:
    """A plugin may declare classes of an engine that is not here: said, and nothing ran."""
    write_plugin(tmp_path, "acme-plugin", source=PAIR)
    run = parity("acme-plugin", path=tmp_path)
    assert run.returncode == 1
    words = " ".join(run.stdout.split())
    assert "skipped: acme_models.draft:Head needs the module acme_models.draft, which is not here" in words
    assert "nothing ran, which is no pass" in words
    (first, _) = answered("acme-plugin", path=tmp_path)["unread"]
    assert (first["rule"], first["subject"]) == ("absent-class", "acme_models.draft:Head")


def test_a_declared_class_that_is_gone_is_a_fault(tmp_path: Path) -> None:
    """The module is there and the class is not: the loader would not find it either."""
    plugin_with_pair(tmp_path, body="class Body: ...\n", head="class Renamed: ...\n")
    run = parity("acme-plugin", path=tmp_path)
    assert run.returncode == 1
    assert "fault: acme_models.draft:Head" in run.stdout


ENGINE_REGISTRY = """
class ModelRegistry:
    from elsewhere.drafts import AcmeForCausalLMNextN
    models = {"AcmeForCausalLMNextN": AcmeForCausalLMNextN}
"""


def engine(site: Path, registry: str) -> None:
    """An installed engine with one target, and a plugin's draft in a package of its own."""
    write_tree(site, {"sglang/__init__.py": ""})
    write_tree(site, {"sglang/srt/models/registry.py": registry, "elsewhere/__init__.py": ""})
    write_tree(site, {"elsewhere/drafts.py": DRAFT, "sglang/srt/models/acme.py": TARGET})


def test_an_engine_is_read_from_source_and_its_registry_asked(tmp_path: Path) -> None:
    """What a plugin registered lives in another package: the live registry names it, its source is read."""
    engine(tmp_path, ENGINE_REGISTRY)
    found = answered("--engine", "sglang", path=tmp_path)
    (violation,) = found["violations"]
    assert (violation["draft"], violation["file"]) == ("AcmeForCausalLMNextN", "elsewhere/drafts.py")
    assert found["notes"] == []


def test_an_engine_that_does_not_import_is_read_all_the_same(tmp_path: Path) -> None:
    """Its registry could not be asked, which is told; what its models list is compared."""
    engine(tmp_path, "raise RuntimeError('needs a GPU')\n")
    write_tree(tmp_path, {"sglang/srt/models/draft.py": DRAFT})
    found = answered("--engine", "sglang", path=tmp_path)
    assert [item["draft"] for item in found["violations"]] == ["AcmeForCausalLMNextN"]
    (note,) = found["notes"]
    assert note["rule"] == "live-registry"
    assert "needs a GPU" in str(note["text"])


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed here")
def test_an_engine_that_is_not_installed_is_one_clear_error() -> None:
    """With the way to look at one without installing it."""
    run = parity("--engine", "vllm")
    assert run.returncode == 2
    words = " ".join(run.stderr.split())
    assert "needs vllm, installed" in words
    assert "--source" in words
