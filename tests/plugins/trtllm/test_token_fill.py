"""What each token of a step is, written in one launch of our own."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch

from backstamp.testing.batches import make_batch
from backstamp_trtllm import token_fill
from backstamp_trtllm.steps import Step, TokenRows, new_mask
from backstamp_trtllm.token_fill import TokenFill
from tests.ahead import Job, compile_ahead
from tests.compiled_code import Kernel, constants_of

#: (query tokens, keys): rows without either, before, between and behind the others, and longer than a draft rung.
ROWS = ((0, 5), (3, 9), (0, 0), (0, 7), (4, 0), (40, 41), (1, 1), (130, 300), (2, 1), (0, 3))
SINGLE = ((5, 5),)
NONE_OWNED = ((0, 5), (0, 0))


def step_of(rows, *, pads=0, dead=False, drafts=0):
    """A step whose tensors hold what no fill would write."""
    q_lens, kv_lens = zip(*rows, strict=True)
    batch = make_batch(q_lens, [max(pair) for pair in rows], pad_tokens=pads).batch
    batch = replace(batch, kv_lens=torch.tensor(kv_lens, dtype=torch.int32))
    count = batch.num_tokens
    tokens = TokenRows(
        torch.full((count,), -7),
        torch.full((count,), -7, dtype=torch.int32),
        torch.full((count,), -7, dtype=torch.int32),
        new_mask(count, drafts, torch.device("cpu")).fill_(-7) if drafts else None,
        drafts,
    )
    step = Step(batch, TokenFill("xqa"), 0, batch.index.page_table, False, tokens=tokens)
    step.dead = (torch.arange(count) % 2).bool().view(-1, 1, 1) if dead else None
    return step


def bits_of(words):
    """Which of a row's tokens a mask's words show."""
    return [
        bit for word, number in enumerate(words) for bit in range(32 * word, 32 * word + 32) if number >> bit % 32 & 1
    ]


def test_the_launch_is_made_on_the_device_of_its_tensors(monkeypatch):
    """Triton launches on the current device, which may be another."""
    asked = []
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: asked.append(tensor) or contextlib.nullcontext())
    step = step_of(ROWS)
    step.fill.fill(step, step.tokens)
    assert [tensor is step.tokens.rows for tensor in asked] == [True]


@pytest.mark.parametrize("block", [4, 64, 128])
@pytest.mark.parametrize("drafts", [0, 8, 32, 128])
@pytest.mark.parametrize("dead", [False, True])
@pytest.mark.parametrize(
    ("rows", "pads"), [(ROWS, 0), (ROWS, 5), (SINGLE, 0), (NONE_OWNED, 3)], ids=["ragged", "pads", "one", "only-pads"]
)
def test_every_token_is_told_what_it_is(rows, pads, dead, drafts, block, monkeypatch):
    """Its row, its place there and the keys it sees; pads are of the last row and see none."""
    monkeypatch.setattr(token_fill, "BLOCK", block)
    step = step_of(rows, pads=pads, dead=dead, drafts=drafts)
    tokens = step.tokens
    step.fill.fill(step, tokens)
    owned = [(row, place, max(0, kv - q + place + 1)) for row, (q, kv) in enumerate(rows) for place in range(q)]
    wanted = owned + [(len(rows) - 1, rows[-1][0] + pad, 0) for pad in range(pads)]
    assert list(zip(tokens.rows.tolist(), tokens.offsets.tolist(), tokens.visible.tolist(), strict=True)) == wanted
    if dead:
        assert step.dead.flatten().tolist() == [seen == 0 for _, _, seen in wanted]
    if drafts:
        shown = [bits_of([word % 2**32 for word in words]) for words in tokens.mask.tolist()]
        assert shown == [[*range(min(place, drafts - 1) + 1)] for _, place, _ in wanted]


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({"rows": ROWS, "pads": 3, "drafts": 8}, (1, 1)),
        ({"dead": True}, (2, 0)),
        ({"drafts": 0}, (2, 0)),
        ({"drafts": 128}, (2, 0)),
    ],
    ids=["sizes", "dead", "no-mask", "wider-mask"],
)
def test_later_steps_run_the_code_of_the_first_where_it_is_the_same(changes, counts, monkeypatch):
    """With their own tensors and sizes; what Triton compiles for is another code."""
    kernel = Kernel(token_fill.fill_kernel)
    monkeypatch.setattr(token_fill, "fill_kernel", kernel)
    fill, step = TokenFill("xqa"), step_of(**({"rows": SINGLE, "drafts": 32} | changes))
    first = step_of(SINGLE, drafts=32)
    fill.fill(first, first.tokens)
    fill.fill(step, step.tokens)
    assert (len(kernel.first), len(kernel.again)) == counts
    if kernel.again:
        (again,) = kernel.again
        assert constants_of(again) == constants_of(kernel.first[0])
        assert all(again[name] is getattr(step.tokens, name) for name in ("rows", "offsets", "visible", "mask"))
        assert (again["num_rows"], again["num_tokens"], again["drafts"]) == (10, 183, 8)


ARCHS = (90, 100, 120)
WHOLE = {"qo_indptr": "*i32", "kv_lens": "*i32", "rows": "*i64", "offsets": "*i32", "visible": "*i32"}
NUMBERS = dict.fromkeys(("num_rows", "num_tokens", "halvings", "drafts"), "i32")
OUTPUTS = {"plain": (None, None, 0), "dead": ("*i1", None, 0), "mask": (None, "*i32", 1), "both": ("*i1", "*i32", 4)}


def test_the_kernel_compiles_once_for_all_addresses_and_sizes(tmp_path):
    """For every kind of chip, without one: code at hand is found by absent tensors and words alone."""
    jobs = [
        Job(
            "backstamp_trtllm.token_fill:fill_kernel",
            ARCHS,
            WHOLE | {"dead": dead, "mask": mask} | NUMBERS,
            {"WORDS": words, "BLOCK": 128},
        )
        for dead, mask, words in OUTPUTS.values()
    ]
    for answer in compile_ahead(jobs, tmp_path):
        assert min(answer["code"].values()) > 0
        assert len(answer["code"]) == len(ARCHS)
        assert answer["looked_at"] == []
