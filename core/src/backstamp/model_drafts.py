"""What a draft model needs of its target, told by its config.

In: the fields of a config and its architecture's name. Out: `DraftFacts`, or None for a model that is no draft. A
target that carries next-token layers beside its own (`num_nextn_predict_layers`) is no draft.

Sources: SGLang 0.5.23 and vLLM 0.32 name draft classes ...Eagle, ...Eagle3, ...NextN, ...MTP and ...DFlash; EAGLE-3
(arXiv 2503.01840) feeds on a low, a middle and a high layer of its target, and its authors' checkpoints say so by
their `draft_vocab_size` alone; DFlash (arXiv 2602.06036) drafts a block at once, its tokens seeing each other, except
in layers with a window (vLLM 0.32, `_dflash_layer_causal`); transformers 5.24 names Gemma 4's cache-sharing drafts
...Assistant.

.. versionadded:: 0.1
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from backstamp.model import DraftFacts
from backstamp.model_fields import Fields

__all__ = ["block_causality", "block_fields", "draft_facts", "draft_layer_count"]

_DRAFT_CLASS: Final = re.compile(r"Eagle|NextN|MTP|DFlash|DSpark|Assistant")
_BLOCK_CLASS: Final = re.compile(r"DFlash|DSpark")
_BLOCK: Final = ("dflash", "dspark")
_NEXT_TOKEN: Final = re.compile(r"NextN|MTP")
_DRAFT_FIELDS: Final = ("draft_vocab_size", "eagle_config", "dflash_config", "eagle_aux_hidden_state_layer_ids")
#: Low, middle and high layer. Source: EAGLE-3, section 3.1.
_EAGLE3_STATES: Final = 3


def draft_facts(outer: Fields, fields: Fields, architecture: str) -> DraftFacts | None:
    """What this draft needs, or None for a model that is no draft."""
    algorithm = outer.text("speculators_model_type") or ""
    if not (_DRAFT_CLASS.search(architecture) or algorithm or outer.has(*_DRAFT_FIELDS)):
        return None
    block = bool(_BLOCK_CLASS.search(architecture)) or algorithm in _BLOCK or outer.has("dflash_config")
    return DraftFacts(
        shares_kv=_shares_kv(fields, architecture),
        aux_hidden_states=_aux_hidden_states(outer, architecture, algorithm),
        non_causal=block,
        conv_sidecar=fields.has("conv_L_cache", "short_conv_kernel_size"),
    )


def draft_layer_count(fields: Fields, architecture: str) -> int | None:
    """How many next-token layers a draft cut from its target's config has; None for a config that is its own."""
    if not _NEXT_TOKEN.search(architecture):
        return None
    names = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "num_mtp_modules")
    return fields.count(*names) if fields.has(*names) else None


def block_causality(outer: Fields) -> tuple[bool, bool]:
    """Whether a block draft's layers are causal: those without a window, and those with one.

    Source: `_dflash_layer_causal` of vLLM 0.32; a window that `use_swa` alone gives makes no layer causal.
    """
    block = outer.part("dflash_config")
    said = outer.flag("is_causal")
    if said is None and block is not None:
        said = block.flag("causal")
    if said is not None:
        return said, said
    if block is not None and block.flag("use_swa"):
        words = outer.words("layer_types") or ["full_attention"]
        if len(set(words)) > 1:
            raise outer.bad(
                "layer_types", "layers of one kind under dflash_config.use_swa", ", ".join(sorted(set(words)))
            )
        return False, words[0] == "sliding_attention"
    return False, True


def block_fields(outer: Fields) -> Mapping[str, object]:
    """What `dflash_config` says of the windows of all its layers, in the words other configs have."""
    block = outer.part("dflash_config")
    if block is None or not block.flag("use_swa"):
        return {}
    window = block.whole("swa_window_size", default=0) or outer.whole("sliding_window")
    count = outer.count("num_hidden_layers")
    return {"sliding_window": window, "use_sliding_window": True, "layer_types": ["sliding_attention"] * count}


def _shares_kv(fields: Fields, architecture: str) -> bool:
    """Every layer reads the target's cache. Source: Gemma4AssistantConfig, which shares all layers where unsaid."""
    shared = fields.whole("num_kv_shared_layers", default=0, least=0)
    if architecture.startswith("Gemma4") and "Assistant" in architecture:
        return True
    return shared > 0 and shared >= fields.whole("num_hidden_layers")


def _aux_hidden_states(outer: Fields, architecture: str, algorithm: str) -> int:
    """How many hidden states of the target a draft consumes beside the last."""
    eagle, block = outer.part("eagle_config"), outer.part("dflash_config")
    listed = outer.wholes("eagle_aux_hidden_state_layer_ids") or outer.wholes("aux_hidden_state_layer_ids")
    if eagle is not None:
        if eagle.flag("use_aux_hidden_state") is False:
            return 0
        listed = eagle.wholes("eagle_aux_hidden_state_layer_ids") or listed
    if block is not None:
        listed = block.wholes("target_layer_ids") or listed
    listed = listed or outer.wholes("dspark_target_layer_ids")
    if listed:
        return len(listed)
    unnamed = outer.has("draft_vocab_size") and not algorithm and block is None
    return _EAGLE3_STATES if "Eagle3" in architecture or algorithm == "eagle3" or unnamed else 0
