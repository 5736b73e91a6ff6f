"""Facts of one machine, frozen: probed here, recorded there, or a named profile.

In: this machine, a JSON file, or a name. Out: `HostFacts`. Every failed probe keeps one line of reason, and nothing
here initialises a driver in the calling process (`backstamp.probes` asks a child).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Final, Literal, NamedTuple, get_args

from backstamp.errors import BadHost
from backstamp.text import near

__all__ = ["Device", "HostFacts", "Probe", "load_host", "parse_host", "profile_names", "this_host"]

Device = Literal["cuda", "rocm", "npu", "musa", "xpu", "cpu"]
SCHEMA: Final = 1
_RUNTIMES: Final = ("cuda", "rocm", "cann", "musa")
_WHAT_IS_A_HOST: Final = "Record one with `backstamp hosts record`, or name one of `backstamp hosts list`"


class Probe(NamedTuple):
    """One question put to this machine: what was found, or the one line of reason why nothing was."""

    name: str
    ok: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """One machine.

    Attributes:
        name: profile name, file name, or "this host".
        device, arch: "cuda" and "9.0", "rocm" and "gfx942", "cpu" and "x86_64".
        device_index, origin: which device, and who numbered it ("runtime", "recorded", "profile").
        cpu_features: as the kernel reports them.
        runtimes: (name, version) pairs, for example ("cuda", "13.0").
        libraries: (distribution, version) pairs, canonical names; None on a described host without a list.
        probes: what was asked of this machine, failed or not.
        triton_interpreter: whether Triton kernels run in Triton's interpreter here.
    """

    name: str
    device: Device
    arch: str
    device_name: str = ""
    device_index: int = 0
    origin: str = "profile"
    cpu_features: frozenset[str] = frozenset()
    runtimes: tuple[tuple[str, str], ...] = ()
    libraries: tuple[tuple[str, str], ...] | None = None
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
            "cpu_features": sorted(self.cpu_features),
            "runtimes": dict(self.runtimes),
            "libraries": None if self.libraries is None else dict(self.libraries),
            "probes": [list(probe) for probe in self.probes],
            "triton_interpreter": self.triton_interpreter,
        }

    def to_json(self) -> str:
        """The text `backstamp hosts record` writes."""
        return json.dumps(self.as_json(), indent=1) + "\n"


def this_host(device: str | None = None, index: int = 0) -> HostFacts:
    """Probe this machine: its accelerator if it has one, else its CPU, or the device asked for.

    Raises:
        BadHost: an unknown device word, or a device this machine does not have; every probe's reason is told.
    """
    from backstamp.probes import probe_machine

    _check_device("--device", device)
    return probe_machine(device, index)


def profile_names() -> tuple[str, ...]:
    """The named hosts that ship, in the order of the file."""
    return tuple(_profiles())


def load_host(name_or_path: str) -> HostFacts:
    """A named profile, or a recorded file.

    Raises:
        BadHost: no such name or file, or the file does not hold one host.
    """
    profiles = _profiles()
    if name_or_path in profiles:
        return parse_host(profiles[name_or_path], name_or_path)
    path = Path(name_or_path)
    if not path.is_file():
        match = near(name_or_path, list(profiles))
        raise BadHost(
            f"host {name_or_path!r}",
            needed=f"a recorded file or one of {', '.join(profiles)}",
            found="neither a file nor a known name",
            fix=f"Did you mean {match!r}?" if match is not None else _WHAT_IS_A_HOST,
        )
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as cause:
        raise BadHost(f"host file {path}", needed="readable JSON", found=str(cause), fix=_WHAT_IS_A_HOST) from cause
    return parse_host(data, path.stem)


def parse_host(data: object, name: str) -> HostFacts:
    """Read one host, in the profile form or the recorded form.

    Raises:
        BadHost: a field is missing, unknown or of the wrong type; the field is named.
    """
    who = f"host {name}"
    if not isinstance(data, dict):
        raise BadHost(who, needed="a JSON object", found=type(data).__name__, fix=_WHAT_IS_A_HOST)
    if data.get("schema", SCHEMA) != SCHEMA:
        raise BadHost(who, needed=f"schema {SCHEMA}", found=repr(data["schema"]), fix=_WHAT_IS_A_HOST)
    recorded = "schema" in data
    device = _text(who, data, "device")
    _check_device(f"{who}, field device", device)
    pairs = _pairs(who, data, "runtimes") or {key: _text(who, data, key) for key in _RUNTIMES if key in data}
    libraries = _pairs(who, data, "libraries")
    return HostFacts(
        name=_text(who, data, "name") if recorded else name,
        device=device,  # type: ignore[arg-type]
        arch=_text(who, data, "arch"),
        device_name=str(data.get("device_name" if recorded else "name", "")),
        device_index=_number(who, data, "device_index"),
        origin=str(data.get("origin", "recorded")) if recorded else "profile",
        cpu_features=frozenset(_words(who, data, "cpu_features")),
        runtimes=tuple(sorted(pairs.items())),
        libraries=None if libraries is None else tuple(sorted(libraries.items())),
        probes=tuple(_probe(who, item) for item in _list(who, data, "probes")),
        triton_interpreter=data.get("triton_interpreter") is True,
    )


def _profiles() -> dict[str, object]:
    text = files("backstamp").joinpath("hosts/profiles.json").read_text("utf-8")
    profiles: dict[str, object] = json.loads(text)
    return {name: facts for name, facts in profiles.items() if name != "_"}


def _check_device(who: str, device: str | None) -> None:
    if device is not None and device not in get_args(Device):
        match = near(device, list(get_args(Device)))
        raise BadHost(
            who,
            needed=f"one of {', '.join(get_args(Device))}",
            found=repr(device),
            fix=f"Did you mean {match!r}?" if match is not None else "",
        )


def _text(who: str, data: Mapping[str, object], field: str) -> str:
    value = data.get(field)
    if not isinstance(value, str) or not value.strip():
        raise BadHost(f"{who}, field {field}", needed="a word", found=repr(value), fix=_WHAT_IS_A_HOST)
    return value


def _number(who: str, data: Mapping[str, object], field: str) -> int:
    value = data.get(field, 0)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise BadHost(f"{who}, field {field}", needed="a whole number >= 0", found=repr(value), fix=_WHAT_IS_A_HOST)
    return value


def _list(who: str, data: Mapping[str, object], field: str) -> list[object]:
    value = data.get(field, [])
    if not isinstance(value, list):
        raise BadHost(f"{who}, field {field}", needed="a list", found=repr(value), fix=_WHAT_IS_A_HOST)
    return value


def _words(who: str, data: Mapping[str, object], field: str) -> list[str]:
    value = _list(who, data, field)
    words = [item for item in value if isinstance(item, str)]
    if len(words) != len(value):
        raise BadHost(f"{who}, field {field}", needed="a list of words", found=repr(value), fix=_WHAT_IS_A_HOST)
    return words


def _pairs(who: str, data: Mapping[str, object], field: str) -> dict[str, str] | None:
    value = data.get(field)
    if value is None:
        return None
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise BadHost(f"{who}, field {field}", needed="names with versions", found=repr(value), fix=_WHAT_IS_A_HOST)
    return {str(key): str(version) for key, version in value.items()}


def _probe(who: str, item: object) -> Probe:
    if not isinstance(item, list) or len(item) != 3:
        raise BadHost(f"{who}, field probes", needed="[name, ok, reason]", found=repr(item), fix=_WHAT_IS_A_HOST)
    return Probe(str(item[0]), item[1] is True, str(item[2]))
