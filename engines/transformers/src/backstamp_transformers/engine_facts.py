"""What Transformers supplies, as facts, and the releases of it this adapter was run with.

In: the installed release, a model's config. Out: `ENGINE` for the resolver, the model's facts, or a refusal. It reads
no weights and runs before any are loaded.
"""

from __future__ import annotations

from typing import Final

import transformers
from packaging.specifiers import SpecifierSet
from transformers import PretrainedConfig

from backstamp.engine import EngineFacts
from backstamp.model import ModelFacts, model_from_config
from backstamp_transformers.errors import NotServed, UntestedTransformers

__all__ = ["ENGINE", "TESTED", "check_release", "model_facts"]

#: Releases the tests ran with; pyproject.toml names the same range.
TESTED: Final = SpecifierSet(">=5.24,<5.25")

#: A dense cache is `[B, Hk, S, D]` whose S grows with every token: no page size but 1 divides it, and pages of one
#: token address it where it lies. Padding never reaches a kernel: rows are cut to their own tokens.
ENGINE: Final = EngineFacts(
    name="Transformers",
    kv_forms=frozenset({"paged"}),
    graph="never",
    replay_hook=False,
    page_size=1,
    components=frozenset({"main"}),
)

_DTYPES: Final = {"torch.float32": "fp32", "torch.float16": "fp16", "torch.bfloat16": "bf16"}


def check_release(version: str = transformers.__version__) -> None:
    """Refuse a release outside the tested range: what it hands an attention function changes between releases.

    Raises:
        UntestedTransformers: the range and the release found.
    """
    if not TESTED.contains(version, prereleases=True):
        raise UntestedTransformers(
            "backstamp-transformers",
            needed=f"transformers {TESTED}",
            found=version,
            fix="Install a release in that range, or a backstamp-transformers tested with yours",
        )


def model_facts(config: PretrainedConfig, dtype: str) -> ModelFacts:
    """The facts of one model config; `dtype` is torch's name of what the model runs in.

    Raises:
        BadModel: the config cannot be read. NotServed: a dtype or an attention family this adapter hands to no kernel.
    """
    who = f"Transformers model {config.model_type}"
    if dtype not in _DTYPES:
        raise NotServed(who, needed=f"one of {', '.join(_DTYPES)}", found=dtype)
    facts = model_from_config(config.to_dict(), who, _DTYPES[dtype])
    for group in facts.groups:
        layer = group.facts
        # a model projects latents up before it attends: no kernel of the absorbed form can be called from there
        if layer.family not in ("mha", "gdn"):
            raise NotServed(who, needed="multi-head attention or gated delta net layers", found=layer.family)
        if layer.attn_type == "cross":
            raise NotServed(who, needed="attention over its own tokens", found="cross-attention layers")
        if layer.chunk_tokens:
            raise NotServed(who, needed="full or sliding attention", found=f"chunks of {layer.chunk_tokens} tokens")
    return facts
