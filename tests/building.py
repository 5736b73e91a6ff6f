"""Plans and stamps in field tests: in-memory plugins on described hosts, built with recording fakes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from backstamp.attention import LayerSpec
from backstamp.catalogue import Catalogue, Row
from backstamp.construction import Factory, RunnerBackends, RunnerShape, build
from backstamp.discovery import Found
from backstamp.engine import EngineFacts
from backstamp.host import HostFacts
from backstamp.launch import Requests, make_launch
from backstamp.model import ModelFacts, default_model, model_from_config
from backstamp.plan import Plan
from backstamp.policy import Policy
from backstamp.resolution import resolve
from backstamp.stamp import is_container, read_stamp, steps_of
from backstamp.testing.fakes import catalogue_of, recording_factory
from backstamp.testing.hosts import described_host
from tests.models import config

#: What a kernel for absorbed MLA, sparse MLA, a gated delta net and Kimi delta attention declares.
MLA = {"family": "mla", "head_dims": ((576, 512),)}
SPARSE = {"family": "sparse_mla", "head_dims": ((576, 512),)}
GDN = {"slot": "linear", "family": "gdn", "head_dims": (128,)}
KDA = {"slot": "linear", "family": "kda", "head_dims": (128,)}
SPEC = Requests(speculative_algorithm="EAGLE")


def model_of(name: str) -> ModelFacts:
    """The facts of one shipped config."""
    return model_from_config(config(name))


def host_of(profile: str, /, **changes: object) -> HostFacts:
    """A named profile with changed facts: an arch no profile has, another runtime, a library list."""
    return replace(described_host(profile), **changes)


def plan_on(
    host: HostFacts | str,
    *plugins: Found,
    requests: Requests | None = None,
    model: ModelFacts | None = None,
    role: str = "target",
    engine: EngineFacts | None = None,
    policy: Policy | None = None,
    target: Plan | None = None,
) -> Plan:
    """Resolve one runner with these plugins."""
    facts = described_host(host) if isinstance(host, str) else host
    launch = make_launch(requests or Requests(), policy=policy, role=role)
    catalogue = catalogue_of(*plugins)
    return resolve(
        launch, engine or EngineFacts(), model or default_model(), facts, catalogue, role=role, target=target
    )


def built_from(
    plan: Plan,
    *plugins: Found,
    layers: Sequence[LayerSpec] = (),
    load: Callable[[Row, Catalogue], Factory] = recording_factory,
) -> RunnerBackends:
    """Build a plan with recording fakes, or with another loader."""
    return build(plan, RunnerShape(layers=layers), catalogue_of(*plugins), load=load)


def stamps_of(backends: RunnerBackends) -> dict[str, set[str]]:
    """The kernels every phase's objects, and their steps, are stamped with."""
    stamps: dict[str, set[str]] = {}
    for (phase, _), built in backends.objects.items():
        steps = steps_of(built) if is_container(built) else ()
        stamps.setdefault(phase, set()).update(read_stamp(item).kernel for item in (built, *steps))
    return stamps
