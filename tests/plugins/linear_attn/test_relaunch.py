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

OFFER = replace(ROWS_GDN, head_dims=("any",))


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


@pytest.mark.parametrize("name", ["A_log", "dt_bias"])
def test_code_is_cut_to_the_dtypes_of_gates(name, kernel):
    """And to where their parameters lie."""
    made, backend, state = _built()
    forward(backend, made, state)
    forward(backend, replace(made, gates=replace(made.gates, **{name: shifted(getattr(made.gates, name))})), state)
    half = replace(made.gates, a=made.gates.a.half(), b=made.gates.b.half())
    forward(backend, replace(made, gates=half), state)
    assert (len(kernel.first), kernel.again) == (3, [])


def test_computed_gates_and_a_bound_are_other_code(kernel):
    """What is computed inside depends on which are given."""
    made, backend, state = _built()
    forward(backend, made, state)
    computed = ComputedGates(g=made.gates.a.float(), beta=made.gates.b.float())
    forward(backend, replace(made, gates=computed), state)
    assert (len(kernel.first), kernel.again) == (2, [])
