"""First step: every key of the catalogue becomes a name of SGLang's attention registry, in every process of SGLang.

In: SGLang's call of its `sglang.srt.plugins` entry point, in the process that is launched and in each it spawns; and,
in those, the arrival of server arguments that ask for one of our names. Out: names in SGLang's registry and lists of
choices, and a step of its argument resolution. It resolves nothing and imports no kernel, and nothing of SGLang is
hooked in a process that was not asked for Backstamp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from logging import getLogger
from typing import TYPE_CHECKING, Final, NamedTuple

from backstamp.catalogue import Catalogue, build_catalogue
from backstamp.discovery import discover
from backstamp.first_party import FIRST_PARTY

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

__all__ = [
    "BEST",
    "LOG",
    "Asked",
    "Marker",
    "asked_by",
    "catalogue_here",
    "is_ours",
    "is_ours_linear",
    "linear_key",
    "marker_of",
    "offer_names",
]

LOG: Final = getLogger("backstamp.sglang")
#: The name that asks for the best kernel by rank.
BEST: Final = "backstamp"
_PREFIX: Final = "backstamp_"


class Asked(NamedTuple):
    """What one of our names stands for: a key of the catalogue (None: the best by rank) and the distribution that has
    it in the process that named it."""

    key: str | None
    owner: str


class Marker:
    """What the launched process was asked for; it travels with the server arguments to the processes it spawns."""

    def __init__(self, names: Mapping[str, Asked], linear: bool) -> None:
        self.names, self.linear = dict(names), linear

    def __reduce__(self) -> tuple[object, ...]:
        return _was_asked, (self.names, self.linear)


def offer_names() -> None:
    """Give every key a name, once a process; a name SGLang has itself gets a prefix."""
    if _asked:
        return
    from sglang.srt.arg_groups import choices
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    catalogue = catalogue_here()
    # a key whose plugin failed or is not installed has a name too: whoever asks for it is told why
    failed = [name for failure in catalogue.failures for name in failure.names]
    for key in sorted({*catalogue.keys("attention"), *failed, *FIRST_PARTY}):
        # `distribution:key` is told apart by no flag of SGLang's
        if ":" not in key:
            owner = catalogue.owner(key, "attention")
            taken = key in choices.ATTENTION_BACKEND_CHOICES
            _offer(f"{_PREFIX}{key}" if taken else key, Asked(key, owner.distribution if owner else ""))
    _offer(BEST, Asked(None, ""))
    for key in catalogue.keys("linear"):
        if ":" not in key:
            choices.LINEAR_ATTN_KERNEL_BACKEND_CHOICES.append(f"{_PREFIX}{key}")
    choices.LINEAR_ATTN_KERNEL_BACKEND_CHOICES.append(BEST)
    for name, asked in _sent.items():
        if name not in _asked:
            # a key of the other process alone: which plugin is missing here is told with the plan
            _offer(name, asked)
    register_resolution_hook("handle_attention_backend_compatibility")(_settle)
    if _sent:
        _hook_runners(_linear_sent[0])


@cache
def catalogue_here() -> Catalogue:
    """What is installed, as this process first saw it."""
    return build_catalogue(discover())


def is_ours(name: str | None) -> bool:
    """Whether a name of `--attention-backend` is one of ours."""
    return name in _asked


def asked_by(name: str) -> Asked:
    """What one of our names stands for."""
    return _asked[name]


def is_ours_linear(name: str | None) -> bool:
    """Whether a name of `--linear-attn-backend` is one of ours."""
    return name is not None and (name == BEST or name.startswith(_PREFIX))


def linear_key(name: str) -> str | None:
    """The key of the linear slot that one of our names stands for; None is the best by rank."""
    return None if name == BEST else name.removeprefix(_PREFIX)


def marker_of(names: Sequence[str], linear: bool) -> Marker:
    """What the processes spawned for these names are to be told."""
    return Marker({name: _asked[name] for name in names}, linear)


_asked: dict[str, Asked] = {}
#: What the server arguments that reached this process ask for.
_sent: dict[str, Asked] = {}
_linear_sent = [False]


def _was_asked(names: Mapping[str, Asked], linear: bool) -> Marker:
    """Arrive in a spawned process: before SGLang loads its plugins there, or after."""
    _sent.update(names)
    _linear_sent[0] |= linear
    if _asked:
        _hook_runners(linear)
    return Marker(names, linear)


def _offer(name: str, asked: Asked) -> None:
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    _asked[name] = asked
    register_attention_backend(name)(_create)
    choices.add_attention_backend_choices([name])
    choices.add_draft_attention_backend_choices([name])
    # whether it really is deterministic is the resolver's to say
    choices.add_deterministic_attention_backend_choices([name])


def _create(runner: ModelRunner) -> AttentionBackend:
    from backstamp_sglang import door

    return door.create_backend(runner)


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
