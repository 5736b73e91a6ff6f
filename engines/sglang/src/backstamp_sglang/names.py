"""First step: every key of the catalogue becomes a name of SGLang's attention registry, in every process of SGLang.

In: SGLang's call of its `sglang.srt.plugins` entry point, in the process that is launched and in each it spawns; and,
in those, the arrival of server arguments that ask for one of our names. Out: names in SGLang's registry and lists of
choices, and a step of its argument resolution. It resolves nothing and imports no kernel, and nothing of SGLang is
hooked in a process that was not asked for Backstamp.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from logging import getLogger
from typing import TYPE_CHECKING, Final, NamedTuple

from backstamp.catalogue import Catalogue, build_catalogue
from backstamp.declarations import Slot
from backstamp.discovery import discover
from backstamp.first_party import FIRST_PARTY

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

__all__ = [
    "BEST",
    "LOG",
    "Marker",
    "catalogue_here",
    "is_ours",
    "is_ours_linear",
    "key_of",
    "keys_of",
    "offer_names",
    "plugins_sent",
]

LOG: Final = getLogger("backstamp.sglang")
#: The name that asks for the best kernel by rank.
BEST: Final = "backstamp"
_PREFIX: Final = "backstamp_"


class Marker(NamedTuple):
    """What the launched process was asked for; it travels with the server arguments to the processes it spawns.

    `names` are ours, `linear` says that linear kernels are asked for, `plugins` are the distributions of its plans.
    """

    names: tuple[str, ...]
    linear: bool
    plugins: tuple[str, ...]

    def __reduce__(self) -> tuple[object, ...]:
        return _arrive, tuple(self)

    def __deepcopy__(self, memo: object) -> Marker:
        # a copy in the launched process has not arrived anywhere
        return self


def offer_names() -> None:
    """Give every key a name, once a process; where SGLang has no such name itself, the bare key is one too."""
    if _names:
        return
    from sglang.srt.arg_groups import choices
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    for key in keys_of(catalogue_here(), "attention"):
        _offer(f"{_PREFIX}{key}")
        if key not in choices.ATTENTION_BACKEND_CHOICES and not key.startswith(BEST):
            _offer(key)
    _offer(BEST)
    linear = [f"{_PREFIX}{key}" for key in keys_of(catalogue_here(), "linear")]
    choices.add_linear_attn_kernel_backend_choices([BEST, *linear])
    for name in (name for marker in _sent for name in marker.names):
        if name not in _names:
            # a key of the other process alone: which plugin is missing here is told with the plan
            _offer(name)
    register_resolution_hook("handle_model_specific_adjustments")(_adjust)
    register_resolution_hook("handle_attention_backend_compatibility")(_settle)
    if _sent:
        _hook_runners(any(marker.linear for marker in _sent))


def keys_of(catalogue: Catalogue, slot: Slot) -> list[str]:
    """Every key that gets a name; one that no kernel can answer too, so that whoever asks for it is told why."""
    failed = [name for failure in catalogue.failures for name in failure.names]
    contested = [key for at, key in catalogue.conflicts if at == slot]
    return sorted({*catalogue.keys(slot), *failed, *contested, *FIRST_PARTY})


@cache
def catalogue_here() -> Catalogue:
    """What is installed, as this process first saw it."""
    return build_catalogue(discover())


def is_ours(name: str | None) -> bool:
    """Whether a name of `--attention-backend` is one of ours, a mistyped one included: the resolver refuses that."""
    return name in _names or is_ours_linear(name)


def is_ours_linear(name: str | None) -> bool:
    """Whether a name of `--linear-attn-backend` is one of ours, a mistyped one included."""
    return name is not None and (name == BEST or name.startswith(_PREFIX))


def key_of(name: str) -> str | None:
    """The key of the catalogue that one of our names stands for; None is the best by rank."""
    return None if name == BEST else name.removeprefix(_PREFIX)


def plugins_sent() -> frozenset[str]:
    """The distributions that the launched process planned with; none in that process itself."""
    return frozenset(plugin for marker in _sent for plugin in marker.plugins)


_names: set[str] = set()
#: What reached this process with server arguments.
_sent: list[Marker] = []


def _arrive(names: tuple[str, ...], linear: bool, plugins: tuple[str, ...]) -> Marker:
    """Come out of a pickle in a spawned process: before SGLang loads its plugins there, or after."""
    marker = Marker(names, linear, plugins)
    _sent.append(marker)
    if _names:
        from sglang.srt.plugins.hook_registry import HookRegistry

        _hook_runners(linear)
        # SGLang has applied its hooks before these came
        HookRegistry.apply_hooks()
    return marker


def _offer(name: str) -> None:
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    _names.add(name)
    register_attention_backend(name)(_create)
    choices.add_attention_backend_choices([name])
    choices.add_draft_attention_backend_choices([name])
    # whether it really is deterministic is the resolver's to say
    choices.add_deterministic_attention_backend_choices([name])


def _create(runner: ModelRunner) -> AttentionBackend:
    from backstamp_sglang import door

    return door.create_backend(runner)


def _adjust(server_args: ServerArgs, previous: Callable[[ServerArgs], None]) -> None:
    from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view

    if not any(map(is_ours, attention_backends_of(resolved_view(server_args)))):
        previous(server_args)
        return
    from backstamp_sglang import admitted

    admitted.adjust(server_args, previous)


def _settle(server_args: ServerArgs, previous: Callable[[ServerArgs], None]) -> None:
    """SGLang's step that settles attention backends, then ours where one of our names is asked for."""
    from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view

    previous(server_args)
    view = resolved_view(server_args)
    asked = (*attention_backends_of(view), view.speculative_draft_attention_backend)
    linear = [getattr(view, f"linear_attn_{part}backend") for part in ("", "prefill_", "decode_", "verify_")]
    if any(map(is_ours, asked)) or any(map(is_ours_linear, linear)):
        from backstamp_sglang import door

        door.settle(server_args)


def _hook_runners(linear: bool) -> None:
    from backstamp_sglang import door

    door.hook_runners(linear)
