"""One group of layers of a plan → one built, checked and stamped backend, or the steps of a draft loop.

In: a `GroupPlan`, the catalogue and the runner. Out: the plugin's own object. An answer that is not what the plan and
the declaration say is refused before it is stamped.

.. versionadded:: 0.1
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from backstamp.catalogue import Catalogue, Row
from backstamp.declarations import GraphLevel, Offer, Phase, Slot
from backstamp.draft import DraftSteps
from backstamp.errors import BackstampError, BuiltMismatch, ContainerWithoutChildren, FactoryFailed
from backstamp.factories import BuildRequest, Built
from backstamp.factory_loading import Factory
from backstamp.linear import stamped_linear_attn_backends
from backstamp.plan import Plan
from backstamp.plan_rows import GroupPlan
from backstamp.stamp import Stamp, is_container, parts_of, put_stamp, said, steps_of

if TYPE_CHECKING:
    from backstamp.attention import AttentionBackend
    from backstamp.construction import Runner

__all__ = ["BuildJob"]


@dataclass(frozen=True, slots=True)
class BuildJob:
    """One group of layers to build for."""

    plan: Plan
    runner: Runner
    catalogue: Catalogue
    group: GroupPlan
    phases: tuple[Phase, ...]
    load: Callable[[Row, Catalogue], Factory]
    slot: Slot = "attention"

    @property
    def who(self) -> str:
        of_slot = "linear " if self.slot == "linear" else ""
        kernel = f"backend {self.group.kernel!r} (plugin {self.group.plugin.name})"
        return f"{self.plan.role} {of_slot}{', '.join(self.phases)} {kernel}"

    def row(self) -> Row:
        """The declared row the plan accepted."""
        row = self.catalogue.row(self.slot, self.group)
        if row is not None:
            return row
        raise BuiltMismatch(
            self.who,
            needed=f"{self.group.plugin.distribution} {self.group.plugin.version} and its row for {self.group.family}",
            found="another set of plugins in this catalogue",
            fix="Resolve again here, or install what the plan names",
        )

    def leaf(self) -> object | None:
        """Build one backend; None where the factory answers none."""
        row = self.row()
        request = self._request(row.offer)
        factory = self.load(row, self.catalogue)
        try:
            answer = factory(request)
        except (KeyboardInterrupt, BackstampError):
            raise
        except BaseException as cause:  # SystemExit from a kernel library must not end an engine
            raise FactoryFailed(
                self.who,
                needed=f"factory {row.offer.factory} to build it",
                found=said(cause),
                fix="Report it to the plugin's author, or ask for another kernel",
            ) from cause
        self._check(answer, row, request)
        return answer[1]

    def steps(self) -> object | None:
        """Build the draft loop: the plugin's own container, or one leaf a step in `DraftSteps`."""
        count = self.plan.num_steps - 1
        first = self.leaf()
        if first is None:
            return None
        if is_container(first):
            if len(steps_of(first)) != count:
                raise BuiltMismatch(self.who, needed=f"{count} steps", found=str(len(steps_of(first))))
            return first
        if not self._runs(first):
            raise ContainerWithoutChildren(
                self.who,
                needed="a decode backend, or a container that exposes its steps as attn_backends",
                found=f"{type(first).__name__}, which has neither forward nor attn_backends",
            )
        leaves = [first, *(self.leaf() for _ in range(count - 1))]
        if None in leaves:
            raise BuiltMismatch(
                self.who, needed=f"a backend for each of {count} steps", found=f"none for step {leaves.index(None)}"
            )
        return DraftSteps(cast("list[AttentionBackend[object]]", leaves))

    def stamp(self, built: object) -> None:
        """Put the stamp on what was built."""
        of_slot = self.plan.phases if self.slot == "attention" or self.plan.linear is None else self.plan.linear.rows
        rows = {row.phase: row for row in of_slot}
        # a container of ours says nothing of whose code runs: its first leaf does
        leaf = next((part for part in parts_of(built) if not is_container(part)), built)
        origin_module = sys.modules.get(type(leaf).__module__)
        put_stamp(
            built,
            Stamp(
                kernel=self.group.kernel,
                slot=self.slot,
                role=self.plan.role,
                plugin=self.group.plugin,
                library=self.group.library,
                origin=str(getattr(origin_module, "__file__", None) or "built in memory"),
                sources=tuple((phase, rows[phase].source) for phase in self.phases),
                skipped=self.group.skipped,
            ),
        )

    def _runs(self, built: object) -> bool:
        try:
            return callable(getattr(built, "forward", None))
        except Exception as cause:  # a class may answer for its attributes with code of its own
            raise BuiltMismatch(
                self.who, needed="a backend whose forward can be read", found=f"one that raised {said(cause)}"
            ) from cause

    def _request(self, offer: Offer) -> BuildRequest:
        own = [layer for layer in self.runner.layers if layer.component == self.group.component]
        layers = tuple(layer for layer in own if layer.layer_id in self.group.layers)
        if self.runner.layers and not layers:
            ids = ", ".join(str(layer.layer_id) for layer in own)
            raise BuiltMismatch(
                self.who,
                needed=f"layers {self.group.layers} of component {self.group.component} in the runner",
                found=f"layers {ids}" if own else "none of that component",
                fix="" if own else "Give every LayerSpec its component, as the plan's groups name it",
            )
        wanted = dict(self.group.settings)
        softcaps = {layer.softcap for layer in layers}
        if "softcap" in offer.build_settings and layers and softcaps != {wanted.get("softcap", 0.0)}:
            found = ", ".join(str(softcap) for softcap in sorted(softcaps))
            needed = f"softcap {wanted.get('softcap', 0.0)}, as the model says, because it is compiled in"
            raise BuiltMismatch(self.who, needed=needed, found=f"layers with softcap {found}")
        graph: GraphLevel = self.plan.graph
        return BuildRequest(
            kernel=self.group.kernel,
            offer=offer,
            family=self.group.family,
            phases=self.phases,
            role=self.plan.role,
            layers=layers,
            dtype=self.plan.dtype,
            kv_dtype=self.plan.kv_dtype,
            page_size=self.plan.page_size,
            layout=dict(self.plan.layouts).get(self.slot, ""),
            device=self.runner.device,
            max_rows=self.runner.max_rows,
            max_tokens=self.runner.max_tokens,
            max_pages=self.runner.max_pages,
            max_kv_len=self.runner.max_kv_len,
            topk=self.plan.topk,
            num_steps=self.plan.num_steps,
            graph=graph,
            settings=wanted,
            sub_settings={
                # a setting of a kernel's insides has its name in it
                name: value
                for name, value in self.plan.sub_settings
                if f"_{self.group.kernel}_" in f"_{name}"
            },
            linear_attn_backends=stamped_linear_attn_backends(self.runner),
        )

    def _check(self, answer: Built, row: Row, request: BuildRequest) -> None:
        """Refuse an answer that is not what the plan and the declaration say."""
        if not isinstance(answer, tuple) or len(answer) < 2 or not isinstance(answer[0], str):
            raise BuiltMismatch(self.who, needed="Built(kernel, backend)", found=type(answer).__name__)
        name = answer[0]
        if self.catalogue.is_alias_only(name, self.slot):
            raise BuiltMismatch(
                self.who, needed="a kernel name", found=f"{name!r}, which is an alias and never a stamp"
            )
        if name != request.kernel:
            declared = {row.offer.kernel for rows in self.catalogue.rows.values() for row in rows}
            known = "another kernel" if name in declared else "a name nobody declared"
            raise BuiltMismatch(self.who, needed=repr(request.kernel), found=f"{name!r}, {known}")
        self._check_settings(answer[2] if len(answer) > 2 else {}, row, request)

    def _check_settings(self, reported: object, row: Row, request: BuildRequest) -> None:
        """Refuse an object that was compiled without what the model needs, or with what it does not."""
        if not isinstance(reported, Mapping):
            raise BuiltMismatch(self.who, needed="Built.settings to be a mapping", found=type(reported).__name__)
        for setting in sorted({*request.settings, *row.offer.build_settings}):
            # 0 is the value of a feature that is off
            wanted, found = request.settings.get(setting, 0.0), reported.get(setting)
            asked, number = setting in request.settings, type(found) in (int, float)
            if (number and found == wanted) or (found is None and not asked):
                continue
            needed = f"{setting} {wanted} compiled in" if asked else f"no {setting} compiled in"
            said_so = "not reported" if found is None else found if number else type(found).__name__
            raise BuiltMismatch(self.who, needed=needed, found=f"{setting} {said_so}")
