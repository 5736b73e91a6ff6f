"""The Python of the pages runs, with keys that a CPU serves in place of a GPU's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engines.transformers.tests.small_models import padded_prompts, small_model
from tests.documents import blocks

HERE = {"fa3": "torch_native", "flashinfer": "flex_attention", "triton": "torch_native"}


@pytest.mark.parametrize("document", ["docs/engines.md", "engines/transformers/README.md"])
def test_the_code_of_the_page_runs(document: str, tmp_path: Path) -> None:
    """Both calls, and what the handle answers."""
    ((_, body),) = blocks(document, "python")
    for key, ours in HERE.items():
        assert f'"{key}"' in body
        body = body.replace(f'"{key}"', f'"{ours}"')
    small_model("qwen3").save_pretrained(tmp_path)
    ids, mask = padded_prompts()
    names = {
        "AutoModelForCausalLM": AutoModelForCausalLM,
        "model": small_model("qwen3"),
        "path": tmp_path,
        "inputs": {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 2},
    }
    exec(body, names)
    with torch.inference_mode():
        assert names["model"](ids).logits.isfinite().all()
