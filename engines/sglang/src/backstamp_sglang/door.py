"""The door SGLang comes through once one of our names is asked for: a plan, a hook on the runner, a backend.

In: server arguments or a model runner. Out: what `launch`, `hooks` and `backend` answer. An SGLang this adapter was not
run against is refused here, before a module that reads more of it is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import sglang
from packaging.specifiers import SpecifierSet

from backstamp.errors import NotInstalled

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

__all__ = ["TESTED", "check_sglang", "create_backend", "hook_runners", "settle"]

#: Versions of SGLang whose attention contract this adapter was run against; it changes between patch releases.
TESTED: Final = "==0.5.23"


def check_sglang(version: str) -> None:
    """Refuse an SGLang this adapter was not run against.

    Raises:
        NotInstalled: the version is outside the tested range.
    """
    if not SpecifierSet(TESTED).contains(version):
        raise NotInstalled(
            "backstamp-sglang",
            needed=f"sglang {TESTED}",
            found=version,
            fix="Install a tested SGLang, or a backstamp-sglang made for this one",
        )


def settle(server_args: ServerArgs) -> None:
    """Resolve what the server arguments ask for, before anything is spawned or loaded.

    Raises:
        NotInstalled: SGLang's version is outside the tested range. BackstampError: as `resolve`.
    """
    check_sglang(sglang.__version__)
    from backstamp_sglang.launch import settle_launch

    settle_launch(server_args)


def hook_runners(linear: bool) -> None:
    """Hook the runners of a process that was asked for Backstamp, and its gated delta nets where those were."""
    check_sglang(sglang.__version__)
    from backstamp_sglang.hooks import install

    install(linear)


def create_backend(runner: ModelRunner) -> AttentionBackend:
    """What SGLang's registry answers for one of our names.

    Raises:
        NotInstalled: SGLang's version is outside the tested range. BackstampError: as `resolve` and `build`.
    """
    check_sglang(sglang.__version__)
    from backstamp_sglang.backend import BackstampAttnBackend

    return BackstampAttnBackend(runner)
