"""Gated delta nets through torch-npu's delta rules, held against their schemas, their documented rules and float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backstamp.errors import Unstamped, UnsupportedBatch
from backstamp.testing.linear_batches import linear_layer
from backstamp_ascend.backend import build_delta_prefill, build_delta_rows
from backstamp_ascend.plugin import DELTA_PREFILL, DELTA_ROWS
from tests.libraries.fake import FakeLibrary
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
from tests.plugins.ascend.behave_delta import chunk_delta_rule, recurrent_delta_rule

ROWS, CHUNK = "torch_npu:npu_recurrent_gated_delta_rule", "torch_npu:npu_chunk_gated_delta_rule"
BF16 = torch.bfloat16
#: Normalised queries and keys, gates and states are rounded to bf16 before they meet.
BOUND = 1.5e-2
#: What every step of this file has: the library's only dtypes, and head dims the row declares.
OURS = {"dtype": BF16, "state_dtype": BF16}
SMALL, CHUNKED = linear_layer(2, 4, 64, 128), linear_layer(1, 2, 128, 128)
OF_ROWS = {"dtype": "bf16", "phases": ("decode", "verify")}
OF_CHUNK = {"dtype": "bf16", "phases": ("prefill",)}
VERIFY = {**CHAIN, **{name: RAGGED_VERIFY[name] for name in ("ragged-kept", "ragged-slots")}}


@pytest.fixture
def library(monkeypatch):
    """torch-npu's recorded functions, computing with torch."""
    library = FakeLibrary("torch-npu", monkeypatch)
    library.on(ROWS, recurrent_delta_rule)
    library.on(CHUNK, chunk_delta_rule)
    return library


@pytest.mark.parametrize(
    ("phase", "of"),
    [
        *(pytest.param("decode", of, id=f"decode-{name}") for name, of in DECODE.items()),
        *(pytest.param("verify", of, id=f"verify-{name}") for name, of in VERIFY.items()),
    ],
)
def test_decode_and_verify_equal_the_recurrence(phase, of, library):
    """Outputs, the pool and the kept states; slots of others hold NaN, pads are written nowhere."""
    made = step(phase, of, layer=SMALL, **OURS)
    wanted = reference(made)
    assert compare(made, run(build_delta_rows, DELTA_ROWS, made, **OF_ROWS), wanted) < BOUND
    assert len(library.called(ROWS)) == 1


def test_a_row_without_a_count_of_its_own_slots_is_a_pad(library):
    """No other row's slot is read, none is written; its outputs are of no state."""
    made = step("verify", UNCOUNTED, layer=SMALL, **OURS)
    wanted, before = reference(made), made.pool.ssm.clone()
    out = run(build_delta_rows, DELTA_ROWS, made, **OF_ROWS)
    assert compare(made, out, wanted) < BOUND
    idle = made.batch.slot_table[1:].flatten().long()
    assert torch.equal(made.pool.ssm[idle].nan_to_num(), before[idle].nan_to_num())


@pytest.mark.parametrize("name", PREFILL)
def test_prefill_equals_the_recurrence(name, library):
    """Fresh rows start from zeros whatever their slots hold."""
    made = step("prefill", PREFILL[name], layer=CHUNKED, **OURS)
    wanted = reference(made)
    assert compare(made, run(build_delta_prefill, DELTA_PREFILL, made, **OF_CHUNK), wanted) < BOUND
    assert len(library.called(CHUNK)) == 1


def test_layers_with_slots_of_their_own_read_those(library):
    """`slots` of the call, not the batch's."""
    made = step("decode", {"q_lens": [1, 1]}, layer=SMALL, **OURS)
    backend = build_delta_rows(request_for(DELTA_ROWS, made, **OF_ROWS)).backend
    state = backend.plan(made.batch)
    moved = replace(made, batch=replace(made.batch, slots=made.batch.slots.flip(0)))
    wanted = reference(moved)
    assert compare(made, forward(backend, made, state, slots=moved.batch.slots), wanted) < BOUND


def test_a_step_of_pads_alone_leaves_every_state_as_it_is(library):
    """There is no slot to write to; the pool's own numbers are written back."""
    made = step("decode", {"q_lens": [1, 1], "pads": [0, 1]}, layer=SMALL, **OURS)
    before = made.pool.ssm.clone()
    assert bool(run(build_delta_rows, DELTA_ROWS, made, **OF_ROWS).isfinite().all())
    assert torch.equal(made.pool.ssm.nan_to_num(), before.nan_to_num())


def test_a_step_without_tokens_calls_nothing(library):
    """Zero rows, and rows that are all empty."""
    for q_lens in ([], [0, 0]):
        made = step("decode", {"q_lens": q_lens, "pad_tokens": 2}, layer=SMALL, **OURS)
        out = run(build_delta_rows, DELTA_ROWS, made, **OF_ROWS)
        assert torch.equal(out, torch.zeros_like(out))
    assert library.calls == []


def test_a_state_is_brought_up_to_date_in_place(library):
    """Whoever kept a state sees the new step."""
    first, second = (step("decode", {"q_lens": lens}, layer=SMALL, **OURS) for lens in ([1], [1, 0, 1]))
    backend = build_delta_rows(request_for(DELTA_ROWS, second, **OF_ROWS)).backend
    state = backend.plan(first.batch)
    assert backend.plan(second.batch, state=state) is state
    assert state.batch is second.batch
    assert state.rows.tolist() == [0, 2]


def test_each_runner_reads_its_own_stamp(library):
    """The choice of linear kernels comes from the runner; without it nothing is built."""
    made = step("decode", {"q_lens": [1]}, layer=SMALL, **OURS)
    for factory, offer, options in (
        (build_delta_rows, DELTA_ROWS, OF_ROWS),
        (build_delta_prefill, DELTA_PREFILL, OF_CHUNK),
    ):
        with pytest.raises(Unstamped, match="linear_attn_backends"):
            factory(request_for(offer, made, linear_attn_backends=None, **options))


REFUSED = {
    "tokens": ("verify", {"q_lens": [9, 1]}, "at most 8 tokens a row, got 9"),
    "tree": ("verify", {"q_lens": [2], "parents": [[-1, -1]]}, "parents: None"),
    "no-host-lens": ("decode", {"q_lens": [1], "host_lens": False}, "qo_indptr_host"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_step_that_is_not_declared_is_refused_in_plan(case, library):
    """The library has chains of 8 tokens, and lengths that the host knows."""
    phase, of, named = REFUSED[case]
    made = step(phase, of, layer=SMALL, **OURS)
    backend = build_delta_rows(request_for(DELTA_ROWS, made, **OF_ROWS)).backend
    with pytest.raises(UnsupportedBatch, match=f"needs .*{named}"):
        backend.plan(made.batch)
    assert library.calls == []


def test_states_of_another_dtype_or_order_are_refused(library):
    """Rounding them in silence would lose what a pool in fp32 was chosen for."""
    made = step("decode", {"q_lens": [1]}, layer=SMALL, dtype=BF16)
    with pytest.raises(UnsupportedBatch, match=r"needs pool\.ssm: torch\.bfloat16, got torch\.float32"):
        run(build_delta_rows, DELTA_ROWS, made, **OF_ROWS)
    made = step("decode", {"q_lens": [1]}, layer=SMALL, order="kv", **OURS)
    with pytest.raises(UnsupportedBatch, match="needs state layout: vk, got 'kv'"):
        run(build_delta_rows, DELTA_ROWS, made, **OF_ROWS)
    assert library.calls == []


@pytest.mark.parametrize(
    ("factory", "offer", "layer", "named"),
    [
        (build_delta_rows, DELTA_ROWS, linear_layer(2, 4, 320, 320), "head_dim"),
        (build_delta_rows, DELTA_ROWS, linear_layer(2, 258, 128, 128), "value heads.*at most 256, got 258"),
        (build_delta_prefill, DELTA_PREFILL, linear_layer(2, 4, 64, 128), "head_dim"),
        (build_delta_prefill, DELTA_PREFILL, linear_layer(2, 66, 128, 128), "value heads.*at most 64, got 66"),
    ],
)
def test_layers_the_library_has_no_kernel_for_are_refused_without_it(factory, offer, layer, named):
    """The library is imported last: there is none here."""
    made = step("decode", {"q_lens": [1]}, layer=SMALL, **OURS)
    with pytest.raises(UnsupportedBatch, match=f"needs {named}"):
        factory(request_for(offer, replace(made, layer=layer), dtype="bf16"))
