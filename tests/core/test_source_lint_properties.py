"""`backstamp lint` never crashes, whatever lies in a file with the name of Python."""

from __future__ import annotations

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstamp.findings import Finding
from backstamp.source_lint.alias_leaf import alias_leaf, declared_in, untold
from backstamp.source_lint.base_field import base_field
from backstamp.source_lint.container_children import classes_of, container_children
from backstamp.source_lint.leaves import Leaves
from backstamp.source_lint.none_is_yes import none_is_yes
from backstamp.source_lint.source import Source, read_source


def every_rule(source: Source) -> list[Finding]:
    """All findings of all rules over one module."""
    functions = list(Leaves(source).functions)
    rules = [base_field(source, "attention_backend"), none_is_yes(source, "attention_backend")]
    rules += [alias_leaf(source, frozenset({"nsa"})), untold(source, [*functions, "build"])]
    assert all(isinstance(factory, str) for factory in declared_in(source))
    return [*(item for rule in rules for item in rule), *container_children(classes_of(source))]


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_are_a_fault(data: bytes) -> None:
    """Whatever lies in a file with the name of Python."""
    source = read_source("a.py", data)
    if isinstance(source, Finding):
        assert source.level == "fault"
    else:
        every_rule(source)


WORDS = [
    "attention_backend",
    "prefill_attention_backend",
    "attn_backends",
    "nsa",
    "Built",
    "backend",
    "self",
    "num_steps",
]
NAMES = st.sampled_from(WORDS)
ATOMS = st.one_of(
    NAMES, NAMES.map(repr), st.sampled_from(["None", "True", "1", "b'x'", "...", "()", "self.attn_backends"])
)


def grown(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Expressions of expressions, in the forms the rules look at."""
    pair = st.tuples(inner, inner)
    forms = [
        "({} or {})", "({} and {})", "({} == {})", "({} != {})", "({} in {})", "({} not in [{}])", "({} is {})",
        "({}, {})", "({} if {} else 1)", "f({}, {})", "getattr({}, {})", "d.get({}, {})", "Built({}, {})",
        "[{} for num_steps in {}]", "({} + {})", "'%s' % ({}, {})", "(lambda backend={}: {})", "{{{}: {}}}",
        "'{{a}}'.format({}, *{})", "({} < 2 < {})", "Offer(factory={}, x={})", "setattr(self, {}, {})",
        "any({} == x for x in {})", "all({} for backend in ({}, 1))", "{{'a': {}}}.get({}, True)", "(({} or '') != {})",
        "replace(*{}, **{})", "partial(Built, {}, {})",
    ]  # fmt: skip
    single = [
        "(not {})",
        "(x := {})",
        "({}).attention_backend",
        "vars()[{}]",
        "f'{{{}}}'",
        "Built._make({})",
        "({})[1:]",
    ]
    joined = st.tuples(st.sampled_from(forms), pair).map(lambda given: given[0].format(*given[1]))
    return joined | st.tuples(st.sampled_from(single), inner).map(lambda given: given[0].format(given[1]))


EXPRESSIONS = st.recursive(ATOMS, grown, max_leaves=8)
SHAPES = st.sampled_from(
    [
        "x = {0}", "{2}: {0} = {1}", "{2} += {0}", "del x[{0}]", "return {0}", "if {0}: return {1}", "assert {0}, {1}",
        "for {2} in {0}: self.{2}.append({1})", "raise {0}", "with {0} as {2}: return {1}", "while {0}: return {1}",
        "match {0}:\n    case {{{3!r}: {2}}}: return {1}",
        "match {0}:\n    case 'a' | {3!r}: return {1}\n    case x if {0}: return x",
        "class {2}MultiStepBackend({0}): x = {1}", "{0}",
        "def build({2}: {0} = {1}) -> bool: return {2}", "async def f(*, {2}={0}): return await {1}", "self.{2} = {0}",
        "try: return {0}\n  except Exception: raise", "from {2} import Built as {3}", "global {2}", "{2} = {3} = {0}",
    ]
)  # fmt: skip
STATEMENTS = st.builds(str.format, SHAPES, EXPRESSIONS, EXPRESSIONS, NAMES, NAMES)


@given(st.lists(STATEMENTS, max_size=5), st.sampled_from(["", "class A:\n", "async "]))
def test_any_python_is_looked_at_by_every_rule(statements: list[str], around: str) -> None:
    """Made of what the rules look for, put together in ways nobody writes."""
    indent = "  " if around.startswith("class") else ""
    body = "\n".join(f"{indent}  {line}" for line in statements) or f"{indent}  pass"
    text = f"{around if indent else ''}{indent}{around if not indent else ''}def build(self, backend=None):\n{body}\n"
    source = read_source("a.py", text.encode())
    if isinstance(source, Source):
        for finding in every_rule(source):
            assert finding.line > 0 or finding.text.startswith("needs Built")
            assert finding.text.startswith("needs ")
            assert "\n" not in finding.text
    else:
        with pytest.raises(SyntaxError):
            ast.parse(text)
