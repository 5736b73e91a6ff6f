"""In a spawned process that was asked for Backstamp: plans before weights, and drafts of ours from SGLang's factory.

In: SGLang's hooks on `ModelRunner.load_model` and `DraftBackendFactory._create_backend`. Out: a told plan and imported
kernels, or our error from inside SGLang's start; and SGLang's own map of draft backends with our names in it. It
changes nothing else of what it hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from backstamp.declarations import Role
from backstamp_sglang.drafts import create_draft
from backstamp_sglang.facts import is_asked, names_in
from backstamp_sglang.runner import runner_of

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

__all__ = ["install"]

_LOAD: Final = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
_DRAFT: Final = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"
_installed: list[str] = []


def install() -> None:
    """Hook once a process; SGLang applies hooks when it has loaded all its plugins."""
    if not _installed:
        HookRegistry.register(_LOAD, _plan_first, HookType.BEFORE)
        HookRegistry.register(_DRAFT, _open_to_ours, HookType.AROUND)
        _installed.extend((_LOAD, _DRAFT))


def _plan_first(runner: ModelRunner) -> None:
    role: Role = "draft" if runner.is_draft_worker else "target"
    if is_asked(resolved_view(runner.server_args), role):
        runner_of(runner)


def _open_to_ours(
    create: Callable[..., object],
    factory: DraftBackendFactory,
    backend_name: str,
    backend_map: Mapping[str, Callable[[], tuple[str, object]]],
    error_template: str,
    stamps_children: bool = False,
) -> object:
    """SGLang picks from the map and stamps what it gets, its children too where they are the steps of a loop."""
    view = resolved_view(factory.draft_model_runner.server_args)
    ours = {name: partial(create_draft, factory, in_loop=stamps_children) for name in names_in(view)}
    return create(factory, backend_name, {**backend_map, **ours}, error_template, stamps_children=stamps_children)
