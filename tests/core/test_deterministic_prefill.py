"""Where a deterministic launch cuts prefill follows from the kernel that prefills.

Incidents: SGLang #28063 and #34264, where truncation was left unset.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from backstamp.decisions import (
    DeterministicPrefill,
    deterministic_prefill,
)
from backstamp.errors import Unresolved
from backstamp.launch import Requests
from backstamp.model import model_from_config
from backstamp.policy import Policy
from tests.models import config
from tests.resolving import kernel, plan_of
from tests.scenes import DENSE, model_with
from tests.splits import SPEC, built

ALIGNED = kernel("aligned", deterministic=True, alignment_tokens=4096, priority=10)
SHORT = kernel("short", deterministic=True, alignment_tokens=96, priority=90)
SILENT = kernel("silent", deterministic=True, priority=1)


@pytest.mark.parametrize(
    ("requests", "tokens"),
    [
        (Requests(prefill_attention_backend="aligned"), 4096),
        (Requests(decode_attention_backend="aligned"), 96),
        (Requests(prefill_attention_backend="aligned", decode_attention_backend="silent"), 4096),
        (Requests(attention_backend="short"), 96),
    ],
    ids=["prefill-only", "decode-only", "mixed", "base"],
)
def test_truncation_is_aligned_to_the_prefill_kernel(requests: Requests, tokens: int) -> None:
    """Whatever decodes, and whether or not it declares an alignment."""
    offers = [ALIGNED, SHORT, SILENT]
    plan = plan_of(offers, replace(requests, deterministic=True))
    name = {4096: "aligned", 96: "short"}[tokens]
    for of in (plan, built(plan, offers)):
        answer = deterministic_prefill(of)
        assert (answer.alignment_tokens, answer.split_tiles) == (tokens, ((name, tokens),))
        assert answer.reason == f"prefill half: {name} splits at {tokens}"


def test_a_draft_is_cut_at_its_own_prefill_kernel() -> None:
    """The draft's, not the target's."""
    asked = Requests(attention_backend="short", draft_attention_backend="aligned", deterministic=True, **SPEC)
    draft = plan_of([ALIGNED, SHORT], asked, role="draft")
    assert deterministic_prefill(draft).alignment_tokens == 4096


def test_a_kernel_of_unknown_alignment_never_leaves_truncation_unset() -> None:
    """SGLang #28063: asked of a plan that was not resolved deterministic, the error names the kernel."""
    plan = plan_of([ALIGNED, SILENT], Requests(prefill_attention_backend="silent"))
    with pytest.raises(Unresolved, match="of every kernel of the prefill half, got none of silent"):
        deterministic_prefill(plan)


def test_unlike_layers_are_cut_where_every_kernel_may_be() -> None:
    """The least common multiple, with each kernel's own tile; one kernel without an alignment is an error."""
    features = {"features": frozenset({"window", "softcap"}), "deterministic": True}
    wide = kernel("wide", head_dims=(512,), alignment_tokens=64, **features)
    model = model_from_config(config("gemma4"))

    def ask(**narrow: object) -> DeterministicPrefill:
        offers = [wide, kernel("narrow", head_dims=(256,), **features, **narrow)]
        return deterministic_prefill(plan_of(offers, model=model, policy=Policy(layers="per_layer")))

    answer = ask(alignment_tokens=96)
    assert (answer.alignment_tokens, dict(answer.split_tiles)) == (192, {"narrow": 96, "wide": 64})
    with pytest.raises(Unresolved, match="got none of narrow"):
        ask()


@pytest.mark.parametrize("widths", [(128, 256), (256, 128)], ids=repr)
def test_unlike_rows_of_one_kernel_are_each_kept(widths: tuple[int, ...]) -> None:
    """One name with an alignment a head width: the least common multiple of all, whichever group comes last."""
    tiles = {128: 4096, 256: 96}
    offers = [
        kernel("aligned", head_dims=(width,), deterministic=True, alignment_tokens=tokens)
        for width, tokens in tiles.items()
    ]
    model = model_with(*((2, replace(DENSE, head_dim=width, v_head_dim=width)) for width in widths))
    plan = plan_of(offers, Requests(attention_backend="aligned", deterministic=True), model=model)
    for of in (plan, built(plan, offers)):
        answer = deterministic_prefill(of)
        assert answer.alignment_tokens == 12288
        assert answer.split_tiles == tuple(("aligned", tiles[width]) for width in widths)


def test_layers_that_are_never_cut_are_not_asked_for_an_alignment() -> None:
    """An encoder has no cache, and no chunks."""
    tower = replace(DENSE, component="vision", attn_type="encoder", causal=False)
    towers = kernel("towers", features=frozenset({"encoder"}), deterministic=True, priority=1)
    plan = plan_of([SHORT, towers], Requests(deterministic=True), model=model_with((4, DENSE), (2, tower)))
    assert deterministic_prefill(plan).split_tiles == (("short", 96),)
