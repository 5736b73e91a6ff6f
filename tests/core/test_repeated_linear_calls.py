"""A linear call like the last right one is let through on comparisons; none is that `check_linear_call` refuses."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from backstamp import repeated_linear_calls
from backstamp.errors import UnsupportedBatch
from backstamp.repeated_linear_calls import LinearCallChecks
from backstamp.testing.linear_batches import MadeLinearStep, linear_layer, make_linear_step
from backstamp_cpu.plugin import NATIVE_KDA
from tests.linear_steps import request_for

LAYER = linear_layer(2, 4, 16, 32)
MADE = make_linear_step([3, 2], family="kda", layer=LAYER)
COMPUTED = make_linear_step([3, 2], family="kda", layer=LAYER, raw_gates=False)
VERIFY = make_linear_step([3, 3], family="kda", layer=LAYER, phase="verify")


def call(checks: LinearCallChecks, made: MadeLinearStep, **changes: object) -> None:
    """One layer's call, with some of it changed."""
    named = {"pool": made.pool, "slots": made.batch.slots, **changes}
    of = {name: named.pop(name, getattr(made, name)) for name in ("q", "k", "v", "gates", "layer", "batch")}
    checks(*of.values(), **named)


def uneven(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape with a last stride of 2."""
    return torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1])[..., ::2]


def gates(**changes: object):
    """The raw gates with others among them."""
    return replace(MADE.gates, **changes)


Q, V, G = MADE.q, MADE.v, MADE.gates
#: Changes to a right call, with the field that the refusal names.
WRONG = {
    "q-tokens": ("q", {"q": torch.zeros(6, 2, 16)}),
    "k-heads": ("k", {"k": torch.zeros(5, 4, 16)}),
    "v-dim": ("v", {"v": torch.zeros(5, 4, 16)}),
    "q-dtype": ("q", {"q": Q.half()}),
    "k-dtype": ("k", {"k": Q.half()}),
    "v-dtype": ("v", {"v": V.half()}),
    "q-device": ("q", {"q": Q.to("meta")}),
    "k-device": ("k", {"k": Q.to("meta")}),
    "v-device": ("v", {"v": V.to("meta")}),
    "q-stride": ("q", {"q": uneven(Q)}),
    "k-stride": ("k", {"k": uneven(Q)}),
    "v-stride": ("v", {"v": uneven(V)}),
    "out-shape": ("out", {"out": torch.zeros(5, 4, 16)}),
    "out-dtype": ("out", {"out": V.half()}),
    "out-device": ("out", {"out": V.to("meta")}),
    "out-stride": ("out", {"out": uneven(V)}),
    "a-shape": ("gates.a", {"gates": gates(a=G.a[:4])}),
    "a-dtype": ("gates.a", {"gates": gates(a=G.a.long())}),
    "a-device": ("gates.a", {"gates": gates(a=G.a.to("meta"))}),
    "b-shape": ("gates.b", {"gates": gates(b=G.b[:4])}),
    "b-dtype": ("gates.b", {"gates": gates(b=G.b.long())}),
    "b-device": ("gates.b", {"gates": gates(b=G.b.to("meta"))}),
    "a-log": ("gates.A_log", {"gates": gates(A_log=G.A_log[:2])}),
    "bias": ("gates.dt_bias", {"gates": gates(dt_bias=G.dt_bias[:2])}),
    "bound": ("gates.lower_bound", {"gates": gates(lower_bound=1.0)}),
    "kind": ("gates.g", {"gates": replace(COMPUTED.gates, g=COMPUTED.gates.g[:4])}),
    "layer": ("head_dim", {"layer": linear_layer(2, 4, 7, 32)}),
    "order": ("pool.order", {"pool": replace(MADE.pool, order="kv")}),
    "states": ("pool.ssm", {"pool": replace(MADE.pool, ssm=MADE.pool.ssm.double())}),
    "slots": ("slots", {"slots": MADE.batch.slots[:1]}),
    "kept": ("intermediate", {"batch": replace(MADE.batch, intermediate=torch.zeros(2, 3, 4, 7, 16))}),
}


@pytest.fixture
def checks() -> LinearCallChecks:
    """The checks of one built object."""
    offer = replace(NATIVE_KDA, head_dims=((16, 32),))
    return LinearCallChecks(request_for(offer, MADE, "fp32"))


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The layers whose call went through the whole check."""
    seen: list[int] = []
    real = repeated_linear_calls.check_linear_call

    def check(request, q, k, v, gates, layer, batch, **named):
        seen.append(layer.layer_id)
        return real(request, q, k, v, gates, layer, batch, **named)

    monkeypatch.setattr(repeated_linear_calls, "check_linear_call", check)
    return seen


@pytest.mark.parametrize("made", [MADE, COMPUTED], ids=["raw", "computed"])
def test_a_call_like_the_last_one_is_compared_alone(made, checks, whole) -> None:
    """Other tokens at other addresses, of a step of another size too."""
    call(checks, made)
    call(checks, made, q=made.q.clone(), k=made.k.clone(), v=made.v.clone(), out=torch.zeros_like(made.v))
    batch = replace(made.batch, num_tokens=4)
    names = ("a", "b") if made is MADE else ("g", "beta")
    fewer = replace(made.gates, **{name: getattr(made.gates, name)[:4] for name in names})
    call(checks, made, batch=batch, q=made.q[:4], k=made.k[:4], v=made.v[:4], gates=fewer)
    assert whole == [0]


@pytest.mark.parametrize("change", WRONG)
def test_what_the_check_refuses_is_refused_after_a_right_call(change: str, checks) -> None:
    """Each field by itself."""
    field, changes = WRONG[change]
    call(checks, MADE)
    call(checks, MADE)
    with pytest.raises(UnsupportedBatch) as caught:
        call(checks, MADE, **changes)
    assert caught.value.needed.startswith(field)
    call(checks, MADE)


def test_slots_of_a_layers_own_and_kept_states_are_checked_whole(checks, whole) -> None:
    """Neither was held to this layer when the step was planned."""
    for _ in range(2):
        call(checks, MADE, slots=MADE.batch.slots.clone())
        call(checks, VERIFY)
    assert len(whole) == 4


def test_no_tensor_is_kept_alive(checks) -> None:
    """An engine that frees its states gets their memory back."""
    made = make_linear_step([3, 2], family="kda", layer=LAYER)
    call(checks, made)
    gone = [weakref.ref(of) for of in (made.pool.ssm, made.gates.A_log, made.gates.dt_bias, made.q, made.batch.slots)]
    del made
    gc.collect()
    assert [of() for of in gone] == [None] * 5
