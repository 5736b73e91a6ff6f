"""The doors of continuous batching that know only Transformers' own names, opened for ours.

In: a model under one of our names. Out: a manager that keeps it, a paged cache that hands over slots instead of copies,
and no CUDA graph: a replay runs no host code, and `plan` is host code. Every other name passes as before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import continuous_api
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from backstamp_transformers.asked import PREFIX
from backstamp_transformers.errors import NotServed
from backstamp_transformers.paged import update

__all__ = ["open_continuous_batching"]

_Manager: Final = continuous_api.ContinuousBatchingManager
_switch: Final = _Manager.switch_to_cb_friendly_attn
_update: Final = PagedAttentionCache.update
_resolve: Final[Callable[..., ContinuousBatchingConfig]] = continuous_api.resolve_continuous_batching_config


def open_continuous_batching() -> None:
    """Let our names in; a second call changes nothing."""
    _Manager.switch_to_cb_friendly_attn = _keep_ours
    PagedAttentionCache.update = _update_ours
    continuous_api.resolve_continuous_batching_config = _resolve_without_graphs


def _ours(config: PretrainedConfig) -> bool:
    return str(config._attn_implementation).startswith(PREFIX)


def _keep_ours(self: object, model: PreTrainedModel, auto_switch_to_flash: bool = True) -> None:
    if not _ours(model.config.get_text_config()):
        _switch(self, model, auto_switch_to_flash)


def _update_ours(
    self: PagedAttentionCache, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    if not _ours(self.config):
        return _update(self, key_states, value_states, layer_idx, kwargs)
    update(self, key_states, value_states, layer_idx, kwargs)
    return key_states, value_states


def _resolve_without_graphs(
    *, config: PretrainedConfig, cb_config: ContinuousBatchingConfig, **hints: object
) -> ContinuousBatchingConfig:
    if not _ours(config):
        return _resolve(config=config, cb_config=cb_config, **hints)
    asked = cb_config.use_cuda_graph
    if asked is True or (isinstance(asked, tuple) and any(asked)):
        raise NotServed(
            "continuous batching, use_cuda_graph",
            needed="False: a replay runs no host code, and a plan is made on the host",
            found=repr(asked),
        )
    without = copy.deepcopy(cb_config)
    without.use_cuda_graph = False
    return _resolve(config=config, cb_config=without, **hints)
