"""A lock: many plans as one record, the same bytes for the same plans, and nothing in it but names and versions."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backstamp import __version__
from backstamp.errors import BadLock, BadPlan, Refused
from backstamp.launch import Requests
from backstamp.lock import (
    Lock,
    LockedRefusal,
    LockEntry,
    LockLaunch,
    lock_from_json,
    lock_text,
    lock_to_json,
    locked_distributions,
    make_lock,
    refusal_of,
)
from backstamp.plan import Plan
from backstamp.plan_rows import PluginRef, Warn
from backstamp.policy import Policy
from tests.plans import resolved
from tests.resolving import kernel, plan_of

PLAN = plan_of([kernel("flashinfer"), kernel("triton")])
PLANS = [replace(PLAN, host=host, model=model) for host in ("h200", "h100") for model in ("qwen3", "llama")]
REFUSED = LockEntry("epyc", "llama", "target", None, LockedRefusal("refused", "triton: needs cuda, got cpu"))
FULL = make_lock(
    [*PLANS, REFUSED],
    launch=LockLaunch(
        requests=Requests(attention_backend="flashinfer", page_size=16, deterministic=True, chunked_prefill_size=-1),
        policy=Policy(strict=True, bypass=frozenset({"companion", "library_version"})),
        role="target",
        device="cuda",
        settings=(("OLD_BACKEND", "triton"),),
    ),
    configs=[("model qwen3", "ab"), ("model llama", "cd"), ("engine vllm", "ef")],
    plugins=[PluginRef("z", "backstamp-z", "2.0")],
)


def test_a_lock_reads_back_equal() -> None:
    """Plans, refusals, launch, files and plugins."""
    assert lock_from_json(json.loads(lock_text(FULL))) == FULL


def test_entries_are_in_order_whatever_order_they_came_in() -> None:
    """The same lock, the same bytes."""
    shuffled = [*PLANS, REFUSED]
    random.Random(7).shuffle(shuffled)
    again = make_lock(
        shuffled, launch=FULL.launch, configs=reversed(FULL.configs), plugins=[PluginRef("z", "backstamp-z", "2.0")]
    )
    assert lock_text(again) == lock_text(FULL)
    assert [entry.key for entry in FULL.entries] == [
        ("epyc", "llama", "target"),
        ("h100", "llama", "target"),
        ("h100", "qwen3", "target"),
        ("h200", "llama", "target"),
        ("h200", "qwen3", "target"),
    ]


@settings(deadline=None, max_examples=50)
@given(st.lists(resolved(), min_size=1, max_size=3))
def test_locks_of_resolved_plans_read_back_equal(made: list[tuple[Plan, object]]) -> None:
    """Whatever the resolver makes."""
    lock = make_lock(replace(plan, host=f"host{at}") for at, (plan, _) in enumerate(made))
    assert lock_from_json(json.loads(lock_text(lock))) == lock
    assert lock_text(lock_from_json(json.loads(lock_text(lock)))) == lock_text(lock)


def test_one_name_for_two_things_is_an_error() -> None:
    """Two models of one type on one host need names of their own."""
    with pytest.raises(BadLock, match=r"target of llama on h100: needs one plan .* got two") as caught:
        make_lock([PLANS[3], replace(PLANS[3], page_size=32)])
    assert "--model NAME=FILE" in caught.value.fix
    draft = replace(PLANS[3], role="draft")
    assert len(make_lock([PLANS[3], draft]).entries) == 2


def test_the_paths_a_cause_quotes_are_left_out() -> None:
    """A failed plugin's cause names files of the machine that resolved; the lock keeps what they are called."""
    cause = (
        "plugin x (dist 1.0): ImportError: cannot import name 'k' from 'lib' (/home/ada/my env/site-packages/lib.py)"
    )
    plan = replace(PLAN, warnings=(Warn("failed", cause), Warn("per_layer", "GDN/KDA as 1/2")))
    message = "x: needs C:\\Users\\ada\\x.dll to load, got /opt/lib/x.so"
    lock = make_lock([plan, REFUSED._replace(refusal=LockedRefusal("plugin_failed", message))])
    text = lock_text(lock)
    assert "ada" not in text
    assert "/opt" not in text
    assert "(lib.py)" in text
    assert "got x.so" in text
    assert "GDN/KDA as 1/2" in text


def test_a_refusal_keeps_who_needs_what_and_not_what_else_was_installed() -> None:
    """The rest of the message lists every plugin there is, and would change with each new one."""
    error = Refused("decode 'fa3'", needed="SM90", found="SM80", considered="triton", fix="Keys here: triton")
    assert refusal_of(error) == LockedRefusal("refused", "decode 'fa3': needs SM90, got SM80")


def test_the_distributions_inside_a_lock_are_those_that_were_there() -> None:
    """Chosen or not: a plugin that was installed when the lock was made is no stranger."""
    assert locked_distributions(FULL) == {"fake-p", "backstamp-z"}
    assert locked_distributions(make_lock([])) == frozenset()


@pytest.mark.parametrize("kind", [Requests, Policy])
def test_every_field_of_a_launch_is_remembered(kind: type) -> None:
    """A flag that the lock forgot would be checked as unset."""
    values = {"frozenset": frozenset({"companion"}), "Layers": "per_layer", "str": "triton", "int": 2, "bool": True}
    special = {
        "speculative_attention_mode": "decode",
        "duplicates": frozenset({"fake-p:triton"}),
        "component_backends": {"vision": "triton"},
        "features": {"sinks": False, "lse": True},
    }
    for item in dataclasses.fields(kind):
        word = next(name for name in values if name in str(item.type))
        asked = kind(**{item.name: special[item.name] if item.name in special else values[word]})
        launch = LockLaunch(**{"requests" if kind is Requests else "policy": asked})
        lock = make_lock([PLAN], launch=launch)
        assert lock != make_lock([PLAN]), item.name
        assert lock_from_json(json.loads(lock_text(lock))) == lock, item.name


def changed(*path: str | int, value: object = ...) -> object:
    """The full lock's JSON with one value replaced, or left out."""
    data = copy.deepcopy(lock_to_json(FULL))
    place = data
    for at in path[:-1]:
        place = place[at]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return data


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (changed("schema", value=2), "schema"),
        (changed("schema"), "schema"),
        (changed("path", value="/home"), "path"),
        (changed("backstamp"), "backstamp"),
        (changed("launch"), "launch"),
        (changed("launch", "role", value="drafter"), "launch.role"),
        (changed("launch", "device", value=1), "launch.device"),
        (changed("launch", "settings", value=["OLD=1"]), "launch.settings"),
        (changed("launch", "requests", "features", value={"lse": "on"}), "launch.requests.features.lse"),
        (changed("launch", "requests", "page_size", value="16"), "launch.requests.page_size"),
        (changed("launch", "requests", "page_size", value=True), "launch.requests.page_size"),
        (changed("launch", "requests", "deterministic", value=1), "launch.requests.deterministic"),
        (changed("launch", "requests", "backend", value="fa3"), "launch.requests.backend"),
        (changed("launch", "policy", "bypass", value="companion"), "launch.policy.bypass"),
        (changed("launch", "policy", "layers", value="some"), "launch.policy.layers"),
        (changed("configs", value=[]), "configs"),
        (changed("plugins", "fake-p", value=1), "plugins.fake-p"),
        (changed("entries", value={}), "entries"),
        (changed("entries", 0, value=None), "entries[0]"),
        (changed("entries", 0, "role"), "entries[0].role"),
        (changed("entries", 0, "refusal", value=None), "entries[0].plan"),
        (changed("entries", 1, "refusal", value={"code": "refused", "message": ""}), "entries[1].plan"),
        (changed("entries", 0, "refusal", "code"), "entries[0].refusal.code"),
        (changed("entries", 0, "host", value="z"), "entries"),
        (changed("entries", 2, value=lock_to_json(FULL)["entries"][1]), "entries"),
        (changed("entries", 0, "path", value="/home"), "entries[0].path"),
    ],
)
def test_a_malformed_lock_is_one_error_that_names_the_field(data: object, field: str) -> None:
    """Missing, of another type, unknown, or in another order."""
    with pytest.raises(BadLock) as caught:
        lock_from_json(data, "lock a.json")
    assert caught.value.who == f"lock a.json, field {field}"


def test_a_malformed_plan_in_a_lock_says_which() -> None:
    """Its digest holds for each plan on its own."""
    with pytest.raises(BadPlan) as caught:
        lock_from_json(changed("entries", 1, "plan", "page_size", value=32))
    assert caught.value.who == "lock, entries[1].plan, field digest"


def test_a_lock_says_which_backstamp_resolved() -> None:
    """The core decides too."""
    assert make_lock([PLAN]).backstamp == Lock(entries=()).backstamp
    assert lock_to_json(make_lock([PLAN]))["backstamp"] == __version__
