"""What changed between two locks is named by host, model and phase, with the plugin version that changed it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from backstamp import __version__
from backstamp.declarations import Offer, PageSizes
from backstamp.drift import Drift, check_lock
from backstamp.engine import EngineFacts
from backstamp.launch import Requests, make_launch
from backstamp.lock import Lock, LockedRefusal, LockEntry, LockLaunch, make_lock
from backstamp.model import ModelFacts, default_model, model_from_config
from backstamp.plan import Plan
from backstamp.plan_rows import PluginRef, Timing, Warn
from backstamp.resolution import resolve
from backstamp.testing.fakes import catalogue_of, fake_plugin
from backstamp.testing.hosts import described_host
from tests.models import config
from tests.resolving import kernel

LIBRARIES = {"triton": "3.4.0"}
FLASH = kernel("flashinfer", priority=60)
TRITON = kernel("triton", priority=50, requires=("triton>=3.2",))


def plan_with(
    flash: Sequence[Offer] = (FLASH,),
    triton: Sequence[Offer] = (TRITON,),
    *,
    versions: tuple[str, str] = ("1.0", "1.0"),
    libraries: dict[str, str] | None = None,
    model: ModelFacts | None = None,
    engine: EngineFacts | None = None,
) -> Plan:
    """A plan of two plugins, each with its version."""
    plugins = [
        fake_plugin(name, offers, distribution=f"backstamp-{name}", version=version)
        for name, offers, version in zip(("flash", "triton"), (flash, triton), versions, strict=True)
    ]
    host = described_host("h100", libraries=LIBRARIES if libraries is None else libraries)
    return resolve(
        make_launch(Requests()), engine or EngineFacts(), model or default_model(), host, catalogue_of(*plugins)
    )


def lock_of(plan: Plan, flash: str | None = "1.0", triton: str | None = "1.0") -> Lock:
    """A lock of one plan, made where these versions were installed."""
    found = [("flash", flash), ("triton", triton)]
    return make_lock([plan], plugins=[PluginRef(name, f"backstamp-{name}", at) for name, at in found if at is not None])


OLD = lock_of(plan_with())


def drifts_of(now: Lock, phase: str, old: Lock = OLD) -> list[Drift]:
    """What changed in one phase."""
    return [drift for drift in check_lock(old, now) if drift.phase == phase]


def test_nothing_changed_is_no_drift() -> None:
    """Verdicts are not what was locked: one more refused candidate changes nothing."""
    assert check_lock(OLD, OLD) == ()
    more = [FLASH, kernel("third", archs=("8.0",))]
    assert check_lock(OLD, lock_of(plan_with(more))) == ()


def test_another_kernel_names_the_plugin_version_that_changed_it() -> None:
    """flashinfer 1.1 no longer serves decode; triton's plugin is as it was."""
    now = lock_of(plan_with([replace(FLASH, phases=frozenset({"prefill"}))], versions=("1.1", "1.0")), flash="1.1")
    (drift,) = drifts_of(now, "decode")
    assert (drift.host, drift.model, drift.role) == ("h100", "llama", "target")
    assert (drift.field, drift.before, drift.after) == ("kernel", "flashinfer", "triton")
    assert drift.because == ("backstamp-flash 1.0 -> 1.1",)
    assert drift.reason.startswith("flashinfer needs ")
    (drift,) = drifts_of(now, "prefill")
    assert (drift.field, drift.before, drift.after) == ("plugin", "backstamp-flash 1.0", "backstamp-flash 1.1")
    assert drift.because == ("backstamp-flash 1.0 -> 1.1",)


def test_a_kernel_that_gained_says_what_had_refused_it() -> None:
    """triton 1.1 claims SM90, which 1.0 did not, and is preferred."""
    old = lock_of(plan_with(triton=[replace(TRITON, archs=("8.0",), priority=90)]))
    now = lock_of(plan_with(triton=[replace(TRITON, priority=90)], versions=("1.0", "1.1")), triton="1.1")
    (drift,) = drifts_of(now, "prefill", old)
    assert (drift.before, drift.after, drift.because) == ("flashinfer", "triton", ("backstamp-triton 1.0 -> 1.1",))
    assert drift.reason == "before: triton needs SM80 (8.0), got SM90 (9.0)"


def test_a_plugin_that_went_or_came_is_named() -> None:
    """Not every change is a new version of something."""
    gone = lock_of(plan_with(flash=[]), flash=None)
    (drift,) = drifts_of(gone, "decode")
    assert (drift.before, drift.after) == ("flashinfer", "triton")
    assert drift.because == ("backstamp-flash 1.0 went",)
    assert drift.reason == "flashinfer is declared by no installed plugin"
    (drift,) = drifts_of(OLD, "decode", gone)
    assert drift.because == ("backstamp-flash 1.0 came",)


def test_another_library_is_named_with_its_versions() -> None:
    """Same kernel, same plugin, another library below it."""
    old = lock_of(plan_with(flash=[]), flash=None)
    now = lock_of(plan_with(flash=[], libraries={"triton": "3.5.0"}), flash=None)
    (drift,) = drifts_of(now, "decode", old)
    assert (drift.field, drift.before, drift.after) == ("library", "triton 3.4.0", "triton 3.5.0")
    assert drift.because == ("library triton 3.4.0 -> 3.5.0",)


def test_page_size_layout_and_graph_are_changes_of_the_whole_plan() -> None:
    """Each with the version that changed it."""
    changed = replace(FLASH, page_sizes=PageSizes(preferred=64, multiple_of=64), layouts=("packed",), graph="uniform")
    engine = EngineFacts(layouts=frozenset({"rows", "packed"}), graph="uniform")
    old = lock_of(plan_with(engine=engine))
    now = lock_of(plan_with([changed], versions=("1.1", "1.0"), engine=engine), flash="1.1")
    whole = {drift.field: drift for drift in check_lock(old, now) if drift.phase == ""}
    assert (whole["page_size"].before, whole["page_size"].after) == ("16", "64")
    assert (whole["layouts.attention"].before, whole["layouts.attention"].after) == ("rows", "packed")
    assert whole["graph"].after == "uniform"
    assert {drift.because for drift in whole.values()} == {("backstamp-flash 1.0 -> 1.1",)}


def test_a_loss_that_came_and_one_that_went_are_told() -> None:
    """A graph that can no longer be captured."""
    engine = EngineFacts(graph="uniform")
    good = lock_of(plan_with([replace(FLASH, graph="uniform")], [], engine=engine), triton=None)
    bad = lock_of(plan_with([FLASH], [], versions=("1.1", "1.0"), engine=engine), flash="1.1", triton=None)
    losses = [drift for drift in check_lock(good, bad) if drift.field == "loss"]
    assert losses
    assert all(drift.before == "-" and "flashinfer" in drift.after for drift in losses)
    assert [drift.after for drift in check_lock(bad, good) if drift.field == "loss"] == ["-"] * len(losses)


def test_a_warning_that_came_and_one_that_went_are_told() -> None:
    """A plugin that fails since the upgrade."""
    entry = OLD.entries[0]
    warned = replace(OLD, entries=(entry._replace(plan=replace(entry.plan, warnings=(Warn("failed", "plugin x"),))),))
    (drift,) = check_lock(OLD, warned)
    assert (drift.field, drift.before, drift.after) == ("warning", "-", "failed: plugin x")
    assert [(drift.before, drift.after) for drift in check_lock(warned, OLD)] == [("failed: plugin x", "-")]


def test_a_time_that_was_measured_anew_is_no_drift() -> None:
    """A diff of two plans of a tuned machine tells what runs otherwise, not how fast it was."""
    plans = [replace(plan_with(), timings=(Timing("attention", "decode", "main", "a", at, "b", 9.0),)) for at in (1, 2)]
    assert check_lock(lock_of(plans[0]), lock_of(plans[1])) == ()


def test_a_combination_that_is_refused_now_says_why() -> None:
    """And one that was, and is not any more."""
    plan = OLD.entries[0].plan
    refusal = LockedRefusal("no_kernel", "decode: needs a kernel, got none")
    refused = make_lock([LockEntry("h100", "llama", "target", None, refusal)])
    now = replace(refused, plugins=(("backstamp-flash", "1.1"), ("backstamp-triton", "1.0")))
    (drift,) = check_lock(OLD, now)
    assert (drift.field, drift.before) == ("outcome", "resolved")
    assert drift.after == "refused (no_kernel): decode: needs a kernel, got none"
    assert drift.because == ("backstamp-flash 1.0 -> 1.1",)
    assert [item.after for item in check_lock(now, make_lock([plan]))] == ["resolved"]
    assert check_lock(now, now) == ()
    other = replace(now, entries=(now.entries[0]._replace(refusal=refusal._replace(message="another reason")),))
    assert [item.field for item in check_lock(now, other)] == ["outcome"]


def test_a_combination_only_one_lock_has_is_told() -> None:
    """One more host."""
    plan = OLD.entries[0].plan
    more = replace(make_lock([plan, replace(plan, host="h200")]), plugins=OLD.plugins)
    (drift,) = check_lock(OLD, more)
    assert (drift.host, drift.before, drift.after) == ("h200", "not in the lock", "resolved")


def test_layers_that_get_another_kernel_are_told() -> None:
    """The main kernel stays, the sliding layers' changes."""
    gemma = model_from_config(config("gemma4"))
    sliding = replace(FLASH, kernel="a256", head_dims=(256,), features=frozenset({"window", "softcap"}))
    full = replace(FLASH, kernel="b512", head_dims=(512,), features=frozenset({"softcap"}))
    other = replace(sliding, kernel="c256", priority=99)
    old = lock_of(plan_with([full, sliding], [], model=gemma), triton=None)
    now = lock_of(plan_with([full, sliding], [other], model=gemma), triton="1.0")
    (drift,) = drifts_of(now, "prefill", old)
    assert drift.field == "layers"
    assert "a256" in drift.before
    assert "c256" in drift.after
    assert drift.because == ("backstamp-triton 1.0 came",)


def test_the_linear_slot_is_compared_under_names_of_its_own() -> None:
    """A recurrent layer's kernel is a kernel."""
    hybrid = model_from_config(config("hybrid"))
    phases = frozenset({"prefill", "decode", "verify"})
    gdn = replace(TRITON, kernel="gdn", slot="linear", family="gdn", head_dims=("any",), phases=phases)
    wide = replace(FLASH, head_dims=("any",))
    old = lock_of(plan_with([wide], [gdn], model=hybrid))
    now = lock_of(
        plan_with([wide], [gdn, replace(gdn, kernel="new", priority=99)], versions=("1.0", "1.1"), model=hybrid),
        triton="1.1",
    )
    drifts = [drift for drift in check_lock(old, now) if drift.field == "kernel"]
    assert [drift.phase for drift in drifts] == ["linear decode", "linear prefill", "linear verify"]
    assert {drift.because for drift in drifts} == {("backstamp-triton 1.0 -> 1.1",)}


def test_a_change_no_plugin_made_is_the_cores() -> None:
    """Same plugins, another Backstamp; and where that is the same too, nothing is blamed."""
    plan = OLD.entries[0].plan
    other = replace(plan, page_size=32)
    now = replace(OLD, entries=(OLD.entries[0]._replace(plan=other),))
    assert [drift.because for drift in check_lock(OLD, now)] == [()]
    (drift,) = check_lock(OLD, replace(now, backstamp="9.9.9"))
    assert drift.because == (f"backstamp {__version__} -> 9.9.9",)


def test_a_change_none_of_the_plans_own_plugins_made_names_the_others() -> None:
    """An alias list of a third plugin, for example."""
    entry = OLD.entries[0]
    other = entry._replace(plan=replace(entry.plan, page_size=32))
    old = replace(OLD, plugins=(*OLD.plugins, ("third", "1.0")))
    now = replace(OLD, plugins=(*OLD.plugins, ("third", "1.1")), entries=(other,))
    assert [drift.because for drift in check_lock(old, now)] == [("third 1.0 -> 1.1",)]


def test_another_launch_and_another_config_are_changes_of_the_whole_lock() -> None:
    """What was asked for comes first, because the rest follows from it."""
    old = replace(OLD, configs=(("model llama", "a" * 64),))
    now = replace(old, launch=LockLaunch(requests=Requests(page_size=64)), configs=(("model llama", "b" * 64),))
    found = [(drift.host, drift.field, drift.before, drift.after) for drift in check_lock(old, now)]
    assert found == [
        ("", "launch.requests.page_size", "-", "64"),
        ("", "configs.model llama", "a" * 16, "b" * 16),
    ]


@pytest.mark.parametrize("field", ["dtype", "kv_dtype", "num_steps", "topk", "model", "bypassed"])
def test_whatever_else_a_plan_says_is_compared(field: str) -> None:
    """A field added to the plan is compared unless somebody says that it need not be."""
    value = {"num_steps": 9, "topk": 9, "bypassed": ("companion",)}.get(field, "other")
    plan = replace(OLD.entries[0].plan, **{field: value})
    now = replace(OLD, entries=(OLD.entries[0]._replace(plan=plan),))
    (drift,) = check_lock(OLD, now)
    assert drift.as_json()["after"] == (str(value) if field != "bypassed" else "companion")
