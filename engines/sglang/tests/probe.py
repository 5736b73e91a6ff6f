"""A plugin of SGLang's that tests install: one more call a scheduler answers, about what it runs.

In: `engine.collective_rpc("backstamp_probe", path=...)`. Out: a JSON file, written inside the scheduler process.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def install() -> None:
    """The entry point: SGLang calls any method of its scheduler by name."""
    from sglang.srt.managers.scheduler import Scheduler

    Scheduler.backstamp_probe = _probe
    _REACHES[os.environ["BACKSTAMP_INTERPRETED"]]()


def _draft_on_a_cpu() -> None:
    """SGLang's own Triton kernels around a draft, which it keeps for devices that have no others."""
    from sglang.kernels.ops.speculative import cache_locs, spec_tree

    cache_locs._is_xpu = spec_tree._is_xpu = True


def _hybrid_on_a_cpu() -> None:
    """SGLang's hybrid models ask the accelerator, and there is none, where to put a norm."""
    import torch

    device_module = torch.get_device_module
    torch.get_device_module = lambda device=None: torch.cpu if device is None else device_module(device)


_REACHES = {"": lambda: None, "draft": _draft_on_a_cpu, "hybrid": _hybrid_on_a_cpu}


def _probe(self: object, path: str) -> None:
    from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
    from sglang.srt.plugins.hook_registry import HookRegistry

    runner = self.tp_worker.model_runner
    whole = runner.attn_backend
    halves = (whole.prefill_backend, whole.decode_backend) if isinstance(whole, HybridAttnBackend) else (whole,)
    touched = {
        "backends": [f"{type(half).__module__}.{type(half).__name__}" for half in halves],
        "hooked": sorted(HookRegistry._patched),
        "page_size": runner.page_size,
        "pool": type(runner.token_to_kv_pool).__name__,
        # an editable plugin's declarations are read from its plugin.py
        "modules": sorted(
            name
            for name in sys.modules
            if name.startswith(("backstamp_sglang.", "backstamp_cpu.")) and not name.endswith(".plugin")
        ),
    }
    # a module of ours is imported for it, so it is asked last
    from backstamp_sglang.stamps import linear_stamps_of, stamps_of

    found = {"touched": touched, "stamps": stamps_of(runner), "linear": linear_stamps_of(runner)}
    if self.draft_worker is not None:
        draft = self.draft_worker._draft_worker.draft_runner
        loop, extend = draft.draft_attn_backend, draft.attn_backend
        made = (loop, *loop.attn_backends, extend)
        found["draft"] = {
            "named": [each.decode_attention_backend_str for each in made],
            "made": [type(each).__module__.partition(".")[0] for each in made],
            "stamps": stamps_of(draft),
        }
    Path(path).write_text(json.dumps(found), "utf-8")
