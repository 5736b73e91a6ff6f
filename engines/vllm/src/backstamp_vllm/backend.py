"""What vLLM asks of each of our names: an attention backend that answers from the rows of the kernels it runs.

In: vLLM's questions about a name. Out: answers from the rows of the plan this process made for it, and before there is
one, from every row its key has on this host. It has no opinion of its own: undeclared means no, and what this adapter
does not carry to a kernel is no either.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import lcm
from typing import TYPE_CHECKING, ClassVar

from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionBackend, AttentionType, MultipleOf

from backstamp.declarations import Offer
from backstamp.errors import BackstampError
from backstamp.row_checks import DTYPE_NAMES, serves_dims
from backstamp_vllm.builder import BackstampMetadataBuilder
from backstamp_vllm.facts import is_same_dtype
from backstamp_vllm.impl import BackstampImpl
from backstamp_vllm.runner import offers_of_name, runner_of

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheSpec

__all__ = ["OfferedBackend", "class_of"]


class OfferedBackend(AttentionBackend):
    """The backend of one name; `name` is set by the class made for it."""

    name: ClassVar[str]
    # vLLM calls `do_kv_cache_update` before attention: the contract's kernels only read
    forward_includes_kv_cache_update = False

    @classmethod
    def get_name(cls) -> str:
        """The member of vLLM's registry; vLLM looks the answer up there."""
        return cls.name

    @staticmethod
    def get_impl_cls() -> type[BackstampImpl]:
        """The layer side."""
        return BackstampImpl

    @staticmethod
    def get_builder_cls() -> type[BackstampMetadataBuilder]:
        """The step side."""
        return BackstampMetadataBuilder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Whether every row takes keys and values of this size."""
        return cls._all(lambda offer: serves_dims(offer, head_size, head_size))

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype) -> bool:
        """Whether every row takes queries of this dtype."""
        return cls._all(lambda offer: DTYPE_NAMES.get(str(dtype)) in offer.dtypes)

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        """Whether the cache is in the model's own dtype; quantised caches are not carried to kernels yet."""
        dtype = get_current_vllm_config().model_config.dtype
        same = kv_cache_dtype is None or is_same_dtype(kv_cache_dtype, dtype)
        return same and cls._all(lambda offer: "same" in offer.kv_dtypes)

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        """Replaced in each class made here: vLLM calls it without the class."""
        raise NotImplementedError

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Whether every row declares windows."""
        return cls._all(lambda offer: "window" in offer.features)

    @classmethod
    def supports_sink(cls) -> bool:
        """Whether every row declares sinks."""
        return cls._all(lambda offer: "sinks" in offer.features)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Decoders only: what has no cache is not carried to kernels yet."""
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Whether every row is deterministic."""
        return cls._all(lambda offer: offer.deterministic)

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Kernels may plan on host lengths."""
        return False

    @classmethod
    def validate_configuration(cls, *args: object, **config: object) -> list[str]:
        """Every reason why this name cannot serve: the resolver's, or vLLM's own questions where there is a plan."""
        try:
            runner_of(get_current_vllm_config())
        except BackstampError as refusal:
            return [str(refusal)]
        return super().validate_configuration(*args, **config)

    @classmethod
    def _all(cls, holds: Callable[[Offer], bool]) -> bool:
        offers = offers_of_name(cls.name)
        # no row on this host is no answer to build on
        return bool(offers) and all(holds(offer) for offer in offers)


def block_sizes_of(name: str) -> list[int | MultipleOf]:
    """Pages that every row reads: multiples of all they are multiples of, and exact sizes all accept."""
    pages = [offer.page_sizes for offer in offers_of_name(name)]
    exact = sorted({size for each in pages for size in each.exact if all(of.accepts(size) for of in pages)})
    multiples = [each.multiple_of for each in pages]
    return [*exact, *([MultipleOf(lcm(*multiples))] if multiples and all(multiples) else [])]


@cache
def class_of(name: str) -> type[OfferedBackend]:
    """A class for each name: vLLM tells backends apart by where their class lies."""

    def block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        return block_sizes_of(name)

    body = {
        # where vLLM looks it up again
        "__module__": "backstamp_vllm.offered",
        "__qualname__": name,
        "__doc__": f"Backstamp's {name}.",
        "name": name,
        "get_supported_kernel_block_sizes": staticmethod(block_sizes),
    }
    return type(name, (OfferedBackend,), body)
