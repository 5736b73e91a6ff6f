"""Who serves which model: a config's plan and kernels, found again from the config that every module carries.

In: a model, and what was asked. Out: its `Served`. Nothing here keeps a model alive.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PretrainedConfig, PreTrainedModel

from backstamp_transformers.asked import asked_as
from backstamp_transformers.errors import NotServed
from backstamp_transformers.served import Served

__all__ = ["admit", "is_admitted", "owner_of", "served_for"]

#: By identity: equal configs of two models are two. A value holds its config and its model weakly.
_served: WeakIdKeyDictionary = WeakIdKeyDictionary()


def admit(model: PreTrainedModel, name: str, dtype: torch.dtype, device: torch.device) -> Served:
    """Resolve a model's request and remember who serves its config.

    Raises:
        BackstampError: nothing serves it as asked.
    """
    served = Served.admit(model, model.config, asked_as(name), dtype, device)
    _served[model.config] = served
    return served


def is_admitted(config: PretrainedConfig, name: str) -> bool:
    """Whether a config's model was resolved under a name: a model's inner parts share its config, and come second."""
    served = _served.get(config)
    return served is not None and served.asked is asked_as(name)


def owner_of(config: PretrainedConfig) -> nn.Module | None:
    """The model a config is served for; None where nobody serves it, or its model is gone."""
    served = _served.get(config)
    return served.model() if served is not None and served.in_force else None


def served_for(config: PretrainedConfig) -> Served:
    """What serves the model of a config, under the name the config carries.

    Raises:
        NotServed: a config that no model was admitted with, or under another name.
    """
    name = str(config._attn_implementation)
    if is_admitted(config, name):
        return _served[config]
    raise NotServed(
        f"Transformers model {config.model_type}, attn_implementation={name!r}",
        needed="a model that was loaded with it, or given to backstamp_transformers.use()",
        found="a config set by hand",
    )
