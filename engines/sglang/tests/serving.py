"""One launch of SGLang as a test sees it: its answer, its log, and whether it served at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from backstamp.testing.dists import write_distribution
from engines.sglang.tests.models import VOCAB
from engines.sglang.tests.serve_once import NUM_PROMPTS

__all__ = ["Served", "serve"]

_HERE = Path(__file__).parent
#: SGLang's rotation imports vLLM's op wherever it has no kernel of its own for the device, and does not call it there.
_STAND_IN = 'def rotary_embedding(*tensors):\n    raise NotImplementedError("a stand-in of the tests")\n'


@dataclass(frozen=True, slots=True)
class Served:
    """What one launch came to; `tokens` and the rest are empty where it did not serve.

    `stamps` are by layer and phase, `touched` is what of Backstamp the scheduler met; `accepted` counts, by prompt, the
    steps that took so many drafted tokens, `draft` is what runs the draft, and `linear` has the linear slot's stamps.
    """

    status: int
    log: str
    tokens: tuple[tuple[int, ...], ...] = ()
    cached: tuple[int, ...] = ()
    stamps: dict[str, dict[str, dict[str, object]]] | None = None
    touched: dict[str, object] | None = None
    accepted: list[list[int] | None] | None = None
    draft: dict[str, object] | None = None
    linear: dict[str, dict[str, object]] | None = None

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
    count: int = NUM_PROMPTS,
    longest: int = 1000,
    interpreted: str = "",
    **engine: object,
) -> Served:
    """Serve the last `longest` tokens of `count` prompts in a child.

    `site` is on the module path of all its processes, `parent_only` of one. `interpreted` is "draft" or "hybrid" where
    Triton's interpreter runs what SGLang has no kernel for on a CPU: see the probe.
    """
    folder.mkdir(parents=True, exist_ok=True)
    request, answer = folder / "request.json", folder / "answer.json"
    asked: dict[str, object] = {"vocab": VOCAB, "count": count, "longest": longest}
    asked["engine"] = {"model_path": str(model), **engine}
    if parent_only is not None:
        asked["parent_only"] = str(parent_only)
    request.write_text(json.dumps(asked), "utf-8")
    child = subprocess.run(
        [sys.executable, str(_HERE / "serve_once.py"), str(request), str(answer)],
        capture_output=True,
        text=True,
        env=_environment([_given(folder / "given"), *([site] if site is not None else [])], interpreted),
        check=False,
        timeout=600,
    )
    log = child.stdout + child.stderr
    if not answer.exists():
        return Served(child.returncode, log)
    found = json.loads(answer.read_text("utf-8"))
    tokens = tuple(tuple(row) for row in found["tokens"])
    told = (found["stamps"], found["touched"], found["accepted"], found.get("draft"), found["linear"])
    return Served(child.returncode, log, tokens, tuple(found["cached"]), *told)


def _given(site: Path) -> Path:
    """A site folder with what the tests give every process: the probe, and the stand-in."""
    (site / "vllm").mkdir(parents=True, exist_ok=True)
    (site / "vllm" / "__init__.py").touch()
    (site / "vllm" / "_custom_ops.py").write_text(_STAND_IN, "utf-8")
    (site / "sglang_probe.py").write_text((_HERE / "probe.py").read_text("utf-8"), "utf-8")
    write_distribution(site, "sglang-probe", entry_points="[sglang.srt.plugins]\nprobe = sglang_probe:install\n")
    return site


def _environment(sites: list[Path], interpreted: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TRITON_INTERPRET"))}
    # with its own CPU kernels asked for, SGLang imports a library that is not on PyPI
    kept.pop("SGLANG_USE_CPU_ENGINE", None)
    path = [*map(str, sites), *filter(None, [os.environ.get("PYTHONPATH")])]
    if interpreted:
        kept["TRITON_INTERPRET"] = "1"
    # SGLang keeps the windows of its convolutions in bfloat16, whatever the model's dtype
    own = {"SGLANG_MAMBA_CONV_DTYPE": "float32", "BACKSTAMP_INTERPRETED": interpreted}
    return {**kept, **own, "PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
