"""One launch of vLLM as a test sees it: its answer, its log, and whether it served at all."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from engines.vllm.tests.models import VOCAB

__all__ = ["Served", "serve"]

_CHILD = Path(__file__).with_name("serve_once.py")


@dataclass(frozen=True, slots=True)
class Served:
    """What one launch came to; `tokens` and the rest are empty where it did not serve.

    `stamps` are by layer and half, `touched` is what of Backstamp the worker met, `distances` those of `linear_steps`.
    """

    status: int
    log: str
    tokens: tuple[tuple[int, ...], ...] = ()
    cached: tuple[int, ...] = ()
    stamps: dict[str, dict[str, dict[str, object]]] | None = None
    touched: dict[str, object] | None = None
    distances: tuple[float, ...] = ()

    def kernels(self, half: str) -> list[str]:
        """The kernel on the stamp of each layer, in order."""
        assert self.stamps is not None, self.log[-4000:]
        return [str(stamps[half]["kernel"]) for stamps in self.stamps.values()]


def serve(
    folder: Path,
    model: Path,
    *,
    site: Path | None = None,
    parent_only: Path | None = None,
    drive_linear: bool = False,
    **llm: object,
) -> Served:
    """Serve the prompts in a child; `site` is on the module path of all its processes, `parent_only` of one.

    With `drive_linear`, the worker drives its gated delta nets after that, with `linear_steps` of this folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    request, answer = folder / "request.json", folder / "answer.json"
    asked: dict[str, object] = {"vocab": VOCAB, "llm": {"model": str(model), **llm}, "drive_linear": drive_linear}
    if parent_only is not None:
        asked["parent_only"] = str(parent_only)
    request.write_text(json.dumps(asked), "utf-8")
    child = subprocess.run(
        [sys.executable, str(_CHILD), str(request), str(answer)],
        capture_output=True,
        text=True,
        env=_environment([site] if not drive_linear else [site, _CHILD.parent]),
        check=False,
        timeout=600,
    )
    # a process of vLLM puts its name before each line, a worker its colour
    log = re.sub(r"\x1b\[[0-9;]*m", "", child.stdout + child.stderr)
    if not answer.exists():
        return Served(child.returncode, log)
    found = json.loads(answer.read_text("utf-8"))
    tokens = tuple(tuple(row) for row in found["tokens"])
    return Served(
        child.returncode,
        log,
        tokens,
        tuple(found["cached"]),
        found["stamps"],
        found["touched"],
        tuple(found["distances"]),
    )


def _environment(folders: list[Path | None]) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TRITON_INTERPRET"))}
    path = [str(folder) for folder in folders if folder is not None]
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])]),
        # functions are sent to workers, to read stamps there
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
