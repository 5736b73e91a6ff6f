"""A mixed launch reads one stored sink parameter: converted buffers stay where they are and follow what is stored.

Incident: SGLang #34917. The conversion leans on autograd's in-place counter: what ticks it, what does not, and what
happens where there is none, is held here through built runners.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from backstamp.attention import LayerSpec
from backstamp.catalogue import Catalogue, Row
from backstamp.construction import Factory, RunnerBackends, RunnerShape, build
from backstamp.decisions import stored_sinks
from backstamp.declarations import Offer
from backstamp.factories import BuildRequest, Built
from backstamp.launch import Requests
from backstamp.model import DraftFacts
from backstamp.sink_buffers import SinkBuffers
from backstamp.stamp import is_container, parts_of
from backstamp.testing.fakes import catalogue_of, fake_plugin
from tests.resolving import kernel
from tests.scenes import DENSE, layer_specs, model_with, plan_with
from tests.splits import SPEC

FEATURES = frozenset({"sinks"})
NARROW = kernel("fa4", features=FEATURES, sink_dtypes=frozenset({"bf16"}))
WIDE = kernel("trtllm_mha", features=FEATURES, sink_dtypes=frozenset({"fp32"}), sink_conversion="lossless")
OFFERS = [NARROW, WIDE]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
MODEL = model_with((2, replace(DENSE, sinks="bf16")))
MIXED = Requests(prefill_attention_backend="fa4", decode_attention_backend="trtllm_mha", **SPEC)
#: Which runners of which launches read the parameter in two dtypes.
RUNNERS = {
    "target": (MIXED, "target"),
    "mirrored": (replace(MIXED, prefill_attention_backend="trtllm_mha", decode_attention_backend="fa4"), "target"),
    "verify": (replace(MIXED, decode_attention_backend="fa4", verify_attention_backend="trtllm_mha"), "target"),
    "draft": (MIXED, "draft"),
}


class Reader:
    """A backend that reads sinks as its row declares, through the buffers real ones use."""

    def __init__(self, request: BuildRequest) -> None:
        self.layers = request.layers
        self._sinks = SinkBuffers(request, tuple(DTYPES[name] for name in request.offer.sink_dtypes))

    def plan(self) -> None:
        self._sinks.update()

    def refresh_parameters(self) -> None:
        self._sinks.refresh_parameters()

    def forward(self) -> dict[int, Tensor]:
        return {layer.layer_id: sinks for layer in self.layers if (sinks := self._sinks.of(layer)) is not None}


class Loop:
    """A plugin's own draft loop, which forgets that its steps keep parameters."""

    def __init__(self, request: BuildRequest) -> None:
        self.attn_backends = [Reader(request) for _ in range(request.num_steps - 1)]


def readers(row: Row, catalogue: Catalogue) -> Factory:
    """A factory of readers."""
    return lambda request: Built(row.offer.kernel, Reader(request))


def loops(row: Row, catalogue: Catalogue) -> Factory:
    """A factory whose draft loop is its own container."""
    return lambda request: Built(row.offer.kernel, (Loop if "draft_decode" in request.phases else Reader)(request))


def runner(
    which: str, stored: dict[int, Tensor], load: object = readers, offers: list[Offer] = OFFERS
) -> RunnerBackends:
    """A built runner of a launch, whose layers hold these sinks."""
    requests, role = RUNNERS[which]
    plan = plan_with(offers, requests, model=MODEL, role=role)
    layers = [replace(layer, sinks=stored[layer.layer_id]) for layer in layer_specs(MODEL)]
    return build(plan, RunnerShape(layers=layers), catalogue_of(fake_plugin("p", offers)), load=load)


def leaves(backends: RunnerBackends) -> list[Reader]:
    """Every reader of a runner, each step of its draft loop too."""
    parts = {id(part): part for built in backends.objects.values() for part in parts_of(built)}
    return [part for part in parts.values() if not is_container(part)]


def step(backends: RunnerBackends) -> Iterator[tuple[int, Tensor]]:
    """Plan every reader, and tell what each layer of it reads."""
    for leaf in leaves(backends):
        leaf.plan()
        yield from leaf.forward().items()


def parameters(dtype: torch.dtype = torch.bfloat16) -> dict[int, Tensor]:
    """One parameter a layer."""
    return {at: torch.nn.Parameter(torch.full((32,), float(at)).to(dtype), requires_grad=False) for at in (0, 1)}


def values(backends: RunnerBackends) -> set[float]:
    """What all readers see of layer 1."""
    return {float(value) for layer, sinks in step(backends) if layer == 1 for value in sinks}


@pytest.mark.parametrize("which", RUNNERS)
def test_every_reader_of_a_mixed_launch_reads_one_parameter(which: str) -> None:
    """Stored as the decision says: the kernel of that dtype reads it in place, the other a buffer of its own."""
    stored = parameters()
    backends = runner(which, stored)
    choice = stored_sinks(backends)
    assert choice.stored == "bf16"
    assert {read.kernel for read in choice.converting} == {"trtllm_mha"}
    seen = list(step(backends))
    assert {sinks.dtype for _, sinks in seen} == {torch.bfloat16, torch.float32}
    for layer, sinks in seen:
        assert (sinks is stored[layer]) is (sinks.dtype is torch.bfloat16)
        assert torch.equal(sinks.double(), stored[layer].double())


@pytest.mark.parametrize("which", RUNNERS)
def test_a_reload_reaches_every_reader_and_no_address_changes(which: str) -> None:
    """`copy_` is seen by the next plan; `.data.copy_()` is stale in every buffer until `refresh_parameters()`."""
    stored = parameters()
    backends = runner(which, stored)
    before = [sinks.data_ptr() for _, sinks in step(backends)]
    assert values(backends) == {1.0}
    stored[1].copy_(torch.full((32,), 3.0))
    assert values(backends) == {3.0}
    stored[1].data.copy_(torch.full((32,), 5.0))
    assert values(backends) == {3.0, 5.0}, "the buffers are stale, the parameter read in place is not"
    backends.refresh_parameters()
    assert values(backends) == {5.0}
    assert [sinks.data_ptr() for _, sinks in step(backends)] == before


def test_a_draft_loop_of_a_plugins_own_is_reached_step_by_step() -> None:
    """A container that forgets its steps hides none of them."""
    stored = parameters()
    backends = runner("draft", stored, loops)
    assert len(leaves(backends)) > 2
    assert values(backends) == {1.0}
    stored[1].data.fill_(5.0)
    backends.refresh_parameters()
    assert values(backends) == {5.0}


def test_a_draft_with_convolutions_of_its_own_is_reached_through_its_wrapper() -> None:
    """The wrapper is what the phase is served by, and what it wraps keeps the buffer."""
    model = replace(MODEL, draft=DraftFacts(conv_sidecar=True))
    asked = Requests(draft_attention_backend="trtllm_mha", speculative_algorithm="EAGLE", speculative_num_steps=1)
    plan = plan_with(OFFERS, asked, model=model, role="draft")
    stored = parameters()
    layers = [replace(layer, sinks=stored[layer.layer_id]) for layer in layer_specs(model)]
    backends = build(plan, RunnerShape(layers=layers), catalogue_of(fake_plugin("p", OFFERS)), load=readers)
    wrapper = backends.serving_attention_backend("draft_extend")
    assert not isinstance(wrapper, Reader)
    wrapper.plan()
    stored[1].data.fill_(5.0)
    # the wrapper alone: what else serves is not what is tested
    RunnerBackends(plan, {("draft_extend", 0): wrapper}).refresh_parameters()
    assert wrapper.forward()[1].unique().tolist() == [5.0]


def test_a_parameter_that_moved_is_converted_again() -> None:
    """`.data = other` ticks no counter either; the address tells."""
    stored = parameters()
    backends = runner("target", stored)
    assert values(backends) == {1.0}
    stored[1].data = torch.full((32,), 7.0, dtype=torch.bfloat16)
    assert values(backends) == {7.0}


def test_a_parameter_without_a_counter_is_converted_each_step() -> None:
    """Made in inference mode it has none to ask, so nothing is taken for unchanged."""
    with torch.inference_mode():
        stored = {at: torch.full((32,), float(at), dtype=torch.bfloat16) for at in (0, 1)}
        backends = runner("target", stored)
        assert values(backends) == {1.0}
        stored[1].data.fill_(9.0)
        assert values(backends) == {9.0}


class Uncounted(torch.Tensor):
    """A tensor whose in-place counter went away, as a private attribute may."""

    @property
    def _version(self) -> int:
        raise AttributeError("_version")


def test_a_missing_counter_fails_loudly() -> None:
    """Taken for "unchanged", every reload would be lost in silence."""
    stored = {at: torch.zeros(32, dtype=torch.bfloat16).as_subclass(Uncounted) for at in (0, 1)}
    backends = runner("target", stored)
    with pytest.raises(AttributeError, match="_version"):
        list(step(backends))


def test_an_object_that_keeps_no_parameters_is_left_alone() -> None:
    """`refresh_parameters` is an optional member of the call contract."""

    class Plain:
        def forward(self) -> None: ...

    plan = plan_with(OFFERS, MIXED, model=MODEL)
    catalogue = catalogue_of(fake_plugin("p", OFFERS))
    build(
        plan, RunnerShape(), catalogue, load=lambda row, _: lambda request: Built(row.offer.kernel, Plain())
    ).refresh_parameters()


def test_a_layer_spec_of_a_runner_holds_the_stored_tensor_itself() -> None:
    """What an engine hands over is never copied on the way to a kernel that reads it as it is."""
    stored = parameters(torch.float32)
    offers = [replace(NARROW, sink_dtypes=frozenset({"bf16", "fp32"})), WIDE]
    requests, _ = RUNNERS["target"]
    model = model_with((2, replace(DENSE, sinks="fp32")))
    plan = plan_with(offers, requests, model=model)
    layers: list[LayerSpec] = [replace(layer, sinks=stored[layer.layer_id]) for layer in layer_specs(model)]
    backends = build(plan, RunnerShape(layers=layers), catalogue_of(fake_plugin("p", offers)), load=readers)
    assert stored_sinks(backends).converting == ()
    assert all(sinks is stored[layer] for layer, sinks in step(backends))
