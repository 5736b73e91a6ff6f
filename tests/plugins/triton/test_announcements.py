"""Each kernel that Triton compiles is announced once, by the step and the layer it is compiled for."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from backstamp.attention import KVIndex, RaggedKV
from tests.announced import catch_announcements
from tests.plugins.triton.cases import Case, build_attention, build_mla, make

CASE = Case("small", ((2, 20), (1, 3)), dtype="fp32")
LONG = dataclasses.replace(CASE, rows=((1, 300),), heads=(2, 1), phase="decode")


@pytest.fixture
def announced(monkeypatch):
    """What was announced, in order."""
    return catch_announcements(monkeypatch)


def _attend(backend, drawn, **options):
    backend.forward(drawn.q, drawn.kv, drawn.layer, backend.plan(drawn.batch), q_rope=drawn.q_rope, **options)


def test_a_kernel_is_announced_once_however_many_steps_run_it(announced):
    """Steps of other sizes run the same kernel."""
    drawn = make(CASE)
    backend = build_attention(drawn.request).backend
    for _ in range(3):
        _attend(backend, drawn)
    _attend(backend, make(dataclasses.replace(CASE, rows=((2, 9),))))
    assert announced == [("triton", "fp32 4/2 heads d64x64 causal yes, tiles of 16x16 page_table")]


def test_a_split_step_announces_its_merge_too(announced):
    """Two kernels, each once."""
    drawn = make(LONG)
    backend = build_attention(drawn.request).backend
    for _ in range(2):
        _attend(backend, drawn)
    assert [what.split(" fp32")[0] for _, what in announced if what.startswith("merge")] == ["merge of"]
    assert len(announced) == 2
    assert all("one token a row split" in what for _, what in announced)


@pytest.mark.parametrize(
    "changes",
    [
        {"sinks": True},
        {"window_left": 4},
        {"softcap": 2.0},
        {"causal": False},
        {"causal": (1, 0)},
        {"starts": (1, 0)},
        {"index": "csr"},
        {"phase": "verify", "tree": "full", "rows": ((2, 20), (2, 3))},
        {"rows": ((1, 2), (1, 3))},
    ],
    ids=["sinks", "window", "softcap", "non-causal", "causal-rows", "starts", "index", "tree", "one-token"],
)
def test_what_is_compiled_in_is_announced_of_its_own(changes, announced):
    """A feature of a step or a layer makes another kernel, announced when it is first met."""
    plain, other = make(CASE), make(dataclasses.replace(CASE, **changes))
    backend = build_attention(plain.request).backend
    for drawn in (plain, other, plain, other):
        _attend(backend, drawn)
    assert len(announced) == len(set(announced)) == 2


def test_the_tensors_of_a_call_make_kernels_of_their_own(announced):
    """An LSE to write, and keys that lie in no cache."""
    drawn = make(CASE)
    backend = build_attention(drawn.request).backend
    new = RaggedKV(k=torch.zeros(23, 2, 64), v=torch.zeros(23, 2, 64), kv_indptr=torch.tensor([0, 20, 23]).int())
    bare = backend.plan(dataclasses.replace(drawn.batch, index=KVIndex(page_size=16)))
    for _ in range(2):
        _attend(backend, drawn)
        _attend(backend, drawn, lse=torch.empty(3, 4))
        backend.forward(drawn.q, None, drawn.layer, bare, new=new)
    assert len(announced) == len(set(announced)) == 3


def test_a_latent_query_in_two_parts_is_announced_apart(announced):
    """`q_rope` is a pointer of its own."""
    case = dataclasses.replace(CASE, rows=((1, 2),), mla=True, heads=(2, 1), dims=(576, 512))
    whole, split = make(case), make(dataclasses.replace(case, split_rope=True))
    backend = build_mla(whole.request).backend
    for drawn in (whole, split, whole, split):
        _attend(backend, drawn)
    assert len(announced) == len(set(announced)) == 2
    assert announced[1][1].endswith("q_rope")
