"""The plugin contract, read first: what Backstamp asks of a plugin, as documented empty functions.

A plugin is a module named by an entry point in the group `backstamp.plugins`. It answers these hooks with frozen data
and does nothing else: no probing, no kernel library, no torch. The range of contract versions a plugin supports is
its distribution's own requirement on `backstamp`.

.. versionadded:: 0.1
"""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from backstamp import API_VERSION
from backstamp.declarations import Alias, EntryPair, FamilyDefault, FeatureDefault, Offer, RetiredSetting

__all__ = ["API_VERSION", "GROUP", "hookimpl", "hookspec"]

#: Entry-point group that plugins register in.
GROUP = "backstamp.plugins"

hookspec = pluggy.HookspecMarker("backstamp")
hookimpl = pluggy.HookimplMarker("backstamp")


@hookspec
def backstamp_offers() -> Iterable[Offer]:  # type: ignore[empty-body]
    """Rows: what this plugin's kernels can do, where, and with which library."""


@hookspec
def backstamp_aliases() -> Iterable[Alias]:  # type: ignore[empty-body]
    """Keys an operator may type, each an ordered list of kernels; a kernel's own name needs no alias."""


@hookspec
def backstamp_entry_classes() -> Iterable[EntryPair]:  # type: ignore[empty-body]
    """Draft and target entry classes, as import strings."""


@hookspec
def backstamp_retired_settings() -> Iterable[RetiredSetting]:  # type: ignore[empty-body]
    """Settings that no longer exist, with what replaces them."""


@hookspec
def backstamp_family_defaults() -> Iterable[FamilyDefault]:  # type: ignore[empty-body]
    """What a model family prefers, and the only kernels it allows."""


@hookspec
def backstamp_feature_defaults() -> Iterable[FeatureDefault]:  # type: ignore[empty-body]
    """Optimisations that are on by default, each on its own archs only."""
