"""What a model's family wishes and allows, and whose word it is."""

from __future__ import annotations

import pytest

from backstamp.declarations import FamilyDefault
from backstamp.errors import NotInstalled, Refused, StrictViolation
from backstamp.family_rules import FamilyRule, rules_of
from backstamp.model import DraftFacts
from backstamp.policy import Policy
from backstamp.testing.fakes import catalogue_of, fake_plugin
from tests.resolving import kernel
from tests.scenes import DENSE, model_with, plan_with, texts_of

MODEL = model_with((2, DENSE), name="g")
OFFERS = [kernel("a", priority=10), kernel("b", priority=20), kernel("c", priority=90)]


def ours(*rules: FamilyDefault):  # type: ignore[no-untyped-def]
    """An engine adapter that declares rules."""
    return fake_plugin("v", family_defaults=rules, distribution="backstamp-vllm")


def rule(**changes: object) -> FamilyDefault:
    """A rule of the family g."""
    return FamilyDefault(model_type="g", **changes)  # type: ignore[arg-type]


def test_a_wish_is_tried_in_its_own_order() -> None:
    """Not by rank, and passing over what is not there is told."""
    plan = plan_with([*OFFERS, ours(rule(kernels=("a", "b")))], model=MODEL)
    assert (plan.phase("decode").kernel, plan.phase("decode").source) == ("a", "family")
    plan = plan_with([*OFFERS, ours(rule(kernels=("absent", "b")))], model=MODEL)
    assert plan.phase("decode").kernel == "b"
    assert "absent" in texts_of(plan, "lost")[0]


def test_a_wish_nothing_fulfils_leaves_the_rank() -> None:
    """It is a preference; only `allowed` bars."""
    plan = plan_with([*OFFERS, ours(rule(kernels=("absent",)))], model=MODEL)
    assert (plan.phase("decode").kernel, plan.phase("decode").source) == ("c", "auto")


def test_a_wish_for_a_denied_distributions_kernel_is_not_followed() -> None:
    """The operator's list is stronger than a family's wish."""
    barred = fake_plugin("barred", [kernel("barred", priority=99)])
    plan = plan_with(
        [*OFFERS, barred, ours(rule(kernels=("barred", "a")))],
        model=MODEL,
        policy=Policy(deny=frozenset({"fake-barred"})),
    )
    assert (plan.phase("decode").kernel, plan.phase("decode").source) == ("a", "family")


def test_a_wish_that_fits_and_is_not_installed_is_the_answer() -> None:
    """As for a key: the missing library is told instead of another kernel taken."""
    wished = kernel("wished", requires=("lib>=2",))
    with pytest.raises((Refused, NotInstalled), match="lib"):
        plan_with([*OFFERS, wished, ours(rule(kernels=("wished", "b")))], model=MODEL, host=_without_libraries())


def _without_libraries():  # type: ignore[no-untyped-def]
    from backstamp.testing.hosts import described_host

    return described_host("h100", libraries={})


def test_a_set_alone_bars_and_leaves_the_rank_among_the_rest() -> None:
    """`allowed` without a wish."""
    plan = plan_with([*OFFERS, ours(rule(allowed=frozenset({"a", "b"})))], model=MODEL)
    assert (plan.phase("decode").kernel, plan.phase("decode").source) == ("b", "auto")


def test_another_family_is_not_concerned() -> None:
    """The rule names a model type."""
    assert plan_with([*OFFERS, ours(rule(kernels=("a",)))]).phase("decode").kernel == "c"


def test_a_sharing_draft_is_held_to_both_sets() -> None:
    """Its own wishes, under what both families allow."""
    mine = FamilyDefault(model_type="d", kernels=("a", "b"), allowed=frozenset({"a", "b"}), role="draft")
    catalogue = catalogue_of(fake_plugin("p", OFFERS), ours(rule(allowed=frozenset({"b", "c"})), mine))
    target = plan_with([*OFFERS, ours(rule(allowed=frozenset({"b", "c"})))], model=MODEL)
    draft = model_with((1, DENSE), name="d", draft=DraftFacts(shares_kv=True))
    rules, warnings = rules_of(catalogue, draft, "draft", Policy(), target)
    assert rules["main"] == FamilyRule(("b",), frozenset({"b"}), "family g, whose KV cache this draft shares,")
    assert warnings == ()
    apart = model_with((1, DENSE), name="d", draft=DraftFacts())
    assert rules_of(catalogue, apart, "draft", Policy(), target)[0]["main"].allowed == frozenset({"a", "b"})


def test_a_lock_without_a_set_binds_no_draft() -> None:
    """A wish of the target's family is not the draft's."""
    catalogue = catalogue_of(fake_plugin("p", OFFERS), ours(rule(kernels=("a",))))
    target = plan_with([*OFFERS, ours(rule(kernels=("a",)))], model=MODEL)
    draft = model_with((1, DENSE), name="d", draft=DraftFacts(shares_kv=True))
    assert rules_of(catalogue, draft, "draft", Policy(), target)[0]["main"] == FamilyRule((), None, "")


def test_an_untrusted_lock_is_told_and_binds_nobody() -> None:
    """Even where it names only kernels of its own: a set bars everybody else's."""
    stranger = fake_plugin("acme", OFFERS, family_defaults=[rule(allowed=frozenset({"a"}))])
    plan = plan_with([stranger], model=MODEL)
    assert plan.phase("decode").kernel == "c"
    assert "--allow fake-acme" in texts_of(plan, "untrusted")[0]


def test_an_untrusted_wish_for_its_own_kernels_alone_needs_no_warning() -> None:
    """It speaks for what it ships."""
    plan = plan_with([fake_plugin("acme", OFFERS, family_defaults=[rule(kernels=("a",))])], model=MODEL)
    assert (plan.phase("decode").kernel, texts_of(plan, "untrusted")) == ("a", [])


def theirs(*rules: FamilyDefault):  # type: ignore[no-untyped-def]
    """A plugin nobody allowed that declares rules."""
    return fake_plugin("acme", family_defaults=rules)


LOCK = rule(kernels=("a",), allowed=frozenset({"a"}))


def test_an_untrusted_rule_beside_a_trusted_lock_removes_nothing() -> None:
    """Trust decides first; what the stranger says of others' kernels is left out and told."""
    plan = plan_with([*OFFERS, ours(LOCK), theirs(rule(kernels=("c",)))], model=MODEL)
    assert (plan.phase("decode").kernel, plan.phase("decode").source) == ("a", "family")
    assert "fake-acme says that family g prefers c" in texts_of(plan, "untrusted")[0]
    assert texts_of(plan, "shadowed") == []


def test_an_untrusted_rule_that_says_the_same_or_only_of_its_own_is_not_told() -> None:
    """Nothing of it is lost that it could have said."""
    for same in (LOCK, rule(kernels=("own",))):
        stranger = fake_plugin("acme", [kernel("own", priority=1)], family_defaults=[same])
        plan = plan_with([*OFFERS, ours(LOCK), stranger], model=MODEL)
        assert (plan.phase("decode").kernel, texts_of(plan, "untrusted")) == ("a", [])


def test_what_a_denied_distribution_says_is_not_told() -> None:
    """The operator has answered it already, so that strict mode has nothing to refuse."""
    policy = Policy(deny=frozenset({"fake-acme"}), strict=True)
    plan = plan_with([*OFFERS, ours(LOCK), theirs(rule(kernels=("c",)))], model=MODEL, policy=policy)
    assert plan.phase("decode").kernel == "a"


def test_two_trusted_rules_that_differ_count_neither_and_the_plan_says_so() -> None:
    """Naming both; strict mode refuses."""
    second = fake_plugin("s", family_defaults=[rule(kernels=("b",))], distribution="backstamp-sglang")
    plan = plan_with([*OFFERS, ours(LOCK), second], model=MODEL)
    assert plan.phase("decode").kernel == "c"
    (text,) = texts_of(plan, "shadowed")
    assert "family g: backstamp-sglang and backstamp-vllm say different things" in text
    with pytest.raises(StrictViolation, match="backstamp-sglang and backstamp-vllm"):
        plan_with([*OFFERS, ours(LOCK), second], model=MODEL, policy=Policy(strict=True))
    assert texts_of(plan_with([*OFFERS, ours(LOCK), second]), "shadowed") == []


def test_an_operator_who_allows_a_plugin_makes_it_a_party() -> None:
    """Then it differs as an equal."""
    plugins = [*OFFERS, ours(LOCK), theirs(rule(kernels=("c",)))]
    plan = plan_with(plugins, model=MODEL, policy=Policy(allow=frozenset({"fake-acme"})))
    assert "backstamp-vllm and fake-acme" in texts_of(plan, "shadowed")[0]


@pytest.mark.parametrize(
    ("of", "who"),
    [
        pytest.param(rule(kernels=("nobodys",)), "prefers nobodys, which no installed plugin has", id="nobodys"),
        pytest.param(rule(kernels=("gdn",)), "prefers gdn, which serves linear layers", id="linear"),
        pytest.param(
            rule(allowed=frozenset({"c", "gdn"})), "allows gdn, which serves linear layers", id="allows-linear"
        ),
    ],
)
def test_a_rule_that_can_never_apply_is_told(of: FamilyDefault, who: str) -> None:
    """Where a model of that family is resolved, and nowhere else."""
    linear = kernel("gdn", slot="linear", family="gdn", head_dims=("any",))
    plan = plan_with([*OFFERS, linear, ours(of)], model=MODEL)
    assert plan.phase("decode").kernel == "c"
    assert [who in text for text in texts_of(plan, "lost")] == [True]
    assert texts_of(plan_with([*OFFERS, linear, ours(of)]), "lost") == []
