"""The indexer: logits and top-k of our own kernels against the reference, in every form of index."""

from __future__ import annotations

import pytest
import torch

from backstamp.attention import PagedKV
from backstamp.errors import UnsupportedBatch
from backstamp.testing.requests import request_for
from backstamp.testing.sparse_reference import reference_indexer, reference_topk
from backstamp_dsa import indexer
from backstamp_dsa.backend import build_dsa_triton
from backstamp_dsa.plugin import DSA_TRITON
from tests.plugins.dsa.cases import DSA, RAGGED, dsa_layer, latent_step

CASES = {
    "prefill": {"rows": RAGGED},
    "prefill-fp32-page1-csr": {"rows": RAGGED, "dtype": torch.float32, "page_size": 1, "index_form": "csr"},
    "prefill-page64-indirect": {"rows": ((3, 130), (2, 2)), "page_size": 64, "index_form": "indirect"},
    "decode": {"rows": ((1, 1), (1, 77), (0, 0)), "phase": "decode", "pad_tokens": 2},
}
KEY_DIM, HEADS = 32, 16


def drawn(rows, dtype=torch.float16, **changes):
    """Index queries, weights and keys under a step's own pages."""
    step = latent_step(rows, dsa_layer(HEADS, head_dim=KEY_DIM, v_head_dim=KEY_DIM), dtype=dtype, **changes)
    weights = torch.randn(step.batch.num_tokens, HEADS, generator=torch.Generator().manual_seed(2))
    name = {torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    request = request_for(DSA_TRITON, (DSA,), dtype=name, page_size=step.batch.index.page_size)
    backend = build_dsa_triton(request).backend
    return step, weights, backend.indexer, backend.plan(step.batch)


@pytest.mark.parametrize("topk", [5, 40])
@pytest.mark.parametrize("case", CASES)
def test_the_choice_of_keys_is_the_references(case, topk):
    """Best first, -1 where a token sees fewer; the logits are random, so no two keys tie."""
    step, weights, chooser, state = drawn(**CASES[case])
    indices = chooser.select(step.q, weights, step.kv, state, topk)
    logits = reference_indexer(step.q, weights, step.kv, step.batch)
    wanted = reference_topk(logits, topk)
    assert torch.equal(indices < 0, wanted < 0)
    # near ties may change places in fp16: what was chosen is as good as what the reference chose
    picked = logits.gather(1, indices.long().clamp_min(0)).masked_fill(indices < 0, 0.0)
    best = logits.gather(1, wanted.long().clamp_min(0)).masked_fill(wanted < 0, 0.0)
    assert float((picked - best).abs().max()) <= (1e-3 if step.q.dtype is torch.float32 else 0.05)
    for token in indices.tolist():
        real = [at for at in token if at >= 0]
        assert len(set(real)) == len(real)


def test_many_tokens_are_taken_in_runs(monkeypatch):
    """The logits of a long prefill never lie in memory at once, and runs choose as one launch would."""
    step, weights, chooser, state = drawn(**CASES["prefill"])
    whole = chooser.select(step.q, weights, step.kv, state, 20)
    monkeypatch.setattr(indexer, "LOGITS_PER_LAUNCH", 2 * step.batch.max_kv_len)
    assert torch.equal(chooser.select(step.q, weights, step.kv, state, 20), whole)


def test_a_step_without_tokens_chooses_nothing():
    """An empty batch launches nothing."""
    step, weights, chooser, state = drawn(((0, 0), (0, 5)))
    assert chooser.select(step.q, weights, step.kv, state, 7).shape == (0, 7)


@pytest.mark.parametrize(
    "wrong",
    [
        {"q": lambda step: step.q[:, :3]},
        {"q": lambda step: step.q[..., :24]},
        {"weights": lambda step: torch.ones(step.batch.num_tokens, HEADS, dtype=torch.float16)},
        {"weights": lambda step: torch.ones(step.batch.num_tokens, 3)},
        {"keys": lambda step: PagedKV(k=step.kv.k.float(), v=None)},
        {"keys": lambda step: PagedKV(k=step.kv.k[..., :16], v=None)},
        {"keys": lambda step: PagedKV(k=step.kv.k[:, :8], v=None)},
    ],
    ids=["heads", "dim", "weights dtype", "weights shape", "key dtype", "key dim", "page size"],
)
def test_what_the_indexer_does_not_take_is_refused(wrong):
    """Each shape and dtype, before a launch, with the field named."""
    step, weights, chooser, state = drawn(RAGGED)
    given = {"q": step.q, "weights": weights, "keys": step.kv}
    given |= {name: make(step) for name, make in wrong.items()}
    (name,) = wrong
    with pytest.raises(UnsupportedBatch, match=f"indexer {name}"):
        chooser.select(given["q"], given["weights"], given["keys"], state, 8)
