"""Launches that set one half, both, the base field or a draft's, over kernels that serve anything."""

from __future__ import annotations

from collections.abc import Sequence

from backstamp.construction import RunnerBackends, RunnerShape, build
from backstamp.declarations import Offer
from backstamp.launch import Requests
from backstamp.plan import Plan
from backstamp.testing.fakes import catalogue_of, fake_plugin, recording_factory
from tests.resolving import kernel

#: What `auto` takes, and the kernel every question below is about.
OTHER, MINE = kernel("other", priority=90), kernel("mine", priority=10)
OFFERS = [OTHER, MINE, kernel("third", priority=5)]
SPEC = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3}
LAUNCHES = {
    "base": Requests(attention_backend="mine"),
    "prefill-only": Requests(prefill_attention_backend="mine"),
    "decode-only": Requests(decode_attention_backend="mine"),
    "mixed": Requests(prefill_attention_backend="mine", decode_attention_backend="other"),
    "mirrored": Requests(prefill_attention_backend="other", decode_attention_backend="mine"),
    "base-and-decode": Requests(attention_backend="mine", decode_attention_backend="other"),
    "nothing": Requests(),
}


def built(plan: Plan, offers: Sequence[Offer] = OFFERS) -> RunnerBackends:
    """A plan built with recording fakes."""
    return build(plan, RunnerShape(), catalogue_of(fake_plugin("p", offers)), load=recording_factory)


def name_of(value: object) -> str:
    """A readable id."""
    return value.__name__ if callable(value) else str(value)
