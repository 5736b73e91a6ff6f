"""Resolving in tests: one CUDA kernel to vary, and plans of in-memory plugins on described hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from backstamp.catalogue import Catalogue
from backstamp.compiled import compile_for
from backstamp.declarations import Alias, Offer
from backstamp.engine import EngineFacts
from backstamp.facts import gather
from backstamp.launch import Launch, Requests, make_launch
from backstamp.measured import work_of
from backstamp.measurements import DEFAULT_WORKLOAD, Machine, Measurements, Timed
from backstamp.model import ModelFacts, default_model
from backstamp.plan import Plan
from backstamp.policy import Policy
from backstamp.resolution import resolve
from backstamp.testing.dists import cpu_offer
from backstamp.testing.fakes import catalogue_of, fake_plugin
from backstamp.testing.hosts import described_host

BASE = replace(
    cpu_offer("base", "fake"), device="cuda", archs=("9.0",), head_dims=(64, 128), features=frozenset({"window"})
)


def kernel(name: str, **changes: object) -> Offer:
    """A CUDA kernel that serves the default model on SM90, with changes."""
    return replace(BASE, kernel=name, **changes)


def plan_of(
    offers: Sequence[Offer],
    requests: Requests | None = None,
    *,
    host: str = "h100",
    model: ModelFacts | None = None,
    aliases: Sequence[Alias] = (),
    role: str = "target",
    policy: Policy | None = None,
    engine: EngineFacts | None = None,
    target: Plan | None = None,
    measurements: Measurements | None = None,
    libraries: dict[str, str] | None = None,
) -> Plan:
    """Resolve with one in-memory plugin."""
    launch = make_launch(requests or Requests(), policy=policy, role=role)
    facts = described_host(host, libraries=libraries)
    catalogue: Catalogue = catalogue_of(fake_plugin("p", offers, aliases))
    return resolve(
        launch, engine or EngineFacts(), model or default_model(), facts, catalogue, measurements, role, target=target
    )


def times_of(
    offers: Sequence[Offer],
    microseconds: Mapping[tuple[str, str], float],
    *,
    host: str = "h100",
    model: ModelFacts | None = None,
    launch: Launch | None = None,
) -> Measurements:
    """Times of `plan_of`'s kernels by (phase, kernel), the same for each kind of layer of the model."""
    at = compile_for(catalogue_of(fake_plugin("p", offers)), described_host(host))
    facts = gather(at, launch or make_launch(Requests()), EngineFacts(), model or default_model())
    rows = []
    for (phase, name), time in microseconds.items():
        for group in facts.model.attention_groups:
            work = work_of(facts, "attention", phase, group.facts, DEFAULT_WORKLOAD.load_of(phase))
            for row in at.slots["attention"].rows:
                if row.offer.kernel == name:
                    ref = row.plugin
                    page = row.offer.page_sizes.preferred
                    rows.append(Timed(work, name, row.index, ref.distribution, ref.version, row.library, page, time))
    return Measurements(machine=Machine.of(at.host), rows=tuple(dict.fromkeys(rows)))


def kernels(plan: Plan) -> dict[str, str | None]:
    """The kernel of every phase."""
    return {row.phase: row.kernel for row in plan.phases}
