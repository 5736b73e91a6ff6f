"""Softcaps and sinks, which SGLang's own backend for a CPU drops: beside Transformers' own tokens."""

from __future__ import annotations

from pathlib import Path

from engines.sglang.tests.models import VOCAB, reference, write_sinks, write_softcap
from engines.sglang.tests.serve_once import prompts
from engines.sglang.tests.serving import serve

KEY = "backstamp_torch_native"


def test_capped_logits_are_served(tmp_path: Path) -> None:
    """A Gemma 2: caps in chunks, over cached prefixes, in windows and without."""
    model = write_softcap(tmp_path)
    served = serve(tmp_path, model, attention_backend=KEY)
    assert list(served.tokens) == reference(model, prompts(VOCAB)), served.log[-4000:]


def test_sinks_are_served_from_slots_of_the_windows_own(tmp_path: Path) -> None:
    """A GPT-OSS: SGLang starts it beside a list of its own names, and keeps its sliding layers' tokens apart."""
    model = write_sinks(tmp_path)
    served = serve(tmp_path, model, attention_backend=KEY)
    assert list(served.tokens) == reference(model, prompts(VOCAB)), served.log[-4000:]
    assert served.kernels("prefill") == ["torch_native"] * 4
    assert (served.touched or {})["pool"] == "SWAKVPool"
