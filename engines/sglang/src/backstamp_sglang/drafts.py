"""The draft's loop and its extend, as SGLang's draft factory hands them to a draft worker.

In: SGLang's factory, when one of our names is asked for. Out: a container with a backend a step, or one backend, each
with the kernel's name that SGLang is to stamp on it. A container plans all its steps at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from backstamp.attention import AttentionBackend as ContractBackend
from backstamp.attention import Batch, DraftContainer
from backstamp.declarations import Phase
from backstamp.stamp import read_stamp
from backstamp_sglang.backend import BackstampAttnBackend, Part, Planned
from backstamp_sglang.step import Chains, draft_batch

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

__all__ = ["DraftLoop", "DraftStep", "create_draft"]


def create_draft(factory: DraftBackendFactory, *, in_loop: bool) -> tuple[str, object]:
    """What SGLang's factory builds for one of our names, and the stamp it puts on it: the kernel that runs.

    Raises:
        BackstampError: as the backend's own construction.
    """
    runner = factory.draft_model_runner
    if not in_loop:
        extend = BackstampAttnBackend(runner)
        return _stamp_of(extend), extend
    loop = DraftLoop(runner, Chains(factory.topk, factory.speculative_num_steps))
    return _stamp_of(loop.attn_backends[0]), loop


class DraftStep(BackstampAttnBackend):
    """One step of a loop: its kernel's own backend, planned by the loop."""

    def __init__(self, model_runner: ModelRunner, step: int) -> None:
        super().__init__(model_runner)
        self._at = step

    def take(self, part: Part, planned: Planned) -> None:
        """Hold what the loop planned for this step."""
        self._step[part] = planned

    def batch(self, part: Part, forward_batch: ForwardBatch, chains: Chains) -> Batch:
        """This step's rows."""
        return draft_batch(forward_batch, self._at, chains, self._slots(part), part.serving.index_forms)

    def _kernel(self, part: Part) -> ContractBackend[object]:
        return _loop_of(part).attn_backends[self._at]


class DraftLoop:
    """What SGLang's draft worker loops over: a backend a step, `num_steps - 1` of them."""

    needs_cpu_seq_lens = True

    def __init__(self, model_runner: ModelRunner, chains: Chains) -> None:
        """Build a step's backend for each step.

        Raises:
            BackstampError: as the backend's own construction.
        """
        self._chains = chains
        self.attn_backends = [DraftStep(model_runner, step) for step in range(chains.num_steps - 1)]

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan every step, before the first one runs.

        Raises:
            UnsupportedBatch: a step asks for what a kernel does not declare.
        """
        for part in set(self.attn_backends[0].parts["draft_decode"].values()):
            batches = [step.batch(part, forward_batch, self._chains) for step in self.attn_backends]
            states = _loop_of(part).plan(batches)
            for step, batch, state in zip(self.attn_backends, batches, states, strict=True):
                step.take(part, Planned(batch, state))


def _loop_of(part: Part) -> DraftContainer[object]:
    return cast("DraftContainer[object]", part.serving.backend)


def _stamp_of(backend: BackstampAttnBackend) -> str:
    """The one kernel SGLang is told of: the first layer's, where a plan gives unlike layers unlike ones."""
    phase: Phase = "draft_decode" if isinstance(backend, DraftStep) else "draft_extend"
    first = next(iter(backend.parts[phase].values()))
    return read_stamp(first.serving.backend).kernel
