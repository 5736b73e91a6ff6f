"""In a spawned process that was asked for Backstamp: the plan is made and told before the runner reads a weight.

In: SGLang's hook on `ModelRunner.load_model`. Out: a told plan and imported kernels, or our error from inside SGLang's
start. It changes neither the arguments nor the answer of what it hooks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from backstamp_sglang.facts import names_in
from backstamp_sglang.runner import runner_of

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

__all__ = ["HOOKED", "install"]

#: What is hooked, and only where one of our names was asked for.
HOOKED: Final = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
_installed: list[str] = []


def install() -> None:
    """Hook once a process; SGLang applies hooks when it has loaded all its plugins."""
    if not _installed:
        HookRegistry.register(HOOKED, _plan_first, HookType.BEFORE)
        _installed.append(HOOKED)


def _plan_first(runner: ModelRunner) -> None:
    if names_in(resolved_view(runner.server_args)):
        runner_of(runner)
