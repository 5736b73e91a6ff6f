"""The work `bench/linear_checks.py` holds against float64: steps of gated delta net and Kimi delta attention.

Cases are those of the conformance kit, with fixed numbers. Heads as served models have them (128 wide, two value heads
a key head); rows of unlike lengths, rows without tokens, pads, fresh rows; NaN in every state slot that nobody may
read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from backstamp.declarations import Phase
from backstamp.testing.conformance.linear_cases import TREE, LinearCase

__all__ = ["CASES"]


def _step(name: str, phase: Phase, q_lens: tuple[int, ...], **more: Any) -> LinearCase:
    known = {"heads": (4, 8), "dims": (128, 128), "dtype": "bf16"}
    return LinearCase(name=name, phase=phase, q_lens=q_lens, **known | more)


RAGGED = (65, 1, 130, 0, 33, 7)
STATES = (True, True, False, True, False, True)
CHAIN = (4, 4, 4, 4)

STEPS = (
    _step("ragged", "prefill", RAGGED, has_state=STATES),
    _step("computed gates", "prefill", RAGGED, has_state=STATES, raw_gates=False),
    _step("empty rows and pads", "prefill", (0, 64, 3, 65, 0), pads=(2, 4)),
    _step("tokens of no row", "prefill", (33, 70), pad_tokens=5, has_state=(False, True)),
    _step("16/32 heads, long", "prefill", (300, 212), has_state=(True, False), heads=(16, 32)),
    _step("as many value heads", "prefill", (65, 20), heads=(8, 8)),
    _step("head dim 64", "prefill", (65, 20), dims=(64, 64)),
    _step("many rows", "prefill", (33, 0, 70, 5) * 6, has_state=(True, True, False, True) * 6, pads=(3,)),
    _step("state order kv", "prefill", RAGGED, has_state=STATES, order="kv"),
    _step("bf16 states", "prefill", (65, 20), state_dtype="bf16"),
    _step("fp16", "prefill", RAGGED, has_state=STATES, dtype="fp16"),
    _step("rows", "decode", (1,) * 7),
    _step("one row", "decode", (1,)),
    _step("pads", "decode", (1,) * 6, pads=(0, 3, 5)),
    _step("empty rows", "decode", (1, 0, 1, 0, 1), pad_tokens=2),
    _step("computed gates", "decode", (1,) * 5, raw_gates=False, pads=(2,)),
    _step("16/32 heads, 64 rows", "decode", (1,) * 64, heads=(16, 32)),
    _step("head dim 64", "decode", (1,) * 3, dims=(64, 64)),
    _step("state order kv", "decode", (1,) * 7, pads=(1,), order="kv"),
    _step("bf16 states", "decode", (1,) * 7, state_dtype="bf16"),
    _step("fp16", "decode", (1,) * 7, dtype="fp16"),
    _step("CUDA graph", "decode", (1,) * 8, pads=(7,), graph=True),
    _step("kept chain", "verify", CHAIN, pads=(1,)),
    _step("kept chain, 16/32 heads, 16 rows", "verify", (4,) * 16, heads=(16, 32)),
    _step("slots a token", "verify", CHAIN, form="slot_table", num_accepted=(1, 3, 2, 4), pads=(2,)),
    _step("ragged chain", "verify", (3, 1, 0, 4)),
    _step("tree", "verify", (5, 5, 5), parents=TREE),
    _step("computed gates", "verify", CHAIN, raw_gates=False),
    _step("state order kv", "verify", CHAIN, order="kv"),
    _step("CUDA graph", "verify", CHAIN, graph=True),
)
#: Kimi delta attention whose decay has a bound.
BOUNDED = (
    _step("bounded decay", "prefill", RAGGED, has_state=STATES),
    _step("bounded decay, empty rows and pads", "prefill", (0, 64, 3, 65, 0), pads=(2, 4), pad_tokens=5),
    _step("bounded decay, as many value heads", "prefill", (300, 212), heads=(8, 8)),
    _step("bounded decay", "decode", (1,) * 6, pads=(0, 3)),
    _step("bounded decay", "verify", CHAIN, pads=(1,)),
)
CASES = (
    *(replace(case, family=family) for family in ("gdn", "kda") for case in STEPS),
    *(replace(case, family="kda", lower_bound=-5.0) for case in BOUNDED),
)
