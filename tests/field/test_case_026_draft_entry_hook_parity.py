"""Case 26, SGLang #33312 and #34376: a draft without its target's loader hook, and accept length fell by half."""

from __future__ import annotations

from backstamp.entry_classes.engines import ENGINES
from backstamp.parity import check_hook_parity


class Target:
    """A target entry class with the hook, and a map of weight names."""

    weight_names = {"q": "qkv"}  # noqa: RUF012

    @classmethod
    def disables_fusion(cls, config: object) -> bool:
        """The loader's question."""
        return True


class DraftOfTarget:
    """A draft without the hook; its map of weight names differs."""

    weight_names = {"q": "q_proj"}  # noqa: RUF012


class DelegatingDraft:
    """A draft that adapts the arguments and delegates."""

    @classmethod
    def disables_fusion(cls, config: object, layer: int = 0) -> bool:
        """The loader's question, asked of the target."""
        return Target.disables_fusion(config)


class PlainTarget:
    """A target without the hook."""


def test_a_draft_that_lacks_its_targets_hook_is_named() -> None:
    """The pair, the hook and the side that lacks it."""
    (violation,) = check_hook_parity([(DraftOfTarget, Target)], ["disables_fusion"])
    assert (violation.hook, violation.missing_on) == ("disables_fusion", "draft")
    for word in ("DraftOfTarget", "draft of", "Target", "the draft lacks disables_fusion, which the target has"):
        assert word in violation.message


def test_a_delegating_draft_passes() -> None:
    """Presence counts, not identity."""
    assert not check_hook_parity([(DelegatingDraft, Target)], ["disables_fusion"])


def test_a_hook_only_the_draft_has_is_reported_too() -> None:
    """The loader decides twice either way."""
    (violation,) = check_hook_parity([(DelegatingDraft, PlainTarget)], ["disables_fusion"])
    assert violation.missing_on == "target"


def test_weight_name_maps_are_no_hooks() -> None:
    """Maps differ by right: no engine's hooks name one, and only whoever asks for one by name is told of it."""
    maps = {"packed_modules_mapping", "remap_prefix", "get_hf_to_sglang_mapper", "hf_to_vllm_mapper"}
    assert not maps & {hook for engine in ENGINES.values() for hook in engine.hooks}
    assert not check_hook_parity([(DelegatingDraft, Target)], ["disables_fusion"])
    assert check_hook_parity([(DelegatingDraft, Target)], ["weight_names"])


def test_every_violation_of_every_pair_is_told() -> None:
    """The check is registry-wide, not first-come."""
    pairs = [(DraftOfTarget, Target), (DelegatingDraft, PlainTarget)]
    assert len(check_hook_parity(pairs, ["disables_fusion"])) == 2
