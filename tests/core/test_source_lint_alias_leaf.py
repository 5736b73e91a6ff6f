"""The static check: no leaf of a factory answers an alias that is never a kernel (SGLang #34264)."""

from __future__ import annotations

from pathlib import Path

import pytest

from backstamp.catalogue import build_catalogue
from backstamp.discovery import discover
from backstamp.source_lint import aliases_of, lint_source
from backstamp.source_lint.alias_leaf import RULE, alias_leaf, declared_in, untold
from backstamp.source_lint.leaves import Leaves
from tests.linted import parsed

ALIASES = frozenset({"nsa", "hybrid_linear_attn"})
IMPORT = "from backstamp.factories import Built\n"


def found(text: str) -> list[int]:
    """The lines of every alias a leaf or a stamp says."""
    return sorted(finding.line for finding in alias_leaf(parsed(text), ALIASES))


def answered(text: str, function: str = "build") -> list[str]:
    """What a function answers; `line N: ...` where it cannot be told."""
    answers = Leaves(parsed(text)).answers(function)
    return sorted(answer.kernel or f"line {answer.line}: {answer.words}" for answer in answers)


@pytest.mark.parametrize(
    "text",
    [
        IMPORT + "def f(r): return Built('nsa', b)",
        IMPORT + "def f(r): return Built(kernel='nsa', backend=b)",
        "from backstamp.factories import Built as Made\ndef f(r): return Made('nsa', b)",
        "import backstamp.factories as made\ndef f(r): return made.Built('nsa', b)",
        IMPORT + "Made = Built\ndef f(r): return Made('nsa', b)",
        IMPORT + "def f(r): return Built._make(('nsa', b, {}))",
        IMPORT + "make = partial(Built, 'nsa')",
        IMPORT + "def f(r): return Built('n' + 'sa', b)",
        IMPORT + "def f(r): return Built('nsa' if r.old else 'dsa', b)",
        IMPORT + "NAME = 'nsa'\ndef f(r): return Built(NAME, b)",
        IMPORT + "def f(r):\n  name = 'nsa'\n  return Built(name, b)",
        IMPORT + "async def f(r): return Built('nsa', b)",
        IMPORT + "class F:\n  def f(self):\n    def inner(): return Built('hybrid_linear_attn', b)\n    return inner()",
        "def f(self): return 'nsa', Backend(self.runner)",
        "def f(self):\n  name = 'nsa'\n  return (name, Backend())",
        "def f(self): return ('nsa', None)",
        "def f(self): return ('nsa', b) if old else ('dsa', b)",
        "table = {'nsa': lambda: ('nsa', Backend())}",
        "backend.decode_attention_backend_str = 'nsa'",
        "backend.prefill_attention_backend_str = backend.decode_attention_backend_str = 'nsa'",
        "setattr(backend, 'prefill_attention_backend_str', 'nsa')",
        "put_stamp(backend, Stamp(kernel='nsa', slot='attention'))",
        "make(decode_attention_backend_str='nsa')",
        IMPORT + "def f(r):\n  name = 'nsa' if r.old else 'dsa'\n  return Built(name, b)",
        IMPORT + "def f(r):\n  name = 'dsa'\n  if r.old: name = 'nsa'\n  return Built(name, b)",
        IMPORT + "def f(r): return Built(**{'kernel': 'nsa', 'backend': b})",
        IMPORT + "def f(r): return Built(*('nsa', b))",
        "def f(self):\n  name, backend = 'nsa', Backend()\n  return name, backend",
        "b.decode_attention_backend_str, b.x = 'nsa', 1",
        "stamp = replace(stamp, kernel='nsa')",
        "put_stamp(b, dataclasses.replace(stamp_of(b), kernel='nsa'))",
    ],
)
def test_a_leaf_that_says_an_alias_is_found_however_it_is_made(text: str) -> None:
    """A `Built`, a pair of name and backend, and a stamp."""
    assert len(found(text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        IMPORT + "def f(r): return Built('dsa', b)",
        "def Built(name, b): pass\nx = Built('nsa', 1)",
        "table = {'nsa': build_dsa, 'dsa': build_dsa}",
        "if key == 'nsa': key = 'dsa'",
        "Alias(key='nsa', kernels=('dsa',), deprecated='use dsa')",
        "def f(): return 'nsa', 'nsa'",
        "def f(): return 'nsa', True",
        "request = replace(request, kernel='nsa')",
        "b.decode_attention_backend_str, b.asked = 'dsa', 'nsa'",
        IMPORT + "def f(r): return Built(**{'kernel': 'dsa', 'asked': 'nsa'})",
        "def f(x): return 'nsa', int(x)",
        "def f(x): return 'nsa', ValueError(x)",
        "def f(x): return 'nsa', KernelError(x)",
        "def f(x): return 'nsa', f'{x}'",
        "def f(x): return 'nsa', [x]",
        "def f(x): return 'nsa', x == 1",
        "def f(): return 'nsa'",
        "def f(): return 'nsa', b, c, d",
        "pair = ('nsa', backend)",
        "args.decode_attention_backend = 'nsa'",
    ],
)
def test_an_alias_in_another_place_is_left_alone(text: str) -> None:
    """A key of a table, a declaration, a request, two names: none is what a factory answers."""
    assert found(text) == []


def test_the_finding_names_the_alias_and_where_it_is_answered() -> None:
    """Who, what and what to do."""
    text = "class Factory:\n  def create(self):\n    return 'nsa', Backend()"
    (finding,) = alias_leaf(parsed(text), ALIASES)
    assert (finding.level, finding.rule, finding.subject, finding.line) == ("fault", RULE, "Factory.create", 3)
    assert finding.text == "needs the name of a kernel, got the alias 'nsa' in ('nsa', Backend())"
    assert finding.fix == "Answer the name of the kernel that is built"


MADE_UP = """
from backstamp.factories import Built as Made

async def build(request):
    def inner():
        return 1
    if request.layers:
        return Made("nsa", inner)
    if request.dtype:
        return await _rest(request)
    return _named(request) if request.topk else made_elsewhere(request)

async def _rest(request):
    if request.layout:
        return Made(request.kernel, None)
    if request.device:
        return ("triton", None)
    built = Made(kernel="dsa", backend=None)
    return built

_named = lambda request: Made("fa3" if request.old else "fa4", None)
"""


def test_answers_are_followed_through_the_functions_of_a_module() -> None:
    """An `async def`, a lambda, a local name; what is computed, or from elsewhere, is told as such."""
    assert answered(MADE_UP) == [
        "dsa",
        "fa3",
        "fa4",
        "line 11: return _named(request) if request.topk else made_elsewhere(request)",
        "line 15: Made(request.kernel, None)",
        "nsa",
        "triton",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "def build(r): return build(r)",
        "def build(r): return rest(r)\ndef rest(r): return build(r)",
        "def build(r):\n  x = x\n  return x",
        "def build(r):\n  x = y\n  y = x\n  return x",
    ],
)
def test_a_function_that_answers_itself_comes_to_an_end(text: str) -> None:
    """Following never goes in a circle."""
    assert all(line.startswith("line ") for line in answered(text))


@pytest.mark.parametrize(
    "text",
    [
        "def build(r): return Built(r.kernel, b)",
        "def build(r): return Built(f'fa{r.version}', b)",
        "def build(r):\n  for name in NAMES: pass\n  return Built(name, b)",
        "def build(kernel): return Built(kernel, b)",
        "def build(r):\n  name = 'a'\n  if r.old: name = r.kernel\n  return Built(name, b)",
        "def build(r): return Built(*r)",
        "def build(r): return other(r)",
        "def build(r): return",
        "build = make(1)",
        "if cuda:\n  def build(r): return Built('a', b)\nelse:\n  def build(r): return other(r)",
    ],
)
def test_a_declared_factory_whose_answer_cannot_be_told_is_a_fault(text: str) -> None:
    """A computed name, an answer from elsewhere, no function of that name."""
    assert [finding.level for finding in untold(parsed(IMPORT + text), ["build"])] == ["fault"]


def test_a_declared_factory_that_can_be_told_is_none() -> None:
    """The ordinary plugin."""
    assert list(untold(parsed(IMPORT + "def build(r): return Built('dsa', b)"), ["build"])) == []


def test_the_factories_of_offers_are_read_from_source() -> None:
    """An offer, a row that replaces its factory, and a constant that is half of the path."""
    text = (
        "P = 'acme.'\nOffer(factory='acme.backend:build')\nreplace(row, factory=P + 'sub.mla:build')\nf(factory='a:b')"
    )
    assert sorted(declared_in(parsed(text))) == ["acme.backend:build", "acme.sub.mla:build"]


def test_a_factory_declared_in_one_file_is_held_in_another(tmp_path: Path) -> None:
    """Also in a subpackage, and where the declaration is read last."""
    (tmp_path / "acme" / "sub").mkdir(parents=True)
    (tmp_path / "acme" / "plugin.py").write_text("Offer(factory='acme.sub:build')\nOffer(factory='acme.a:build')")
    (tmp_path / "acme" / "a.py").write_text("from backstamp import Built\ndef build(r): return Built('a', 1)")
    (tmp_path / "acme" / "sub" / "__init__.py").write_text("def build(r): return Built(r.kernel, 1)")
    (tmp_path / "old_acme").mkdir()
    for other in ("sub.py", "old_acme/sub.py"):
        (tmp_path / other).write_text("def build(r): return Built(r.kernel, 1)")
    (finding,) = lint_source(tmp_path).findings
    assert (finding.rule, finding.file, finding.subject) == (RULE, "acme/sub/__init__.py", "build")
    assert "return Built(r.kernel, 1)" in finding.text


def test_aliases_that_name_a_kernel_of_their_own_are_kernels() -> None:
    """`trtllm_mha` is an alias and the first of its kernels; `nsa` never is one."""
    aliases = aliases_of(build_catalogue(discover()))
    assert {"nsa", "hybrid_linear_attn"} <= aliases
    assert not {"trtllm_mha", "dsa", "fa3"} & aliases
