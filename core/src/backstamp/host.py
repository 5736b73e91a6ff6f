"""Third step of the flow: facts of one machine, frozen: probed here, recorded there, or a named profile.

In: this machine, a JSON file, or a name. Out: `HostFacts`. Every failed probe keeps one line of reason, and nothing
here initialises a driver in the calling process (`backstamp.probes` asks a child). A fact nobody knows is left out,
never filled in.

.. versionadded:: 0.1
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from pkgutil import get_data
from typing import Final, Literal, NamedTuple, cast, get_args

from backstamp.errors import BadHost
from backstamp.host_fields import SCHEMA, WHAT_IS_A_HOST, HostFields
from backstamp.text import near, plain

__all__ = [
    "Accelerator",
    "Device",
    "HostFacts",
    "Origin",
    "Probe",
    "load_host",
    "parse_host",
    "profile_names",
    "record_host",
    "this_host",
]

Device = Literal["cuda", "rocm", "npu", "musa", "xpu", "cpu"]
#: Who numbered a device: torch's runtime here, the driver's management tool here, a recorded file, or a profile.
Origin = Literal["runtime", "management", "recorded", "profile"]
_RUNTIMES: Final = ("cuda", "rocm", "cann", "musa")
#: What a host file may say: recorded by `record_host`, or written by hand as a profile is.
_RECORDED_FIELDS: Final = (
    *("schema", "name", "device", "arch", "device_name", "device_index", "origin", "cpu_arch", "cpu_features"),
    *("runtimes", "libraries", "devices", "probes", "triton_interpreter"),
)
_PROFILE_FIELDS: Final = ("device", "arch", "name", "cpu_arch", "cpu_features", "libraries", *_RUNTIMES)


class Probe(NamedTuple):
    """One question put to this machine: what was found, or the one line of reason why nothing was."""

    name: str
    ok: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One visible accelerator, under the number its runtime gives it."""

    device: Device
    index: int
    arch: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """One machine.

    Attributes:
        name: profile name, file name, or "this host".
        device, arch: "cuda" and "9.0", "rocm" and "gfx942", "cpu" and "x86_64".
        device_index, origin: which device, and who numbered it.
        cpu_arch: "x86_64", "aarch64"; "" where a described machine does not say.
        cpu_features: as the kernel reports them.
        runtimes: (name, version) pairs, for example ("cuda", "13.0"); of a CPU of this machine, how many "cpus" this
            process may use and how many "threads" its environment sets.
        libraries: (distribution, version) pairs, canonical names; None on a described host without a list.
        devices: every accelerator the runtime sees, in its order.
        probes: what was asked of this machine, failed or not.
        triton_interpreter: whether Triton kernels run in Triton's interpreter here.
    """

    name: str
    device: Device
    arch: str
    device_name: str = ""
    device_index: int = 0
    origin: Origin = "profile"
    cpu_arch: str = ""
    cpu_features: frozenset[str] = frozenset()
    runtimes: tuple[tuple[str, str], ...] = ()
    libraries: tuple[tuple[str, str], ...] | None = None
    devices: tuple[Accelerator, ...] = ()
    probes: tuple[Probe, ...] = ()
    triton_interpreter: bool = False

    def as_json(self) -> dict[str, object]:
        """The facts for tools; `parse_host` reads them back equal."""
        return {
            "schema": SCHEMA,
            "name": self.name,
            "device": self.device,
            "arch": self.arch,
            "device_name": self.device_name,
            "device_index": self.device_index,
            "origin": self.origin,
            "cpu_arch": self.cpu_arch,
            "cpu_features": sorted(self.cpu_features),
            "runtimes": dict(self.runtimes),
            "libraries": None if self.libraries is None else dict(self.libraries),
            "devices": [[item.device, item.index, item.arch, item.name] for item in self.devices],
            "probes": [list(probe) for probe in self.probes],
            "triton_interpreter": self.triton_interpreter,
        }

    def to_json(self) -> str:
        """The text `backstamp hosts record` writes; the same facts give the same bytes."""
        return json.dumps(self.as_json(), indent=1) + "\n"


def this_host(device: str | None = None, index: int = 0) -> HostFacts:
    """Probe this machine: its accelerator if it has one, else its CPU, or the device asked for.

    Raises:
        BadHost: an unknown device word, or a device this machine does not have; every probe's reason is told.
    """
    # probing needs subprocess and importlib_metadata, which a described host does not
    from backstamp.probes import probe_machine

    if device is not None:
        _device("--device", device)
    return probe_machine(device, index)


def record_host(device: str | None = None, index: int = 0) -> str:
    """This machine's facts as the JSON text of a host file.

    Raises:
        BadHost: as `this_host`.
    """
    return this_host(device, index).to_json()


def profile_names() -> tuple[str, ...]:
    """The named hosts that ship, in the order of the file."""
    return tuple(_profiles())


def load_host(name_or_path: str | Path) -> HostFacts:
    """A named profile, or a recorded file.

    Raises:
        BadHost: no such name or file, or the file does not hold one host.
    """
    profiles = _profiles()
    if isinstance(name_or_path, str) and name_or_path in profiles:
        return parse_host(profiles[name_or_path], name_or_path)
    path = Path(name_or_path)
    if not _is_file(path):
        match = near(str(name_or_path), list(profiles))
        raise BadHost(
            f"host {str(name_or_path)!r}",
            needed=f"a recorded file or one of {', '.join(profiles)}",
            found="neither a file nor a known name",
            fix=f"Did you mean {match!r}?" if match is not None else WHAT_IS_A_HOST,
        )
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as cause:
        raise BadHost(
            f"host file {path}", needed="readable JSON", found=plain(str(cause)), fix=WHAT_IS_A_HOST
        ) from cause
    return parse_host(data, path.stem)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        # a name no file system takes
        return False


def parse_host(data: object, name: str) -> HostFacts:
    """Read one host: the recorded form, which has a schema and its own name, or the short form of a profile.

    Raises:
        BadHost: a field is missing, unknown or of the wrong type; the field is named.
    """
    fields = HostFields(data, f"host {name}")
    fields.only(_RECORDED_FIELDS if fields.recorded else _PROFILE_FIELDS)
    device = _device(f"host {name}, field device", fields.text("device"))
    arch = fields.text("arch")
    if device == "cuda" and not re.fullmatch(r"\d{1,3}\.\d{1,2}", arch):
        raise fields.bad("arch", 'a compute capability such as "9.0"', repr(arch))
    runtimes = fields.pairs("runtimes") if fields.recorded else fields.texts(_RUNTIMES)
    libraries = fields.pairs("libraries")
    origin = fields.text("origin", "recorded") if fields.recorded else "profile"
    if origin not in get_args(Origin):
        raise fields.bad("origin", f"one of {', '.join(get_args(Origin))}", repr(origin))
    return HostFacts(
        name=fields.text("name") if fields.recorded else name,
        device=device,
        arch=arch,
        device_name=fields.text("device_name" if fields.recorded else "name", ""),
        device_index=fields.whole("device_index"),
        origin=cast("Origin", origin),
        cpu_arch=fields.text("cpu_arch", arch if device == "cpu" else ""),
        cpu_features=frozenset(fields.words("cpu_features")),
        runtimes=tuple(sorted((runtimes or {}).items())),
        libraries=None if libraries is None else _libraries(libraries),
        devices=_accelerators(fields, f"host {name}, field devices"),
        probes=_probes(fields),
        triton_interpreter=fields.flag("triton_interpreter"),
    )


def _profiles() -> dict[str, object]:
    profiles: dict[str, object] = json.loads(get_data("backstamp", "hosts/profiles.json") or b"")
    return {name: facts for name, facts in profiles.items() if name != "_"}


def _device(who: str, word: str) -> Device:
    known = get_args(Device)
    if word not in known:
        match = near(word, list(known))
        fix = f"Did you mean {match!r}?" if match is not None else ""
        raise BadHost(who, needed=f"one of {', '.join(known)}", found=repr(word), fix=fix)
    return cast("Device", word)


def _accelerators(fields: HostFields, who: str) -> tuple[Accelerator, ...]:
    rows = cast("list[tuple[str, int, str, str]]", fields.rows("devices", (str, int, str, str)))
    return tuple(Accelerator(_device(who, word), index, arch, label) for word, index, arch, label in rows)


def _probes(fields: HostFields) -> tuple[Probe, ...]:
    return tuple(Probe(*row) for row in cast("list[tuple[str, bool, str]]", fields.rows("probes", (str, bool, str))))


def _libraries(pairs: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((re.sub(r"[-_.]+", "-", name).lower(), version) for name, version in pairs.items()))
