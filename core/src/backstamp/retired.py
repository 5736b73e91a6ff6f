"""Settings that no longer exist: told when found set, mapped where their value still means something.

In: a `Launch` with the settings found, and the tombstones plugins declare. Out: the launch with mapped requests in it,
and a warning for each. A retired setting is never accepted without effect and without a word.

Source: vLLM #50292, SGLang #1380.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from backstamp.defaults import Settled, settle
from backstamp.launch import FLAGS, Launch, Request
from backstamp.plan_rows import Warn
from backstamp.text import plain

if TYPE_CHECKING:
    from backstamp.catalogue import Catalogue
    from backstamp.declarations import RetiredSetting

__all__ = ["without_retired"]

#: Requests that name several phases, each of which has a flag of its own.
_SPLIT: Final[Mapping[str, Mapping[str, str]]] = {
    "attention_backend": {half: f"{half}_attention_backend" for half in ("prefill", "decode")},
    "linear_attn_backend": {phase: f"linear_attn_{phase}_backend" for phase in ("prefill", "decode", "verify")},
}


def without_retired(launch: Launch, catalogue: Catalogue) -> tuple[Launch, tuple[Warn, ...]]:
    """The launch with what retired settings still ask for, and what to say about each that is set.

    A mapped value asks as the operator would, and yields to what the operator asked for by flags: the flag's own, or
    those of all its phases. Only a trusted distribution may map a setting to a key.
    """
    if not launch.settings or not catalogue.defaults.retired:
        return launch, ()
    warnings: list[Warn] = []
    keys = dict(launch.keys)
    for name, value in sorted(launch.settings.items()):
        if name not in catalogue.defaults.retired:
            continue
        settled = settle(catalogue.defaults.retired[name], launch.policy)
        setting, said = settled.row, f"{plain(name)}={plain(value)}"
        warnings += _strangers(settled, value, said)
        if setting is None:
            owners = " and ".join(settled.contradicted)
            text = f"{said} is retired and ignored: {owners} say different things about it, so neither counts"
            warnings.append(Warn("shadowed", text))
            continue
        key = setting.values.get(value)
        if key is None or not settled.trusted:
            warnings.append(Warn("retired", f"{said} is retired and ignored; use {setting.replacement}"))
            continue
        beside = _in_its_place(setting.request, key, launch)
        if beside:
            text = f"{said} is retired and ignored beside {' and '.join(beside)}"
            warnings.append(Warn("retired", f"{text}; use {setting.replacement}"))
            continue
        before = keys.get(setting.request)
        if before is None or before.source != "operator":
            keys[setting.request] = Request(key, "operator", name)
        warnings.append(_mapped(setting, said, key, launch))
    return replace(launch, keys=keys), tuple(warnings)


def _in_its_place(request: str, key: str, launch: Launch) -> list[str]:
    """What the operator asked for by flags that leave the mapped request nothing to decide."""
    before = launch.keys.get(request)
    if before is not None and before.source == "operator" and before.value != key:
        return [f"{before.setting} {before.value}"]
    if request not in _SPLIT:
        return []
    phases = [phase for phase in _SPLIT[request] if phase != "verify" or launch.speculative]
    splits = [launch.keys.get(_SPLIT[request][phase]) for phase in phases]
    asked = [split for split in splits if split is not None and split.source == "operator"]
    return [f"{split.setting} {split.value}" for split in asked] if len(asked) == len(phases) else []


def _strangers(settled: Settled[RetiredSetting], value: str, said: str) -> Iterator[Warn]:
    """What an untrusted distribution makes of a setting a trusted one speaks about."""
    ours = settled.row.values.get(value) if settled.row is not None else None
    for theirs, distribution in settled.left_out:
        key = theirs.values.get(value)
        if key is not None and key != ours:
            text = f"{distribution} reads {said} as {FLAGS.get(theirs.request, theirs.request)} {plain(key)}"
            yield Warn("untrusted", f"{text}; it is left out, unless allowed with --allow {distribution}")


def _mapped(setting: RetiredSetting, said: str, key: str, launch: Launch) -> Warn:
    flag = FLAGS.get(setting.request, setting.request)
    read = f"{said} is deprecated, read as {flag} {key}"
    main = launch.components.get("main")
    if setting.request == "attention_backend" and main is not None and main.source == "operator":
        beside = f"which does not reach component main beside {main.setting}={main.value}"
        return Warn("retired", f"{read}, {beside}; use {setting.replacement}")
    return Warn("deprecated", f"{read}; use {setting.replacement}")
