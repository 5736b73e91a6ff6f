"""Device buffers of trtllm-gen kernels, at their final size from the start.

In: a `BuildRequest`. Out: zeroed buffers. The kernels reset their counters themselves, so one buffer serves every
launch of one stream, recorded ones too.
"""

from __future__ import annotations

import torch
from flashinfer.utils import get_device_sm_count, get_trtllm_gen_multi_ctas_kv_counter_bytes
from torch import Tensor

from backstamp.factories import BuildRequest
from backstamp_trtllm.launches import zeros

__all__ = ["WORKSPACE_BYTES", "counters"]

#: What flashinfer's documentation of these functions recommends, 128 MiB.
WORKSPACE_BYTES = 128 << 20


def counters(request: BuildRequest, *, rows: int | None = None) -> Tensor:
    """Counters for `rows` rows (by default as many as a step may have) of the widest layer.

    Without a buffer of ours flashinfer would allocate and clear one in every call.
    """
    heads = max((spec.num_qo_heads for spec in request.layers), default=128)
    sm_count = get_device_sm_count(torch.device(request.device))
    most = request.max_rows if rows is None else rows
    return zeros(get_trtllm_gen_multi_ctas_kv_counter_bytes(max(1, most), heads, sm_count), request.device)
