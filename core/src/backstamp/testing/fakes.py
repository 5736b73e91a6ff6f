"""Fakes that stand for machines and libraries we do not have: recording backends and in-memory plugins.

In: a row of the catalogue, or declared offers. Out: a factory whose backend records every call and computes nothing,
or a `Found` plugin as discovery would answer it. Stamps read from them are real: construction checks and stamps them
like any other object.

.. versionadded:: 0.1
"""

from __future__ import annotations

from collections.abc import Sequence

from backstamp.catalogue import Catalogue, Row, build_catalogue
from backstamp.construction import Factory
from backstamp.declarations import Alias, FamilyDefault, FeatureDefault, Offer, RetiredSetting
from backstamp.declared import Declared
from backstamp.discovery import Discovery, Failure, Found
from backstamp.factories import BuildRequest, Built
from backstamp.plan_rows import PluginRef

__all__ = ["RecordingBackend", "catalogue_of", "fake_plugin", "recording_factory"]


class RecordingBackend:
    """A backend that remembers what it was asked and answers nothing."""

    def __init__(self, request: BuildRequest) -> None:
        self.request = request
        self.calls: list[str] = []

    def plan(self, batch: object, *, state: object = None, capture: bool = False) -> object:
        """Record a plan."""
        self.calls.append("plan")
        return state

    def forward(self, *tensors: object) -> object:
        """Record a forward."""
        self.calls.append("forward")
        return tensors[0]


def recording_factory(row: Row, catalogue: Catalogue) -> Factory:
    """A factory that answers the row's own kernel name with a recording backend and reports all settings back."""

    def factory(request: BuildRequest) -> Built:
        return Built(row.offer.kernel, RecordingBackend(request), request.settings)

    return factory


def fake_plugin(
    name: str,
    offers: Sequence[Offer] = (),
    aliases: Sequence[Alias] = (),
    *,
    distribution: str | None = None,
    version: str = "1.0",
    packages: frozenset[str] | None = None,
    family_defaults: Sequence[FamilyDefault] = (),
    feature_defaults: Sequence[FeatureDefault] = (),
    retired_settings: Sequence[RetiredSetting] = (),
) -> Found:
    """A plugin as discovery would answer it, of a distribution that is not installed.

    A `distribution` of a first-party name, "backstamp-vllm" for instance, speaks for families and other people's
    kernels as an engine's adapter does.
    """
    tops = frozenset(offer.factory.partition(":")[0].partition(".")[0] for offer in offers)
    return Found(
        plugin=PluginRef(name, distribution if distribution is not None else f"fake-{name}", version),
        declared=Declared(
            offers=tuple(offers),
            aliases=tuple(aliases),
            family_defaults=tuple(family_defaults),
            feature_defaults=tuple(feature_defaults),
            retired_settings=tuple(retired_settings),
        ),
        packages=tops if packages is None else packages,
        module=f"fake_{name}.plugin",
        origin="memory",
    )


def catalogue_of(*plugins: Found, failures: Sequence[Failure] = ()) -> Catalogue:
    """The catalogue of in-memory plugins."""
    return build_catalogue(Discovery(found=tuple(plugins), failures=tuple(failures)))
