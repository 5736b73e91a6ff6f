"""docs/integrate.md is an engine: its blocks are the demo's engine, they run, and their tokens are plain torch's."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from torch import Tensor

import backstamp
from backstamp.attention import Batch, LayerSpec, PagedKV
from backstamp.host import this_host
from backstamp.launch import Requests
from backstamp.testing import demo, mini_engine
from backstamp.testing.demo import facts_of_decoder
from tests.documents import ROOT, blocks
from tests.greedy import MODELS, NEW_TOKENS, decoder, dense_tokens, prompts

PAGE = "docs/integrate.md"
FILE = ROOT / "core/src/backstamp/testing/mini_engine.py"
SPLIT = {"prefill_attention_backend": "flex_attention", "decode_attention_backend": "torch_native"}


def shown() -> str:
    """The page's blocks of the engine's file, one after the other."""
    return "\n".join(body for _, body in blocks(PAGE, "python file=mini_engine.py"))


def code_lines(text: str) -> list[str]:
    """Lines that are not blank: the page cuts the file between them."""
    return [line for line in text.splitlines() if line.strip()]


@pytest.fixture
def page(tmp_path: Path) -> Iterator[ModuleType]:
    """The page's code, imported as a reader's own file."""
    path = tmp_path / "engine_of_the_page.py"
    path.write_text(shown(), "utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up by name
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[path.stem]


def serve(page: ModuleType, model: str, log: list[str] | None = None, **flags: str) -> mini_engine.MiniEngine:
    """The page's engine over a small seeded model on this CPU."""
    target, lines = decoder(model), [] if log is None else log
    return page.serve(
        Requests(**flags), facts_of_decoder(MODELS[model], target.config), this_host("cpu"), target, lines.append
    )


def test_the_page_shows_the_engine_line_by_line() -> None:
    """What the page shows is the whole file the demo serves with, in its order."""
    assert code_lines(shown()) == code_lines(FILE.read_text("utf-8"))
    assert issubclass(demo._Watched, mini_engine.MiniEngine)


def test_the_engine_stays_as_short_as_the_page_says() -> None:
    """Blank lines, comments, docstrings and imports aside."""
    text = shown()
    aside: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            aside.update(range(node.lineno, node.end_lineno + 1))
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            aside.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = [
        line
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.lstrip().startswith("#") and number not in aside
    ]
    assert 100 < len(lines) < 155


def test_the_engine_speaks_to_backstamp_by_its_public_names_alone() -> None:
    """A reader's engine needs nothing that is not in `backstamp.__all__`; the model and the requests are its own."""
    tree = ast.parse(shown())
    spelled = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "backstamp"
    }
    assert {"resolve", "build", "Batch", "PagedKV", "read_stamp"} <= spelled <= set(backstamp.__all__)
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    own = {name for name in imported if name is not None and name.startswith("backstamp")}
    assert own == {"backstamp.testing.admission", "backstamp.testing.decoder"}


@pytest.mark.parametrize("flags", [{}, SPLIT], ids=["auto", "split"])
@pytest.mark.parametrize("model", MODELS)
def test_the_pages_code_gives_the_tokens_of_plain_torch(page: ModuleType, model: str, flags: dict[str, str]) -> None:
    """Installed kernels, resolved and built as the page says, in chunks of prompts: equal in fp32, token for token."""
    log: list[str] = []
    served = serve(page, model, log, **flags)
    served.chunk_tokens = 7
    assert served.generate(prompts(), NEW_TOKENS) == dense_tokens(decoder(model))
    prefill = flags.get("prefill_attention_backend", "torch_native")
    assert f"prefill: {prefill} ({'operator' if flags else 'auto'})" in log[0]
    assert "not fa3: needs cuda or musa, got cpu" in log[0]
    assert [line.split(" of ")[0] for line in log[1:]] == [
        f"prefill is served by {prefill}",
        "decode is served by torch_native",
    ]


@pytest.mark.parametrize("fault", ["zeros", "no-causal-mask"])
def test_the_pages_tokens_differ_where_attention_is_wrong(page: ModuleType, fault: str) -> None:
    """The comparison is seen red with attention answering zeros and with the causal mask dropped."""

    class Broken(page.MiniEngine):  # type: ignore[misc, name-defined]
        def batch(self, phase: str, rows: list[object]) -> Batch:
            batch = page.MiniEngine.batch(self, phase, rows)
            return dataclasses.replace(batch, causal=False) if fault == "no-causal-mask" else batch

        def attend(self, part: object, layer: LayerSpec, q: Tensor, kv: PagedKV, out: Tensor) -> None:
            page.MiniEngine.attend(self, part, layer, q, kv, out)
            if fault == "zeros":
                out.zero_()

    sound = serve(page, "llama")
    broken = Broken(sound.decoder, sound.backends)
    assert broken.generate(prompts(), NEW_TOKENS) != dense_tokens(decoder("llama"))


def test_a_refusal_leaves_the_pages_engine_before_anything_is_built(page: ModuleType) -> None:
    """A key for another machine raises with every verdict; nothing was logged, because nothing runs."""
    log: list[str] = []
    with pytest.raises(backstamp.BackstampError, match="needs cuda or musa, got cpu") as caught:
        serve(page, "llama", log, attention_backend="fa3")
    assert caught.value.verdicts
    assert log == []


def test_every_example_of_the_page_holds() -> None:
    """The examples share one namespace, as a reader would type them."""
    failed, tried = doctest.testfile(str(ROOT / PAGE), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert tried >= 10
    assert failed == 0
