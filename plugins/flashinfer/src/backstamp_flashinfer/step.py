"""What `forward` runs a layer with: the planned step of its KV group, and what is known of the layer.

In: nothing of its own; the backend in `attention.py` fills it. Out: the host half of a step, its plans by kind of
layer, and each layer's kind. It holds no keys and launches nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor

from backstamp.attention import Batch, LayerSpec, PagedKV
from backstamp.step_checks import IndexForm
from backstamp_flashinfer.routes import LayerKind
from backstamp_flashinfer.rows import HostRows
from backstamp_flashinfer.wrappers import Planned, WrapperPool

__all__ = ["Keys", "KnownLayer", "Step"]

#: Where a layer's keys lie: in pages, in pages with values of other strides, or in no cache.
Keys: TypeAlias = Literal["paged", "apart", "ragged"]


class Step:
    """A planned step of one KV group.

    Attributes:
        batch: the batch, whose tree is read in `forward`. form: how its pages are listed, "none" where there are none.
        rows: the host half of a step over pages. pages: its page list on the device.
        ragged: the host half of the same step over ragged keys, read when a layer brings them.
        capture: buffers stay at their addresses, for a graph to record.
        plans: by kind of layer and where its keys lie.
    """

    __slots__ = ("_pool", "batch", "capture", "form", "pages", "plans", "ragged", "rows")

    def __init__(self, pool: WrapperPool) -> None:
        self._pool = pool
        self.batch: Batch
        self.form: IndexForm
        self.rows: HostRows | None = None
        self.ragged: HostRows | None = None
        self.pages: Tensor | None = None
        self.capture = False
        self.plans: dict[tuple[LayerKind, Keys], Planned] = {}

    def __del__(self) -> None:
        # what a graph records is never handed to another step
        if not self.capture:
            self.give_back()

    def give_back(self) -> None:
        """Hand its wrappers on. The garbage collector may call this: it must not wait, nor ask the device anything."""
        for planned in self.plans.values():
            self._pool.give(planned)
        self.plans.clear()

    def rows_of(self, keys: Keys) -> HostRows:
        """The host half for one place of keys."""
        rows = self.ragged if keys == "ragged" else self.rows
        assert rows is not None, "a step without tokens returns before it asks"
        return rows


def _no_cache() -> None:
    return None


@dataclass(slots=True)
class KnownLayer:
    """A layer, what the library is planned with for it, and where the keys of its last cache lie.

    `kv` answers that cache, or None once it is gone: it is not kept alive.
    """

    spec: LayerSpec
    kind: LayerKind
    kv: Callable[[], PagedKV | None] = _no_cache
    keys: Keys = "paged"
