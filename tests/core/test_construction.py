"""Building and stamping: what a stamp says, where it is put, and what construction refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from backstamp.catalogue import Catalogue, Row
from backstamp.construction import Factory, RunnerBackends, RunnerShape, build
from backstamp.declarations import Alias, Offer
from backstamp.draft import DraftBackendFactory, DraftSteps
from backstamp.engine import EngineFacts
from backstamp.errors import (
    BadInput,
    BuiltMismatch,
    ContainerWithoutChildren,
    FactoryFailed,
    FactoryImportFailed,
    Unstamped,
)
from backstamp.factories import BuildRequest, Built
from backstamp.launch import Requests, make_launch
from backstamp.model import default_model, group_layers
from backstamp.plan import Plan
from backstamp.resolution import resolve
from backstamp.stamp import copy_stamp, read_stamp, verify_consumed
from backstamp.testing.dists import cpu_offer
from backstamp.testing.fakes import RecordingBackend, catalogue_of, fake_plugin, recording_factory
from backstamp.testing.hosts import described_host

OFFER = cpu_offer("one", "fake")
ALIAS = Alias(key="pair", kernels=("one",))


def planned(
    *offers: Offer,
    requests: Requests | None = None,
    role: str = "target",
    aliases: tuple[Alias, ...] = (),
    softcap: float = 0.0,
) -> tuple[Plan, Catalogue]:
    """A plan on a CPU host with one in-memory plugin."""
    layers = tuple((replace(facts, softcap=softcap),) for (facts,) in default_model().layers)
    model = replace(default_model(), layers=layers, groups=group_layers(layers))
    catalogue = catalogue_of(fake_plugin("p", offers or (OFFER,), aliases))
    launch = make_launch(requests or Requests(), role=role)
    return resolve(launch, EngineFacts(), model, described_host("epyc"), catalogue, role=role), catalogue


def built(
    *offers: Offer,
    requests: Requests | None = None,
    role: str = "target",
    aliases: tuple[Alias, ...] = (),
    load: Callable[[Row, Catalogue], Factory] = recording_factory,
) -> RunnerBackends:
    """The same, built with recording fakes."""
    plan, catalogue = planned(*offers, requests=requests, role=role, aliases=aliases)
    return build(plan, RunnerShape(), catalogue, load=load)


def answering(answer: Callable[[BuildRequest], object]) -> Callable[[Row, Catalogue], Factory]:
    """A loader whose every factory answers what `answer` makes of the request."""
    return lambda row, catalogue: answer  # type: ignore[return-value]


def test_a_stamp_names_what_was_built() -> None:
    """Kernel, plugin, library, phases and who decided, read from the object."""
    offer = replace(OFFER, requires=("lib>=1",))
    stamp = read_stamp(built(offer).serving_attention_backend("decode"))
    assert stamp.kernel == "one"
    assert stamp.plugin == ("p", "fake-p", "1.0")
    assert stamp.library == ("lib", None)
    assert stamp.sources == (("prefill", "auto"), ("decode", "auto"))
    assert stamp.origin.endswith("fakes.py")
    assert stamp.as_json("decode")["phase"] == "decode"


def test_a_kernel_named_by_two_phases_is_built_once() -> None:
    """sglang #32317: one object serves every phase its kernel was chosen for."""
    backends = built(requests=Requests(speculative_algorithm="EAGLE"))
    objects = {id(backends.serving_attention_backend(phase)) for phase in ("prefill", "decode", "verify")}
    assert len(objects) == 1


def test_the_stamp_says_the_kernel_not_the_alias() -> None:
    """sglang #34264: what was typed never becomes the stamp."""
    backends = built(aliases=(ALIAS,), requests=Requests(attention_backend="pair"))
    assert read_stamp(backends.serving_attention_backend("prefill")).kernel == "one"


def test_a_factory_that_answers_an_alias_is_refused() -> None:
    """An alias stamp crashed the first draft-extend forward: no leaf may answer one."""
    load = answering(lambda request: Built("pair", RecordingBackend(request)))
    with pytest.raises(BuiltMismatch, match="alias and never a stamp"):
        built(aliases=(ALIAS,), load=load)


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        pytest.param(lambda request: Built("two", RecordingBackend(request)), "another kernel", id="other-kernel"),
        pytest.param(lambda request: Built("zzz", RecordingBackend(request)), "nobody declared", id="undeclared"),
        pytest.param(lambda request: RecordingBackend(request), "Built", id="no-name"),
        pytest.param(lambda request: None, "Built", id="nothing"),
    ],
)
def test_a_factory_that_answers_another_name_is_refused(answer: Callable[[BuildRequest], object], word: str) -> None:
    """The name comes from the constructor and must be the plan's."""
    with pytest.raises(BuiltMismatch, match=word):
        built(OFFER, replace(OFFER, kernel="two", priority=1), load=answering(answer))


def test_no_backend_is_never_stamped() -> None:
    """A factory may answer no backend; the planned phase is then reported as not built."""
    with pytest.raises(BuiltMismatch, match="none was built"):
        built(load=answering(lambda request: Built("one", None)))


def test_every_step_of_a_draft_loop_is_stamped() -> None:
    """DraftSteps loops any decode backend: num_steps - 1 children, each stamped like the container."""
    backends = built(role="draft", requests=Requests(speculative_num_steps=4))
    container = DraftBackendFactory(backends).create_decode_backend()
    assert isinstance(container, DraftSteps)
    assert len(container.attn_backends) == 3
    assert len({id(step) for step in container.attn_backends}) == 3
    assert {read_stamp(step) for step in container.attn_backends} == {read_stamp(container)}
    assert read_stamp(DraftBackendFactory(backends).create_draft_extend_backend()).phases == ("prefill", "draft_extend")


def test_an_unstamped_step_is_found() -> None:
    """A backend swapped in after start carries no stamp, and the check says where."""
    backends = built(role="draft", requests=Requests(speculative_num_steps=4))
    container = backends.serving_attention_backend("draft_decode")
    container.attn_backends[1] = RecordingBackend(container.attn_backends[0].request)
    with pytest.raises(Unstamped):
        verify_consumed(backends)


def test_a_container_without_children_is_refused() -> None:
    """A draft loop that hides its steps is an error, not a silent skip."""

    class Hidden:
        def plan(self, batches: object) -> None:
            """A container's call, without the steps."""

    load = answering(
        lambda request: Built("one", Hidden() if "draft_decode" in request.phases else RecordingBackend(request))
    )
    with pytest.raises(ContainerWithoutChildren, match="attn_backends"):
        built(role="draft", load=load)


def test_a_plugins_own_container_is_kept_and_its_steps_counted() -> None:
    """A plugin may bring a container; it must hold exactly num_steps - 1 steps."""

    def load(count: int) -> Callable[[Row, Catalogue], Factory]:
        def answer(request: BuildRequest) -> Built:
            leaf = RecordingBackend(request)
            steps = DraftSteps([RecordingBackend(request) for _ in range(count)])  # type: ignore[list-item]
            return Built("one", steps if request.phases == ("draft_decode",) else leaf)

        return answering(answer)

    asked = Requests(speculative_num_steps=3)
    assert (
        len(built(role="draft", requests=asked, load=load(2)).serving_attention_backend("draft_decode").attn_backends)
        == 2
    )
    with pytest.raises(BuiltMismatch, match="needs 2 steps, got 3"):
        built(role="draft", requests=asked, load=load(3))


def test_a_draft_answers_with_its_own_pair() -> None:
    """Mission section 1: a runner answers with what it built, a draft with its draft-decode kernel."""
    asked = Requests(decode_attention_backend="two", draft_attention_backend="one")
    offers = (OFFER, replace(OFFER, kernel="two"))
    assert built(*offers, requests=asked, role="draft").attention_backends() == ("one", "one")
    assert built(*offers, requests=asked).attention_backends() == ("one", "two")


def test_a_single_step_draft_has_no_container() -> None:
    """speculative_num_steps <= 1 returns None."""
    backends = built(role="draft", requests=Requests(speculative_num_steps=1))
    assert DraftBackendFactory(backends).create_decode_backend() is None


def test_a_target_has_no_draft_backends() -> None:
    """Its prefill half serves a draft-extend, and is not handed out for a draft's."""
    with pytest.raises(BadInput, match="needs the backends of a draft, got those of the target"):
        DraftBackendFactory(built())


def test_a_wrapper_carries_the_stamp_of_what_it_wraps() -> None:
    """copy_stamp is the only door; without it the wrapper is unstamped."""

    class Wrapper:
        def __init__(self, inner: object) -> None:
            self.inner = inner

    inner = built().serving_attention_backend("decode")
    wrapper = Wrapper(inner)
    with pytest.raises(Unstamped, match="copy_stamp"):
        read_stamp(wrapper)
    copy_stamp(wrapper, inner)
    assert read_stamp(wrapper) == read_stamp(inner)


def test_an_object_that_takes_no_attributes_is_refused() -> None:
    """A stamp that cannot be put is an error with its remedy."""

    class Slotted:
        __slots__ = ()

        def forward(self) -> None:
            """A leaf."""

    with pytest.raises(BuiltMismatch, match="__slots__"):
        built(load=answering(lambda request: Built("one", Slotted())))


def test_forward_is_the_plugins_own_function() -> None:
    """After building, the registry costs nothing on the token path: no wrapper, no proxy."""
    made: list[RecordingBackend] = []

    def answer(request: BuildRequest) -> Built:
        made.append(RecordingBackend(request))
        return Built("one", made[-1])

    backend = built(load=answering(answer)).serving_attention_backend("decode")
    assert backend is made[0]
    assert type(backend) is RecordingBackend
    assert backend.forward.__func__ is RecordingBackend.forward
    assert backend.plan.__func__ is RecordingBackend.plan


def test_a_build_time_feature_must_be_reported_back() -> None:
    """sglang #33915: a softcap that was dropped at compile time is an error, not an uncapped model."""
    from backstamp.attention import LayerSpec

    offer = replace(OFFER, features=frozenset({"softcap"}), build_settings=frozenset({"softcap"}))
    plan, catalogue = planned(offer, softcap=50.0)
    layer = LayerSpec(
        layer_id=0, num_qo_heads=32, num_kv_heads=8, head_dim=128, v_head_dim=128, scale=0.1, softcap=50.0
    )
    runner = RunnerShape(layers=(layer,))
    build(plan, runner, catalogue, load=recording_factory)
    forgetful = answering(lambda request: Built("one", RecordingBackend(request)))
    with pytest.raises(BuiltMismatch, match=r"needs softcap 50.0 compiled in, got softcap not reported"):
        build(plan, runner, catalogue, load=forgetful)


def test_a_factory_that_does_not_import_names_its_cause() -> None:
    """A factory path that leads nowhere is refused with the cause chained."""
    plan, catalogue = planned(replace(OFFER, factory="fake.backend:build"))
    with pytest.raises(FactoryImportFailed, match=r"fake\.backend:build") as caught:
        build(plan, RunnerShape(), catalogue)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


@pytest.mark.parametrize("raised", [KeyError("kk"), SystemExit(4)], ids=["error", "exit"])
def test_a_factory_that_raises_names_its_plugin(raised: BaseException) -> None:
    """What a factory raises never escapes bare: the plugin is named, the cause chained, the process lives."""

    def answer(request: BuildRequest) -> Built:
        raise raised

    with pytest.raises(FactoryFailed, match="plugin p") as caught:
        built(load=answering(answer))
    assert caught.value.__cause__ is raised


def test_a_plan_of_other_plugins_is_refused() -> None:
    """A plan is used as is or refused: a catalogue with another version of the plugin cannot build it."""
    plan, _ = planned()
    other = catalogue_of(fake_plugin("p", (OFFER,), version="2.0"))
    with pytest.raises(BuiltMismatch, match="another set of plugins"):
        build(plan, RunnerShape(), other, load=recording_factory)


@pytest.mark.parametrize(
    ("mode", "phase"),
    [
        ("extend", "prefill"),
        ("mixed", "prefill"),
        ("decode", "decode"),
        ("idle", "decode"),
        ("target_verify", "verify"),
        ("draft_extend", "prefill"),
    ],
)
def test_forward_modes_map_onto_phases(mode: str, phase: str) -> None:
    """Mission section 1: extend and mixed run prefill, decode and idle run decode, verify is its own."""
    offers = (
        replace(OFFER, kernel="pre", phases=frozenset({"prefill"})),
        replace(OFFER, kernel="dec", phases=frozenset({"decode"})),
        replace(OFFER, kernel="ver", phases=frozenset({"verify"})),
    )
    asked = Requests(speculative_algorithm="EAGLE", verify_attention_backend="ver")
    backends = built(*offers, requests=asked)
    assert phase in read_stamp(backends.serving_attention_backend(mode)).phases
    assert backends.attention_backends() == ("pre", "dec")


def test_a_phase_this_runner_never_runs_has_no_backend() -> None:
    """Asking for it, or for an unknown mode, is an error that names what runs."""
    with pytest.raises(BadInput, match="prefill, decode"):
        built().serving_attention_backend("draft_decode")
    with pytest.raises(BadInput, match="target_verify"):
        built().serving_attention_backend("nonsense")
