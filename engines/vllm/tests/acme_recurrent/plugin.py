"""What this plugin declares: a right kernel of each slot, and wrong ones for equalities to be worth something."""

from __future__ import annotations

from dataclasses import replace

from backstamp.declarations import Offer
from backstamp.hookspecs import hookimpl
from backstamp_cpu.plugin import NATIVE, NATIVE_GDN

__all__ = ["LATENT", "RULES", "backstamp_offers"]

RULES = ("acme_rule", "acme_rule_zeros", "acme_rule_forgets")
LATENT = ("acme_latent", "acme_latent_zeros", "acme_latent_no_causal")


@hookimpl
def backstamp_offers() -> tuple[Offer, ...]:
    """States in the other order than vLLM's; `auto` never takes the lowest priority."""
    rules = [
        replace(
            NATIVE_GDN,
            kernel=name,
            factory=f"acme_recurrent.backend:{name.replace('acme', 'build')}",
            state_layouts=("kv",),
            reference=False,
            priority=0,
        )
        for name in RULES
    ]
    latent = [
        replace(
            NATIVE,
            kernel=name,
            factory=f"acme_recurrent.backend:{name.replace('acme', 'build')}",
            phases=frozenset({"prefill"}),
            draft_phases=frozenset(),
            kv_forms=frozenset({"ragged"}),
            features=frozenset({"lse", "non_causal"}),
            inputs=frozenset({"host_lens"}),
            priority=0,
        )
        for name in LATENT
    ]
    return (*rules, *latent)
