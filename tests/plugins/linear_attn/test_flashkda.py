"""`flashkda` over FlashKDA's recorded signature: what it is handed, what is refused, and numbers against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backstamp.errors import UnsupportedBatch
from backstamp.testing.linear_batches import linear_layer
from backstamp_linear_attn.backend import build_flashkda_prefill
from backstamp_linear_attn.plugin import FLASHKDA
from tests.linear_steps import PREFILL, compare, forward, reference, request_for, run, step
from tests.plugins.linear_attn import behave

# the library's heads are 128 wide; what is computed here does not depend on it
OFFER = replace(FLASHKDA, head_dims=("any",))
LAYER = linear_layer(3, 3, 16, 16)
KDA = {"family": "kda", "layer": LAYER, "dtype": torch.bfloat16, "lower_bound": -5.0}
BUILT = {"dtype": "bf16", "phases": ("prefill",)}
RAW = {name: of for name, of in PREFILL.items() if of.get("raw_gates", True)}
BOUND = 4e-3


@pytest.fixture(autouse=True)
def library(monkeypatch):
    """FlashKDA as recorded."""
    return behave.flashkda(monkeypatch)


@pytest.mark.parametrize("of", [pytest.param(of, id=name) for name, of in RAW.items()])
def test_it_equals_the_recurrence(of):
    """Outputs and the pool; states of fresh rows and slots of others are NaN and stay out of it."""
    made = step("prefill", of, **KDA)
    wanted = reference(made)
    assert compare(made, run(build_flashkda_prefill, OFFER, made, **BUILT), wanted) < BOUND


def test_the_library_is_handed_raw_tensors_and_packed_states(library):
    """It computes norms, gates and beta itself; offsets are as wide as it reads them."""
    made = step("prefill", PREFILL["ragged"] | {"pad_tokens": 2}, **KDA)
    out = torch.full_like(made.v, float("nan"))
    backend = build_flashkda_prefill(request_for(OFFER, made, **BUILT)).backend
    assert forward(backend, made, backend.plan(made.batch), out=out) is out
    (called,) = library.called(behave.FLASH_KDA)
    for name, given in (("q", made.q), ("g", made.gates.a), ("beta", made.gates.b), ("out", out)):
        assert called[name].data_ptr() == given.data_ptr()
    assert called["q"].shape == (1, 18, 3, 16)
    assert called["initial_state"].shape == (4, 3, 16, 16)
    assert called["initial_state"].dtype == torch.float32
    assert called["cu_seqlens"].tolist() == [0, 5, 6, 15, 18]
    assert (called["lower_bound"], called["scale"]) == (-5.0, LAYER.scale)
    assert out[18:].abs().max() == 0


def test_tokens_of_no_row_are_zero_where_only_the_device_knows_them():
    """The library leaves them alone."""
    made = step("prefill", {"q_lens": [3, 2], "pad_tokens": 2, "host_lens": False}, **KDA)
    out = torch.full_like(made.v, float("nan"))
    backend = build_flashkda_prefill(request_for(OFFER, made, **BUILT)).backend
    forward(backend, made, backend.plan(made.batch), out=out)
    assert out[5:].abs().max() == 0


def test_two_value_heads_may_share_a_key_head(library):
    """The library has no such form: keys and queries are repeated for it."""
    made = step("prefill", PREFILL["ragged"], **KDA | {"layer": linear_layer(2, 4, 16, 16)})
    wanted = reference(made)
    assert compare(made, run(build_flashkda_prefill, OFFER, made, **BUILT), wanted) < BOUND


def test_strided_tokens_and_outputs_are_copied():
    """The library takes contiguous tensors."""
    made = step("prefill", PREFILL["ragged"], **KDA)
    wanted = reference(made)
    wide_q, wide_k = torch.cat([made.q, made.k], 1).split(3, 1)
    buffer = torch.full((made.v.shape[0], 2, *made.v.shape[1:]), float("nan"), dtype=torch.bfloat16)
    backend = build_flashkda_prefill(request_for(OFFER, made, **BUILT)).backend
    strided = replace(made, q=wide_q, k=wide_k)
    out = forward(backend, strided, backend.plan(made.batch), out=buffer[:, 1])
    assert out.data_ptr() == buffer[:, 1].data_ptr()
    assert compare(made, out, wanted) < BOUND


GATES = [
    pytest.param({"lower_bound": None}, "gates.lower_bound: from -5 up to 0", id="no-bound"),
    pytest.param({"lower_bound": -6.0}, "gates.lower_bound: from -5 up to 0", id="too-low"),
    pytest.param({"raw_gates": False}, "gates: RawGates", id="computed"),
]


@pytest.mark.parametrize(("change", "needed"), GATES)
def test_gates_it_has_no_form_for_are_refused(change, needed, library):
    """By their name, before any launch; another decay would be computed in silence."""
    made = step("prefill", PREFILL["ragged"], **KDA | change)
    backend = build_flashkda_prefill(request_for(OFFER, made, **BUILT)).backend
    with pytest.raises(UnsupportedBatch) as caught:
        forward(backend, made, backend.plan(made.batch))
    assert caught.value.needed.startswith(needed)
    assert library.calls == []


def test_wider_gates_are_refused_and_not_rounded(library):
    """The library takes bf16 alone."""
    made = step("prefill", PREFILL["ragged"], **KDA)
    wide = replace(made, gates=replace(made.gates, b=made.gates.b.float()))
    backend = build_flashkda_prefill(request_for(OFFER, made, **BUILT)).backend
    with pytest.raises(UnsupportedBatch, match=r"gates\.a and gates\.b: torch\.bfloat16"):
        forward(backend, wide, backend.plan(made.batch))
    assert library.calls == []


def test_no_tokens_call_nothing(library):
    """Outputs of pads are zero."""
    made = step("prefill", {"q_lens": [0, 0], "pad_tokens": 3}, **KDA)
    assert run(build_flashkda_prefill, OFFER, made, **BUILT).abs().max() == 0
    assert library.calls == []
