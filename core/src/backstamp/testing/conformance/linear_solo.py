"""One declared row of the linear slot, alone: resolved with nothing else behind its key, and built by its real factory.

In: a plugin, one of its rows and a case. Out: the plan, and the stamped backend of the case's phase. The other phases,
and the layer of full attention, go to companions that accept everything and compute nothing.

.. versionadded:: 0.2
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from backstamp.attention import LinearBackend
from backstamp.catalogue import Catalogue
from backstamp.construction import RunnerShape, build
from backstamp.declarations import ANY, FEATURES, Offer, PageSizes
from backstamp.device_check import torch_device
from backstamp.engine import EngineFacts
from backstamp.launch import Requests, make_launch
from backstamp.plan import Plan
from backstamp.resolution import resolve
from backstamp.stamp import read_stamp
from backstamp.testing.conformance.linear_cases import LinearCase
from backstamp.testing.conformance.linear_row_cases import LINEAR_PHASES
from backstamp.testing.conformance.solo import COMPANION, NUM_STEPS, Alone, asked_by, load_alone

__all__ = ["LinearSolo"]

_ROWS: Final = 64
_TOKENS: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSolo(Alone):
    """One row of the linear slot of a plugin on one host."""

    def plan(self, case: LinearCase) -> Plan:
        """Resolve the case with this row behind its phase, over states of the case's order.

        Raises:
            BackstampError: the row does not serve the case, or not on this host.
        """
        asked: dict[str, object] = {"attention_backend": COMPANION, **asked_by(case.words)}
        asked |= {f"linear_attn_{phase}_backend": self.key for phase in LINEAR_PHASES}
        if case.phase == "verify" or "spec" in case.said:
            asked |= {"speculative_algorithm": "EAGLE", "speculative_num_steps": NUM_STEPS}
            asked["speculative_topk"] = 2 if "topk" in case.said else 1
        engine = EngineFacts(name="conformance", graph="uniform" if case.graph else "never")
        launch = make_launch(Requests(**asked))  # type: ignore[arg-type]
        return resolve(launch, engine, case.model(), self.host, self._catalogue(case))

    def build(self, case: LinearCase) -> tuple[LinearBackend[object], str]:
        """The stamped backend of the case's phase, and torch's name of its device.

        Raises:
            BackstampError: as `plan` and `backstamp.construction.build`. AssertionError: another kernel answers.
        """
        plan = self.plan(case)
        device = torch_device(plan.device)
        runner = RunnerShape(device=device, layers=case.layers(), max_rows=_ROWS, max_tokens=_TOKENS)
        backend = build(plan, runner, self._catalogue(case), load=load_alone).serving_linear_backend(case.phase)
        assert read_stamp(backend).kernel == self.offer.kernel
        return backend, device  # type: ignore[return-value]

    def _catalogue(self, case: LinearCase) -> Catalogue:
        others = [phase for phase in LINEAR_PHASES if phase != case.phase]
        recurrent = _companion_of(self.offer, case)
        dense = replace(recurrent, kernel=COMPANION, slot="attention", family="mha", state_layouts=())
        return self.catalogue(others, (recurrent, dense))


def _companion_of(offer: Offer, case: LinearCase) -> Offer:
    """A row for the other phases, that reads states of the case's order and no other: the plan's is that one."""
    return Offer(
        kernel=f"{COMPANION}-linear",
        slot="linear",
        factory="conformance_companion.backend:build",
        family=offer.family,
        device="any",
        archs=ANY,
        phases=frozenset({"prefill", "decode", "verify"}),
        draft_phases=frozenset(),
        dtypes=frozenset({"fp16", "bf16", "fp32"}),
        head_dims=ANY,
        page_sizes=PageSizes(preferred=1, multiple_of=1),
        prefix=True,
        features=FEATURES,
        graph="any",
        plan="device",
        deterministic=True,
        alignment_tokens=1,
        state_layouts=(case.order,),
        mask_format="internal_causal",
        priority=0,
    )
