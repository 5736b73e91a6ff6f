"""Second step: a vLLM config → what the resolver reads: launch, engine and model facts.

In: a `VllmConfig` and the key asked for. Out: the resolver's arguments, or an error for what this adapter does not
hand to a kernel yet. It reads the config only: no weights, no device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

import vllm
import vllm.envs
from packaging.specifiers import SpecifierSet

from backstamp.declarations import Family
from backstamp.engine import EngineFacts
from backstamp.errors import BadInput, NotInstalled, Refused
from backstamp.launch import Launch, Requests, make_launch
from backstamp.model import LINEAR_FAMILIES, LayerFacts, ModelFacts, group_layers, model_from_config
from backstamp.row_checks import DTYPE_NAMES
from backstamp_vllm.unread import SECTION

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

__all__ = ["TESTED", "Question", "asks_for_linear", "check_vllm", "is_same_dtype", "is_tested", "question_of"]

#: Versions of vLLM whose attention contract this adapter was run against.
TESTED: Final = ">=0.32,<0.33"
#: Attention that vLLM hands to a layer of another kind than `Attention`.
_ELSEWHERE: Final[frozenset[Family]] = frozenset({"mla", "sparse_mla", "csa"})
#: What a linear key is asked through; vLLM keeps the recurrent layers of a launch without one.
_LINEAR: Final = "linear_attn_"
#: What has no flag of vLLM's: a plan that says more than vLLM does would say what does not run.
_ASKED_HERE: Final = (
    *("attention_backend", "prefill_attention_backend", "decode_attention_backend"),
    *("linear_attn_backend", "linear_attn_prefill_backend", "linear_attn_decode_backend"),
)


class Question(NamedTuple):
    """What the resolver is asked for one model of one vLLM config."""

    launch: Launch
    engine: EngineFacts
    model: ModelFacts


def is_tested(version: str) -> bool:
    """Whether this adapter was run against a vLLM of this version."""
    return SpecifierSet(TESTED).contains(version, prereleases=True)


def check_vllm(version: str) -> None:
    """Refuse a vLLM this adapter was not run against; its attention contract changes between minor versions.

    Raises:
        NotInstalled: the version is outside the tested range.
    """
    if not is_tested(version):
        raise NotInstalled(
            "backstamp-vllm",
            needed=f"vllm {TESTED}",
            found=version,
            fix="Install a tested vLLM, or a backstamp-vllm made for this one",
        )


def question_of(config: VllmConfig, key: str | None, page_size: int | None = None) -> Question:
    """What to resolve; `page_size` is the cache's where it is settled.

    Raises:
        BadInput: `--additional-config` asks for what is no request. BadModel: the model's config cannot be read.
        Refused: the config needs what this adapter does not hand over.
    """
    model = _model(config)
    _check_reach(config, model)
    return Question(_launch(config, key, page_size), _engine(config), model)


def asks_for_linear(config: VllmConfig) -> bool:
    """Whether a launch names a linear kernel.

    Raises:
        BadInput: as `question_of`.
    """
    return any(name.startswith(_LINEAR) and value is not None for name, value in _section(config).items())


def is_same_dtype(kv_cache_dtype: str, dtype: torch.dtype) -> bool:
    """Whether a cache of vLLM's name for its dtype holds keys as a model of this dtype makes them."""
    return kv_cache_dtype == "auto" or kv_cache_dtype == str(dtype).removeprefix("torch.")


def _launch(config: VllmConfig, key: str | None, page_size: int | None) -> Launch:
    cache, scheduler = config.cache_config, config.scheduler_config
    asked = _section(config)
    if page_size is None and cache.user_specified_block_size:
        page_size = cache.block_size
    said: dict[str, object] = {
        "attention_backend": key,
        "page_size": page_size,
        "chunked_prefill_size": scheduler.max_num_batched_tokens if scheduler.enable_chunked_prefill else None,
        "tp_size": config.parallel_config.tensor_parallel_size,
        "deterministic": vllm.envs.VLLM_BATCH_INVARIANT or None,
    }
    twice = [name for name, value in said.items() if value is not None and name in asked]
    if twice:
        needed = "each request once; these are vLLM's own flags"
        raise BadInput(f"--additional-config {SECTION}", needed=needed, found=f"{', '.join(twice)} again")
    return make_launch(Requests(**{**said, **asked}))  # type: ignore[arg-type]


def _section(config: VllmConfig) -> Mapping[str, object]:
    """What `--additional-config` asks: kernels of a pair and of recurrences; vLLM's own flags say all else."""
    extra = config.additional_config
    asked: object = extra.get(SECTION, {}) if isinstance(extra, Mapping) else {}
    who = f"--additional-config {SECTION}"
    if not isinstance(asked, Mapping):
        raise BadInput(who, needed="a JSON object", found=repr(asked))
    strange = [str(name) for name in asked if name not in _ASKED_HERE]
    if strange:
        needed = f"requests among {', '.join(_ASKED_HERE)}; all else is said by vLLM's own flags"
        raise BadInput(who, needed=needed, found=", ".join(strange))
    return asked


def _engine(config: VllmConfig) -> EngineFacts:
    return EngineFacts(
        name=f"vllm {vllm.__version__}",
        index_forms=frozenset({"page_table"}),
        kv_forms=frozenset({"paged"}),
        inputs=frozenset({"host_lens"}),
        # attention is left out of vLLM's graphs: nothing here is captured
        graph="never",
        prefix_cache=bool(config.cache_config.enable_prefix_caching),
        components=frozenset({"main"}),
    )


def _model(config: VllmConfig) -> ModelFacts:
    """The facts of the main model's attention, and of its recurrences where they are asked for; towers stay vLLM's."""
    dtype = DTYPE_NAMES.get(str(config.model_config.dtype), str(config.model_config.dtype))
    who = f"model config {config.model_config.model}"
    facts = model_from_config(config.model_config.hf_config.to_dict(), who, dtype)
    linear = asks_for_linear(config)

    def is_served(mixer: LayerFacts) -> bool:
        return linear or mixer.family not in LINEAR_FAMILIES

    layers = tuple(tuple(filter(is_served, mixers)) for mixers in facts.layers)
    return replace(facts, layers=layers, groups=group_layers(layers), unread=())


def _check_reach(config: VllmConfig, model: ModelFacts) -> None:
    """Refuse what a plan would promise and this adapter does not carry to the kernel."""
    parallel = config.parallel_config
    attention = config.attention_config
    families = sorted({group.facts.family for group in model.attention_groups})
    linear = {group.facts.family for group in model.linear_groups}
    others = ", ".join(sorted(linear - {"gdn"}))
    mixed = len({group.facts.attn_type for group in model.groups} - {"decoder"}) > 0
    cache = config.cache_config
    kv_dtype = cache.cache_dtype
    same = is_same_dtype(kv_dtype, config.model_config.dtype)
    for needed, found, wrong in (
        ("attention layers", "a model without any", not families),
        ("layers of vLLM's Attention", f"layers of family {', '.join(families)}", bool(_ELSEWHERE & set(families))),
        ("gated delta nets", f"linear layers of family {others}", bool(others)),
        ("linear layers, or no linear key", "a model without any", asks_for_linear(config) and not linear),
        ("states at the ends of chunks", "mamba_cache_mode all", bool(linear) and cache.mamba_cache_mode == "all"),
        ("decoder layers", "encoder or cross-attention layers", mixed),
        ("a launch without speculation", "a speculative config", config.speculative_config is not None),
        ("a cache in the model's own dtype", f"--kv-cache-dtype {kv_dtype}", not same),
        ("one rank a sequence", "context parallelism", parallel.decode_context_parallel_size > 1),
        ("one rank a prompt", "context parallelism", parallel.prefill_context_parallel_size > 1),
        ("one backend for all layers", "backend_per_kind", bool(attention.backend_per_kind)),
        ("causal attention", "use_non_causal", attention.use_non_causal),
        ("a causal prefix", "a multimodal prefix seen both ways", config.model_config.is_mm_prefix_lm),
        ("a window or none", "a reference sliding window", config.model_config.rswa_window is not None),
    ):
        if wrong:
            raise Refused("backstamp-vllm", needed=needed, found=found, fix="Ask for one of vLLM's own backends")
