"""The linear slot of a plan, built: objects and stamps of its own, on a runner that was stamped before them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

import backstamp
from backstamp.catalogue import Catalogue, Row, build_catalogue
from backstamp.construction import Factory, RunnerBackends, RunnerShape, build
from backstamp.declarations import Alias
from backstamp.discovery import discover
from backstamp.engine import EngineFacts
from backstamp.errors import BadInput, BuiltMismatch, ConflictingRequest, Unstamped
from backstamp.factories import BuildRequest, Built
from backstamp.launch import Requests, make_launch
from backstamp.linear import (
    LinearAttnBackends,
    flashinfer_prefill_on_sm100,
    linear_attn_backends_of,
    linear_attn_backends_of_request,
    resolve_linear_attn_backends,
    stamp_linear_attn_backends,
)
from backstamp.model import default_model, model_from_config
from backstamp.resolution import resolve
from backstamp.stamp import read_stamp, verify_consumed
from backstamp.testing.fakes import RecordingBackend, catalogue_of, fake_plugin, recording_factory
from backstamp.testing.hosts import described_host
from tests.models import config
from tests.resolving import kernel
from tests.scenes import DENSE, GATED, model_with, plan_with

GDN = {"slot": "linear", "family": "gdn", "state_layouts": ("vk",)}
MODEL = model_with((3, GATED), (1, DENSE))
PLUGIN = fake_plugin(
    "p",
    [
        kernel("fa3"),
        kernel("flashinfer", **GDN, phases=frozenset({"prefill"}), priority=60),
        kernel("triton", **GDN, phases=frozenset({"prefill", "decode", "verify"})),
    ],
    [Alias(key="portable", kernels=("triton",), slot="linear")],
)
SPEC = Requests(speculative_algorithm="EAGLE")
Load = Callable[[Row, Catalogue], Factory]


def built(runner: object = None, *, load: Load = recording_factory, role: str = "target") -> RunnerBackends:
    """A hybrid runner of fakes: flashinfer prefills its gated delta nets, triton does the rest."""
    plan = plan_with([PLUGIN], SPEC, model=MODEL, role=role)
    return build(plan, RunnerShape() if runner is None else runner, catalogue_of(PLUGIN), load=load)  # type: ignore[arg-type]


def test_each_linear_kernel_is_built_once_and_stamped_in_its_slot() -> None:
    """One object for decode and verify, another for prefill; attention's names are another matter."""
    backends = built()
    decode, prefill = backends.serving_linear_backend("decode"), backends.serving_linear_backend("prefill")
    assert backends.serving_linear_backend("verify") is decode
    stamps = [read_stamp(part) for part in (decode, prefill)]
    assert [(stamp.kernel, stamp.slot, stamp.phases) for stamp in stamps] == [
        ("triton", "linear", ("decode", "verify")),
        ("flashinfer", "linear", ("prefill",)),
    ]
    attention = backends.serving_attention_backend("decode")
    assert (read_stamp(attention).kernel, read_stamp(attention).slot) == ("fa3", "attention")
    assert backends.attention_backends() == ("fa3", "fa3")


def test_a_linear_factory_is_asked_for_its_own_slots_row_and_layout() -> None:
    """The state layout, not the cache's; the family; and what the runner is stamped with."""
    decode = built().serving_linear_backend("decode")
    assert isinstance(decode, RecordingBackend)
    request = decode.request
    assert (request.family, request.layout, request.offer.slot) == ("gdn", "vk", "linear")
    assert request.linear_attn_backends == LinearAttnBackends("triton", "flashinfer", "triton")


@pytest.mark.parametrize(
    ("mode", "kernel_name"),
    [
        ("extend", "flashinfer"),
        ("mixed", "flashinfer"),
        ("idle", "triton"),
        ("target_verify", "triton"),
        ("draft_decode", "triton"),
        ("draft_extend", "flashinfer"),
    ],
)
def test_a_forward_mode_finds_its_linear_kernel(mode: str, kernel_name: str) -> None:
    """A draft's two phases run by the halves they follow."""
    assert read_stamp(built().serving_linear_backend(mode)).kernel == kernel_name


@pytest.mark.parametrize(("mode", "group"), [("decode", 1), ("sideways", 0)])
def test_a_mode_or_group_the_runner_does_not_have_is_an_error(mode: str, group: int) -> None:
    """It names what runs."""
    with pytest.raises(BadInput):
        built().serving_linear_backend(mode, group)


def test_a_runner_without_linear_layers_says_so() -> None:
    """And is not stamped: nobody reads it."""
    plugin = fake_plugin("p", [kernel("fa3")])
    runner = RunnerShape()
    backends = build(plan_with([plugin], model=default_model()), runner, catalogue_of(plugin), load=recording_factory)
    assert runner.linear_attn_backends is None
    with pytest.raises(BadInput, match="it has no linear layers"):
        backends.serving_linear_backend("decode")


def test_the_runner_is_stamped_before_anything_that_reads_it_is_built() -> None:
    """Every factory of either slot finds the stamp on its request, the first one too."""
    seen: list[LinearAttnBackends] = []

    def load(row: Row, catalogue: Catalogue) -> Factory:
        def factory(request: BuildRequest) -> Built:
            seen.append(linear_attn_backends_of_request(request))
            return Built(row.offer.kernel, RecordingBackend(request))

        return factory

    runner = RunnerShape()
    built(runner, load=load)
    assert seen == [LinearAttnBackends("triton", "flashinfer", "triton")] * 3
    assert linear_attn_backends_of(runner) == seen[0]


def test_a_request_of_an_unstamped_runner_raises_on_the_attribute() -> None:
    """A default would be another runner's."""
    part = built().serving_linear_backend("decode")
    assert isinstance(part, RecordingBackend)
    with pytest.raises(Unstamped, match="linear_attn_backends of its runner"):
        linear_attn_backends_of_request(replace(part.request, linear_attn_backends=None))


def test_an_engines_own_stamp_is_kept_where_it_is_the_plans() -> None:
    """What verify would be is no matter for a runner that never verifies; what runs is."""
    runner = RunnerShape()
    stamp_linear_attn_backends(runner, LinearAttnBackends("triton", "flashinfer", "triton"))
    kept = linear_attn_backends_of(runner)
    built(runner)
    assert linear_attn_backends_of(runner) is kept


def test_a_stamp_that_contradicts_the_plan_is_refused_with_both_kernels() -> None:
    """One of the two would be read by half of the consumers."""
    runner = RunnerShape()
    stamp_linear_attn_backends(runner, LinearAttnBackends("triton", "triton", "triton"))
    with pytest.raises(ConflictingRequest) as caught:
        built(runner)
    assert caught.value.needed == "flashinfer for prefill, as planned"
    assert caught.value.found == "triton for prefill, stamped on the runner"


LAUNCHES = {
    "unset": Requests(),
    "drafting": SPEC,
    "asked": Requests(linear_attn_decode_backend="torch_native", linear_attn_prefill_backend="torch_native"),
}


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("model", ["hybrid", "kda"])
@pytest.mark.parametrize("host", ["h100", "b200", "mi300x", "ascend910b", "epyc"])
def test_a_runner_stamped_as_its_plan_says_is_built_on_every_host(host: str, model: str, launch: str) -> None:
    """The path an engine is told: an explicit choice wins, and every default is what the plan came to."""
    catalogue, facts = build_catalogue(discover()), model_from_config(config(model))
    asked = make_launch(LAUNCHES[launch])
    plan = resolve(asked, EngineFacts(), facts, described_host(host), catalogue)
    assert plan.linear is not None
    runner, left_alone = RunnerShape(), RunnerShape()
    planned = backstamp.linear_attn_backends_in(plan)
    assert planned is not None
    backstamp.stamp_linear_attn_backends(runner, planned)
    build(plan, runner, catalogue, load=recording_factory)
    build(plan, left_alone, catalogue, load=recording_factory)
    assert linear_attn_backends_of(runner) is planned
    assert linear_attn_backends_of(left_alone) == planned
    assert (planned.decode, planned.prefill) == (plan.linear.decode.kernel, plan.linear.prefill.kernel)
    assert launch != "asked" or (planned.decode, planned.prefill) == ("torch_native", "torch_native")
    # the plan's prefill is the default an engine may hand on; its own choice still wins
    assert resolve_linear_attn_backends(asked, planned.prefill).prefill == planned.prefill


def test_an_unstamped_runner_is_told_what_build_would_take() -> None:
    """The remedy of the error is the path above, not one that `build` refuses."""
    with pytest.raises(Unstamped) as caught:
        linear_attn_backends_of(RunnerShape())
    assert "stamp_linear_attn_backends(runner, linear_attn_backends_in(plan))" in caught.value.fix
    runner = RunnerShape()
    stamp_linear_attn_backends(runner, LinearAttnBackends("x", "x", "x"))
    with pytest.raises(ConflictingRequest, match=r"linear_attn_backends_in\(plan\), or leave it to build"):
        built(runner)


def test_a_linear_factory_that_answers_an_alias_is_refused() -> None:
    """`portable` is a key of the linear slot and never a stamp."""

    def load(row: Row, catalogue: Catalogue) -> Factory:
        name = "portable" if row.offer.slot == "linear" else row.offer.kernel
        return lambda request: Built(name, RecordingBackend(request))

    with pytest.raises(BuiltMismatch, match="'portable', which is an alias") as caught:
        built(load=load)
    assert caught.value.who == "target linear decode, verify backend 'triton' (plugin p)"


def test_a_linear_object_swapped_in_later_is_found() -> None:
    """`verify_consumed` walks both slots."""
    backends = built()
    part = backends.serving_linear_backend("decode")
    assert isinstance(part, RecordingBackend)
    swapped = {**backends.linear_objects, ("decode", 0): RecordingBackend(part.request)}
    with pytest.raises(Unstamped):
        verify_consumed(replace(backends, linear_objects=swapped))
    with pytest.raises(BuiltMismatch, match=r"target linear decode, component main.*none was built"):
        verify_consumed(replace(backends, linear_objects={}))
    exchanged = {**backends.linear_objects, ("decode", 0): backends.serving_linear_backend("prefill")}
    with pytest.raises(BuiltMismatch, match="needs triton of fake-p"):
        verify_consumed(replace(backends, linear_objects=exchanged))


def test_a_target_and_its_draft_hold_choices_of_their_own() -> None:
    """Building one never changes the other."""
    target, draft = RunnerShape(), RunnerShape()
    built(target)
    other = fake_plugin("q", [kernel("fa3"), kernel("triton", **GDN)])
    plan = plan_with([other], SPEC, model=MODEL, role="draft")
    build(plan, draft, catalogue_of(other), load=recording_factory)
    assert linear_attn_backends_of(draft) == LinearAttnBackends("triton", "triton", "triton")
    assert linear_attn_backends_of(target) == LinearAttnBackends("triton", "flashinfer", "triton")


@pytest.mark.parametrize(("host", "kernel_name"), [("b200", "flashinfer"), ("gb300", "flashinfer"), ("h200", "triton")])
def test_the_gate_names_flashinfer_on_sm100_for_gated_delta_nets(host: str, kernel_name: str) -> None:
    """SGLang's default of prefill, as an argument."""
    gate = flashinfer_prefill_on_sm100(MODEL, lambda: described_host(host))
    assert resolve_linear_attn_backends(make_launch(Requests()), gate).prefill == kernel_name


@pytest.mark.parametrize("reason", ["operator", "family"])
def test_the_gate_declines_before_it_probes(reason: str) -> None:
    """An operator's choice, or a model without a gated delta net: no device is asked."""

    def probe() -> object:
        raise AssertionError("the gate probed a device")

    model = MODEL if reason == "operator" else model_with((3, replace(GATED, family="kda")), (1, DENSE))
    asked = Requests(linear_attn_prefill_backend="triton") if reason == "operator" else Requests()
    gate = flashinfer_prefill_on_sm100(model, probe)  # type: ignore[arg-type]
    assert resolve_linear_attn_backends(make_launch(asked), gate).prefill == "triton"
