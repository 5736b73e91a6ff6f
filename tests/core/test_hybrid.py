"""The composed backend of a hybrid runner: each layer is run by the kernel of its half, on its own batch."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from backstamp.attention import LayerSpec
from backstamp.catalogue import Catalogue, Row
from backstamp.construction import Factory, RunnerBackends, RunnerShape, build
from backstamp.draft import DraftSteps
from backstamp.errors import BadInput, Unstamped
from backstamp.factories import BuildRequest, Built
from backstamp.hybrid import HybridBackend
from backstamp.launch import Requests
from backstamp.model import default_model
from backstamp.policy import Policy
from backstamp.stamp import read_stamp
from backstamp.testing.fakes import catalogue_of, fake_plugin
from tests.resolving import kernel
from tests.scenes import DENSE, GATED, model_with, plan_with

GDN = {"slot": "linear", "family": "gdn"}
PLUGIN = fake_plugin(
    "p",
    [
        kernel("fa3"),
        kernel("flashinfer", **GDN, phases=frozenset({"prefill"}), priority=60),
        kernel("triton", **GDN, phases=frozenset({"prefill", "decode", "verify"})),
    ],
)
#: Layers 0 to 2 are gated delta nets, 3 is full attention with a KV group of its own.
MODEL = model_with((3, GATED), (1, DENSE))
DELTA = LayerSpec(layer_id=0, num_qo_heads=16, num_kv_heads=32, head_dim=128, v_head_dim=128, scale=1.0)
LAYERS = (
    *(replace(DELTA, layer_id=at, group=group) for at, group in ((0, 0), (1, 0), (2, 2))),
    replace(DELTA, layer_id=3, num_qo_heads=32, num_kv_heads=8, group=1),
)


class Told:
    """A backend that says what it was asked: the state is (kernel, batch, recording or not, an earlier state)."""

    def __init__(self, kernel_name: str) -> None:
        self.kernel, self.calls = kernel_name, []

    def init_graphs(self, max_rows, max_tokens):
        self.calls.append(("init_graphs", max_rows, max_tokens))

    def plan(self, batch, *, state=None, capture=False):
        return (self.kernel, batch, capture, state)

    def replan(self, state):
        self.calls.append(("replan", state[1]))

    def refresh_parameters(self):
        self.calls.append(("refresh_parameters",))

    def forward(self, q, *tensors, **named):
        return (self.kernel, q, tensors, named)


class Plain:
    """A backend with the two mandatory members alone."""

    def __init__(self, kernel_name: str) -> None:
        self.kernel = kernel_name

    def plan(self, batch, *, state=None, capture=False):
        return (self.kernel, batch, capture, state)

    def forward(self, q, *tensors, **named):
        return (self.kernel, q, tensors, named)


def loading(kind: type) -> object:
    """A loader of backends of this class."""

    def load(row: Row, catalogue: Catalogue) -> Factory:
        def factory(request: BuildRequest) -> Built:
            return Built(row.offer.kernel, kind(row.offer.kernel))

        return factory

    return load


def built(kind: type = Told, **more: object) -> RunnerBackends:
    """The hybrid runner."""
    plan = plan_with([PLUGIN], Requests(speculative_algorithm="EAGLE"), **{"model": MODEL, **more})
    return build(plan, RunnerShape(layers=LAYERS), catalogue_of(PLUGIN), load=loading(kind))  # type: ignore[arg-type]


def test_each_layer_runs_the_kernel_of_its_half_with_the_state_of_its_group() -> None:
    """Three batches, three states, two kernels; no layer sees another's."""
    hybrid = HybridBackend(built(), "extend", LAYERS)
    state = hybrid.plan({1: "full"}, {0: "linear", 2: "other"})
    full = hybrid.forward("q", "kv", LAYERS[3], state, out="out", lse="lse")
    assert full == (
        "fa3",
        "q",
        ("kv", LAYERS[3], ("fa3", "full", False, None)),
        {"out": "out", "lse": "lse", "new": None, "q_rope": None, "indices": None},
    )
    for layer, batch in ((LAYERS[0], "linear"), (LAYERS[1], "linear"), (LAYERS[2], "other")):
        ran = hybrid.forward_linear("q", "k", "v", "gates", layer, state, pool="pool", slots="slots")
        of = ("flashinfer", batch, False, None)
        assert ran == (
            "flashinfer",
            "q",
            ("k", "v", "gates", layer, of),
            {"pool": "pool", "slots": "slots", "out": None},
        )
    assert len(state.linear) == 2


@pytest.mark.parametrize(
    ("mode", "linear"),
    [("prefill", "flashinfer"), ("decode", "triton"), ("target_verify", "triton"), ("draft_extend", "flashinfer")],
)
def test_a_phase_takes_its_own_linear_kernel(mode: str, linear: str) -> None:
    """The stamp is the full kernel's, as of any key; the linear kernel keeps its own."""
    hybrid = HybridBackend(built(), mode, LAYERS)
    assert read_stamp(hybrid).kernel == "fa3"
    assert [read_stamp(part).kernel for part in hybrid.linear] == [linear]


def test_a_layer_of_the_other_half_is_refused_by_its_number() -> None:
    """Running attention on a recurrence's tensors would be wrong in silence."""
    hybrid = HybridBackend(built(), "decode", LAYERS)
    state = hybrid.plan({1: "full"}, {0: "linear", 2: "other"})
    with pytest.raises(BadInput, match=r"one of its full layers \(3\), got layer 1 of main, which is linear"):
        hybrid.forward("q", "kv", LAYERS[1], state)
    with pytest.raises(BadInput, match=r"linear layers \(0, 1, 2\), got layer 3 of main, which is full attention"):
        hybrid.forward_linear("q", "k", "v", "gates", LAYERS[3], state, pool="pool", slots="slots")
    vision = SimpleNamespace(layer_id=3, component="vision")
    with pytest.raises(BadInput, match="layer 3 of vision"):
        hybrid.forward("q", "kv", vision, state)


def test_a_group_without_a_batch_is_named() -> None:
    """Both halves are planned before either runs."""
    hybrid = HybridBackend(built(), "decode", LAYERS)
    with pytest.raises(BadInput, match="a batch of group 2, linear layers, got groups 0"):
        hybrid.plan({1: "full"}, {0: "linear"})


def test_graphs_reach_both_halves() -> None:
    """Buffers, the recorded state of each part, and the device half of each."""
    hybrid = HybridBackend(built(), "decode", LAYERS)
    hybrid.init_graphs(4, 8)
    recorded = hybrid.plan({1: "a"}, {0: "b", 2: "c"}, capture=True)
    again = hybrid.plan({1: "d"}, {0: "e", 2: "f"}, state=recorded)
    assert list(again.full.values()) == [("fa3", "d", False, ("fa3", "a", True, None))]
    assert [of[3][1] for of in again.linear.values()] == ["b", "c"]
    hybrid.replan(again)
    assert hybrid.full[0].calls == [("init_graphs", 4, 8), ("replan", "d")]
    assert hybrid.linear[0].calls == [("init_graphs", 4, 8), ("replan", "e"), ("replan", "f")]


def test_reloaded_parameters_reach_both_halves_and_every_step_of_a_draft() -> None:
    """A kernel that keeps converted sinks is told, wherever it is built into; one without such copies is passed by."""
    hybrid = HybridBackend(built(), "decode", LAYERS)
    hybrid.refresh_parameters()
    assert [part.calls for part in (*hybrid.full, *hybrid.linear)] == [[("refresh_parameters",)]] * 2
    steps = DraftSteps([Told("a"), Plain("b"), Told("c")])
    steps.refresh_parameters()
    assert [step.calls for step in steps.attn_backends if isinstance(step, Told)] == [[("refresh_parameters",)]] * 2


def test_the_optional_members_may_be_missing() -> None:
    """Only plan and forward are mandatory."""
    hybrid = HybridBackend(built(Plain), "decode", LAYERS)
    hybrid.init_graphs(4, 8)
    hybrid.refresh_parameters()
    hybrid.replan(hybrid.plan({1: "a"}, {0: "b", 2: "c"}))


def test_a_model_of_one_half_has_no_composed_backend() -> None:
    """Its own backend serves it."""
    with pytest.raises(BadInput, match="no linear ones"):
        HybridBackend(built(model=default_model()), "decode", LAYERS)


@pytest.mark.parametrize("mode", ["draft_decode", "decode", "idle"])
def test_a_draft_loop_is_not_composed(mode: str) -> None:
    """Its steps have states of their own, however the mode is called."""
    with pytest.raises(BadInput, match="a draft loop"):
        HybridBackend(built(role="draft"), mode, LAYERS)


def test_unlike_full_kernels_leave_it_unstamped() -> None:
    """No one name would be true of it."""
    wide = {"head_dim": 256, "v_head_dim": 256}
    plugin = fake_plugin(
        "p", [kernel("narrow", head_dims=(128,)), kernel("wide", head_dims=(256,)), kernel("triton", **GDN)]
    )
    model = model_with((2, GATED), (1, replace(DENSE, **wide)), (1, DENSE))
    plan = plan_with([plugin], model=model, policy=Policy(layers="per_layer"))
    layers = (*LAYERS[:2], replace(LAYERS[2], **wide), LAYERS[3])
    backends = build(plan, RunnerShape(layers=layers), catalogue_of(plugin), load=loading(Told))  # type: ignore[arg-type]
    hybrid = HybridBackend(backends, "decode", layers)
    assert [read_stamp(part).kernel for part in hybrid.full] == ["wide", "narrow"]
    with pytest.raises(Unstamped):
        read_stamp(hybrid)


def test_both_halves_compute_what_their_layers_should() -> None:
    """Through real kernels on this CPU: a full layer over its cache, a recurrence over its states."""
    torch = pytest.importorskip("torch")
    from backstamp.catalogue import build_catalogue
    from backstamp.discovery import discover
    from backstamp.engine import EngineFacts
    from backstamp.host import this_host
    from backstamp.launch import make_launch
    from backstamp.resolution import resolve
    from backstamp.testing.batches import make_batch
    from backstamp.testing.linear_batches import make_linear_step
    from backstamp.testing.linear_reference import reference_linear, relative_error
    from backstamp.testing.reference import reference_attention

    model = model_with((3, GATED), (1, DENSE))
    asked = Requests(attention_backend="torch_native", linear_attn_backend="torch_native")
    catalogue = build_catalogue(discover())
    plan = resolve(make_launch(asked), EngineFacts(), model, this_host("cpu"), catalogue)
    hybrid = HybridBackend(build(plan, RunnerShape(layers=LAYERS), catalogue), "extend", LAYERS)
    bf16 = {"dtype": torch.bfloat16, "phase": "prefill"}
    full = make_batch((5, 3), (9, 3), layer=LAYERS[3], page_size=plan.page_size, **bf16)
    linear = make_linear_step((5, 3), layer=LAYERS[0], has_state=(True, False), **bf16)
    truth = reference_linear(linear.q, linear.k, linear.v, linear.gates, LAYERS[0], linear.batch, linear.pool)
    state = hybrid.plan({1: full.batch}, {0: linear.batch, 2: linear.batch})
    out = hybrid.forward(full.q, full.kv, LAYERS[3], state)
    assert relative_error(out, reference_attention(full.q, full.kv, LAYERS[3], full.batch)[0]) < 8e-3
    named = {"pool": linear.pool, "slots": linear.batch.slots}
    out = hybrid.forward_linear(linear.q, linear.k, linear.v, linear.gates, LAYERS[0], state, **named)
    assert relative_error(out, truth.out) < 8e-3
    assert relative_error(linear.pool.ssm, truth.ssm) < 1e-5
