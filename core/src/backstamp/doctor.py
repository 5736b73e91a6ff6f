"""What is wrong with this installation: versions, shadowed distributions, broken plugins, failed probes.

In: a `Discovery`, its catalogue and the host. Out: a list of findings, each with what to do. A plugin that kills or
hangs its process is found here, in a child with a timeout, and nowhere else.

.. versionadded:: 0.1
"""

from __future__ import annotations

import subprocess
import sys
from typing import NamedTuple

import importlib_metadata

from backstamp.catalogue import Catalogue
from backstamp.discovery import GROUP, Found
from backstamp.host import HostFacts
from backstamp.text import plain

__all__ = ["Finding", "examine", "find_killers"]

_TIMEOUT_S = 60.0


class Finding(NamedTuple):
    """One line of the report; `level` is "ok", "note" or "fault"."""

    level: str
    subject: str
    text: str
    fix: str = ""

    def as_json(self) -> dict[str, str]:
        """The finding for tools."""
        return self._asdict()


def examine(catalogue: Catalogue, host: HostFacts) -> tuple[Finding, ...]:
    """Every finding, in the order core, plugins, names, host."""
    findings = [_version(name) for name in ("backstamp", "torch", "triton")]
    for found in catalogue.found:
        findings.append(_plugin(found))
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


def find_killers() -> tuple[Finding, ...]:
    """Plugins that end or hang the process that imports them, each tried in a child; none where discovery survives."""
    if _run("from backstamp.discovery import discover; discover()") is None:
        return ()
    findings = []
    for entry in sorted(importlib_metadata.entry_points(group=GROUP), key=lambda entry: entry.name):
        fault = _in_child(entry.value)
        if fault is not None:
            findings.append(Finding("fault", f"plugin {entry.name} ({entry.value})", fault, "Mend or uninstall it"))
    return tuple(findings)


def _in_child(module: str, *factories: str) -> str | None:
    """What goes wrong when a plugin is imported and its factory modules are looked for, or None."""
    code = (
        "import sys, importlib.util; from backstamp.discovery import import_plugin; import_plugin(sys.argv[1])\n"
        "for name in sys.argv[2:]:\n"
        "    if importlib.util.find_spec(name) is None:\n"
        "        raise ModuleNotFoundError(f'factory module {name} does not exist')\n"
    )
    return _run(code, module, *factories)


def _run(code: str, *arguments: str) -> str | None:
    """The last line a child leaves when it fails, hangs, or ends before its last statement; None where it is well."""
    program = [sys.executable, "-c", f"{code}\nprint('REACHED')", *arguments]
    try:
        child = subprocess.run(program, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"hangs at import: no answer in {_TIMEOUT_S:.0f} s"
    if child.returncode == 0 and "REACHED" in child.stdout:
        return None
    return plain((child.stderr.strip().splitlines()[-1:] or [f"ends the process, exit status {child.returncode}"])[0])


def _version(name: str) -> Finding:
    try:
        return Finding("ok", name, importlib_metadata.version(name))
    except importlib_metadata.PackageNotFoundError:
        return Finding("note", name, "not installed")
    except (KeyError, OSError, ValueError) as cause:
        return Finding("fault", name, plain(f"unreadable metadata: {cause}"), f"Reinstall {name}")


def _plugin(found: Found) -> Finding:
    """Import the plugin in a child: its declarations were read, now see that it loads and its factories exist."""
    who = f"plugin {found.plugin.name} ({found.plugin.distribution} {found.plugin.version})"
    factories = dict.fromkeys(offer.factory.partition(":")[0] for offer in found.declared.offers)
    fault = _in_child(found.module, *factories)
    if fault is not None:
        return Finding("fault", who, fault, f"Mend or uninstall {found.plugin.distribution}")
    kernels = ", ".join(dict.fromkeys(offer.kernel for offer in found.declared.offers)) or "no kernels"
    return Finding("ok", who, f"{kernels}; read from {found.origin}")
