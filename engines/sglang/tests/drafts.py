"""SGLang's own draft factory, asked on a described host: its leaf classes are recorders, its answer is a stamp.

In: a row of the golden table. Out: the names it stamps on what it builds, or its own refusal. The module folder of each
leaf is replaced while it is asked, because a leaf's module imports kernel libraries that are not here.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from sglang.srt.speculative import draft_utils

from backstamp.host import HostFacts
from backstamp.testing.hosts import described_host

__all__ = ["draft_runner", "on_host", "own_answers"]

_LEAVES = re.compile(r"from (sglang\.srt\.[\w.]*attention[\w.]*) import")
_MLA = ("mla", "dsa", "dsv4")


class Recorder:
    """Stands for a leaf class: a backend, or the container of a draft loop with a backend a step."""

    def __init__(self, runner: object, *rest: object, **named: object) -> None:
        self.attn_backends = [SimpleNamespace(), SimpleNamespace()]


class RecorderModule(ModuleType):
    """A module whose every class is a recorder."""

    def __getattr__(self, name: str) -> type[Recorder]:
        if name.startswith("__"):
            raise AttributeError(name)
        return Recorder


def own_answers(row: dict[str, str], patch: pytest.MonkeyPatch) -> tuple[str, str]:
    """What SGLang's factory stamps for draft decode and for draft extend: a kernel, or `refused: ...`."""
    on_host(described_host(row["host"]), patch)
    factory = draft_utils.DraftBackendFactory(draft_runner(row), topk=1, speculative_num_steps=3)
    return _answer(factory.create_decode_backend), _answer(factory.create_draft_extend_backend)


def draft_runner(row: dict[str, str]) -> SimpleNamespace:
    """What the factory reads of a draft's runner."""
    config = SimpleNamespace(hf_config=SimpleNamespace(), hf_text_config=SimpleNamespace())
    return SimpleNamespace(
        draft_attention_backend=row["alias"], use_mla_backend=row["model"] in _MLA, model_config=config
    )


def on_host(host: HostFacts, patch: pytest.MonkeyPatch) -> None:
    """Have SGLang's factory see a described host, and recorders where its leaves are."""
    for module in set(_LEAVES.findall(Path(draft_utils.__file__).read_text("utf-8"))):
        if not module.endswith(("attention_registry", "config")):
            patch.setitem(sys.modules, module, RecorderModule(module))
    cuda, amx = host.device == "cuda", host.device == "cpu" and "amx_tile" in (host.cpu_features or ())
    for name, answer in (
        ("is_cpu", host.device == "cpu"),
        ("is_hip", host.device == "rocm"),
        ("is_npu", host.device == "npu"),
        ("is_musa", host.device == "musa"),
        ("cpu_has_amx_support", amx),
        ("is_blackwell", cuda and host.arch.split(".")[0] in ("10", "12")),
        ("attention_backends", (None, None)),
        ("get_spec", SimpleNamespace(speculative_attention_mode="prefill")),
    ):
        patch.setattr(draft_utils, name, lambda answer=answer: answer)


def _answer(create: object) -> str:
    try:
        built = create()
    except ValueError as refusal:
        return f"refused: {refusal}"
    children = {child.decode_attention_backend_str for child in built.attn_backends if vars(child)}
    assert children <= {built.decode_attention_backend_str}
    return built.decode_attention_backend_str
