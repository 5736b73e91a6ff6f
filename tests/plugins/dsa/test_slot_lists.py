"""Lists of slots are made once a step, searched for by one code, and never shared by two lists of one layer."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from backstamp_dsa import steps
from backstamp_dsa.backend import build_dsv4
from backstamp_dsa.plugin import DSV4_CUDA
from backstamp_dsa.slots import find_slots
from backstamp_dsa.steps import SparseStep, kept_of
from tests.compiled_code import apart, constants_of, shifted
from tests.plugins.dsa.cases import latent_step
from tests.plugins.dsa.flash_mla import SPARSE, install
from tests.plugins.dsa.launched import ROWS, Call, counts, stand_in
from tests.plugins.dsa.test_dsv4 import drawn, plain_object

LISTS = ("slots_ptr", "ends_ptr", "seen_ptr")


@pytest.fixture
def kernels(monkeypatch):
    """Every kernel of a layer, as on an H100."""
    return stand_in(monkeypatch)


@pytest.fixture
def library(monkeypatch):
    """sgl-flash-mla, which here reads no slots: nothing has found any."""
    monkeypatch.delitem(sys.modules, "backstamp_dsa.csa_cuda", raising=False)
    made = install(monkeypatch)
    made.on(SPARSE, lambda q, **_: (torch.zeros_like(q), None, torch.zeros(q.shape[:2])))
    return made


def same(one, other):
    """Whether two launches write the same list."""
    return [one[name] is other[name] for name in LISTS]


#: A search of given choices, and what another one has otherwise.
GIVEN = {"width": 128, "entries_per_page": 16, "slots_per_page": 32, "rate": 4, "window": 0}
UNLIKE = {
    "tokens": lambda indices: {"indices": apart(indices)},
    "address": lambda indices: {"indices": shifted(indices)},
    "width": lambda _: {"width": 256},
    "entries a page": lambda _: {"entries_per_page": 1},
    "slots a page": lambda _: {"slots_per_page": 1},
    "rate": lambda _: {"rate": 1},
}


@pytest.mark.parametrize("unlike", UNLIKE)
def test_a_search_is_cut_to_what_it_searches(unlike, kernels):
    """Where choices lie and what they count."""
    step, indices = SparseStep(latent_step(ROWS).batch, "page_table"), torch.zeros(2, 100, dtype=torch.int32)
    find_slots(step, **GIVEN, indices=indices)
    find_slots(step, **GIVEN | {"indices": indices} | UNLIKE[unlike](indices))
    assert counts(kernels["slots"]) == (2, 0)


def test_each_source_of_choices_has_its_own_code(kernels):
    """One choice for all tokens has no stride, as an absent one: what is searched for tells them apart."""
    step, one = SparseStep(latent_step(ROWS).batch, "page_table"), torch.zeros(1, 100, dtype=torch.int32)
    find_slots(step, **GIVEN, indices=one.expand(2, 100))
    find_slots(step, **GIVEN | {"window": 100}, indices=None)
    find_slots(step, **GIVEN, indices=None)
    assert [search["SOURCE"] for search in kernels["slots"].first] == ["given", "window", "all"]


def test_a_search_is_not_cut_to_sizes_that_change_with_every_step(kernels):
    """Other choices, more of them at the same stride, and windows of other lengths."""
    step, wide = SparseStep(latent_step(ROWS).batch, "page_table"), torch.zeros(2, 120, dtype=torch.int32)
    find_slots(step, **GIVEN, indices=wide[:, :100])
    find_slots(step, **GIVEN, indices=wide)
    assert kernels["slots"].again[0]["topk"] == 120
    for window in (100, 1):
        find_slots(step, **GIVEN | {"window": window}, indices=None)
    assert counts(kernels["slots"]) == (2, 2)
    assert kernels["slots"].again[1]["window"] == 1


def test_a_list_of_another_width_is_another(kernels):
    """It has room for every choice."""
    call = Call("tile")
    call.run()
    call.indices = call.choices[:, :512]
    call.run()
    assert [attend["slots_ptr"].shape for attend in kernels["tile"].first] == [(2, 1024), (2, 512)]


@pytest.mark.parametrize("rate", ["chosen", "all"])
def test_a_compressed_layer_has_two_lists_and_the_next_one_the_same(rate, kernels, library):
    """Window and compressed entries, both 128 wide, are found by the first layer's code, and merged by it."""
    rows = ((1, 500), (1, 40))
    step, indices = drawn(rows, 4, topk=20 if rate == "chosen" else None, sinks=True, phase="decode")
    backend = plain_object(DSV4_CUDA, build_dsv4, step)
    state = backend.plan(step.batch)
    second = replace(step.layer, layer_id=4, sinks=step.layer.sinks.clone())
    chosen = None if indices is None else indices.clone()
    backend.forward(step.q, step.kv, step.layer, state, indices=indices)
    out = backend.forward(step.q, step.kv, second, state, indices=chosen)
    search, merge = kernels["slots"], kernels["merge"]
    (near, far), (near_again, far_again) = search.first, search.again
    source = "given" if rate == "chosen" else "all"
    assert [(at["SOURCE"], at["rate"], at["entries_per_page"]) for at in search.first] == [
        ("window", 1, 128),
        (source, 4, 32),
    ]
    assert [constants_of(at) for at in search.again] == [constants_of(at) for at in search.first]
    assert near["slots_ptr"].shape == far["slots_ptr"].shape == (2, 128)
    assert same(near, far) == [False] * 3
    assert same(near, near_again) == same(far, far_again) == [True] * 3
    assert far_again["indices_ptr"] is chosen
    # what each call of the library reads: the window's list, then the other
    handed = [call["indices"].data_ptr() for call in library.called(SPARSE)]
    assert handed == [near["slots_ptr"].data_ptr(), far["slots_ptr"].data_ptr()] * 2
    assert counts(merge) == (1, 1)
    assert merge.again[0]["out_ptr"] is out
    assert merge.again[0]["sinks_ptr"] is second.sinks


@pytest.mark.parametrize("unlike", ["rate", "no sinks"])
def test_an_unlike_compressed_layer_has_its_own_code(unlike, kernels, library):
    """A layer of another rate has another search, one without sinks another merge; the rest is the first one's."""
    step, _ = drawn(ROWS, 4, sinks=True, phase="decode")
    other, _ = drawn(ROWS, 2 if unlike == "rate" else 4, sinks=unlike == "rate", phase="decode")
    backend = plain_object(DSV4_CUDA, build_dsv4, step)
    state = backend.plan(step.batch)
    backend.forward(step.q, step.kv, step.layer, state)
    backend.forward(step.q, other.kv, replace(other.layer, layer_id=4), state)
    assert counts(kernels["slots"]) == ((3, 1) if unlike == "rate" else (2, 2))
    assert counts(kernels["merge"]) == ((1, 1) if unlike == "rate" else (2, 0))


def test_no_list_made_while_a_graph_is_recorded_is_kept(kernels, monkeypatch):
    """It is the graph's own memory; one made before is good inside and after."""
    call, kept = Call("tile"), []
    for recorded in (True, True, False, True):
        monkeypatch.setattr(steps, "recording", lambda recorded=recorded: recorded)
        call.run()
        kept.append(len(call.state.slots))
    assert kept == [0, 0, 1, 1]
    one, two, eager, warmed = kernels["slots"].first + kernels["slots"].again
    assert same(one, two) == same(one, eager) == same(two, eager) == [False] * 3
    assert same(eager, warmed) == [True] * 3


@pytest.mark.parametrize("kernel", ["dsa", "dsv4"])
def test_a_step_planned_again_keeps_its_lists_and_its_code(kernel, kernels, library):
    """A graph that recorded the first plan's launches reads their memory at each replay."""
    if kernel == "dsa":
        call = Call("tile")
        run, plan, batch, state = call.run, call.backend.plan, call.step.batch, call.state
    else:
        step, indices = drawn(ROWS, 4, topk=20, phase="decode")
        backend = plain_object(DSV4_CUDA, build_dsv4, step)
        plan, batch, state = backend.plan, step.batch, backend.plan(step.batch)

        def run():
            backend.forward(step.q, step.kv, step.layer, state, indices=indices)

    run()
    search = kernels["slots"]
    first, codes = list(search.first), dict(state.codes)
    assert plan(replace(batch, kv_lens=batch.kv_lens - 3), state=state) is state
    run()
    assert state.codes == codes
    assert counts(search) == (len(first), len(first))
    assert all(same(one, again) == [True] * 3 for one, again in zip(first, search.again, strict=True))


def test_what_a_step_keeps_is_made_once_outside_a_graph(monkeypatch):
    """Each key has its own; one made while a graph is recorded is handed to its maker alone."""
    kept, made = {}, iter("abcdef")

    def ask(key, *, recorded):
        monkeypatch.setattr(steps, "recording", lambda: recorded)
        return kept_of(kept, key, lambda: next(made))

    assert [ask("one", recorded=True), ask("one", recorded=True)] == ["a", "b"]
    assert kept == {}
    assert [ask("one", recorded=False), ask("two", recorded=False)] == ["c", "d"]
    assert [ask("one", recorded=False), ask("one", recorded=True), ask("two", recorded=False)] == ["c", "c", "d"]
    assert kept == {"one": "c", "two": "d"}
