"""The work `bench/linear_checks.py` holds against float64: steps of gated delta net and Kimi delta attention.

A case is data. Heads as served models have them (128 wide, two value heads a key head); rows of unlike lengths, rows
without tokens, pads, fresh rows; NaN in every state slot that nobody may read.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from backstamp.attention import LayerSpec
from backstamp.declarations import Phase
from backstamp.model import LayerFacts, LayerGroup, ModelFacts
from backstamp.testing.linear_batches import linear_layer

__all__ = ["CASES", "LinearCase"]


class LinearCase(NamedTuple):
    """One step: `q_lens` are query tokens a row, `more` what `make_linear_step` is told beside."""

    name: str
    phase: Phase
    q_lens: tuple[int, ...]
    more: dict[str, Any]
    family: Literal["gdn", "kda"] = "gdn"
    heads: tuple[int, int] = (4, 8)
    dims: tuple[int, int] = (128, 128)
    order: Literal["vk", "kv"] = "vk"
    dtype: str = "bf16"
    state_dtype: str = "fp32"
    graph: bool = False

    def layer(self) -> LayerSpec:
        """The layer as a kernel sees it."""
        return linear_layer(*self.heads, *self.dims)

    def layers(self) -> tuple[LayerSpec, LayerSpec]:
        """The runner's layers: this one, and the one of full attention."""
        full = LayerSpec(layer_id=1, num_qo_heads=8, num_kv_heads=2, head_dim=128, v_head_dim=128, scale=128**-0.5)
        return self.layer(), full

    def model(self) -> ModelFacts:
        """The layer as the resolver sees it, above one of full attention: a plan has both slots."""
        key_heads, value_heads = self.heads
        facts = LayerFacts(
            family=self.family,
            num_qo_heads=key_heads,
            num_kv_heads=value_heads,
            head_dim=self.dims[0],
            v_head_dim=self.dims[1],
            conv_kernel=4,
        )
        full = LayerFacts(family="mha", num_qo_heads=8, num_kv_heads=2, head_dim=128, v_head_dim=128)
        groups = (LayerGroup("main", facts, (0,)), LayerGroup("main", full, (1,)))
        return ModelFacts(name="check", architecture="", dtype=self.dtype, layers=((facts,), (full,)), groups=groups)


#: Two branches under the first token, and a second root.
TREE = [[-1, 0, 0, 1, 2], [-1, -1, 0, 1, 1], [-1, 0, 1, 2, 3]]
RAGGED = (65, 1, 130, 0, 33, 7)
STATES = [True, True, False, True, False, True]
CHAIN = (4, 4, 4, 4)

STEPS = (
    LinearCase("ragged", "prefill", RAGGED, {"has_state": STATES}),
    LinearCase("computed gates", "prefill", RAGGED, {"has_state": STATES, "raw_gates": False}),
    LinearCase("empty rows and pads", "prefill", (0, 64, 3, 65, 0), {"pads": [2, 4]}),
    LinearCase("tokens of no row", "prefill", (33, 70), {"pad_tokens": 5, "has_state": [False, True]}),
    LinearCase("16/32 heads, long", "prefill", (300, 212), {"has_state": [True, False]}, heads=(16, 32)),
    LinearCase("as many value heads", "prefill", (65, 20), {}, heads=(8, 8)),
    LinearCase("head dim 64", "prefill", (65, 20), {}, dims=(64, 64)),
    LinearCase("state order kv", "prefill", RAGGED, {"has_state": STATES}, order="kv"),
    LinearCase("bf16 states", "prefill", (65, 20), {}, state_dtype="bf16"),
    LinearCase("fp16", "prefill", RAGGED, {"has_state": STATES}, dtype="fp16"),
    LinearCase("rows", "decode", (1,) * 7, {}),
    LinearCase("one row", "decode", (1,), {}),
    LinearCase("pads", "decode", (1,) * 6, {"pads": [0, 3, 5]}),
    LinearCase("empty rows", "decode", (1, 0, 1, 0, 1), {"pad_tokens": 2}),
    LinearCase("computed gates", "decode", (1,) * 5, {"raw_gates": False, "pads": [2]}),
    LinearCase("16/32 heads, 64 rows", "decode", (1,) * 64, {}, heads=(16, 32)),
    LinearCase("head dim 64", "decode", (1,) * 3, {}, dims=(64, 64)),
    LinearCase("state order kv", "decode", (1,) * 7, {"pads": [1]}, order="kv"),
    LinearCase("bf16 states", "decode", (1,) * 7, {}, state_dtype="bf16"),
    LinearCase("fp16", "decode", (1,) * 7, {}, dtype="fp16"),
    LinearCase("CUDA graph", "decode", (1,) * 8, {"pads": [7]}, graph=True),
    LinearCase("kept chain", "verify", CHAIN, {"pads": [1]}),
    LinearCase("kept chain, 16/32 heads, 16 rows", "verify", (4,) * 16, {}, heads=(16, 32)),
    LinearCase("slots a token", "verify", CHAIN, {"form": "slot_table", "num_accepted": [1, 3, 2, 4], "pads": [2]}),
    LinearCase("ragged chain", "verify", (3, 1, 0, 4), {}),
    LinearCase("tree", "verify", (5, 5, 5), {"parents": TREE}),
    LinearCase("computed gates", "verify", CHAIN, {"raw_gates": False}),
    LinearCase("state order kv", "verify", CHAIN, {}, order="kv"),
    LinearCase("CUDA graph", "verify", CHAIN, {}, graph=True),
)
CASES = tuple(case._replace(family=family) for family in ("gdn", "kda") for case in STEPS)
