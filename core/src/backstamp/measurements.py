"""What kernels were measured at on a machine: a frozen record that `auto` may rank by.

In: times that `backstamp.tune` took and `backstamp.tune_record` keeps. Out: the time of one declared row for one class
of work, or None. It times nothing, reads no file, and never guesses a time from another class's.

.. versionadded:: 0.1
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from backstamp.declarations import Phase, Slot
from backstamp.errors import BadInput
from backstamp.host import HostFacts
from backstamp.plan_rows import LibraryRef
from backstamp.text import plain

__all__ = [
    "DEFAULT_WORKLOAD",
    "Load",
    "Machine",
    "Measurements",
    "Timed",
    "WorkClass",
    "Workload",
    "bucket_of",
    "workload_of",
]


class Load(NamedTuple):
    """So many rows (requests) a step, each over so many readable tokens."""

    rows: int
    tokens: int


class Workload(NamedTuple):
    """What a launch is expected to serve, a phase; prefill reads whole prompts, with nothing cached before them."""

    prefill: Load = Load(1, 2048)
    decode: Load = Load(32, 4096)
    verify: Load = Load(32, 4096)

    def load_of(self, phase: Phase) -> Load | None:
        """The load of a phase; None for a draft's own, which nothing times."""
        return {"prefill": self.prefill, "decode": self.decode, "verify": self.verify}.get(phase)


DEFAULT_WORKLOAD: Final = Workload()
_MOST: Final = 1 << 24


class WorkClass(NamedTuple):
    """Work whose kernels are compared with each other: exact in what the model and the launch are, and in buckets, the
    next power of two, of what traffic brings.

    `layer` is `LayerFacts.describe()` with the heads one rank has; `page_size` is what the launch or its engine fixes,
    0 where each kernel brings its own; `q_len` are the tokens a row asks for; `tree` whether they are a tree.
    `kv_len` is 0 in the linear slot, whose states do not grow.
    """

    slot: Slot
    phase: Phase
    layer: str
    dtype: str
    kv_dtype: str
    page_size: int
    q_len: int
    tree: bool
    rows: int
    kv_len: int

    def describe(self) -> str:
        """The class in one line."""
        of_rows = f"{self.rows} x {self.q_len}{' (tree)' if self.tree else ''}"
        over = f" over {self.kv_len} tokens" if self.kv_len else ""
        kv = "" if self.kv_dtype in ("same", self.dtype) else f", KV {self.kv_dtype}"
        pages = f", pages of {self.page_size}" if self.page_size else ""
        return f"{self.phase} {of_rows}{over}, {self.layer}, {self.dtype}{kv}{pages}"


class Timed(NamedTuple):
    """The median time of one call of `forward` of one layer, in microseconds.

    `row` is the position of the declared row among its kernel's, `distribution` and `version` are its plugin's, and
    `page_size` is the one it ran with. A row of other versions is another row.
    """

    work: WorkClass
    kernel: str
    row: int
    distribution: str
    version: str
    library: LibraryRef | None
    page_size: int
    microseconds: float

    @property
    def key(self) -> tuple[object, ...]:
        """What was timed: all but how long it took and the page size it ran with, which no resolve asks about."""
        return self[:-2]


class Machine(NamedTuple):
    """What a time depends on beside the kernel's own versions; two machines that are equal in it share a record.

    `cpu_features` is a digest, empty where the device is no CPU; `runtimes` are names with versions, the driver's too.
    """

    device: str
    arch: str
    device_name: str
    cpu_arch: str
    cpu_features: str
    runtimes: tuple[tuple[str, str], ...]
    torch: str
    triton: str

    @classmethod
    def of(cls, host: HostFacts) -> Machine:
        """The machine these facts are of; what they do not say is empty."""
        libraries = dict(host.libraries or ())
        features = " ".join(sorted(host.cpu_features)) if host.device == "cpu" else ""
        return cls(
            device=host.device,
            arch=host.arch,
            device_name=host.device_name,
            cpu_arch=host.cpu_arch,
            cpu_features=_digest(features) if features else "",
            runtimes=tuple(sorted(host.runtimes)),
            torch=libraries.get("torch", ""),
            triton=libraries.get("triton", ""),
        )

    @property
    def key(self) -> str:
        """Sixteen digits that stand for the machine, as in the name of its record."""
        return _digest(repr(tuple(self)))

    def as_json(self) -> dict[str, object]:
        """The machine for tools."""
        return {**self._asdict(), "runtimes": dict(self.runtimes)}

    def unlike(self, other: Machine) -> str:
        """The first thing in which another machine differs, and both values; empty where they are one."""
        for name, ours, theirs in zip(self._fields, self, other, strict=True):
            if ours != theirs:
                return f"{name} {_said(ours)} there, {_said(theirs)} here"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """The times of one machine, and the workload this launch is ranked by."""

    machine: Machine
    rows: tuple[Timed, ...] = ()
    workload: Workload = DEFAULT_WORKLOAD

    def time_of(
        self,
        work: WorkClass,
        kernel: str,
        row: int,
        plugin: tuple[str, str],
        library: LibraryRef | None,
    ) -> float | None:
        """The time of a declared row in microseconds a layer, or None if these versions of it were not measured."""
        for timed in self.rows:
            named = (timed.kernel, timed.row, (timed.distribution, timed.version), timed.library)
            if named == (kernel, row, plugin, library) and timed.work == work:
                return timed.microseconds
        return None


def workload_of(words: Mapping[str, str], who: str = "workload") -> Workload:
    """The workload of words like {"decode": "64x8192"}, the default for each phase they do not name.

    Raises:
        BadInput: a phase without a load, or what is not two whole numbers from 1 to 2**24.
    """
    loads: dict[str, Load] = {}
    for phase, text in words.items():
        if phase not in Workload._fields:
            needed = f"one of {', '.join(Workload._fields)}"
            raise BadInput(f"{who} {plain(phase)}", needed=needed, found=plain(repr(phase)))
        found = re.fullmatch(r"([0-9]{1,8})x([0-9]{1,8})", text)
        load = Load(*(int(number) for number in found.groups())) if found is not None else Load(0, 0)
        if not (1 <= load.rows <= _MOST and 1 <= load.tokens <= _MOST):
            needed = f"ROWSxTOKENS, whole numbers from 1 to {_MOST}, for example 64x8192"
            raise BadInput(f"{who} {phase}", needed=needed, found=plain(repr(text)))
        loads[phase] = load
    return DEFAULT_WORKLOAD._replace(**loads)


def bucket_of(number: int) -> int:
    """The power of two at or above a number >= 1."""
    return 1 << (number - 1).bit_length()


def _digest(text: str) -> str:
    # a resolve without times is spared the import
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _said(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(f"{name} {version}" for name, version in value) or "unknown"
    return str(value) or "unknown"
