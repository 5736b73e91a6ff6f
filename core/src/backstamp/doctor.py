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
from backstamp.discovery import Found
from backstamp.host import HostFacts
from backstamp.text import plain

__all__ = ["Finding", "examine"]

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


def _version(name: str) -> Finding:
    try:
        return Finding("ok", name, importlib_metadata.version(name))
    except importlib_metadata.PackageNotFoundError:
        return Finding("note", name, "not installed")


def _plugin(found: Found) -> Finding:
    """Import the plugin module in a child: its declarations were read, now see that it loads and does not hang."""
    who = f"plugin {found.plugin.name} ({found.plugin.distribution} {found.plugin.version})"
    code = "import sys; from backstamp.discovery import import_plugin; import_plugin(sys.argv[1])"
    try:
        child = subprocess.run(
            [sys.executable, "-c", code, found.module], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Finding("fault", who, f"hangs at import: no answer in {_TIMEOUT_S:.0f} s", "Uninstall it, or report it")
    if child.returncode != 0:
        last = child.stderr.strip().splitlines()[-1:] or [f"exit status {child.returncode}"]
        return Finding("fault", who, plain(last[0]), f"Mend or uninstall {found.plugin.distribution}")
    kernels = ", ".join(dict.fromkeys(offer.kernel for offer in found.declared.offers)) or "no kernels"
    return Finding("ok", who, f"{kernels}; read from {found.origin}")
