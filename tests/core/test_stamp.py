"""Putting and reading stamps: containers of any depth, objects of two purposes, and objects that refuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from backstamp.catalogue import Catalogue, Row
from backstamp.construction import Factory, RunnerBackends
from backstamp.errors import BuiltMismatch, ContainerWithoutChildren, Unstamped
from backstamp.factories import BuildRequest, Built
from backstamp.launch import Requests
from backstamp.stamp import copy_stamp, parts_of, read_stamp, verify_consumed
from backstamp.testing.fakes import RecordingBackend, fake_plugin
from tests.building import built_from, plan_on
from tests.resolving import kernel

PLUGIN = fake_plugin("p", [kernel("one"), kernel("two")])
ASKED = Requests(attention_backend="one", draft_attention_backend="one", speculative_num_steps=3)


class Box:
    """A container of whatever it is given."""

    def __init__(self, steps: object) -> None:
        self.attn_backends = steps


def answering(answer: Callable[[BuildRequest], object]) -> Callable[[Row, Catalogue], Factory]:
    """A loader whose every factory answers the row's kernel with what `answer` makes of the request."""
    return lambda row, catalogue: lambda request: Built(row.offer.kernel, answer(request))


def built(answer: Callable[[BuildRequest], object], role: str = "target", asked: Requests = ASKED) -> RunnerBackends:
    """The kernels of one runner, with objects that `answer` makes."""
    return built_from(plan_on("h100", PLUGIN, requests=asked, role=role), PLUGIN, load=answering(answer))


CHILDREN: dict[str, Callable[[], object]] = {
    "empty": list,
    "none": lambda: None,
    "number": lambda: 5,
    "generator": lambda: (item for item in [RecordingBackend(None)]),  # type: ignore[arg-type]
    "word": lambda: "ab",
    "mapping": lambda: {0: RecordingBackend(None)},  # type: ignore[arg-type]
}


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("children", CHILDREN)
def test_steps_that_are_no_list_are_refused(children: str, role: str) -> None:
    """A container that shows no steps cannot be stamped all through, whichever runner it serves."""
    with pytest.raises(ContainerWithoutChildren, match="a list of at least one, got") as caught:
        built(lambda request: Box(CHILDREN[children]()), role)
    assert caught.value.who.endswith("Box")


def test_a_module_list_is_a_list_of_steps() -> None:
    """torch's ModuleList counts and indexes as a list does, without being one."""

    class Listed:
        def __init__(self, *items: object) -> None:
            self.items = items

        def __len__(self) -> int:
            return len(self.items)

        def __getitem__(self, at: int) -> object:
            return self.items[at]

        def __iter__(self) -> object:
            return iter(self.items)

    container = built(lambda request: Box(Listed(RecordingBackend(request)))).serving_attention_backend("decode")
    assert {read_stamp(part).kernel for part in parts_of(container)} == {"one"}


def test_steps_of_steps_are_stamped_and_held_against_the_plan() -> None:
    """A step may be a container itself, and one of its own may be swapped after start."""
    backends = built(lambda request: Box([Box([RecordingBackend(request)]), RecordingBackend(request)]))
    outer = backends.serving_attention_backend("decode")
    inner = outer.attn_backends[0].attn_backends
    assert read_stamp(inner[0]).kernel == "one"
    inner[0] = RecordingBackend(inner[0].request)
    with pytest.raises(Unstamped):
        verify_consumed(backends)
    inner.clear()
    with pytest.raises(ContainerWithoutChildren):
        verify_consumed(backends)


def test_a_container_of_itself_ends() -> None:
    """Each part is looked at once."""

    def answer(request: BuildRequest) -> Box:
        box = Box([RecordingBackend(request)])
        box.attn_backends.append(box)  # type: ignore[attr-defined]
        return box

    assert len(parts_of(built(answer).serving_attention_backend("decode"))) == 2


def test_one_object_for_target_and_draft_is_refused() -> None:
    """Its stamp would say one of them; the error names both."""
    shared = RecordingBackend(None)  # type: ignore[arg-type]
    target = built(lambda request: shared)
    assert read_stamp(target.serving_attention_backend("decode")).role == "target"
    with pytest.raises(BuiltMismatch, match=r"one of fake-p 1\.0 \(draft\) for .*got RecordingBackend, .*\(target\)"):
        built(lambda request: shared, "draft")
    assert read_stamp(shared).role == "target"


def test_one_object_for_two_kernels_is_refused() -> None:
    """The half that was stamped first would read as the other's kernel."""
    shared = RecordingBackend(None)  # type: ignore[arg-type]
    asked = Requests(prefill_attention_backend="one", decode_attention_backend="two")
    with pytest.raises(BuiltMismatch, match=r"needs an object of its own for two .* stamped as one .* for prefill"):
        built(lambda request: shared, asked=asked)


def test_an_equal_stamp_may_be_put_again() -> None:
    """Building the same plan twice from a factory that keeps its objects is no contradiction."""
    shared = RecordingBackend(None)  # type: ignore[arg-type]
    assert built(lambda request: shared).objects == built(lambda request: shared).objects


def test_a_wrapper_keeps_the_stamp_it_has() -> None:
    """A wrapper that is handed another backend would go on under the first one's name, or lie about itself."""
    asked = Requests(prefill_attention_backend="one", decode_attention_backend="two")
    backends = built(RecordingBackend, asked=asked)
    wrapper = RecordingBackend(None)  # type: ignore[arg-type]
    copy_stamp(wrapper, backends.serving_attention_backend("prefill"))
    with pytest.raises(BuiltMismatch, match="stamped as one"):
        copy_stamp(wrapper, backends.serving_attention_backend("decode"))


def test_an_object_that_raises_when_it_is_stamped_is_refused() -> None:
    """Its own error is told, and chained."""

    class Guarded:
        def __setattr__(self, name: str, value: object) -> None:
            raise RuntimeError("frozen here")

    with pytest.raises(BuiltMismatch, match=r"takes no attributes \(RuntimeError: frozen here\)") as caught:
        built(lambda request: Guarded())
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_an_object_that_raises_when_it_is_read_is_refused() -> None:
    """Only AttributeError says that an attribute is not there."""

    class Guarded:
        def __getattr__(self, name: str) -> object:
            raise RuntimeError(f"no {name}")

    with pytest.raises(
        BuiltMismatch, match="attributes can be read, got one that raised RuntimeError: no attn_backends"
    ):
        built(lambda request: Guarded())


def test_an_object_that_hides_its_state_is_unstamped() -> None:
    """Whatever it raises when it is asked for its stamp."""

    class Hidden:
        def __getattribute__(self, name: str) -> object:
            if name == "attn_backends":
                raise AttributeError(name)
            raise RuntimeError(name)

    with pytest.raises(Unstamped):
        built(lambda request: Hidden())
    with pytest.raises(Unstamped):
        read_stamp(Hidden())
