"""The parity check over SGLang as it was published; run by `make test-parity`, which fetches it first."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from backstamp.entry_classes.pairing import is_draft
from backstamp.parity import Parity, Violation, check_parity, from_folder
from tests.parity_wheels.fetch import sglang_models

GATE = "shared_experts_fusion_disable_reason"
COUNT = "num_fusable_shared_experts"
PRECOMPILE = "precompile_kernels_after_loading"
FALL_BACK = "fall_back_to_pt_during_load"

#: Draft, target, hook, the side that lacks it. docs/parity.md says of each what comes of it.
FOUND = {
    ("BailingMoeForCausalLMNextN", "BailingMoeForCausalLM", GATE, "target"),
    ("BailingMoeForCausalLMNextN", "BailingMoeForCausalLM", COUNT, "target"),
    ("BailingMoeForCausalLMNextN", "BailingMoeForCausalLM", "post_load_weights", "target"),
    ("BailingMoeForCausalLMNextN", "BailingMoeV2ForCausalLM", GATE, "target"),
    ("BailingMoeForCausalLMNextN", "BailingMoeV2ForCausalLM", COUNT, "target"),
    ("BailingMoeForCausalLMNextN", "BailingMoeV2ForCausalLM", "post_load_weights", "target"),
    ("BailingMoeForCausalLMNextN", "BailingMoeV2_5ForCausalLM", GATE, "target"),
    ("BailingMoeForCausalLMNextN", "BailingMoeV2_5ForCausalLM", COUNT, "target"),
    ("DFlashLagunaForCausalLM", "LagunaForCausalLM", FALL_BACK, "draft"),
    ("DSparkMiniMaxDraftModel", "MiniMaxM3SparseForCausalLM", GATE, "draft"),
    ("DSparkMiniMaxDraftModel", "MiniMaxM3SparseForCausalLM", COUNT, "draft"),
    ("DSparkMiniMaxDraftModel", "MiniMaxM3SparseForCausalLM", PRECOMPILE, "draft"),
    ("DSparkMiniMaxDraftModel", "MiniMaxM3SparseForConditionalGeneration", GATE, "draft"),
    ("DSparkMiniMaxDraftModel", "MiniMaxM3SparseForConditionalGeneration", COUNT, "draft"),
    ("DSparkMiniMaxDraftModel", "MiniMaxM3SparseForConditionalGeneration", PRECOMPILE, "draft"),
    ("Dots3NoteForCausalLMNextN", "Dots3NoteForCausalLM", FALL_BACK, "draft"),
    ("Eagle3DeepseekV2ForCausalLM", "DeepseekV2ForCausalLM", GATE, "draft"),
    ("Eagle3DeepseekV2ForCausalLM", "DeepseekV2ForCausalLM", COUNT, "draft"),
    ("Glm5NextForConditionalGenerationNextN", "Glm5NextForConditionalGeneration", FALL_BACK, "draft"),
    ("Lfm2DSparkDraftModel", "Lfm2ForCausalLM", FALL_BACK, "draft"),
    ("Qwen4ExpForCausalLMMTP", "Qwen4ExpForConditionalGeneration", PRECOMPILE, "draft"),
}
DOCUMENT = Path(__file__).resolve().parents[2] / "docs/parity.md"
#: The gate's own method of the DSpark draft, as it stands in its module.
METHOD = re.compile(rf"    @classmethod\n    def {GATE}\(.*?(?=\n    @classmethod)", re.DOTALL)


@pytest.fixture(scope="module")
def parity() -> Parity:
    """The check over the model folder."""
    return check_parity(from_folder(sglang_models()))


def keys(violations: tuple[Violation, ...]) -> set[tuple[str, str, str, str]]:
    """Draft, target, hook and side of each."""
    return {(item.draft, item.target, item.hook, item.missing_on) for item in violations}


def test_every_violation_is_known_and_documented(parity: Parity) -> None:
    """What it finds is this list; each pair of it stands in the page with what comes of it."""
    assert keys(parity.violations) == FOUND
    page = DOCUMENT.read_text("utf-8")
    for draft, target, hook, _ in FOUND:
        assert all(f"`{name}`" in page for name in (draft, target, hook)), (draft, target, hook)


def test_every_draft_is_paired_or_reported(parity: Parity) -> None:
    """No entry class with a draft's name is passed over, and heads for any target are the only ones without one."""
    read = from_folder(sglang_models()).rows
    named = {row.name for row in read if re.search("NextN|MTP|Eagle|DSpark|DFlash|Assistant|LiLiCorr", row.name)}
    paired = {pair.draft.name for pair in parity.pairs}
    loose = {item.draft.name for item in parity.unpaired}
    assert paired | loose == named
    assert loose == {
        "DFlash2DraftModel",
        "DFlashDraftModel",
        "DSparkDraftModel",
        "LiLiCorrDraftModel",
        "LingDSparkModel",
        "MiniMaxDFlash2DraftModel",
    }
    assert not any(is_draft(pair.target) for pair in parity.pairs)


def test_everything_was_read_and_nothing_imported(parity: Parity) -> None:
    """290 entry classes, no file and no class left out; a base of transformers answers no hook and is told."""
    assert (len(parity.classes), len(parity.pairs), parity.troubles, parity.absent) == (290, 57, (), ())
    assert [note.subject for note in parity.notes] == ["transformers.PreTrainedModel"]
    assert not [name for name in sys.modules if name.partition(".")[0] == "sglang"]


def test_gates_assigned_in_a_loop_are_seen(parity: Parity) -> None:
    """qwen3_5.py gives its four entry classes the gate in a loop: none of them is told to lack it."""
    assert not [item for item in parity.violations if "Qwen3_5" in item.draft]
    assert "Qwen3_5MoeForConditionalGeneration" in parity.covered


def test_coverage_names_two_classes(parity: Parity) -> None:
    """Both are explained in the page."""
    assert [item.name for item in parity.uncovered] == [
        "DSparkMiniMaxDraftModel",
        "GlmOcrForConditionalGenerationNextN",
    ]
    assert all(f"`{item.name}`" in DOCUMENT.read_text("utf-8") for item in parity.uncovered)


def test_the_shipped_defect_is_named(parity: Parity, tmp_path: Path) -> None:
    """SGLang #33312 again, in a copy: without the DSpark draft's gate exactly that pair is named, with the draft."""
    folder = tmp_path / "sglang/srt/models"
    shutil.copytree(sglang_models(), folder)
    module = folder / "deepseek_v4_dspark.py"
    text, count = METHOD.subn("", module.read_text("utf-8"))
    assert count == 1
    module.write_text(text, "utf-8")
    broken = check_parity(from_folder(folder))
    assert keys(broken.violations) - FOUND == {("DeepseekV4ForCausalLMDSpark", "DeepseekV4ForCausalLM", GATE, "draft")}
    assert keys(broken.violations) >= FOUND
    (violation,) = [item for item in broken.violations if item.draft == "DeepseekV4ForCausalLMDSpark"]
    assert violation.file == "deepseek_v4_dspark.py"
    assert {item.name for item in broken.uncovered} - {item.name for item in parity.uncovered} == {violation.draft}
