"""Backstamp: discover, resolve, build and stamp attention kernels for LLM inference.

Importing this package loads nothing: every public name is found when it is first read, so that an engine pays for
what it uses and `import backstamp` costs less than importing pluggy.

.. versionadded:: 0.1
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from backstamp.attention import Batch, KVIndex, LayerSpec, PagedKV, RaggedKV, TreeMask
    from backstamp.catalogue import Catalogue, build_catalogue
    from backstamp.compiled import compile_for
    from backstamp.construction import RunnerShape, build
    from backstamp.discovery import discover
    from backstamp.draft import DraftBackendFactory, DraftSteps
    from backstamp.engine import EngineFacts
    from backstamp.errors import BackstampError
    from backstamp.factories import BuildRequest, Built
    from backstamp.host import HostFacts, load_host, this_host
    from backstamp.launch import Launch, Policy, Requests, make_launch
    from backstamp.model import ModelFacts, default_model, load_model
    from backstamp.plan import Plan
    from backstamp.registration import register, unregister
    from backstamp.resolution import resolve, resolve_on
    from backstamp.stamp import Stamp, read_stamp

__version__ = "0.2.0"
#: Version of the plugin contract in `backstamp.hookspecs`; here, so that reading declarations needs no pluggy.
API_VERSION = "0.2"
#: The contract versions this core reads, newest first: the present one and the one before it.
API_VERSIONS = ("0.2", "0.1")

__all__ = [
    "API_VERSION",
    "API_VERSIONS",
    "BackstampError",
    "Batch",
    "BuildRequest",
    "Built",
    "Catalogue",
    "DraftBackendFactory",
    "DraftSteps",
    "EngineFacts",
    "HostFacts",
    "KVIndex",
    "Launch",
    "LayerSpec",
    "ModelFacts",
    "PagedKV",
    "Plan",
    "Policy",
    "RaggedKV",
    "Requests",
    "RunnerShape",
    "Stamp",
    "TreeMask",
    "build",
    "build_catalogue",
    "compile_for",
    "default_model",
    "discover",
    "load_host",
    "load_model",
    "make_launch",
    "read_stamp",
    "register",
    "resolve",
    "resolve_on",
    "this_host",
    "unregister",
]

_HOMES = {
    "BackstampError": "errors",
    "Batch": "attention",
    "BuildRequest": "factories",
    "Built": "factories",
    "Catalogue": "catalogue",
    "DraftBackendFactory": "draft",
    "DraftSteps": "draft",
    "EngineFacts": "engine",
    "HostFacts": "host",
    "KVIndex": "attention",
    "Launch": "launch",
    "LayerSpec": "attention",
    "ModelFacts": "model",
    "PagedKV": "attention",
    "Plan": "plan",
    "Policy": "launch",
    "RaggedKV": "attention",
    "RunnerShape": "construction",
    "Requests": "launch",
    "Stamp": "stamp",
    "TreeMask": "attention",
    "build": "construction",
    "build_catalogue": "catalogue",
    "compile_for": "compiled",
    "default_model": "model",
    "discover": "discovery",
    "load_host": "host",
    "load_model": "model",
    "make_launch": "launch",
    "read_stamp": "stamp",
    "register": "registration",
    "resolve": "resolution",
    "resolve_on": "resolution",
    "this_host": "host",
    "unregister": "registration",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"backstamp.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'backstamp' has no attribute {name!r}; it has {', '.join(sorted(_HOMES))}")


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
