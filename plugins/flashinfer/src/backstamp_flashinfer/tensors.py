"""The tensors of one call: what the library's kernels take of strides, and what they never write.

In: queries, caches and outputs, shapes and dtypes checked already. Out: yes or no, a refusal, or pads filled. Reads
addresses and strides, never a value.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from backstamp.attention import LayerSpec
from backstamp.factories import BuildRequest
from backstamp.step_checks import refusal

__all__ = ["DTYPES", "cover_pads", "even_strides", "refuse_odd_strides"]

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}

#: Bytes of one load or store. Source: flashinfer 0.7.4 cp_async.cuh (128-bit), mla/_batch_mla/_backends/_fa_common.py
VECTOR_BYTES = 16


def even_strides(tensor: Tensor) -> bool:
    """Whether every vector of a `[..., D]` tensor starts at a multiple of its size, as the kernels take for granted."""
    vectors_fit = _vectors_fit(tensor.shape, tensor.stride(), tensor.element_size())
    return vectors_fit and tensor.data_ptr() % VECTOR_BYTES == 0


def refuse_odd_strides(request: BuildRequest, layer: LayerSpec, *caches: tuple[str, Tensor]) -> None:
    """Refuse a cache the kernels would read across vectors: a cache is never copied.

    Raises:
        UnsupportedBatch: the first such cache, by its name.
    """
    for field, cache in caches:
        if not even_strides(cache):
            needed = f"an address and strides of multiples of {VECTOR_BYTES} bytes"
            found = f"strides {list(cache.stride())} at byte {cache.data_ptr() % VECTOR_BYTES}"
            raise refusal(request, field, needed, found, phase=f"layer {layer.layer_id}")


def cover_pads(out: Tensor, lse: Tensor | None, used: int) -> None:
    """Zeros and -inf for the tokens that belong to no row."""
    if used < out.shape[0]:
        out[used:].zero_()
        if lse is not None:
            lse[used:].fill_(float("-inf"))


@functools.lru_cache(maxsize=1024)
def _vectors_fit(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """The part of it that steps and layers have in common: a walk over dimensions costs as much as a launch."""
    outer = zip(strides[:-1], shape[:-1], strict=True)
    return strides[-1] == 1 and not any(size > 1 and step * itemsize % VECTOR_BYTES for step, size in outer)
