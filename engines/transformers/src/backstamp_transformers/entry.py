"""The two calls of an operator: kernels for a loaded model, or a name for a model that is yet to be loaded.

In: keys, as they are typed everywhere. Out: a `Handle`, or a string for `attn_implementation=`.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from backstamp.catalogue import Catalogue
from backstamp.policy import Policy
from backstamp_transformers.admission import admit, restore, server_of
from backstamp_transformers.asked import ARGUMENTS, make_asked
from backstamp_transformers.engine_facts import check_release
from backstamp_transformers.errors import NotServed
from backstamp_transformers.handle import Handle
from backstamp_transformers.names import check_modules, register, release
from backstamp_transformers.served import Served

__all__ = ["implementation", "use"]


def use(
    model: PreTrainedModel,
    backend: str | None = None,
    *,
    prefill: str | None = None,
    decode: str | None = None,
    linear: str | None = None,
    policy: Policy | None = None,
    catalogue: Catalogue | None = None,
) -> Handle:
    """Run a loaded model's attention on the resolved kernels; they are built and stamped before this returns.

    `backend` is the key of both halves, `prefill` and `decode` those of one; unset is `auto`. In a composite model only
    the language model is served. `catalogue` None is what is installed.

    Raises:
        BackstampError: as a `ValueError` or an `ImportError`, with the verdict of every candidate; the model is left as
        it was.
    """
    check_release()
    text = _language_model(model)
    asked = make_asked(
        ARGUMENTS, backend=backend, prefill=prefill, decode=decode, linear=linear, policy=policy, catalogue=catalogue
    )
    before = server_of(text.config)
    _refuse_served(text, before)
    name = register(asked)
    former = text.config._attn_implementation
    try:
        served = admit(text, name, text.dtype, text.device)
        check_modules(served)
        served.build()
        text.set_attn_implementation(name)
    except BaseException:
        restore(text.config, before)
        release(name)
        raise
    served.held = True
    return Handle(text, name, served, former)


def implementation(
    backend: str | None = None,
    *,
    prefill: str | None = None,
    decode: str | None = None,
    linear: str | None = None,
    policy: Policy | None = None,
    catalogue: Catalogue | None = None,
    device: str | None = None,
) -> str:
    """A name for `from_pretrained(..., attn_implementation=...)`; the model is resolved before its weights load.

    `device` is where it will run, where that is not this machine's accelerator or, without one, the CPU.

    Raises:
        BackstampError: as a `ValueError` or an `ImportError`; what depends on the model is refused when one is loaded.
    """
    check_release()
    return register(
        make_asked(
            ARGUMENTS,
            backend=backend,
            prefill=prefill,
            decode=decode,
            linear=linear,
            policy=policy,
            catalogue=catalogue,
            device=device,
        )
    )


def _language_model(model: PreTrainedModel) -> PreTrainedModel:
    """The part of a model that its text config describes: itself, but for a composite model."""
    if not isinstance(model, PreTrainedModel):
        raise NotServed("backstamp_transformers.use", needed="a PreTrainedModel", found=type(model).__name__)
    config = model.config.get_text_config()
    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel) and part.config is config)
    found = next(parts, None)
    if found is None:
        raise NotServed(f"Transformers model {model.config.model_type}", needed="a language model in it", found="none")
    return found


def _refuse_served(model: PreTrainedModel, served: Served | None) -> None:
    """The name of an implementation lies on the config: two models with one config cannot have two, nor two handles."""
    who = f"Transformers model {model.config.model_type}"
    if served is not None and served.model() is not model:
        raise NotServed(
            who,
            needed="a config of its own",
            found="the config of another model that Backstamp serves",
            fix="Make each model of a copy: copy.deepcopy(config)",
        )
    if served is not None and served.held:
        raise NotServed(
            who,
            needed="a model that no other handle serves",
            found="one that use() serves",
            fix="Release that handle first",
        )
