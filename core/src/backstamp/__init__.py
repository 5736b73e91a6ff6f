"""Backstamp: discover, resolve, build and stamp attention kernels for LLM inference.

Importing this package loads nothing: every public name is found when it is first read, so that an engine pays for
what it uses and `import backstamp` costs less than importing pluggy.

.. versionadded:: 0.1
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from backstamp.adoption import adopt
    from backstamp.agreement import agree, compare, differences
    from backstamp.attention import AttentionBackend, Batch, KVIndex, LayerSpec, PagedKV, RaggedKV, TreeMask
    from backstamp.catalogue import Catalogue, build_catalogue
    from backstamp.compiled import compile_for
    from backstamp.construction import RunnerBackends, RunnerShape, build
    from backstamp.discovery import discover
    from backstamp.draft import DraftBackendFactory, DraftSteps
    from backstamp.drift import Drift, check_lock
    from backstamp.engine import EngineFacts
    from backstamp.errors import BackstampError
    from backstamp.factories import BuildRequest, Built
    from backstamp.forward import check_entry
    from backstamp.host import HostFacts, load_host, this_host
    from backstamp.job import resolve_job
    from backstamp.launch import Launch, Requests, make_launch
    from backstamp.linear import linear_attn_backends_in, stamp_linear_attn_backends
    from backstamp.lock import Lock, lock_from_json, lock_text, locked_distributions, make_lock
    from backstamp.measurements import Measurements
    from backstamp.model import ModelFacts, default_model, load_model
    from backstamp.plan import Plan
    from backstamp.plan_reading import plan_from_json
    from backstamp.policy import Policy
    from backstamp.records import read_record, write_record
    from backstamp.registration import register, unregister
    from backstamp.resolution import resolve, resolve_on
    from backstamp.stamp import Stamp, read_stamp
    from backstamp.tune_record import load_measurements

__version__ = "0.2.0"
#: Version of the plugin contract in `backstamp.hookspecs`; here, so that reading declarations needs no pluggy.
API_VERSION = "0.2"
#: The contract versions this core reads, newest first: the present one and the one before it.
API_VERSIONS = ("0.2", "0.1")

__all__ = [
    "API_VERSION",
    "API_VERSIONS",
    "AttentionBackend",
    "BackstampError",
    "Batch",
    "BuildRequest",
    "Built",
    "Catalogue",
    "DraftBackendFactory",
    "DraftSteps",
    "Drift",
    "EngineFacts",
    "HostFacts",
    "KVIndex",
    "Launch",
    "LayerSpec",
    "Lock",
    "Measurements",
    "ModelFacts",
    "PagedKV",
    "Plan",
    "Policy",
    "RaggedKV",
    "Requests",
    "RunnerBackends",
    "RunnerShape",
    "Stamp",
    "TreeMask",
    "adopt",
    "agree",
    "build",
    "build_catalogue",
    "check_entry",
    "check_lock",
    "compare",
    "compile_for",
    "default_model",
    "differences",
    "discover",
    "linear_attn_backends_in",
    "load_host",
    "load_measurements",
    "load_model",
    "lock_from_json",
    "lock_text",
    "locked_distributions",
    "make_launch",
    "make_lock",
    "plan_from_json",
    "read_record",
    "read_stamp",
    "register",
    "resolve",
    "resolve_job",
    "resolve_on",
    "stamp_linear_attn_backends",
    "this_host",
    "unregister",
    "write_record",
]

_HOMES = {
    "AttentionBackend": "attention",
    "BackstampError": "errors",
    "Batch": "attention",
    "BuildRequest": "factories",
    "Built": "factories",
    "Catalogue": "catalogue",
    "DraftBackendFactory": "draft",
    "DraftSteps": "draft",
    "Drift": "drift",
    "EngineFacts": "engine",
    "HostFacts": "host",
    "KVIndex": "attention",
    "Launch": "launch",
    "LayerSpec": "attention",
    "Lock": "lock",
    "Measurements": "measurements",
    "ModelFacts": "model",
    "PagedKV": "attention",
    "Plan": "plan",
    "Policy": "policy",
    "RaggedKV": "attention",
    "Requests": "launch",
    "RunnerBackends": "construction",
    "RunnerShape": "construction",
    "Stamp": "stamp",
    "TreeMask": "attention",
    "adopt": "adoption",
    "agree": "agreement",
    "build": "construction",
    "build_catalogue": "catalogue",
    "check_entry": "forward",
    "check_lock": "drift",
    "compare": "agreement",
    "compile_for": "compiled",
    "default_model": "model",
    "differences": "agreement",
    "discover": "discovery",
    "linear_attn_backends_in": "linear",
    "load_host": "host",
    "load_measurements": "tune_record",
    "load_model": "model",
    "lock_from_json": "lock",
    "lock_text": "lock",
    "locked_distributions": "lock",
    "make_launch": "launch",
    "make_lock": "lock",
    "plan_from_json": "plan_reading",
    "read_record": "records",
    "read_stamp": "stamp",
    "register": "registration",
    "resolve": "resolution",
    "resolve_job": "job",
    "resolve_on": "resolution",
    "stamp_linear_attn_backends": "linear",
    "this_host": "host",
    "write_record": "records",
    "unregister": "registration",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"backstamp.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'backstamp' has no attribute {name!r}; it has {', '.join(sorted(_HOMES))}")


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
