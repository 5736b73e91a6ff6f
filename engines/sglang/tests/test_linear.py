"""A hybrid model's gated delta nets on a linear kernel of ours, beside Transformers' own tokens.

SGLang's kernels for them do not take float32, and its convolutions and gates are Triton's: those run in Triton's
interpreter here.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.sglang.tests.models import VOCAB, reference, write_hybrid
from engines.sglang.tests.serve_once import CHUNK, prompts
from engines.sglang.tests.serving import serve

COUNT, LONGEST = 6, 120


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with recurrent layers."""
    return write_hybrid(tmp_path_factory.mktemp("models"))


def test_linear_kernels_serve_what_transformers_does(model: Path, tmp_path: Path) -> None:
    """Prompts in chunks, states carried from one to the next and into decode, and the stamps of the linear slot."""
    asked = [tokens[-LONGEST:] for tokens in prompts(VOCAB)[:COUNT]]
    assert sum(len(tokens) > CHUNK for tokens in asked) >= COUNT // 2
    served = serve(
        tmp_path,
        model,
        count=COUNT,
        longest=LONGEST,
        interpreted="hybrid",
        attention_backend="backstamp_torch_native",
        linear_attn_backend="backstamp_torch_native",
    )
    # SGLang caches prefixes of final states in pages of one token alone, and nobody asked for pages
    assert (served.touched or {})["page_size"] == 1
    assert list(served.tokens) == reference(model, asked), served.log[-4000:]
    assert served.linear is not None
    assert {phase: stamp["kernel"] for phase, stamp in served.linear.items()} == {
        "prefill": "torch_native",
        "decode": "torch_native",
    }
    assert "; linear prefill torch_native (backstamp-cpu 0.1.0, operator)" in served.log
    assert "sglang.srt.layers.attention.linear.gdn_backend.GDNAttnBackend.__init__" in (served.touched or {})["hooked"]
