"""Who serves which model: a config's plan and kernels, found again from the config that every module carries.

In: a model, and what was asked. Out: its `Served`. Nothing here keeps a model alive.
"""

from __future__ import annotations

import torch
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PretrainedConfig, PreTrainedModel

from backstamp_transformers.asked import asked_as
from backstamp_transformers.errors import NotServed
from backstamp_transformers.served import Served

__all__ = ["admit", "is_admitted", "is_tower", "leave", "mark_towers", "restore", "served_for", "server_of"]

#: By identity: equal configs of two models are two. A value holds its config and its model weakly.
_served: WeakIdKeyDictionary = WeakIdKeyDictionary()
#: Configs of a composite model's other parts, which keep attention of their own.
_towers: WeakIdKeyDictionary = WeakIdKeyDictionary()


def admit(model: PreTrainedModel, name: str, dtype: torch.dtype, device: torch.device) -> Served:
    """Resolve a model's request and remember who serves its config.

    Raises:
        BackstampError: nothing serves it as asked, or it calls no attention function of Transformers'.
    """
    if not model._can_set_attn_implementation():
        raise NotServed(
            f"Transformers model {model.config.model_type}",
            needed="a model that calls attention through Transformers' AttentionInterface",
            found=type(model).__name__,
            fix="Use eager for this model",
        )
    served = Served.admit(model, model.config, asked_as(name), dtype, device)
    _served[model.config] = served
    return served


def is_admitted(config: PretrainedConfig, name: str) -> bool:
    """Whether a config's model was resolved under a name: a model's inner parts share its config, and come second."""
    served = _served.get(config)
    return served is not None and served.asked is asked_as(name)


def server_of(config: PretrainedConfig) -> Served | None:
    """What serves a config's model; None where nothing does any more, or the model is gone."""
    served = _served.get(config)
    return served if served is not None and served.in_force and served.model() is not None else None


def leave(config: PretrainedConfig) -> None:
    """Let go of all that was built for a config's model: it runs something else."""
    served = _served.get(config)
    if served is not None:
        served.let_go()


def restore(config: PretrainedConfig, served: Served | None) -> None:
    """Have a config served as it was before an admission that came to nothing."""
    if served is not None:
        _served[config] = served
    else:
        _served.pop(config, None)


def mark_towers(config: PretrainedConfig) -> None:
    """Remember every part of a composite config but the language model's."""
    text = config.get_text_config()
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if isinstance(part, PretrainedConfig) and part is not text:
            _towers[part] = True
            mark_towers(part)


def is_tower(config: PretrainedConfig) -> bool:
    """Whether a config is of a part that is no language model."""
    return config in _towers


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
        found="a copy of one, or a config set by hand",
        fix="Give it to backstamp_transformers.use(), or set its attention implementation",
    )
