"""What the lint says holds of every resolve: a row that it calls unreachable is in no plan."""

from __future__ import annotations

import re
from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from backstamp.declarations import Alias, Offer, PageSizes
from backstamp.engine import EngineFacts
from backstamp.errors import BackstampError
from backstamp.launch import Requests
from backstamp.lint import known_hosts, lint
from backstamp.plan import Plan
from backstamp.testing.fakes import catalogue_of, fake_plugin
from tests.building import host_of, plan_on
from tests.resolving import kernel

HOSTS = known_hosts()
ROLES = ("target", "draft")


def some(*values: str) -> st.SearchStrategy[frozenset[str]]:
    """A set with at least one of these."""
    return st.frozensets(st.sampled_from(values), min_size=1)


def any_of(*values: str) -> st.SearchStrategy[frozenset[str]]:
    """A set of these, empty among them."""
    return st.frozensets(st.sampled_from(values), max_size=2)


FIELDS: dict[str, st.SearchStrategy[object]] = {
    "archs": some("8.0", "9.0", "9.0a", "10.0").map(lambda archs: tuple(sorted(archs))),
    "forward_archs": st.sampled_from(["no", "major", "any"]),
    "phases": some("prefill", "decode", "verify"),
    "draft_phases": st.sampled_from([None, frozenset(), frozenset({"draft_decode"})]),
    "dtypes": some("bf16", "fp16"),
    "kv_dtypes": some("same", "bf16", "e4m3fn"),
    "head_dims": st.sampled_from([(64,), (128,), (64, 128), ("any",)]),
    "group_sizes": st.sampled_from([("any",), (4,), ((1, 4),), (4, (8, 16))]),
    "page_sizes": st.sampled_from([PageSizes(preferred=16, multiple_of=16), PageSizes(preferred=64, exact=(64,))]),
    "features": any_of("window", "tree_mask", "topk", "lse"),
    "needs": any_of("spec", "tp", "spec+tp", "draft"),
    "excludes": any_of("tp", "spec", "spec+tp", "deterministic"),
    "deterministic": st.booleans(),
    "alignment_tokens": st.sampled_from([None, 1, 64]),
    "priority": st.sampled_from([40, 50]),
    "accuracy": st.sampled_from(["exact", "fp8_scores"]),
    "inputs": any_of("host_lens", "crystal_ball"),
    "requires": st.sampled_from([(), ("lib>=1",), ("lib>=2",)]),
    "mask_format": st.sampled_from(["internal_causal", "2d"]),
    "layouts": st.sampled_from([("rows",), ("hnd",), ("rows", "hnd")]),
}
KEYS = sorted(FIELDS)
#: A row that differs from the plain one in one field at most: rows near enough to hide one another often.
ROWS = st.lists(st.sampled_from(KEYS), max_size=1, unique=True).flatmap(
    lambda keys: st.fixed_dictionaries({key: FIELDS[key] for key in keys})
)
#: An ordinary launch, or one that differs in one thing: far more would be refused for another reason.
LAUNCHES = st.sampled_from(
    [
        Requests(),
        Requests(speculative_algorithm="EAGLE"),
        Requests(speculative_algorithm="EAGLE", speculative_topk=2),
        Requests(speculative_algorithm="EAGLE", tp_size=2),
        Requests(tp_size=2),
        Requests(deterministic=True),
        Requests(deterministic=True, chunked_prefill_size=96),
        Requests(page_size=64),
        Requests(kv_cache_dtype="fp8_e4m3"),
    ]
)
ENGINES = st.sampled_from(
    [
        EngineFacts(mask_formats=frozenset({"2d"}), layouts=frozenset({"rows", "hnd"})),
        EngineFacts(mask_formats=frozenset({"2d"})),
        EngineFacts(layouts=frozenset({"hnd"})),
        EngineFacts(inputs=frozenset()),
    ]
)
MACHINES = st.builds(
    lambda name, libraries: host_of(name, libraries=libraries),
    st.sampled_from(["h100", "a100", "l40s", "b200"]),
    st.sampled_from([None, (), (("lib", "1.0"),)]),
)


def sound(name: str, changes: dict[str, object]) -> Offer:
    """A row without what soundness refuses."""
    offer = kernel(name, **changes)
    if "verify" not in offer.phases:
        offer = replace(offer, features=offer.features - {"tree_mask"})
    if not offer.deterministic:
        offer = replace(offer, alignment_tokens=None)
    return replace(offer, excludes=offer.excludes - offer.needs)


def planned(plugin: object, machine: object, requests: Requests, engine: EngineFacts, role: str) -> Plan | None:
    """A plan, or None where this launch is refused."""
    try:
        return plan_on(machine, plugin, requests=requests, engine=engine, role=role)
    except BackstampError:
        return None


@settings(max_examples=300, deadline=None)
@given(st.lists(ROWS, min_size=2, max_size=3), MACHINES, LAUNCHES, ENGINES, st.sampled_from(ROLES), st.booleans())
def test_a_row_called_unreachable_or_never_accepted_is_in_no_plan(
    rows: list[dict[str, object]],
    machine: object,
    requests: Requests,
    engine: EngineFacts,
    role: str,
    asked: bool,
) -> None:
    """By auto and asked for, as target and as draft: the lint never calls dead what lives."""
    plugin = fake_plugin("p", [sound("k", changes) for changes in rows])
    dead = {
        int(re.search(r"row (\d+)", flaw.subject).group(1))
        for flaw in lint(catalogue_of(plugin), HOSTS)
        if "never reached" in flaw.text or "never accepted" in flaw.text or "no known host" in flaw.text
    }
    if asked:
        requests = replace(requests, attention_backend="k", draft_attention_backend="k")
    plan = planned(plugin, machine, requests, engine, role)
    ran = {group.row for row in plan.running for group in row.groups} if plan is not None else set()
    assert not ran & dead


@settings(max_examples=300, deadline=None)
@example([{"phases": frozenset({"prefill"})}, {}], host_of("h100"), Requests(), EngineFacts(), "draft", True)
@given(st.lists(ROWS, min_size=2, max_size=3), MACHINES, LAUNCHES, ENGINES, st.sampled_from(ROLES), st.booleans())
def test_a_kernel_called_unreachable_behind_a_key_never_answers_to_it(
    rows: list[dict[str, object]],
    machine: object,
    requests: Requests,
    engine: EngineFacts,
    role: str,
    by_phase: bool,
) -> None:
    """What an alias's list hides, no launch gets through that alias."""
    names = [f"k{at}" for at in range(len(rows))]
    alias = Alias(key="key", kernels=tuple(names), by_phase={"decode": tuple(names[:1])} if by_phase else {})
    plugin = fake_plugin("p", [sound(name, changes) for name, changes in zip(names, rows, strict=True)], [alias])
    hidden = {
        (name, phases)
        for flaw in lint(catalogue_of(plugin), HOSTS)
        if flaw.subject == "alias 'key'"
        for name, phases in re.findall(r"^(k\d) is never reached(?: in ([^:]+))?:", flaw.text)
    }
    requests = replace(requests, attention_backend="key", draft_attention_backend="key")
    plan = planned(plugin, machine, requests, engine, role)
    for row in plan.running if plan is not None else ():
        for name, phases in hidden:
            if not phases or row.phase in phases.split(", "):
                assert row.kernel != name or "default" in row.source
