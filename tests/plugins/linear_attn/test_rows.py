"""Our recurrent kernel against float64, in Triton's interpreter: decode and verify, both families and state orders."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backstamp.errors import UnsupportedBatch
from backstamp.testing.linear_batches import linear_layer
from backstamp_linear_attn.backend import build_triton_rows
from backstamp_linear_attn.plugin import ROWS_GDN, ROWS_KDA
from tests.linear_steps import (
    CHAIN,
    DECODE,
    RAGGED_VERIFY,
    UNCOUNTED,
    compare,
    forward,
    reference,
    request_for,
    run,
    step,
)

# small heads: the interpreter runs every program in Python
OFFERS = {family: replace(offer, head_dims=("any",)) for family, offer in (("gdn", ROWS_GDN), ("kda", ROWS_KDA))}
PHASES = ("decode", "verify")
STEPS = [
    *(pytest.param("decode", of, id=f"decode-{name}") for name, of in DECODE.items()),
    *(pytest.param("verify", of, id=f"verify-{name}") for name, of in {**CHAIN, **RAGGED_VERIFY}.items()),
]


@pytest.mark.parametrize("order", ["vk", "kv"])
@pytest.mark.parametrize("family", ["gdn", "kda"])
@pytest.mark.parametrize(("phase", "of"), STEPS)
def test_it_equals_the_recurrence(phase, of, family, order):
    """Outputs, the pool and the kept states; a NaN of a slot of others would show."""
    made = step(phase, of, family=family, order=order)
    wanted = reference(made)
    assert compare(made, run(build_triton_rows, OFFERS[family], made, phases=PHASES), wanted) < 3e-6


def test_a_row_without_a_count_of_its_own_slots_is_a_pad():
    """No other row's slot is read, none is written, and its outputs are zero."""
    made = step("verify", UNCOUNTED)
    wanted, before = reference(made), made.pool.ssm.clone()
    out = run(build_triton_rows, OFFERS["gdn"], made, phases=PHASES)
    assert compare(made, out, wanted) < 3e-6
    assert out[3:].abs().max() == 0
    idle = made.batch.slot_table[1:].flatten().long()
    assert torch.equal(made.pool.ssm[idle].nan_to_num(), before[idle].nan_to_num())


@pytest.mark.parametrize("dims", [(16, 16), (24, 40), (8, 72)], ids=str)
def test_head_dims_that_fill_no_block(dims):
    """Keys that are no power of two, values that leave the last block part empty."""
    made = step("decode", DECODE["pads"], layer=linear_layer(1, 3, *dims), order="kv")
    wanted = reference(made)
    assert compare(made, run(build_triton_rows, OFFERS["gdn"], made, phases=PHASES), wanted) < 3e-6


def test_half_precision_tokens_and_states():
    """fp16 in, computed in fp32, fp16 out."""
    made = step("verify", RAGGED_VERIFY["tree"], dtype=torch.float16, state_dtype=torch.float16)
    wanted = reference(made)
    assert compare(made, run(build_triton_rows, OFFERS["gdn"], made, dtype="fp16", phases=PHASES), wanted) < 2e-3


@pytest.mark.parametrize("phase", PHASES)
def test_strided_tensors_are_read_where_they_lie(phase):
    """Slices of a fused projection and of a pool with pages between its slots."""
    made = step(phase, (DECODE["rows"] if phase == "decode" else RAGGED_VERIFY["ragged-kept"]), family="kda")
    wanted = reference(made)
    q, k = torch.cat([made.q, made.k], dim=1).split(2, dim=1)
    wide = torch.full((made.pool.ssm.shape[0], 2, *made.pool.ssm.shape[1:]), float("nan"))
    wide[:, 1] = made.pool.ssm
    strided = replace(made, q=q, k=k, pool=replace(made.pool, ssm=wide[:, 1]))
    assert compare(strided, run(build_triton_rows, OFFERS["kda"], strided, phases=PHASES), wanted) < 3e-6
    assert bool(wide[:, 0].isnan().all())


def test_a_rows_bits_do_not_depend_on_its_batch():
    """The row declares it: alone, or between others, last bits too."""
    made = step("verify", {"q_lens": [3, 3, 3]})
    out = run(build_triton_rows, OFFERS["gdn"], made, phases=PHASES)
    alone = step("verify", {"q_lens": [3, 3, 3]})
    offsets = torch.tensor([0, 3], dtype=torch.int32)
    batch = replace(
        alone.batch, num_rows=1, num_tokens=3, qo_indptr=offsets, qo_indptr_host=offsets, slots=alone.batch.slots[1:2],
        has_state=alone.batch.has_state[1:2],
    )  # fmt: skip
    gates = replace(alone.gates, a=alone.gates.a[3:6], b=alone.gates.b[3:6])
    one = replace(alone, q=alone.q[3:6], k=alone.k[3:6], v=alone.v[3:6], gates=gates, batch=batch)
    assert torch.equal(run(build_triton_rows, OFFERS["gdn"], one, phases=PHASES), out[3:6])


def test_a_replayed_step_reads_new_values_at_old_addresses():
    """What a graph recorded is the first plan's tensors: a later plan copies into them."""
    first, second = step("decode", DECODE["rows"]), step("decode", DECODE["pads"] | {"q_lens": [1] * 5}, seed=3)
    wanted = reference(second)
    backend = build_triton_rows(request_for(OFFERS["gdn"], first, phases=PHASES)).backend
    recorded = backend.plan(first.batch, capture=True)
    slots = first.batch.slots
    assert backend.plan(second.batch, state=recorded) is recorded
    backend.replan(recorded)
    assert compare(second, forward(backend, second, recorded, slots=slots), wanted) < 3e-6


def test_a_step_of_another_shape_is_not_replayed():
    """Another number of rows is another launch."""
    backend = build_triton_rows(request_for(OFFERS["gdn"], step("decode", DECODE["rows"]), phases=PHASES)).backend
    recorded = backend.plan(step("decode", DECODE["rows"]).batch, capture=True)
    with pytest.raises(UnsupportedBatch, match="num_rows: as the recorded step has it"):
        backend.plan(step("decode", {"q_lens": [1, 1]}).batch, state=recorded)


def test_kept_states_stay_where_the_recorded_step_leaves_them():
    """A copy of another step's buffer would be written and never seen by who reads that one."""
    made, other = step("verify", CHAIN["kept"]), step("verify", CHAIN["kept"], seed=3)
    backend = build_triton_rows(request_for(OFFERS["gdn"], made, phases=PHASES)).backend
    recorded = backend.plan(made.batch, capture=True)
    before, slots = made.batch.intermediate.clone(), made.batch.slots.clone()
    with pytest.raises(UnsupportedBatch, match="intermediate: as the recorded step has it"):
        backend.plan(other.batch, state=recorded)
    assert torch.equal(made.batch.intermediate.nan_to_num(), before.nan_to_num())
    # refused whole
    assert torch.equal(made.batch.slots, slots)
    same = replace(other.batch, intermediate=made.batch.intermediate)
    assert backend.plan(same, state=recorded) is recorded


@pytest.mark.parametrize("field", ["slot_table", "intermediate"])
def test_another_view_of_the_recorded_memory_is_not_replayed(field):
    """It begins at the same address; the launch has the recorded strides."""
    made = step("verify", CHAIN["slots" if field == "slot_table" else "kept"])
    tensor = getattr(made.batch, field)
    rows, width = tensor.shape[:2]
    memory = tensor.new_zeros(rows, 2 * width, *tensor.shape[2:])
    close = memory.flatten(0, 1)[: rows * width].view(tensor.shape)
    wide = memory[:, :width]
    close.copy_(tensor)
    backend = build_triton_rows(request_for(OFFERS["gdn"], made, phases=PHASES)).backend
    recorded = backend.plan(replace(made.batch, **{field: close}), capture=True)
    assert backend.plan(replace(made.batch, **{field: close}), state=recorded) is recorded
    with pytest.raises(UnsupportedBatch, match=f"{field}: as the recorded step has it"):
        backend.plan(replace(made.batch, **{field: wide}), state=recorded)


def test_strides_of_a_single_row_say_nothing():
    """Where there is one row, no launch steps to another."""
    made = step("verify", {"q_lens": [2], "form": "slot_table"})
    table = made.batch.slot_table
    alike = table.as_strided(table.shape, (99, 1))
    backend = build_triton_rows(request_for(OFFERS["gdn"], made, phases=PHASES)).backend
    recorded = backend.plan(made.batch, capture=True)
    assert backend.plan(replace(made.batch, slot_table=alike), state=recorded) is recorded


@pytest.mark.parametrize("order", ["vk", "kv"])
@pytest.mark.parametrize(("phase", "of"), [("decode", DECODE["pads"]), ("verify", RAGGED_VERIFY["tree"])])
def test_a_bounded_decay_equals_the_recurrence(phase, of, order):
    """Of Kimi delta attention; a gated delta net has none."""
    made = step(phase, of, family="kda", order=order, lower_bound=-5.0)
    wanted = reference(made)
    assert compare(made, run(build_triton_rows, OFFERS["kda"], made, phases=PHASES), wanted) < 3e-6
    with pytest.raises(UnsupportedBatch, match=r"gates\.lower_bound: None"):
        run(build_triton_rows, OFFERS["gdn"], step(phase, of, lower_bound=-5.0), phases=PHASES)


@pytest.mark.parametrize("known", ["longest", "offsets", "nothing"])
@pytest.mark.parametrize("family", ["gdn", "kda"])
def test_rows_of_decode_may_have_more_than_one_token(family, known):
    """Whatever the host knows of them."""
    made = step("decode", {"q_lens": [1, 3, 0, 2], "pads": [3]}, family=family)
    batch = made.batch
    if known != "longest":
        batch = replace(batch, max_q_len=None, qo_indptr_host=batch.qo_indptr_host if known == "offsets" else None)
    made = replace(made, batch=batch)
    wanted = reference(made)
    assert compare(made, run(build_triton_rows, OFFERS[family], made, phases=PHASES), wanted) < 3e-6


@pytest.mark.parametrize("known", ["longest", "offsets"])
def test_a_step_recorded_for_a_token_a_row_takes_no_longer_rows(known):
    """Its launch advances each row by one; nothing is copied."""
    one, two = step("decode", {"q_lens": [1, 1, 1]}), step("decode", {"q_lens": [2, 1, 0]}, seed=3)
    if known == "offsets":
        one, two = (replace(of, batch=replace(of.batch, max_q_len=None)) for of in (one, two))
    backend = build_triton_rows(request_for(OFFERS["gdn"], one, phases=PHASES)).backend
    recorded = backend.plan(one.batch, capture=True)
    before = one.batch.qo_indptr.clone()
    with pytest.raises(UnsupportedBatch, match="max_q_len: 1, as the recorded step has it"):
        backend.plan(two.batch, state=recorded)
    assert torch.equal(one.batch.qo_indptr, before)


def test_no_tokens_return_at_once():
    """Nothing to launch."""
    made = step("decode", {"q_lens": []})
    assert run(build_triton_rows, OFFERS["gdn"], made, phases=PHASES).shape == (0, 4, 32)
