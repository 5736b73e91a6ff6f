"""The parity check over vLLM as it was published; run by `make test-parity`, which fetches it first."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from backstamp.parity import Parity, Violation, check_parity, from_folder
from tests.parity_wheels.fetch import vllm_models

PROCESS = "process_weights_after_loading"
FALL_BACK = "fall_back_to_pt_during_load"

#: Draft, target, hook, the side that lacks it, and where. docs/parity.md says of each what comes of it.
FOUND = {
    ("DFlash2BeamForCausalLM", "BeamForCausalLM", PROCESS, "draft", ()),
    ("DFlash2BeamForCausalLM", "BeamForCausalLM", FALL_BACK, "draft", ()),
    ("DFlashLagunaForCausalLM", "LagunaForCausalLM", FALL_BACK, "draft", ()),
    ("DSparkDraftModel", "DeepseekV4ForCausalLM", PROCESS, "draft", ("cuda",)),
    ("DSparkDraftModel", "DeepseekV4ForCausalLM", PROCESS, "draft", ("cpu",)),
    ("DSparkV41DraftModel", "DeepseekV41ForCausalLM", PROCESS, "draft", ("cuda", "xpu", "cpu")),
    ("DeepSeekV4MTP", "DeepseekV4ForCausalLM", PROCESS, "draft", ("cuda",)),
    ("DeepSeekV4MTP", "DeepseekV4ForCausalLM", PROCESS, "draft", ("cpu",)),
    ("DeepSeekV4MTP", "DeepseekV4ForConditionalGeneration", PROCESS, "draft", ("cuda",)),
    ("Dots3NoteMTP", "Dots3NoteForCausalLM", PROCESS, "draft", ()),
    ("ErnieMTP", "Ernie4_5_MoeForCausalLM", FALL_BACK, "draft", ()),
    ("Glm4MoeMTP", "Glm4MoeForCausalLM", FALL_BACK, "draft", ()),
    ("HYV4MTP", "HYV4ForCausalLM", PROCESS, "draft", ("rocm",)),
    ("K3DSparkForCausalLM", "KimiK3ForConditionalGeneration", PROCESS, "target", ("cuda", "xpu", "cpu")),
    ("K3DSparkForCausalLM", "KimiK3ForConditionalGeneration", PROCESS, "target", ("rocm",)),
}
DOCUMENT = Path(__file__).resolve().parents[2] / "docs/parity.md"
MADE_BY_CALLS = ["_D3ForSequenceClassificationBase", "_LlamaBidirectionalForSequenceClassificationBase",
                 "_LlamaBidirectionalModelBase"]  # fmt: skip


@pytest.fixture(scope="module")
def parity() -> Parity:
    """The check over the model folder, and the packages its registry leads to."""
    return check_parity(from_folder(vllm_models()))


def keys(violations: tuple[Violation, ...]) -> set[tuple[str, str, str, str, tuple[str, ...]]]:
    """Draft, target, hook, side and platforms of each."""
    return {(item.draft, item.target, item.hook, item.missing_on, item.platforms) for item in violations}


def test_every_violation_is_known_and_documented(parity: Parity) -> None:
    """What it finds is this list; each pair of it stands in the page with what comes of it."""
    assert keys(parity.violations) == FOUND
    page = DOCUMENT.read_text("utf-8")
    for draft, target, hook, _, _ in FOUND:
        assert all(f"`{name}`" in page for name in (draft, target, hook)), (draft, target, hook)


def test_every_draft_of_the_table_is_paired_or_reported(parity: Parity) -> None:
    """Each class of `_SPECULATIVE_DECODING_MODELS`; two of them have no target of their own."""
    table = {row.label for row in from_folder(vllm_models()).rows if row.draft}
    loose = {item.draft.name for item in parity.unpaired}
    assert {pair.draft.name for pair in parity.pairs} | loose == table
    assert loose == {"ExtractHiddenStatesModel", "LiLiCorrForCausalLM"}


def test_everything_was_read_and_nothing_imported(parity: Parity) -> None:
    """Every class the registry lists; three stand on a base that a call makes, which is told and decides nothing."""
    assert (len(parity.classes), len(parity.pairs), parity.troubles, parity.absent) == (347, 76, (), ())
    assert [note.subject for note in parity.notes] == MADE_BY_CALLS
    assert not [name for name in sys.modules if name.partition(".")[0] == "vllm"]


def test_a_hook_removed_for_one_platform_is_named_for_it(tmp_path: Path) -> None:
    """In a copy whose ROCm draft of DeepSeek-V4 loses its hook, exactly that pair is named, with the platform."""
    package = vllm_models().parents[1]
    for part in ("model_executor/models", "models"):
        shutil.copytree(package / part, tmp_path / "vllm" / part)
    module = tmp_path / "vllm/models/deepseek_v4/amd/mtp.py"
    text = module.read_text("utf-8")
    assert text.count(f"def {PROCESS}(") == 1
    module.write_text(text.replace(f"def {PROCESS}(", "def renamed("), "utf-8")
    broken = check_parity(from_folder(tmp_path / "vllm/model_executor/models"))
    assert keys(broken.violations) - FOUND == {
        ("DeepSeekV4MTP", target, PROCESS, "draft", ("rocm",))
        for target in ("DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration")
    }
