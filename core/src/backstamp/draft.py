"""The draft's backends: the per-step container of the draft loop, and the factory a draft worker calls.

In: the draft's plan and runner. Out: `DraftSteps` (or a plugin's own container) and the draft-extend backend, both
stamped. The kernel comes from the plan; topk and the number of steps from the runner's speculative settings.

.. versionadded:: 0.1
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from backstamp.errors import BadInput, BuiltMismatch

if TYPE_CHECKING:
    from backstamp.attention import AttentionBackend, Batch, ParameterBackend
    from backstamp.construction import RunnerBackends

__all__ = ["DraftBackendFactory", "DraftSteps"]

State = TypeVar("State")


class DraftSteps(Generic[State]):
    """A draft loop over any decode backend: one backend a step, `num_steps - 1` of them, in step order."""

    def __init__(self, backends: Sequence[AttentionBackend[State]]) -> None:
        self.attn_backends = list(backends)

    def plan(self, batches: Sequence[Batch]) -> list[State]:
        """Plan every step: `batches[i]` holds the B * topk rows of step i.

        Raises:
            BuiltMismatch: not one batch a step.
        """
        if len(batches) != len(self.attn_backends):
            raise BuiltMismatch(
                "draft_decode container",
                needed=f"one batch a step: {len(self.attn_backends)}",
                found=str(len(batches)),
            )
        return [backend.plan(batch) for backend, batch in zip(self.attn_backends, batches, strict=True)]

    def refresh_parameters(self) -> None:
        """Let every step that keeps converted parameters convert them anew, after a reload of weights."""
        for backend in self.attn_backends:
            # an optional member of the call contract
            if hasattr(backend, "refresh_parameters"):
                cast("ParameterBackend[State]", backend).refresh_parameters()


class DraftBackendFactory:
    """What a draft worker asks for its backends, under the names the field knows."""

    def __init__(self, backends: RunnerBackends) -> None:
        """Hand out the backends of one draft runner.

        Raises:
            BadInput: a target's; its prefill half would answer a draft-extend.
        """
        plan = backends.plan
        if plan.role != "draft":
            raise BadInput("draft backends", needed="the backends of a draft", found=f"those of the {plan.role}")
        self._backends = backends

    def create_decode_backend(self) -> object | None:
        """The per-step container, or None where the draft takes a single step."""
        if self._backends.plan.num_steps <= 1:
            return None
        return self._backends.serving_attention_backend("draft_decode")

    def create_draft_extend_backend(self) -> object | None:
        """The backend of the draft-extend phase."""
        return self._backends.serving_attention_backend("draft_extend")
