"""What is wrong with this installation: versions, shadowed distributions, broken plugins, failed probes.

In: a `Discovery`, its catalogue and the host. Out: a list of findings, each with what to do. A plugin that kills or
hangs its process is found here, in a child with a timeout, and nowhere else.

.. versionadded:: 0.1
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import importlib_metadata

from backstamp.catalogue import Catalogue
from backstamp.discovery import Found, check_entry
from backstamp.host import HostFacts
from backstamp.installed import entries_of, list_installed
from backstamp.ownership import Owners
from backstamp.registration import IN_PROCESS
from backstamp.text import plain
from backstamp.watching import Seen, read_report

__all__ = ["TIMEOUT_S", "Finding", "examine", "find_killers"]

#: A plugin module takes milliseconds; a cold disk, or a plugin that imports torch all the same, takes longer.
TIMEOUT_S: Final = 60.0


class Finding(NamedTuple):
    """One line of the report; `level` is "ok", "note" or "fault"."""

    level: str
    subject: str
    text: str
    fix: str = ""

    def as_json(self) -> dict[str, str]:
        """The finding for tools."""
        return self._asdict()


def examine(catalogue: Catalogue, host: HostFacts, timeout_s: float = TIMEOUT_S) -> tuple[Finding, ...]:
    """Every finding, in the order core, plugins, names, host; each plugin gets `timeout_s` to be imported in."""
    findings = [_version(name) for name in ("backstamp", "torch", "triton")]
    for found in catalogue.found:
        findings += _plugin(found, timeout_s)
    for failure in catalogue.failures:
        who = f"plugin {failure.plugin.name} ({failure.plugin.distribution} {failure.plugin.version})"
        findings.append(Finding("fault", who, failure.cause, f"Mend or uninstall {failure.plugin.distribution}"))
    for conflict in catalogue.conflicts.values():
        owners = ", ".join(conflict.distributions)
        findings.append(Finding("fault", f"name {conflict.name!r}", f"claimed by {owners}", "Uninstall one of them"))
    findings += [Finding("note", "discovery", plain(note)) for note in catalogue.notes]
    findings += [
        Finding("ok" if probe.ok else "note", f"probe {probe.name}", plain(probe.reason)) for probe in host.probes
    ]
    return tuple(findings)


def find_killers(timeout_s: float = TIMEOUT_S) -> tuple[Finding, ...]:
    """Plugins that end or hang the process that imports them, each tried in a child; none where discovery survives."""
    code = "import sys; from backstamp.discovery import discover; word = sys.stdin.readline(); discover(); print(word)"
    word = secrets.token_hex(16)
    child = _child(["-c", code], word, timeout_s)
    if child.fault is None and word in child.stdout:
        return ()
    listing = list_installed()
    owners = Owners(listing.everything)
    findings = []
    for installed in listing.plugins:
        for entry in entries_of(installed, []):
            who = f"plugin {entry.name} ({installed.name} {installed.version})"
            try:
                check_entry(installed, entry, owners, who)
            except (ImportError, ValueError):
                # discovery refuses it without importing it, and so does this
                continue
            fault = _import_in_child(entry.target, (), timeout_s)
            if isinstance(fault, str):
                findings.append(Finding("fault", who, fault, f"Mend or uninstall {installed.name}"))
    return tuple(findings)


def _import_in_child(target: str, factories: Sequence[str], timeout_s: float) -> Seen | str:
    """What importing a plugin did to a child process, or what went wrong there."""
    word = secrets.token_hex(16)
    child = _child(["-m", "backstamp.watching", target, *factories], word, timeout_s)
    try:
        seen = read_report(child.stdout, word)
    except ValueError:
        seen = None
    if child.fault is not None or seen is None:
        return child.fault or "ends the process before its import is over, exit status 0"
    return seen


class _Child(NamedTuple):
    stdout: str
    fault: str | None


def _child(arguments: Sequence[str], word: str, timeout_s: float) -> _Child:
    """Run Python with one line of input; a fault is how it ended, in the last line it left."""
    # a session of its own: what the plugin started would keep the pipes open after it is gone
    with subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            stdout, stderr = process.communicate(f"{word}\n", timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return _Child("", f"hangs at import: no answer in {timeout_s:g} s")
        finally:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode == 0:
        return _Child(stdout, None)
    ended = f"ends the process, {_status(process.returncode)}"
    return _Child(stdout, plain((stderr.strip().splitlines()[-1:] or [ended])[0] if process.returncode > 0 else ended))


def _status(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def _version(name: str) -> Finding:
    try:
        return Finding("ok", name, importlib_metadata.version(name))
    except importlib_metadata.PackageNotFoundError:
        return Finding("note", name, "not installed")
    except (KeyError, OSError, ValueError) as cause:
        return Finding("fault", name, plain(f"unreadable metadata: {cause}"), f"Reinstall {name}")


def _plugin(found: Found, timeout_s: float) -> Iterable[Finding]:
    """Import the plugin in a child: its declarations were read, now see that it loads, what that does, and that its
    factories exist."""
    who = f"plugin {found.plugin.name} ({found.plugin.distribution} {found.plugin.version})"
    kernels = ", ".join(dict.fromkeys(offer.kernel for offer in found.declared.offers)) or "no kernels"
    if found.plugin.distribution == IN_PROCESS:
        fix = "Ship it as an entry point for workers to find"
        yield Finding("note", who, f"{kernels}; registered by {found.module} in this process alone", fix)
        return
    factories = dict.fromkeys(offer.factory.partition(":")[0] for offer in found.declared.offers)
    seen = _import_in_child(found.module, tuple(factories), timeout_s)
    mend = f"Mend or uninstall {found.plugin.distribution}"
    if isinstance(seen, str):
        yield Finding("fault", who, seen, mend)
        return
    if seen.drivers:
        text = f"touches a driver when imported: {', '.join(seen.drivers)}; workers forked afterwards fail"
        yield Finding("fault", who, plain(text), mend)
    if seen.changed:
        yield Finding("fault", who, plain(f"changes Backstamp itself when imported: {', '.join(seen.changed)}"), mend)
    if seen.heavy:
        text = f"imports {', '.join(seen.heavy)}: plugin.py is declarations, and imports backstamp alone"
        yield Finding("note", who, text, "Import the kernel library in backend.py")
    yield Finding("ok", who, plain(f"{kernels}; read from {found.origin}"))
