"""Speculative decoding: a draft's loop and the verification of what it drafts, beside SGLang's own Triton backend.

SGLang has no draft for a CPU. Its Triton kernels run here in Triton's interpreter: its own attention, for the answer to
compare with, and in every run the small kernels around a draft. Tokens alone would show no fault of a draft, so what
the target accepts is compared too.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.sglang.tests.models import write_models
from engines.sglang.tests.serving import Served, serve

KEY = "backstamp_torch_native"
SHAPES = {
    "chain": {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4},
    "tree": {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6},
}


def speculate(folder: Path, model: Path, shape: str, **asked: object) -> Served:
    """Serve a few short prompts with a draft that is the target's own checkpoint."""
    return serve(
        folder,
        model,
        count=5,
        longest=32,
        interpreted="draft",
        page_size=1,
        speculative_algorithm="STANDALONE",
        speculative_draft_model_path=str(model),
        **SHAPES[shape],
        **asked,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, of the target and of the draft."""
    return write_models(tmp_path_factory.mktemp("models"))["full"]


@pytest.fixture(scope="module")
def own(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Served]:
    """What SGLang's Triton backend answers and accepts, target and draft."""
    return {
        shape: speculate(tmp_path_factory.mktemp("own"), model, shape, attention_backend="triton") for shape in SHAPES
    }


def test_a_draft_is_taken_and_refused(own: dict[str, Served]) -> None:
    """What the other tests compare is not the easy case: drafted tokens are accepted, and refused."""
    for served in own.values():
        assert served.accepted is not None, served.log[-4000:]
        counts = [sum(column) for column in zip(*(row + [0] * (4 - len(row)) for row in served.accepted), strict=True)]
        assert counts[0] > 0
        assert counts[1] > 0
        assert counts[2] > 0


@pytest.mark.parametrize("shape", SHAPES)
def test_target_and_draft_serve_what_sglang_serves(
    shape: str, model: Path, own: dict[str, Served], tmp_path: Path
) -> None:
    """One key for both: equal tokens, equal steps of equal length, and stamps of every phase."""
    served = speculate(tmp_path, model, shape, attention_backend=KEY)
    assert served.tokens == own[shape].tokens, served.log[-4000:]
    assert served.accepted == own[shape].accepted
    assert set((served.stamps or {})["0"]) == {"prefill", "decode", "verify"}
    assert served.draft is not None
    # the container, its steps and the extend, each stamped by SGLang with the kernel's name
    assert served.draft["named"] == ["torch_native"] * 4
    stamps = served.draft["stamps"]["0"]
    assert {stamp["source"] for stamp in stamps.values()} == {"inherited"}
    assert set(stamps) == {"prefill", "draft_decode", "draft_extend"}


def test_a_draft_of_ours_beside_a_target_of_sglangs(model: Path, own: dict[str, Served], tmp_path: Path) -> None:
    """`--speculative-draft-attention-backend` alone: the target stays SGLang's."""
    served = speculate(tmp_path, model, "chain", attention_backend="triton", speculative_draft_attention_backend=KEY)
    assert served.tokens == own["chain"].tokens, served.log[-4000:]
    assert served.accepted == own["chain"].accepted
    assert served.stamps == {}
    assert served.draft is not None
    assert served.draft["made"] == ["backstamp_sglang"] * 4
    assert served.draft["named"] == ["torch_native"] * 4
    assert served.draft["stamps"]["0"]["draft_decode"]["source"] == "operator"
