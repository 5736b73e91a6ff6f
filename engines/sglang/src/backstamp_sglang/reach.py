"""What this adapter does not hand to a kernel yet, refused before anything is resolved.

In: SGLang's resolved arguments, its `ModelConfig` and the model's facts. Out: nothing, or an error: a plan may not
promise what a layer's call would drop. What a kernel cannot do is the resolver's to say.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from sglang.srt.configs.hybrid_arch import hybrid_gdn_config
from sglang.srt.runtime_context import get_platform

from backstamp.declarations import Family, Role
from backstamp.errors import Refused
from backstamp.model import LINEAR_FAMILIES, ModelFacts
from backstamp_sglang.asked import linear_names, names_of
from backstamp_sglang.names import is_ours, is_ours_linear

if TYPE_CHECKING:
    from sglang.srt.arg_groups.overrides import ResolvedView
    from sglang.srt.configs.model_config import ModelConfig

__all__ = ["check_reach"]

#: Attention whose layers SGLang calls with other tensors than queries, keys and values.
_ELSEWHERE: Final[frozenset[Family]] = frozenset({"mla", "sparse_mla", "csa"})
#: Models whose images are seen both ways: they give that mask to SGLang's Triton backend alone.
_SEEN_BOTH_WAYS: Final = tuple(f"Gemma{kind}ForConditionalGeneration" for kind in ("3", "4", "4Unified"))
#: Algorithms whose draft is a model run in a loop, and verified as rows of a tree.
_DRAFTED: Final = ("EAGLE", "EAGLE3", "STANDALONE")


class _Limit(NamedTuple):
    """One thing needed, what was found, and whether that is something else."""

    needed: str
    found: object
    broken: bool


def check_reach(view: ResolvedView, config: ModelConfig, model: ModelFacts, role: Role) -> None:
    """Refuse what a plan would promise and this adapter does not carry to the kernel.

    Raises:
        Refused: the first thing of it that the launch needs.
    """
    for limits in (
        _of_attention(view, config, model, role),
        _of_linear(view, model),
        _of_draft(view),
        _of_cache(view),
    ):
        for limit in limits:
            if limit.broken:
                fix = "Ask for SGLang's own backends"
                raise Refused("backstamp-sglang", needed=limit.needed, found=str(limit.found), fix=fix)


def _of_attention(view: ResolvedView, config: ModelConfig, model: ModelFacts, role: Role) -> Iterator[_Limit]:
    foreign = ", ".join(str(name) for name in names_of(view, role) if not is_ours(name))
    families = sorted({group.facts.family for group in model.groups})
    types = {group.facts.attn_type for group in model.groups} - {"decoder"}
    images = [name for name in config.hf_config.architectures if name in _SEEN_BOTH_WAYS]
    yield _Limit("both halves from Backstamp", f"{foreign} beside it", bool(foreign))
    yield _Limit("attention layers", "a model without any", not families)
    yield _Limit(
        "layers of keys and values", f"layers of family {', '.join(families)}", bool(_ELSEWHERE & set(families))
    )
    yield _Limit("decoder layers", "encoder or cross-attention layers", bool(types) or config.is_encoder_decoder)
    yield _Limit("a causal prefix", f"{', '.join(images)}, whose images are seen both ways", bool(images))
    # SGLang asserts its own names there, when weights are loaded
    barred = get_platform().is_blackwell and hybrid_gdn_config(config) is not None
    yield _Limit(
        "a GPU before Blackwell", "a Blackwell one, where SGLang takes no other attention beside these", barred
    )
    yield _Limit("causal attention", "a diffusion language model", view.dllm_algorithm is not None)
    yield _Limit("one item a request", "multi-item scoring", view.enable_mis)
    yield _Limit("one stream of steps", "two-batch overlap", view.enable_two_batch_overlap)
    yield _Limit("one stream of steps", "prefill and decode multiplexed", view.enable_pdmux)


def _of_linear(view: ResolvedView, model: ModelFacts) -> Iterator[_Limit]:
    pair = linear_names(view)
    if not pair:
        return
    recurrent = sorted({group.facts.family for group in model.groups} & LINEAR_FAMILIES)
    verify, tracked = view.linear_attn_verify_backend, view.mamba_radix_cache_strategy
    algorithm = view.speculative_algorithm
    yield _Limit("SGLang's own linear verify", verify, is_ours_linear(verify))
    yield _Limit("both linear halves from Backstamp", ", ".join(pair), not all(map(is_ours_linear, pair)))
    yield _Limit("gated delta nets", f"recurrent layers {', '.join(recurrent) or 'none'}", recurrent != ["gdn"])
    yield _Limit("a launch without speculation beside linear kernels", algorithm, algorithm is not None)
    # SGLang may have chosen it itself, so the flags are said
    no_states = "no states in between: --mamba-radix-cache-strategy no_buffer --disable-overlap-schedule"
    yield _Limit(no_states, str(tracked), tracked in ("extra_buffer", "extra_buffer_lazy"))


def _of_draft(view: ResolvedView) -> Iterator[_Limit]:
    algorithm, dtype = view.speculative_algorithm, view.speculative_draft_kv_cache_dtype
    windowed = view.speculative_draft_window_size is not None or view.speculative_draft_sink_size is not None
    yield _Limit(f"a draft of {', '.join(_DRAFTED)}", algorithm, algorithm is not None and algorithm not in _DRAFTED)
    yield _Limit("one draft model, run in a loop", "multi-layer EAGLE", view.enable_multi_layer_eagle)
    yield _Limit("one number of draft steps", "adaptive speculation", view.speculative_adaptive)
    yield _Limit("a draft that sees all its tokens", "a draft window", windowed)
    # SGLang asks its target's name alone, and would load a draft of ours first
    in_pages = (view.speculative_eagle_topk or 1) > 1 and (view.page_size or 1) > 1
    yield _Limit("pages of one token for drafts side by side", f"--page-size {view.page_size}", in_pages)
    yield _Limit("one dtype for both caches", f"--speculative-draft-kv-cache-dtype {dtype}", dtype is not None)


def _of_cache(view: ResolvedView) -> Iterator[_Limit]:
    dtype = view.kv_cache_dtype
    yield _Limit("a cache in the model's own dtype", f"--kv-cache-dtype {dtype}", dtype != "auto")
    yield _Limit("one rank a sequence", "decode context parallelism", view.dcp_size > 1)
    yield _Limit("one rank a prompt", "context parallelism", view.attn_cp_size > 1)
    yield _Limit("a cache of one model", "unified memory", view.enable_unified_memory)
    yield _Limit("a cache of plain rows", "page-major layout", view.enable_page_major_kv_layout)
