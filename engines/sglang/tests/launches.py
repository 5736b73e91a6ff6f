"""Server arguments of a launch on the CPU, as tests without a server ask for them.

In: a checkpoint and what is asked. Out: arguments, not resolved yet.
"""

from __future__ import annotations

from pathlib import Path

from sglang.srt.server_args import ServerArgs

__all__ = ["KEY", "arguments"]

KEY = "backstamp_torch_native"


def arguments(model: Path, **asked: object) -> ServerArgs:
    """A launch that asks for a key of ours, or for what is given."""
    said = {"model_path": str(model), "dtype": "float32", "device": "cpu", "skip_tokenizer_init": True}
    return ServerArgs(**{**said, "attention_backend": KEY, **asked})
