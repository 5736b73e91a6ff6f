"""Case 32, sglang #10403 and #10366: hybrid_linear_attn is another kernel on each host, and every step says which."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from backstamp.catalogue import Catalogue, Row
from backstamp.construction import Factory, RunnerBackends
from backstamp.declarations import Alias
from backstamp.draft import DraftBackendFactory
from backstamp.errors import ContainerWithoutChildren, Unstamped
from backstamp.factories import BuildRequest, Built
from backstamp.launch import Requests
from backstamp.stamp import copy_stamp, read_stamp, steps_of
from backstamp.testing.fakes import RecordingBackend, fake_plugin, recording_factory
from tests.building import GDN, built_from, model_of, plan_on, stamps_of
from tests.resolving import kernel

WIDE = {"head_dims": (256,)}
PLUGIN = fake_plugin(
    "p",
    [
        kernel("fa3", **WIDE, priority=80),
        kernel("triton", archs=("8.0",), forward_archs="any", **WIDE),
        kernel("intel_amx", device="cpu", archs=("x86_64",), cpu_features=frozenset({"amx_tile"}), **WIDE),
        # serves every host, and is not on the alias's list
        kernel("torch_native", device="any", archs=("any",), priority=99, **WIDE),
        kernel("triton", device="any", archs=("any",), **GDN),
    ],
    [Alias(key="hybrid_linear_attn", kernels=("fa3", "triton", "intel_amx"))],
)
HOSTS = [
    pytest.param("xeon_amx", "intel_amx", id="cpu-amx"),
    pytest.param("b200", "triton", id="sm100"),
    pytest.param("h100", "fa3", id="sm90"),
]


def draft_on(
    host: str, load: Callable[[Row, Catalogue], Factory] = recording_factory, **requests: str
) -> RunnerBackends:
    """A draft of three steps on the hybrid model."""
    asked = Requests(speculative_algorithm="EAGLE", speculative_num_steps=4, **requests)
    plan = plan_on(host, PLUGIN, requests=asked, model=model_of("hybrid"), role="draft")
    return built_from(plan, PLUGIN, load=load)


@pytest.mark.parametrize(("host", "stamp"), HOSTS)
@pytest.mark.parametrize("setting", ["draft_attention_backend", "attention_backend", "by auto"])
def test_hybrid_linear_attn_is_the_hosts_kernel_in_both_draft_phases(host: str, stamp: str, setting: str) -> None:
    """sglang #10403: asked for as the draft's, as the target's, or by nobody on a hybrid model."""
    requests = {} if setting == "by auto" else {setting: "hybrid_linear_attn"}
    stamps = stamps_of(draft_on(host, **requests))
    assert (stamps["draft_decode"], stamps["draft_extend"]) == ({stamp}, {stamp})


@pytest.mark.parametrize(("host", "stamp"), HOSTS)
@pytest.mark.parametrize("flag", ["prefill", "decode", "verify"])
def test_the_split_flags_lead_to_the_same_kernel(host: str, stamp: str, flag: str) -> None:
    """The relative: one phase asked for by its own flag on a target."""
    asked = Requests(speculative_algorithm="EAGLE", **{f"{flag}_attention_backend": "hybrid_linear_attn"})
    plan = plan_on(host, PLUGIN, requests=asked, model=model_of("hybrid"))
    assert stamps_of(built_from(plan, PLUGIN))[flag] == {stamp}


@pytest.mark.parametrize(("host", "stamp"), HOSTS)
def test_every_step_of_the_container_carries_its_stamp(host: str, stamp: str) -> None:
    """sglang #10366: the container and each child are stamped alike."""
    container = DraftBackendFactory(draft_on(host)).create_decode_backend()
    assert container is not None
    children = steps_of(container)
    assert len(children) == 3
    assert {read_stamp(child) for child in children} == {read_stamp(container)}
    assert read_stamp(container).kernel == stamp


def test_a_container_without_a_child_list_is_an_error() -> None:
    """Not a silent skip: a draft loop that hides its steps is refused when it is built."""

    class Hidden:
        def plan(self, batches: object) -> None:
            """A container's call, without the steps."""

    def load(row: Row, catalogue: Catalogue) -> Factory:
        def factory(request: BuildRequest) -> Built:
            hides = "draft_decode" in request.phases
            return Built(row.offer.kernel, Hidden() if hides else RecordingBackend(request))

        return factory

    with pytest.raises(ContainerWithoutChildren, match="attn_backends") as caught:
        draft_on("h100", load)
    assert "'fa3'" in caught.value.who


def test_a_wrapper_copies_the_stamp_of_what_it_wraps() -> None:
    """Until it does, it is unstamped; it never answers with a name of its own."""

    class Wrapper:
        def __init__(self, inner: object) -> None:
            self.inner = inner

    inner = draft_on("h100").serving_attention_backend("draft_extend")
    wrapper = Wrapper(inner)
    with pytest.raises(Unstamped):
        read_stamp(wrapper)
    copy_stamp(wrapper, inner)
    assert read_stamp(wrapper) == read_stamp(inner)
    assert read_stamp(wrapper).kernel == "fa3"
