"""A plugin of SGLang's that tests install: one more call a scheduler answers, about what it runs.

In: `engine.collective_rpc("backstamp_probe", path=...)`. Out: a JSON file, written inside the scheduler process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def install() -> None:
    """The entry point: SGLang calls any method of its scheduler by name."""
    from sglang.srt.managers.scheduler import Scheduler

    Scheduler.backstamp_probe = _probe


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
        # an editable plugin's declarations are read from its plugin.py
        "modules": sorted(
            name
            for name in sys.modules
            if name.startswith(("backstamp_sglang.", "backstamp_cpu.")) and not name.endswith(".plugin")
        ),
    }
    # a module of ours is imported for it, so it is asked last
    from backstamp_sglang.stamps import stamps_of

    Path(path).write_text(json.dumps({"touched": touched, "stamps": stamps_of(runner)}), "utf-8")
