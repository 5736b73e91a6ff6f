"""Scenes for field tests: models given layer by layer, plans of fake plugins, and what was built of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from backstamp.attention import LayerSpec
from backstamp.construction import RunnerBackends, RunnerShape, build
from backstamp.declarations import Offer
from backstamp.discovery import Found
from backstamp.engine import EngineFacts
from backstamp.host import HostFacts
from backstamp.launch import Requests, make_launch
from backstamp.model import DraftFacts, LayerFacts, LayerGroup, ModelFacts, default_model
from backstamp.plan import Plan
from backstamp.plan_rows import GroupPlan
from backstamp.policy import Policy
from backstamp.resolution import resolve
from backstamp.testing.fakes import catalogue_of, fake_plugin, recording_factory
from backstamp.testing.hosts import described_host

#: An Ampere card that is none of the profiles.
SM86 = replace(described_host("a100"), name="a10", arch="8.6", device_name="NVIDIA A10")
#: Every arch of the CUDA profiles, for kernels whose arch is not what a test is about.
CUDA = ("8.6", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1")
DENSE = LayerFacts(family="mha", num_qo_heads=32, num_kv_heads=8, head_dim=128, v_head_dim=128)
LATENT = LayerFacts(
    family="mla", num_qo_heads=128, num_kv_heads=1, head_dim=576, v_head_dim=512, kv_lora_rank=512, qk_rope_head_dim=64
)
SPARSE = replace(LATENT, family="sparse_mla", index_topk=2048)
GATED = LayerFacts(family="gdn", num_qo_heads=16, num_kv_heads=32, head_dim=128, v_head_dim=128, conv_kernel=4)
#: What a kernel for each of these layers declares beside its name.
MLA = {"family": "mla", "head_dims": ((576, 512),)}
SPARSE_MLA = {"family": "sparse_mla", "head_dims": ((576, 512),), "features": frozenset({"indices"})}
GDN = {"slot": "linear", "family": "gdn"}


def model_with(*layers: tuple[int, LayerFacts], name: str = "made_up", draft: DraftFacts | None = None) -> ModelFacts:
    """A model of (how many, which) layers, one group each, in this order."""
    groups, at = [], 0
    for count, facts in layers:
        groups.append(LayerGroup(facts.component, facts, tuple(range(at, at + count))))
        at += count
    mixers = tuple((group.facts,) for group in groups for _ in group.layers)
    return replace(default_model(), name=name, architecture="", layers=mixers, groups=tuple(groups), draft=draft)


def plan_with(
    plugins: Sequence[Found | Offer],
    requests: Requests | None = None,
    *,
    embedder: Requests | None = None,
    settings: Mapping[str, str] | None = None,
    host: str | HostFacts = "h100",
    model: ModelFacts | None = None,
    role: str = "target",
    policy: Policy | None = None,
    engine: EngineFacts | None = None,
    target: Plan | None = None,
) -> Plan:
    """Resolve with plugins; bare offers come from one plugin of a third party."""
    facts = described_host(host) if isinstance(host, str) else host
    launch = make_launch(requests or Requests(), embedder=embedder, policy=policy, role=role, settings=settings)
    catalogue = catalogue_of(*_plugins(plugins))
    return resolve(
        launch, engine or EngineFacts(), model or default_model(), facts, catalogue, role=role, target=target
    )


def built_with(plugins: Sequence[Found | Offer], plan: Plan, model: ModelFacts | None = None) -> RunnerBackends:
    """Build a plan with recording fakes, each handed the specs of its own layers."""
    runner = RunnerShape(layers=layer_specs(model) if model else ())
    return build(plan, runner, catalogue_of(*_plugins(plugins)), load=recording_factory)


def layer_specs(model: ModelFacts) -> list[LayerSpec]:
    """The spec of every layer of a model, as an engine would hand it; of sinks, facts have no values."""
    return [_spec(group, layer) for group in model.groups for layer in group.layers]


def groups_of(plan: Plan, phase: str = "prefill") -> dict[str, GroupPlan]:
    """One phase's groups by component, for models whose components have one group each."""
    return {group.component: group for group in plan.phase(phase).groups}


def texts_of(plan: Plan, code: str) -> list[str]:
    """The texts of a plan's warnings of one code."""
    return [warning.text for warning in plan.warnings if warning.code == code]


def _plugins(plugins: Sequence[Found | Offer]) -> list[Found]:
    offers = [item for item in plugins if isinstance(item, Offer)]
    found = [item for item in plugins if isinstance(item, Found)]
    return [*found, fake_plugin("p", offers)] if offers else found


def _spec(group: LayerGroup, layer: int) -> LayerSpec:
    facts = group.facts
    heads = {"num_qo_heads": facts.num_qo_heads, "num_kv_heads": facts.num_kv_heads}
    dims = {"head_dim": facts.head_dim, "v_head_dim": facts.v_head_dim}
    masks = {"window_left": facts.window_left, "softcap": facts.softcap, "attn_type": facts.attn_type}
    return LayerSpec(layer_id=layer, component=group.component, scale=0.1, **heads, **dims, **masks)
