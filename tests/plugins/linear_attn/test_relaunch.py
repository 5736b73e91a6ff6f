"""A step's later recurrent layers run the code of its first one, where Triton would have compiled the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backstamp.attention import ComputedGates
from backstamp_linear_attn import rows
from backstamp_linear_attn.backend import build_triton_rows
from backstamp_linear_attn.plugin import ROWS_GDN
from tests.compiled_code import Kernel, apart, constants_of, shifted
from tests.linear_steps import DECODE, forward, request_for, step

OFFER = replace(ROWS_GDN, head_dims=("any",), features=ROWS_GDN.features | {"bounded_gates"})


@pytest.fixture
def kernel(monkeypatch):
    """What would be launched."""
    stand_in = Kernel(rows.advance_rows)
    monkeypatch.setattr(rows, "advance_rows", stand_in)
    return stand_in


def _built():
    made = step("decode", DECODE["rows"])
    backend = build_triton_rows(request_for(OFFER, made, phases=("decode", "verify"))).backend
    return made, backend, backend.plan(made.batch)


def test_a_later_layer_runs_the_first_ones_code(kernel):
    """With its own tensors, and with the constants of the first launch."""
    made, backend, state = _built()
    forward(backend, made, state)
    second = replace(
        made,
        q=made.q.clone(),
        pool=replace(made.pool, ssm=made.pool.ssm.clone()),
        layer=replace(made.layer, layer_id=1, scale=0.5),
    )
    forward(backend, second, state)
    (first,), (again,) = kernel.first, kernel.again
    assert (again["q_ptr"], again["pool_ptr"], again["scale"]) == (second.q, second.pool.ssm, 0.5)
    assert constants_of(again) == constants_of(first)


@pytest.mark.parametrize("change", [apart, shifted])
@pytest.mark.parametrize("name", ["q", "k", "v", "a", "b", "out", "pool"])
def test_code_is_cut_to_strides_and_addresses(name, change, kernel):
    """Another layer's tensors may lie otherwise."""
    made, backend, state = _built()
    out = torch.empty_like(made.v)
    forward(backend, made, state, out=out)
    if name in ("a", "b"):
        made = replace(made, gates=replace(made.gates, **{name: change(getattr(made.gates, name))}))
    elif name == "pool":
        made = replace(made, pool=replace(made.pool, ssm=change(made.pool.ssm)))
    elif name == "out":
        out = change(out)
    else:
        made = replace(made, **{name: change(getattr(made, name))})
    forward(backend, made, state, out=out)
    assert (len(kernel.first), kernel.again) == (2, [])


@pytest.mark.parametrize("change", [shifted, torch.Tensor.half])
@pytest.mark.parametrize("name", ["A_log", "dt_bias"])
def test_code_is_cut_to_the_parameters_of_gates(name, change, kernel):
    """To where they lie, and to their dtypes."""
    made, backend, state = _built()
    forward(backend, made, state)
    forward(backend, replace(made, gates=replace(made.gates, **{name: change(getattr(made.gates, name))})), state)
    assert (len(kernel.first), kernel.again) == (2, [])


@pytest.mark.parametrize("name", ["a", "b"])
def test_code_is_cut_to_the_dtypes_of_gates(name, kernel):
    """Each by itself: an engine may compute one of them in fp32."""
    made, backend, state = _built()
    forward(backend, made, state)
    forward(backend, replace(made, gates=replace(made.gates, **{name: getattr(made.gates, name).half()})), state)
    assert (len(kernel.first), kernel.again) == (2, [])


@pytest.mark.parametrize("change", [shifted, torch.Tensor.long])
def test_code_is_cut_to_the_slots(change, kernel):
    """To where they lie, and to their dtype: both whole numbers are taken."""
    made, backend, state = _built()
    forward(backend, made, state)
    forward(backend, made, state, slots=change(made.batch.slots))
    assert (len(kernel.first), kernel.again) == (2, [])


def test_code_is_cut_to_the_dtype_of_states(kernel):
    """Layers may keep theirs otherwise."""
    made, backend, state = _built()
    forward(backend, made, state)
    forward(backend, replace(made, pool=replace(made.pool, ssm=made.pool.ssm.half())), state)
    assert (len(kernel.first), kernel.again) == (2, [])


def test_code_is_cut_to_how_far_apart_lines_of_a_state_lie(kernel):
    """Though slots and heads lie as far apart as before."""
    made, backend, state = _built()
    ssm = made.pool.ssm
    wide = torch.zeros(*ssm.shape[:2], 2 * ssm.shape[2], ssm.shape[3])
    for at in (wide[:, :, ::2], wide[:, :, : ssm.shape[2]]):
        forward(backend, replace(made, pool=replace(made.pool, ssm=at)), state)
    assert (len(kernel.first), kernel.again) == (2, [])


@pytest.mark.parametrize(
    ("name", "fewer"), [("num_qo_heads", 1), ("num_kv_heads", 2), ("head_dim", 8), ("v_head_dim", 16)]
)
def test_code_is_cut_to_heads_and_dims(name, fewer, kernel):
    """Though a smaller layer's tensors be a part of another's, and lie as they do."""
    made, backend, state = _built()
    smaller, out = replace(made.layer, layer_id=1, **{name: fewer}), torch.empty_like(made.v)
    forward(backend, made, state, out=out)
    part, part_out = _part_of(made, out, smaller)
    forward(backend, part, state, out=part_out)
    assert (len(kernel.first), kernel.again) == (2, [])


@pytest.mark.parametrize("change", ["computed", "bounded"])
def test_computed_gates_and_a_bound_are_other_code(change, kernel):
    """What is computed inside depends on which are given."""
    made, backend, state = _built()
    forward(backend, made, state)
    computed = ComputedGates(g=made.gates.a, beta=made.gates.b)
    gates = {"computed": computed, "bounded": replace(made.gates, lower_bound=-5.0)}[change]
    forward(backend, replace(made, gates=gates), state)
    assert (len(kernel.first), kernel.again) == (2, [])


def test_another_bound_is_the_same_code(kernel):
    """A bound is a number like the scale."""
    made, backend, state = _built()
    for bound in (-5.0, -4.0):
        forward(backend, replace(made, gates=replace(made.gates, lower_bound=bound)), state)
    assert [launched["bound"] for launched in (*kernel.first, *kernel.again)] == [-5.0, -4.0]
    assert len(kernel.again) == 1


def _part_of(made, out, layer):
    """The step of a layer of fewer heads or numbers, whose tensors are the first ones of another's; and its outputs."""
    keys, values = layer.num_qo_heads, layer.num_kv_heads
    gates = made.gates
    part = replace(
        made,
        layer=layer,
        q=made.q[:, :keys, : layer.head_dim],
        k=made.k[:, :keys, : layer.head_dim],
        v=made.v[:, :values, : layer.v_head_dim],
        gates=replace(
            gates,
            a=gates.a[:, :values],
            b=gates.b[:, :values],
            A_log=gates.A_log[:values],
            dt_bias=gates.dt_bias[:values],
        ),
        pool=replace(made.pool, ssm=made.pool.ssm[:, :values, : layer.v_head_dim, : layer.head_dim]),
    )
    return part, out[:, :values, : layer.v_head_dim]
