"""What is asked of us beside another's backend: nobody would read it, so vLLM's log says so.

In: the line with which vLLM's engine logs its config when it starts. Out: that line as it is, and a warning where the
config has our section of `--additional-config` and none of our names. It changes nothing of vLLM's.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import vllm

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["SECTION", "tell_of_unread"]

#: Where `--additional-config` holds what is asked of Backstamp: some fields of `backstamp.Requests`.
SECTION: Final = "backstamp"
#: The logger of that line: a plugin is handed no config of a launch that asks for another backend.
#: Source: `EngineCore.__init__`, vllm 0.32, vllm/v1/engine/core.py
_ENGINE: Final = "vllm.v1.engine.core"


def tell_of_unread() -> None:
    """Have the engine of this process say what of its config nobody reads; once more is no more."""
    logging.getLogger(_ENGINE).addFilter(_told)


def _told(record: logging.LogRecord) -> bool:
    from vllm.config import VllmConfig

    for config in record.args or ():
        if isinstance(config, VllmConfig):
            _tell(config)
    return True


def _tell(config: VllmConfig) -> None:
    asked = config.additional_config
    if not isinstance(asked, Mapping) or SECTION not in asked:
        return
    from backstamp_vllm.facts import is_tested
    from backstamp_vllm.names import LOG, is_ours

    # another vLLM may hold its choice elsewhere, and starts without us
    if is_tested(vllm.__version__) and not is_ours(config.attention_config.backend):
        backend = config.attention_config.backend
        LOG.warning(
            "Backstamp is asked for %r in --additional-config and runs nothing of it: needs one of its names in "
            "--attention-backend (custom takes a pair), got %s",
            asked[SECTION],
            "none" if backend is None else backend.name,
        )
