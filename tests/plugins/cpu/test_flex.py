"""What only `flex_attention` has to hold: steps of new sizes do not compile anew without end."""

from __future__ import annotations

import random

from torch._dynamo.utils import counters

from backstamp.testing.batches import make_batch, make_tree
from backstamp.testing.reference import reference_attention, relative_error
from backstamp.testing.requests import request_for
from backstamp_cpu.backend import build_flex_attention
from backstamp_cpu.plugin import FLEX_CPU
from tests.announced import catch_announcements

REQUEST = request_for(FLEX_CPU, phases=("prefill", "decode", "verify"))


def test_steps_of_new_sizes_reuse_a_handful_of_graphs():
    """Dynamo gives up after eight recompiles of one code object, and a server never stops meeting new sizes."""
    backend = build_flex_attention(REQUEST).backend
    dice = random.Random(0)
    before = counters["stats"]["unique_graphs"]
    for _ in range(40):
        count, kind = dice.randint(1, 9), dice.choice(["decode", "prefill", "tree", "verify"])
        same = 1 if kind == "decode" else dice.randint(1, 9)
        q_lens = [dice.randint(1, 200) if kind == "prefill" else same for _ in range(count)]
        kv_lens = [q_len + dice.choice([0, 0, dice.randint(1, 300)]) for q_len in q_lens]
        tree = make_tree(q_lens, kv_lens, "qlen") if kind == "tree" else None
        step = make_batch(q_lens, kv_lens, tree=tree)
        out = backend.forward(step.q, step.kv, step.layer, backend.plan(step.batch))
        truth, _ = reference_attention(step.q, step.kv, step.layer, step.batch)
        assert relative_error(out, truth) < 1e-5
    # one for each of four kinds of view, and a little slack: a graph also notes which sizes happened to be equal; other
    # tests of this process may have compiled some of the four already
    assert counters["stats"]["unique_graphs"] >= 4
    assert counters["stats"]["unique_graphs"] - before <= 6


def test_each_compiled_function_is_announced_once(monkeypatch):
    """By layer shape and kind of view; steps of other sizes say nothing."""
    announced = catch_announcements(monkeypatch)
    backend = build_flex_attention(REQUEST).backend
    for q_lens, kv_lens in (([30], [40]), ([31], [50]), ([1, 1], [9, 12]), ([30], [40]), ([1, 1, 1], [9, 8, 12])):
        step = make_batch(q_lens, kv_lens)
        backend.forward(step.q, step.kv, step.layer, backend.plan(step.batch))
    layer = step.layer
    shape = f"torch.float32 {layer.num_qo_heads}/{layer.num_kv_heads} heads d{layer.head_dim}x{layer.v_head_dim}"
    assert announced == [("flex_attention", f"{shape} bounds {rows}") for rows in ("flat", "padded")]
