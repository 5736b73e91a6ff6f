"""In a spawned process that was asked for Backstamp: plans before weights, and our kernels where SGLang takes none.

In: SGLang's hooks on `ModelRunner.load_model`, `DraftBackendFactory._create_backend` and, where linear kernels are
asked for, the construction of its backend for gated delta nets. Out: a told plan and imported kernels, or our error
from inside SGLang's start; its map of draft backends with our names in it. It changes nothing else of what it hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from backstamp.declarations import Role
from backstamp_sglang.asked import is_asked, names_in
from backstamp_sglang.drafts import create_draft
from backstamp_sglang.runner import runner_of

if TYPE_CHECKING:
    from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

__all__ = ["install"]

_LOAD: Final = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
_DRAFT: Final = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"
_LINEAR: Final = "sglang.srt.layers.attention.linear.gdn_backend.GDNAttnBackend.__init__"


def install(linear: bool) -> None:
    """Hook the runners; SGLang applies a hook to its target once, when it has loaded all its plugins."""
    HookRegistry.register(_LOAD, _plan_first, HookType.BEFORE)
    HookRegistry.register(_DRAFT, _open_to_ours, HookType.AROUND)
    if linear:
        # its module imports kernels that a model without recurrences does not need
        HookRegistry.register(_LINEAR, _with_ours, HookType.AROUND)


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


def _with_ours(construct: Callable[..., None], backend: GDNAttnBackend, model_runner: ModelRunner) -> None:
    from backstamp_sglang.linear import build_with_ours

    build_with_ours(construct, backend, model_runner)
