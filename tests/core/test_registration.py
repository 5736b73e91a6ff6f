"""Plugins registered by hand: checked like installed ones, told to children by name, and forgotten on request."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator
from dataclasses import replace

import pluggy
import pytest

import backstamp
from backstamp.catalogue import build_catalogue
from backstamp.construction import RunnerShape, build
from backstamp.declarations import Alias, Offer
from backstamp.discovery import discover, unmatched
from backstamp.doctor import examine
from backstamp.errors import AlreadyRegistered, DeclarationError, UnknownKey
from backstamp.factories import BuildRequest, Built
from backstamp.hookspecs import hookimpl
from backstamp.registration import IN_PROCESS, VARIABLE, register, registered, registered_elsewhere, unregister
from backstamp.stamp import read_stamp
from backstamp.testing.dists import cpu_offer
from backstamp.testing.fakes import RecordingBackend
from backstamp.testing.hosts import described_host
from tests.sites import ask

HERE = __name__


class Mine:
    """An object with hookimpls: one kernel, one alias, a factory in this module."""

    def __init__(self, kernel: str = "mine", key: str = "my_key") -> None:
        self.kernel, self.key = kernel, key

    @hookimpl
    def backstamp_offers(self) -> tuple[Offer, ...]:
        """One kernel."""
        return (replace(cpu_offer(self.kernel, "x"), factory=f"{HERE}:build_mine"),)

    @hookimpl
    def backstamp_aliases(self) -> tuple[Alias, ...]:
        """One key."""
        return (Alias(key=self.key, kernels=(self.kernel,)),)


def build_mine(request: BuildRequest) -> Built:
    """The factory of `Mine`."""
    return Built(request.kernel, RecordingBackend(request), request.settings)


@pytest.fixture(autouse=True)
def _nothing_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setitem(sys.modules, HERE, sys.modules.get(HERE) or types.ModuleType(HERE))
    vars(sys.modules[HERE])["build_mine"] = build_mine
    yield
    for item in registered():
        unregister(item.name)


def test_a_registered_plugin_is_found_resolved_and_built() -> None:
    """It is one of the catalogue, of a distribution that no index can hold."""
    register("mine", Mine())
    catalogue = build_catalogue(discover())
    (found,) = [item for item in catalogue.found if item.plugin.name == "mine"]
    assert (found.plugin.distribution, found.origin) == (IN_PROCESS, "this process")
    assert found.module == f"{HERE}:Mine"
    plan = ask(catalogue, "my_key")
    stamp = read_stamp(build(plan, RunnerShape(), catalogue).objects["decode", 0])
    assert (stamp.kernel, stamp.plugin.distribution) == ("mine", IN_PROCESS)


def test_a_module_is_registered_like_an_object() -> None:
    """Its hookimpls are functions."""
    module = types.ModuleType("made_by_hand")
    hook = hookimpl(lambda: (cpu_offer("made", "made_by_hand"),))
    vars(module)["backstamp_offers"] = hook
    register("made", module)
    (found,) = [item for item in discover([]).found if item.plugin.name == "made"]
    assert found.module == "made_by_hand"
    assert {"made_by_hand", "__main__"} <= found.packages


def test_a_name_taken_is_an_error_that_names_both() -> None:
    """And the first stays."""
    register("mine", Mine())
    with pytest.raises(AlreadyRegistered) as caught:
        register("mine", types.ModuleType("second"))
    assert f"{HERE}:Mine" in caught.value.found
    assert "second" in caught.value.found
    assert [item.module for item in registered()] == [f"{HERE}:Mine"]


def test_unregistering_forgets_and_an_unknown_name_is_an_error() -> None:
    """A discovery made before keeps what it holds."""
    register("mine", Mine())
    before = discover([])
    unregister("mine")
    assert [item.plugin.name for item in before.found] == ["mine"]
    assert discover([]).found == ()
    with pytest.raises(UnknownKey, match="nothing is registered"):
        unregister("mine")


def test_pluggy_and_soundness_judge_it_like_any_other() -> None:
    """Nothing faulty is registered, and nothing of it is exported."""

    class NoHooks:
        pass

    class UnknownHook:
        @hookimpl
        def backstamp_kernels(self) -> tuple[()]:
            return ()

    class Foreign(Mine):
        @hookimpl
        def backstamp_offers(self) -> tuple[Offer, ...]:
            return (replace(cpu_offer("mine", "x"), mask_format=None),)

    for plugin, error in ((NoHooks(), AttributeError), (UnknownHook(), pluggy.PluginValidationError)):
        with pytest.raises(error):
            register("bad", plugin)
    with pytest.raises(DeclarationError, match="mask_format is empty"):
        register("bad", Foreign())
    with pytest.raises(DeclarationError, match="a name of letters"):
        register("bad,name", Mine())
    assert registered() == ()
    assert VARIABLE not in os.environ


def test_kernels_and_keys_are_exported_and_taken_back() -> None:
    """Names only, in order; what another plugin registered stays."""
    register("mine", Mine())
    register("other", Mine("other_kernel", "other_key"))
    assert os.environ[VARIABLE] == "mine,my_key,other_kernel,other_key"
    unregister("mine")
    assert os.environ[VARIABLE] == "other_kernel,other_key"
    unregister("other")
    assert VARIABLE not in os.environ


def test_names_of_a_parent_are_known_and_stay_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grandchild hears of them too, and whoever registers one knows it for his own."""
    monkeypatch.setenv(VARIABLE, "parents,mine")
    assert discover([]).parent_only == {"parents", "mine"}
    register("mine", Mine())
    assert registered_elsewhere() == {"parents"}
    assert os.environ[VARIABLE] == "mine,my_key,parents"
    unregister("mine")
    assert os.environ[VARIABLE] == "mine,parents"


def test_an_environment_that_others_wrote_is_read_as_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control characters, empty names and markup do no harm."""
    monkeypatch.setenv(VARIABLE, ",a%0Ab,%1b[31mred,, ,::error::x")
    assert registered_elsewhere() == {"a b", "[31mred", ": :error: :x"}


def test_a_conflict_with_an_installed_plugin_names_both() -> None:
    """In process or installed, one name has one owner."""
    register("left", Mine("same", "left_key"))
    register("right", Mine("same", "right_key"))
    catalogue = build_catalogue(discover([]))
    assert ("attention", "same") in catalogue.rows
    assert unmatched(catalogue, [IN_PROCESS]) == ()


def test_doctor_says_that_workers_will_not_find_it() -> None:
    """It imports nothing in a child, where there is nothing to import."""
    register("mine", Mine())
    findings = examine(build_catalogue(discover([])), described_host("epyc"))
    (finding,) = [item for item in findings if "mine" in item.subject]
    assert finding.level == "note"
    assert "in this process alone" in finding.text


def test_the_public_names_are_the_packages_own() -> None:
    """`backstamp.register` is where an engine looks."""
    assert backstamp.register is register
    assert backstamp.unregister is unregister
