"""`torch_native` of the linear slot against float64: every phase, both families, both state orders, and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backstamp.errors import Unstamped, UnsupportedBatch
from backstamp_cpu.backend import build_torch_native_linear
from backstamp_cpu.plugin import NATIVE_GDN, NATIVE_KDA
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

OFFERS = {"gdn": NATIVE_GDN, "kda": NATIVE_KDA}
STEPS = [
    *(pytest.param("prefill", of, id=f"prefill-{name}") for name, of in PREFILL.items()),
    *(pytest.param("decode", of, id=f"decode-{name}") for name, of in DECODE.items()),
    *(pytest.param("verify", of, id=f"verify-{name}") for name, of in {**CHAIN, **RAGGED_VERIFY}.items()),
]


@pytest.mark.parametrize("order", ["vk", "kv"])
@pytest.mark.parametrize("family", ["gdn", "kda"])
@pytest.mark.parametrize(("phase", "of"), STEPS)
def test_it_equals_the_recurrence(phase, of, family, order):
    """Outputs, the pool and the kept states, to fp32's own error; slots of others, all NaN, stay as they are."""
    made = step(phase, of, family=family, order=order)
    wanted = reference(made)
    out = run(build_torch_native_linear, OFFERS[family], made)
    assert compare(made, out, wanted) < 2e-6


def test_a_row_without_a_count_of_its_own_slots_is_a_pad():
    """No other row's slot is read, none is written, and its outputs are zero."""
    made = step("verify", UNCOUNTED)
    wanted, before = reference(made), made.pool.ssm.clone()
    out = run(build_torch_native_linear, OFFERS["gdn"], made)
    assert compare(made, out, wanted) < 2e-6
    assert out[3:].abs().max() == 0
    idle = made.batch.slot_table[1:].flatten().long()
    assert torch.equal(made.pool.ssm[idle].nan_to_num(), before[idle].nan_to_num())


@pytest.mark.parametrize(("dtype", "name", "bound"), [(torch.bfloat16, "bf16", 6e-3), (torch.float16, "fp16", 1e-3)])
def test_half_precision_is_rounded_once(dtype, name, bound):
    """Only outputs and stored states are rounded."""
    made = step("prefill", PREFILL["ragged"], dtype=dtype, state_dtype=dtype)
    wanted = reference(made)
    assert compare(made, run(build_torch_native_linear, NATIVE_GDN, made, dtype=name), wanted) < bound


def test_a_prefill_cut_in_two_is_the_whole_one():
    """Chunks of a prompt hand each other the state."""
    whole = step("prefill", {"q_lens": [8], "has_state": [False]})
    cut = step("prefill", {"q_lens": [8], "has_state": [False]})
    out = run(build_torch_native_linear, NATIVE_GDN, whole)
    parts = []
    for at, (start, stop) in enumerate([(0, 3), (3, 8)]):
        offsets = torch.tensor([0, stop - start], dtype=torch.int32)
        batch = replace(
            cut.batch,
            num_tokens=stop - start,
            qo_indptr=offsets,
            qo_indptr_host=offsets,
            has_state=torch.tensor([at > 0]),
        )
        gates = replace(cut.gates, a=cut.gates.a[start:stop], b=cut.gates.b[start:stop])
        part = replace(cut, q=cut.q[start:stop], k=cut.k[start:stop], v=cut.v[start:stop], gates=gates, batch=batch)
        parts.append(run(build_torch_native_linear, NATIVE_GDN, part))
    assert torch.equal(torch.cat(parts), out)
    assert torch.equal(cut.pool.ssm.nan_to_num(), whole.pool.ssm.nan_to_num())


def test_a_layer_may_have_slots_of_its_own():
    """`forward`'s slots count, not the batch's."""
    made = step("decode", DECODE["rows"])
    backend = build_torch_native_linear(request_for(NATIVE_GDN, made)).backend
    other = replace(made, batch=replace(made.batch, slots=made.batch.slots.flip(0)))
    wanted = reference(other)
    out = forward(backend, made, backend.plan(made.batch), slots=made.batch.slots.flip(0))
    assert compare(made, out, wanted) < 2e-6


def test_outputs_are_written_in_place():
    """Into the engine's buffer, strided or not, and no rows at all return at once."""
    made = step("decode", DECODE["pads"])
    wanted = reference(made)
    backend = build_torch_native_linear(request_for(NATIVE_GDN, made)).backend
    buffer = torch.full((made.batch.num_tokens, 2, *made.v.shape[1:]), float("nan"))
    out = forward(backend, made, backend.plan(made.batch), out=buffer[:, 1])
    assert out.data_ptr() == buffer[:, 1].data_ptr()
    assert compare(made, out, wanted) < 2e-6
    assert bool(buffer[:, 0].isnan().all())
    none = step("decode", {"q_lens": []})
    assert run(build_torch_native_linear, NATIVE_GDN, none).shape == (0, 4, 32)


CHANGES = [
    pytest.param({"dtype": "fp64"}, "dtype", "fp64", id="dtype"),
    pytest.param({"layout": "transposed"}, "state layout", "'transposed'", id="layout"),
]


@pytest.mark.parametrize(("changes", "needed", "found"), CHANGES)
def test_a_build_it_does_not_declare_is_refused(changes, needed, found):
    """Before anything is allocated."""
    made = step("decode", DECODE["rows"])
    with pytest.raises(UnsupportedBatch) as caught:
        build_torch_native_linear(request_for(NATIVE_GDN, made, **changes))
    assert caught.value.needed.startswith(needed)
    assert caught.value.found == found


def test_a_runner_without_its_stamp_raises_on_the_attribute():
    """A default would be another runner's."""
    made = step("decode", DECODE["rows"])
    with pytest.raises(Unstamped, match="linear_attn_backends of its runner"):
        build_torch_native_linear(request_for(NATIVE_GDN, made, linear_attn_backends=None))
