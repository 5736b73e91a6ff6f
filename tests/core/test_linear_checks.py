"""What a linear kernel is handed, held against its row: every field that does not fit is refused by its name."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from backstamp.attention import ComputedGates, RawGates, StatePool
from backstamp.declarations import Offer
from backstamp.errors import Unstamped, UnsupportedBatch
from backstamp.linear_checks import check_linear_batch, check_linear_build, check_linear_call
from backstamp.testing.linear_batches import SMALL_LINEAR_LAYER, MadeLinearStep, linear_layer, make_linear_step
from tests.linear_steps import TREE, request_for
from tests.resolving import kernel

OFFER = kernel(
    "delta",
    slot="linear",
    family="gdn",
    phases=frozenset({"prefill", "decode", "verify"}),
    dtypes=frozenset({"fp32"}),
    head_dims=((16, 32),),
    state_layouts=("vk",),
    features=frozenset({"tree_mask"}),
    graph="any",
)
PREFILL = {"q_lens": [3, 2]}
KEPT = {"q_lens": [3, 3], "phase": "verify"}
SLOTS = {**KEPT, "form": "slot_table"}


def request(made: MadeLinearStep, offer: Offer = OFFER, **changes: object):
    """What an object would be built for."""
    return request_for(offer, made, **changes)


def long(made: MadeLinearStep, **changes: object) -> MadeLinearStep:
    """The step with another batch."""
    return replace(made, batch=replace(made.batch, **changes))


BUILDS = [
    pytest.param({"dtype": "bf16"}, "dtype: fp32", "bf16", id="dtype"),
    pytest.param({"layout": "kv"}, "state layout: vk", "'kv'", id="layout"),
    pytest.param({"layers": (linear_layer(2, 4, 32, 32, 7),)}, "head_dim of layer 7", "32 and 32", id="dims"),
    pytest.param({"layers": (linear_layer(3, 4, 16, 32),)}, "value heads", "4", id="heads"),
]


@pytest.mark.parametrize(("changes", "needed", "found"), BUILDS)
def test_a_build_that_does_not_fit_is_refused(changes, needed, found) -> None:
    """Before anything is allocated."""
    with pytest.raises(UnsupportedBatch) as caught:
        check_linear_build(request(make_linear_step([1]), **changes))
    assert caught.value.needed.startswith(needed)
    assert caught.value.found == found
    assert caught.value.who == "target prefill, decode, verify linear-attention kernel 'delta' (gdn)"


def test_a_build_without_the_runners_stamp_is_refused() -> None:
    """It would read another runner's choice, or a default."""
    with pytest.raises(Unstamped):
        check_linear_build(request(make_linear_step([1]), linear_attn_backends=None))


BATCHES = [
    pytest.param(PREFILL, {"phase": "draft_decode"}, "phase", id="phase"),
    pytest.param(PREFILL, {"num_tokens": 5000}, "num_rows and num_tokens", id="tokens"),
    pytest.param(PREFILL, {"num_rows": 65}, "num_rows and num_tokens", id="rows"),
    pytest.param(PREFILL, {"qo_indptr": torch.zeros(2, dtype=torch.int32)}, "qo_indptr", id="short-offsets"),
    pytest.param(PREFILL, {"qo_indptr": torch.zeros(3)}, "qo_indptr", id="offsets-dtype"),
    pytest.param(PREFILL, {"slots": torch.zeros(1, dtype=torch.int32)}, "slots", id="short-slots"),
    pytest.param(PREFILL, {"slots": torch.zeros(2, 1, dtype=torch.int32)}, "slots", id="slots-dims"),
    pytest.param(PREFILL, {"has_state": torch.ones(2)}, "has_state", id="has-state-dtype"),
    pytest.param(PREFILL, {"has_state": torch.ones(1, dtype=torch.bool)}, "has_state", id="has-state-rows"),
    pytest.param(PREFILL, {"qo_indptr_host": torch.zeros(2, dtype=torch.int32)}, "qo_indptr_host", id="host"),
    pytest.param(PREFILL, {"slot_table": torch.zeros(2, 3, dtype=torch.int32)}, "slot_table: None in", id="table"),
    pytest.param(PREFILL, {"parents": torch.zeros(2, 3, dtype=torch.int32)}, "parents: None in", id="parents"),
    pytest.param(KEPT, {"intermediate": None}, "verify: slot_table with num_accepted", id="neither"),
    pytest.param(KEPT, {"slot_table": torch.zeros(2, 3, dtype=torch.int32)}, "verify: slot_table with", id="both"),
    pytest.param(SLOTS, {"num_accepted": None}, "num_accepted", id="accepted"),
    pytest.param(SLOTS, {"num_accepted": torch.ones(2)}, "num_accepted", id="accepted-dtype"),
    pytest.param(SLOTS, {"slot_table": torch.zeros(6, dtype=torch.int32)}, "slot_table", id="table-dims"),
    pytest.param(SLOTS, {"parents": torch.zeros(2, 3, dtype=torch.int32)}, "parents: None beside", id="tree-of-slots"),
    pytest.param(SLOTS, {"slot_table": torch.zeros(2, 2, dtype=torch.int32)}, "qo_indptr_host: at most 2", id="narrow"),
    pytest.param(SLOTS, {"slot_table": torch.zeros(3, 2, dtype=torch.int32).T}, "slot_table: a last", id="columns"),
    pytest.param(PREFILL, {"slots": torch.zeros(4, dtype=torch.int32)[::2]}, "slots: a last stride", id="slots-stride"),
    pytest.param(PREFILL, {"has_state": torch.ones(4, dtype=torch.bool)[::2]}, "has_state: a last", id="state-stride"),
    pytest.param(KEPT, {"intermediate": torch.zeros(1, 3, 4, 32, 16)}, "intermediate: [n, S", id="few-kept"),
]


@pytest.mark.parametrize(("of", "changes", "needed"), BATCHES)
def test_a_step_that_does_not_fit_is_refused(of, changes, needed) -> None:
    """At `plan`, before any launch."""
    made = long(make_linear_step(**of), **changes)
    with pytest.raises(UnsupportedBatch) as caught:
        check_linear_batch(request(made), made.batch)
    assert caught.value.needed.startswith(needed)


@pytest.mark.parametrize("form", ["slot_table", "intermediate"])
def test_every_row_of_a_verify_step_has_places_for_its_states(form) -> None:
    """A long row beside a short one would write into the places of the row after it, though all tokens fit."""
    made = make_linear_step([6, 2], phase="verify", form=form)
    kept = getattr(made.batch, form)
    assert check_linear_batch(request(made), made.batch) == form
    with pytest.raises(UnsupportedBatch, match="qo_indptr_host: at most 4 tokens a row") as caught:
        check_linear_batch(request(made), replace(made.batch, **{form: kept[:, :4].contiguous()}))
    assert caught.value.found == "[6, 2]"


@pytest.mark.parametrize("form", ["slot_table", "intermediate"])
def test_without_host_offsets_the_longest_row_is_bounded(form) -> None:
    """Nothing else on the host says that no row is longer than its places."""
    made = make_linear_step([3, 3], phase="verify", form=form, host_lens=False)
    assert check_linear_batch(request(made), made.batch) == form
    for bound in (None, 4):
        with pytest.raises(UnsupportedBatch, match="max_q_len: at most 3"):
            check_linear_batch(request(made), replace(made.batch, max_q_len=bound))
    # exact offsets say more than a bound
    exact = replace(made.batch, qo_indptr_host=made.batch.qo_indptr.clone(), max_q_len=None)
    assert check_linear_batch(request(made), exact) == form


def test_a_tree_needs_a_row_that_declares_trees() -> None:
    """Read as a chain, every branch but the first would be wrong."""
    made = make_linear_step([5, 3, 0, 2], phase="verify", parents=TREE)
    assert check_linear_batch(request(made), made.batch) == "intermediate"
    with pytest.raises(UnsupportedBatch, match="parents: None: the row declares no tree_mask"):
        check_linear_batch(request(made, replace(OFFER, features=frozenset())), made.batch)


def test_host_offsets_are_asked_for_where_the_row_reads_them() -> None:
    """In the phases that do."""
    made = long(make_linear_step([1, 1], phase="decode"), qo_indptr_host=None)
    assert check_linear_batch(request(made), made.batch) == "slots"
    reads = replace(OFFER, phase_inputs={"verify": frozenset({"host_lens"})})
    assert check_linear_batch(request(made, reads), made.batch) == "slots"
    with pytest.raises(UnsupportedBatch, match="the row declares the input host_lens"):
        check_linear_batch(request(made, replace(OFFER, inputs=frozenset({"host_lens"}))), made.batch)


@pytest.mark.parametrize(("graph", "phase"), [("never", "decode"), ("any", "prefill")])
def test_a_captured_step_needs_a_row_with_graphs_and_no_prefill(graph, phase) -> None:
    """What is read on the host would be frozen."""
    made = make_linear_step([1, 1], phase=phase)
    with pytest.raises(UnsupportedBatch, match="capture"):
        check_linear_batch(request(made, replace(OFFER, graph=graph)), made.batch, capture=True)


def call(made: MadeLinearStep, **changes: object) -> None:
    """Hold one layer's tensors against an object built for states in the order vk."""
    named = {"pool": made.pool, "slots": made.batch.slots, **changes}
    built = request(made, layout="vk")
    check_linear_call(built, made.q, made.k, made.v, made.gates, made.layer, made.batch, **named)


def states(ssm: torch.Tensor, order: str = "vk") -> MadeLinearStep:
    """The step below with another pool."""
    return replace(MADE, pool=StatePool(ssm=ssm, order=order))


def gates(made: MadeLinearStep, **changes: object) -> MadeLinearStep:
    """The step with other gates."""
    return replace(made, gates=replace(made.gates, **changes))


MADE = make_linear_step([3, 2])
COMPUTED = make_linear_step([3, 2], raw_gates=False)
SSM = MADE.pool.ssm
CALLS = [
    pytest.param(replace(MADE, q=MADE.q[:4]), "q: [5, 2, 16]", id="q"),
    pytest.param(replace(MADE, k=MADE.k.mT.contiguous().mT), "k: [5, 2, 16] with a last stride of 1", id="k-stride"),
    pytest.param(replace(MADE, v=MADE.v.half()), "v: fp32, as built", id="v-dtype"),
    pytest.param(replace(MADE, layer=linear_layer(2, 4, 32, 16)), "head_dim of layer 0", id="layer"),
    pytest.param(gates(MADE, a=MADE.gates.a[:, :2]), "gates.a: [5, 4]", id="a"),
    pytest.param(gates(MADE, b=MADE.gates.b.long()), "gates.b: [5, 4], fp16, bf16 or fp32", id="b"),
    pytest.param(gates(MADE, A_log=torch.zeros(2)), "gates.A_log: [4]", id="a-log"),
    pytest.param(gates(MADE, dt_bias=torch.zeros(4, 16)), "gates.dt_bias: [4]", id="bias-of-kda"),
    pytest.param(
        gates(MADE, lower_bound=-5.0), "gates.lower_bound: None: the row declares no bounded_gates", id="bound"
    ),
    pytest.param(gates(COMPUTED, g=COMPUTED.gates.g[..., None].expand(5, 4, 16)), "gates.g: [5, 4]", id="g-of-kda"),
    pytest.param(gates(COMPUTED, beta=COMPUTED.gates.beta[:3]), "gates.beta: [5, 4]", id="beta"),
    pytest.param(states(SSM, "kv"), "pool.order: 'vk', as built", id="order"),
    pytest.param(states(SSM.mT.contiguous()), "pool.ssm: [N, 4, 32, 16]", id="turned"),
    pytest.param(states(SSM.mT.contiguous().mT), "pool.ssm: [N, 4", id="strides"),
    pytest.param(states(SSM.double()), "pool.ssm: fp16, bf16 or fp32", id="fp64"),
]


@pytest.mark.parametrize(("made", "needed"), CALLS)
def test_a_call_that_does_not_fit_is_refused(made, needed) -> None:
    """At `forward`, before any launch; the layer and the phase are named."""
    with pytest.raises(UnsupportedBatch) as caught:
        call(made)
    assert caught.value.needed.startswith(needed)
    assert "prefill layer 0" in caught.value.who


def test_outputs_slots_and_kept_states_are_held_too() -> None:
    """Whatever is written."""
    with pytest.raises(UnsupportedBatch, match="out: "):
        call(MADE, out=torch.zeros(5, 4, 16))
    with pytest.raises(UnsupportedBatch, match="slots: "):
        call(MADE, slots=torch.zeros(2))
    verify = make_linear_step([3, 3], phase="verify")
    turned = long(verify, intermediate=verify.batch.intermediate.mT.contiguous())
    with pytest.raises(UnsupportedBatch, match=r"intermediate: \[N, S, 4, 32, 16\]"):
        call(turned)


def test_what_fits_passes() -> None:
    """Raw and computed gates, Kimi delta attention's bias flat or not, strided heads."""
    call(MADE)
    call(COMPUTED)
    kda = make_linear_step([3, 2], family="kda")
    offer = replace(OFFER, family="kda")
    offer = replace(offer, features=offer.features | {"bounded_gates"})
    for made in (kda, gates(kda, dt_bias=kda.gates.dt_bias.flatten()), gates(kda, lower_bound=-5.0)):
        named = {"pool": made.pool, "slots": made.batch.slots}
        check_linear_call(request(made, offer), made.q, made.k, made.v, made.gates, made.layer, made.batch, **named)
    q, k = torch.cat([MADE.q, MADE.k], 1).split(2, 1)
    call(replace(MADE, q=q, k=k))


def test_a_bound_of_nothing_is_refused() -> None:
    """The decay of a bound of zero would be none."""
    made = gates(make_linear_step([3, 2], family="kda"), lower_bound=0.0)
    offer = replace(OFFER, family="kda", features=OFFER.features | {"bounded_gates"})
    named = {"pool": made.pool, "slots": made.batch.slots}
    with pytest.raises(UnsupportedBatch, match=r"gates\.lower_bound: a number below 0, got 0\.0"):
        check_linear_call(request(made, offer), made.q, made.k, made.v, made.gates, made.layer, made.batch, **named)


def test_gates_have_the_fields_the_contract_names() -> None:
    """A field that is added must be held too."""
    assert [field.name for field in fields(RawGates)] == ["a", "b", "A_log", "dt_bias", "lower_bound"]
    assert [field.name for field in fields(ComputedGates)] == ["g", "beta"]
    assert SMALL_LINEAR_LAYER.head_dim != SMALL_LINEAR_LAYER.v_head_dim
