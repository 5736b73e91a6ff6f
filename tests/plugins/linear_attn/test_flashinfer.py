"""`flashinfer`'s gated delta net over recorded signatures: what it is handed, what is refused, and numbers."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import pytest
import torch

from backstamp.errors import UnsupportedBatch
from backstamp.linear_gates import computed_gates
from backstamp.linear_math import unit_heads
from backstamp.testing.linear_batches import linear_layer
from backstamp_linear_attn.backend import build_flashinfer_prefill, build_flashinfer_rows
from backstamp_linear_attn.plugin import FLASHINFER_PREFILL, FLASHINFER_ROWS
from tests.linear_steps import (
    CHAIN,
    DECODE,
    PREFILL,
    RAGGED_VERIFY,
    UNCOUNTED,
    compare,
    forward,
    reference,
    request_for,
    run,
    step,
)
from tests.plugins.linear_attn import behave

# the library's heads are 128 wide; what is computed here does not depend on it
PREFILL_OFFER = replace(FLASHINFER_PREFILL, head_dims=("any",))
ROWS_OFFER = replace(FLASHINFER_ROWS, head_dims=("any",))
BF16 = {"dtype": torch.bfloat16}
# our own kernel prepares a prefill, and Triton's interpreter cuts bf16 off instead of rounding it
FP16 = {"dtype": torch.float16}
PREFILLS = {"dtype": "fp16", "phases": ("prefill",)}
ROWS = {"dtype": "bf16", "phases": ("decode", "verify")}
BOUND = 4e-3


@pytest.fixture(autouse=True)
def library(monkeypatch):
    """flashinfer as recorded."""
    return behave.flashinfer(monkeypatch)


def split_above(tokens, monkeypatch):
    """Have rows of more tokens be ones that the library may split; the module is the one over the stand-in."""
    monkeypatch.setattr(import_module("backstamp_linear_attn.flashinfer_prefill"), "_SHORT_ROW", tokens)


@pytest.mark.parametrize("short", [0, 1024], ids=["packed", "pool"])
@pytest.mark.parametrize("of", [pytest.param(of, id=name) for name, of in PREFILL.items()])
def test_prefill_equals_the_recurrence(of, short, monkeypatch):
    """Outputs and the pool; fresh rows read no state. Rows that the library may split go through packed states."""
    split_above(short, monkeypatch)
    made = step("prefill", of, **FP16)
    wanted = reference(made)
    assert compare(made, run(build_flashinfer_prefill, PREFILL_OFFER, made, **PREFILLS), wanted) < BOUND


#: More rows than the library splits: as many states as it takes to be above `_FEW_STATES`.
MANY = {"q_lens": [1, 0, 2] * 9, "has_state": [True, False, True] * 9, "pads": [3, 5], "pad_tokens": 2}


def test_short_rows_are_not_worth_splitting(library):
    """However few: their states stay where they lie."""
    made = step("prefill", {"q_lens": [1024]}, layer=linear_layer(1, 1, 16, 16), **FP16)
    library.on(behave.PREFILL, lambda output, **_: output.zero_())
    run(build_flashinfer_prefill, PREFILL_OFFER, made, **PREFILLS)
    longer = step("prefill", {"q_lens": [1025]}, layer=linear_layer(1, 1, 16, 16), **FP16)
    library.on(behave.PREFILL, lambda output_state, output, **_: (output.zero_(), output_state.zero_()))
    run(build_flashinfer_prefill, PREFILL_OFFER, longer, **PREFILLS)
    assert ["state_indices" in called for called in library.called(behave.PREFILL)] == [True, False]


@pytest.mark.parametrize("host_lens", [True, False])
def test_prefill_of_many_rows_equals_the_recurrence(host_lens):
    """Over the pool itself."""
    made = step("prefill", MANY | {"host_lens": host_lens}, **FP16)
    wanted = reference(made)
    out = run(build_flashinfer_prefill, PREFILL_OFFER, made, **PREFILLS)
    assert compare(made, out, wanted) < BOUND
    assert out[-2:].abs().max() == 0


def test_prefill_of_few_long_rows_hands_over_packed_states_and_the_longest_row(library, monkeypatch):
    """The library splits a row among processors over packed states alone, and launches by the longest."""
    split_above(8, monkeypatch)
    made = step("prefill", PREFILL["ragged"] | {"pad_tokens": 3}, **FP16)
    wanted = reference(made)
    out = run(build_flashinfer_prefill, PREFILL_OFFER, made, **PREFILLS)
    assert compare(made, out, wanted) < BOUND
    assert out[18:].abs().max() == 0
    (called,) = library.called(behave.PREFILL)
    assert called["initial_state"].shape == called["output_state"].shape == (4, 4, 32, 16)
    assert called["initial_state"].dtype == torch.float32
    assert called["max_seqlen"] == 9
    assert called["q"].shape[0] == called["output"].shape[0] == 18
    assert "state_indices" not in called


def test_prefill_addresses_the_pool_and_hands_over_factors(library):
    """Heads over their norms and gates as factors, in one launch of ours: the library's own preparation is a dozen."""
    lens = [5, 2, 4, *[1] * 24]
    made = step("prefill", {"q_lens": lens, "has_state": [True, False, *[True] * 25], "pads": [2]}, **FP16)
    out = torch.full_like(made.v, float("nan"))
    backend = build_flashinfer_prefill(request_for(PREFILL_OFFER, made, **PREFILLS)).backend
    assert forward(backend, made, backend.plan(made.batch), out=out) is out
    (called,) = library.called(behave.PREFILL)
    slots = made.batch.slots.tolist()
    assert called["state_indices"].tolist() == [slots[0], -1, -1, *slots[3:]]
    assert called["output_state_indices"].tolist() == [slots[0], slots[1], -1, *slots[3:]]
    assert called["initial_state"] is called["output_state"] is made.pool.ssm
    assert called["output"] is out
    assert [called[name] for name in ("gate_domain", "backend", "scale")] == ["linear", "flashinfer", made.layer.scale]
    assert "use_qk_l2norm_in_kernel" not in called
    assert torch.equal(called["q"], unit_heads(made.q).to(torch.float16))
    assert torch.allclose(called["g"], computed_gates(made.gates).g.exp())


@pytest.mark.parametrize("short", [0, 1024], ids=["packed", "pool"])
def test_prefill_writes_a_strided_output_by_a_copy(short, monkeypatch):
    """The library takes contiguous tensors."""
    split_above(short, monkeypatch)
    made = step("prefill", PREFILL["ragged"], **FP16)
    wanted = reference(made)
    wide_q, wide_k = torch.cat([made.q, made.k], 1).split(2, 1)
    buffer = torch.full((made.v.shape[0], 2, *made.v.shape[1:]), float("nan"), dtype=torch.float16)
    backend = build_flashinfer_prefill(request_for(PREFILL_OFFER, made, **PREFILLS)).backend
    strided = replace(made, q=wide_q, k=wide_k)
    out = forward(backend, strided, backend.plan(made.batch), out=buffer[:, 1])
    assert out.data_ptr() == buffer[:, 1].data_ptr()
    assert compare(made, out, wanted) < BOUND


def test_prefill_without_host_offsets_zeroes_what_the_library_may_not_write():
    """Only the device knows how many tokens are of no row."""
    made = step("prefill", {"q_lens": [3, 2], "pad_tokens": 2, "host_lens": False}, **FP16)
    out = torch.full_like(made.v, float("nan"))
    backend = build_flashinfer_prefill(request_for(PREFILL_OFFER, made, **PREFILLS)).backend
    forward(backend, made, backend.plan(made.batch), out=out)
    assert out[5:].abs().max() == 0


def test_prefill_takes_a_layers_own_slots():
    """`forward`'s slots count, not the batch's."""
    made = step("prefill", {"q_lens": [3, 2]}, **FP16)
    other = replace(made, batch=replace(made.batch, slots=made.batch.slots.flip(0)))
    wanted = reference(other)
    backend = build_flashinfer_prefill(request_for(PREFILL_OFFER, made, **PREFILLS)).backend
    out = forward(backend, made, backend.plan(made.batch), slots=made.batch.slots.flip(0))
    assert compare(made, out, wanted) < BOUND


@pytest.mark.parametrize("of", [pytest.param(of, id=name) for name, of in DECODE.items()])
def test_decode_equals_the_recurrence(of):
    """Pads, empty rows, tokens of no row, and gates that are computed already."""
    made = step("decode", of, **BF16)
    wanted = reference(made)
    # computed gates are prepared by our own kernel
    bound = BOUND if of.get("raw_gates", True) else 2 * BOUND
    assert compare(made, run(build_flashinfer_rows, ROWS_OFFER, made, **ROWS), wanted) < bound


def test_decode_hands_each_token_the_slot_of_its_row(library):
    """Rows without a token are passed over; a token of no row has none."""
    made = step("decode", DECODE["empty-rows"], **BF16)
    run(build_flashinfer_rows, ROWS_OFFER, made, **ROWS)
    (called,) = library.called(behave.DECODE)
    slots = made.batch.slots.tolist()
    assert called["initial_state_indices"].tolist() == [slots[0], slots[2], slots[4], -1, -1]
    assert called["q"].shape == (5, 1, 2, 16)
    assert called["A_log"].dtype == torch.float32
    assert called["backend"] == "flashinfer"


@pytest.mark.parametrize("known", ["longest", "offsets"])
def test_decode_rows_of_more_than_one_token_are_refused(known, library):
    """Each token would advance the state as it was before the step."""
    made = step("decode", {"q_lens": [1, 2]}, **BF16)
    batch = replace(made.batch, max_q_len=None) if known == "offsets" else replace(made.batch, qo_indptr_host=None)
    backend = build_flashinfer_rows(request_for(ROWS_OFFER, made, **ROWS)).backend
    with pytest.raises(UnsupportedBatch, match="max_q_len: at most 1 in decode"):
        backend.plan(batch)
    assert library.calls == []


def test_decode_of_computed_gates_goes_through_prefill_a_token_a_sequence(library):
    """The recurrent kernel takes raw gates alone."""
    made = step("decode", DECODE["computed"], **BF16)
    run(build_flashinfer_rows, ROWS_OFFER, made, **ROWS)
    (called,) = library.called(behave.PREFILL)
    assert called["cu_seqlens"].tolist() == [0, 1, 2, 3]
    assert called["state_indices"].tolist() == called["output_state_indices"].tolist() == made.batch.slots.tolist()
    assert library.called(behave.DECODE) == []


VERIFY = [
    *CHAIN.items(),
    ("empty-rows-last", {"q_lens": [2, 2, 0]}),
    ("pad-tokens", {"q_lens": [3, 3, 0], "pad_tokens": 2}),
]


@pytest.mark.parametrize("of", [pytest.param(of, id=name) for name, of in VERIFY])
def test_verify_equals_the_recurrence(of):
    """Kept states leave the pool as it is; slots a token leave the row's first."""
    made = step("verify", of, **BF16)
    wanted = reference(made)
    assert compare(made, run(build_flashinfer_rows, ROWS_OFFER, made, **ROWS), wanted) < BOUND


def test_a_row_without_a_count_of_its_own_slots_is_a_pad():
    """No other row's slot is read, none is written, and its outputs are zero."""
    made = step("verify", UNCOUNTED, **BF16)
    wanted, before = reference(made), made.pool.ssm.clone()
    out = run(build_flashinfer_rows, ROWS_OFFER, made, **ROWS)
    assert compare(made, out, wanted) < BOUND
    assert out[3:].abs().max() == 0
    idle = made.batch.slot_table[1:].flatten().long()
    assert torch.equal(made.pool.ssm[idle].nan_to_num(), before[idle].nan_to_num())


@pytest.mark.parametrize(("name", "keeps"), [("kept", True), ("slots", False)])
def test_verify_says_whether_the_pool_is_updated(name, keeps, library):
    """The library's default for that changes with its next version."""
    made = step("verify", CHAIN[name], **BF16)
    run(build_flashinfer_rows, ROWS_OFFER, made, **ROWS)
    (called,) = library.called(behave.MTP)
    assert called["disable_state_update"] is keeps
    assert called["intermediate_states_buffer"] is made.batch.intermediate
    table = made.batch.slot_table
    assert (called["ssm_state_indices"] is None) is keeps
    first = made.batch.slots.tolist() if keeps else [int(table[0, 0]), int(table[1, 2]), -1]
    assert called["initial_state_indices"].tolist() == first


@pytest.mark.parametrize("phase", ["decode", "verify"])
def test_rows_take_a_layers_own_slots(phase):
    """`forward`'s slots count, not the batch's."""
    made = step(phase, {"q_lens": [2, 2] if phase == "verify" else [1, 1]}, **BF16)
    other = replace(made, batch=replace(made.batch, slots=made.batch.slots.flip(0)))
    wanted = reference(other)
    backend = build_flashinfer_rows(request_for(ROWS_OFFER, made, **ROWS)).backend
    out = forward(backend, made, backend.plan(made.batch), slots=made.batch.slots.flip(0))
    assert compare(made, out, wanted) < BOUND


def test_decode_writes_a_strided_output():
    """By a copy: the library takes what it is given as contiguous."""
    made = step("decode", DECODE["pads"], **BF16)
    wanted = reference(made)
    buffer = torch.full((made.v.shape[0], 2, *made.v.shape[1:]), float("nan"), dtype=torch.bfloat16)
    backend = build_flashinfer_rows(request_for(ROWS_OFFER, made, **ROWS)).backend
    out = forward(backend, made, backend.plan(made.batch), out=buffer[:, 1])
    assert out.data_ptr() == buffer[:, 1].data_ptr()
    assert compare(made, out, wanted) < BOUND


AT_PLAN = [
    pytest.param({"q_lens": [3, 1, 3]}, {}, "qo_indptr_host: at least two tokens a row", id="ragged"),
    pytest.param({"q_lens": [1, 1]}, {}, "qo_indptr_host: at least two tokens a row", id="one-token"),
    pytest.param({"q_lens": [2, 0, 2]}, {}, "qo_indptr_host: at least two tokens a row", id="empty-row-between"),
    pytest.param({"q_lens": [2, 2], "host_lens": False}, {}, "qo_indptr_host", id="no-host-offsets"),
    pytest.param(RAGGED_VERIFY["tree"], {}, "parents: None: the row declares no tree_mask", id="tree"),
]


@pytest.mark.parametrize(("of", "more", "needed"), AT_PLAN)
def test_a_verify_step_it_does_not_take_is_refused_at_plan(of, more, needed, library):
    """Before any launch."""
    made = step("verify", of, **BF16)
    backend = build_flashinfer_rows(request_for(ROWS_OFFER, made, **ROWS)).backend
    with pytest.raises(UnsupportedBatch) as caught:
        backend.plan(made.batch)
    assert caught.value.needed.startswith(needed)
    assert library.calls == []


def test_a_token_without_a_slot_in_a_live_row_is_refused():
    """The library would write outside the pool; a row that is a pad throughout is left alone."""
    made = step("verify", CHAIN["slots"], **BF16)
    made.batch.slot_table[1, 3] = -1
    backend = build_flashinfer_rows(request_for(ROWS_OFFER, made, **ROWS)).backend
    with pytest.raises(UnsupportedBatch, match="slot_table: a slot for every token of a live row"):
        backend.plan(made.batch)


@pytest.mark.parametrize("phase", ["decode", "verify"])
def test_states_of_another_dtype_are_refused(phase, library):
    """In bf16 the library would overwrite slot 0 for every pad."""
    made = step(phase, {"q_lens": [2, 2] if phase == "verify" else [1, 1]}, state_dtype=torch.bfloat16, **BF16)
    backend = build_flashinfer_rows(request_for(ROWS_OFFER, made, **ROWS)).backend
    state = backend.plan(made.batch)
    with pytest.raises(UnsupportedBatch, match=r"pool\.ssm: torch\.float32, got torch\.bfloat16"):
        forward(backend, made, state)
    assert library.calls == []


def test_verify_refuses_other_gates_and_strided_kept_states(library):
    """Each by its name, before any launch; the library would round the gates in silence."""
    made = step("verify", {"q_lens": [2, 2]}, **BF16)
    backend = build_flashinfer_rows(request_for(ROWS_OFFER, made, **ROWS)).backend
    wide = replace(made, gates=replace(made.gates, a=made.gates.a.float()))
    with pytest.raises(UnsupportedBatch, match=r"gates\.a and gates\.b: torch\.bfloat16"):
        forward(backend, wide, backend.plan(made.batch))
    made = step("verify", {"q_lens": [2, 2], "raw_gates": False}, **BF16)
    backend = build_flashinfer_rows(request_for(ROWS_OFFER, made, **ROWS)).backend
    with pytest.raises(UnsupportedBatch, match="gates: RawGates"):
        forward(backend, made, backend.plan(made.batch))
    made = step("verify", {"q_lens": [2, 2]}, **BF16)
    kept = made.batch.intermediate.transpose(0, 1).contiguous().transpose(0, 1)
    strided = replace(made, batch=replace(made.batch, intermediate=kept))
    with pytest.raises(UnsupportedBatch, match=r"intermediate: torch\.float32, contiguous"):
        forward(backend, strided, backend.plan(strided.batch))
    assert library.calls == []


@pytest.mark.parametrize("build", [build_flashinfer_prefill, build_flashinfer_rows])
@pytest.mark.parametrize(
    ("changes", "field"),
    [({"dtype": "fp32"}, "dtype"), ({"layout": "kv"}, "state layout"), ({}, "head_dim")],
    ids=["dtype", "layout", "head-dim"],
)
def test_a_build_it_does_not_declare_is_refused(build, changes, field):
    """The declared row's own head dim is 128."""
    made = step("decode", DECODE["rows"], **BF16)
    offer = FLASHINFER_PREFILL if build is build_flashinfer_prefill else FLASHINFER_ROWS
    if changes:
        offer = replace(offer, head_dims=("any",))
    with pytest.raises(UnsupportedBatch) as caught:
        build(request_for(offer, made, **{"dtype": "bf16", **changes}))
    assert caught.value.needed.startswith(field)


def test_graphs_are_refused():
    """No row declares them: its kernels are compiled at the first call of each shape."""
    made = step("decode", DECODE["rows"], **BF16)
    backend = build_flashinfer_rows(request_for(ROWS_OFFER, made, **ROWS)).backend
    with pytest.raises(UnsupportedBatch, match="capture"):
        backend.plan(made.batch, capture=True)


def test_the_first_compile_is_announced(library, monkeypatch):
    """Each phase by its name."""
    seen = []
    import backstamp.jit_notice as module

    real = module.compiling
    monkeypatch.setattr(module, "compiling", lambda kernel, what: seen.append((kernel, what)) or real(kernel, what))
    for phase, of in (("decode", DECODE["rows"]), ("verify", CHAIN["kept"])):
        run(build_flashinfer_rows, ROWS_OFFER, step(phase, of, **BF16), **ROWS)
    said = ["gated delta net decode bf16", "gated delta net verify bf16 3 tokens"]
    assert seen == [("flashinfer", what) for what in said]
