"""The static check: nobody reads the base attention field on its own, in our tree or in anyone's."""

from __future__ import annotations

import pytest

from backstamp.source_lint import lint_source
from backstamp.source_lint.base_field import RULE, base_field
from backstamp.source_lint.linting import python_files
from tests.documents import ROOT
from tests.linted import parsed, said

FIELD = "attention_backend"


def found(text: str, field: str = FIELD) -> list[tuple[str, int]]:
    """Level and line of each read."""
    return said(list(base_field(parsed(text), field)))


def test_only_a_half_of_a_launch_reads_the_base_field() -> None:
    """SGLang #34264: seven decisions read it, and a split launch had left it unset. Not even a note is left over."""
    report = lint_source(ROOT)
    assert [finding for finding in report.findings if finding.rule == RULE] == []
    assert len(list(python_files(ROOT))) > 300


def test_without_its_entry_the_pair_of_a_launch_is_found() -> None:
    """The list is what lets it pass, not the rule."""
    text = (ROOT / "core/src/backstamp/launch.py").read_text("utf-8")
    assert [level for level, _ in found(text)] == ["fault"]


@pytest.mark.parametrize(
    "line",
    [
        "if args.attention_backend == 'fa3': pass",
        "if get_args().kernel.attention_backend: pass",
        "backend = args.attention_backend.lower()",
        "if (b := args.attention_backend): use(b)",
        "use(f'on {args.attention_backend!r}')",
        "args.attention_backend += '_x'",
        "[f(a.attention_backend) for a in every]",
        "lambda args: args.attention_backend",
        "getattr(args, 'attention_backend', None)",
        "inspect.getattr_static(args, 'attention_backend')",
        "args.__getattribute__('attention_backend')",
        "getattr(args, 'attention_' 'backend')",
        "getattr(args, 'attention_' + 'backend')",
        "kernel = args['attention_backend']",
        "vars(args)['attention_backend']",
        "args.__dict__['attention_backend']",
        "flags.get('attention_backend')",
        "flags.get('attention_backend', 'triton')",
        "b = flags.pop('attention_backend')",
        "b = flags.setdefault('attention_backend', 'x')",
        "get_flag(args, 'attention_backend')",
        "read_field(args, name='attention_backend')",
        "operator.attrgetter('server_args.attention_backend')(runner)",
        "attrgetter('attention_backend')",
        "itemgetter('attention_backend')(flags)",
        "if 'attention_backend' in vars(args): pass",
        "ok = 'attention_backend' not in flags",
        "'{0.attention_backend}'.format(args)",
        "'{args[attention_backend]:>8}'.format(args=flags)",
        "'{attention_backend}'.format(**vars(args))",
        "'{attention_backend!r}'.format_map(vars(args))",
        "'%(attention_backend)s' % vars(args)",
        "match args:\n  case Args(attention_backend='fa3'): pass",
        "match flags:\n  case {'attention_backend': backend}: pass",
        "match args.attention_backend:\n  case 'fa3': pass",
        "FIELD = 'attention_backend'\nb = getattr(args, FIELD)",
        "for name in ('attention_backend', 'kv_cache_dtype'):\n  use(getattr(args, name))",
        "NAMES = ['attention_backend']\n[flags[name] for name in NAMES]",
        "def f(args):\n  names = ['attention_backend']\n  return [getattr(args, name) for name in names]",
        "def f(args):\n  name = f'attention_backend'\n  return getattr(args, name)",
        "FIELD = f'attention_backend'\ngetattr(args, FIELD)",
        "for key, value in vars(args).items():\n  if key == 'attention_backend': use(value)",
        "[value for key, value in flags.items() if 'attention_backend' == key]",
    ],
)
def test_a_reading_is_found_however_it_is_spelled(line: str) -> None:
    """An attribute, getattr, a key, a lookup, a pattern, a template, a name in a constant, a loop over names."""
    assert [level for level, _ in found(line)] == ["fault"]


@pytest.mark.parametrize(
    "line",
    [
        "args.attention_backend = 'fa3'",
        "args.attention_backend: str = 'fa3'",
        "del args.attention_backend",
        "flags['attention_backend'] = 'fa3'",
        "del flags['attention_backend']",
        "flags.pop('attention_backend', None)",
        "flags.setdefault('attention_backend', 'fa3')",
        "setattr(args, 'attention_backend', 'fa3')",
        "delattr(args, 'attention_backend')",
        "hasattr(args, 'attention_backend')",
        "Args(attention_backend='fa3')",
        "replace(args, attention_backend='fa3')",
        "flags = {'attention_backend': 'fa3'}",
        "class Args:\n  attention_backend: str | None = None",
        "def build(attention_backend): return attention_backend",
        "parser.add_argument('--attention-backend', default=ServerArgs.attention_backend)",
        "backend = runner.attention_backend()",
        "pair = args.prefill_attention_backend",
        "from engine import attention_backend",
        "log('attention_backend')",
        "use('attention_backend' in 'attention_backend is set')",
        "if name in ('attention_backend', 'x'): pass",
        "'{attention_backend}'.format(attention_backend='fa3')",
        "x: Literal['attention_backend']",
        "for name in ('attention_backend', 'x'):\n  setattr(args, name, None)",
        "for key, value in flags.items():\n  if value == 'attention_backend': use(key)",
        "for name, default in zip(names, defaults):\n  if name == 'attention_backend': use(default)",
        "for index, name in enumerate(names):\n  if name == 'attention_backend': use(index)",
        "def f(name):\n  name = 'attention_backend' if name else 'x'\n  return getattr(args, name)",
        "# args.attention_backend\n'args.attention_backend'",
        "FIELD = 'attention_backend'\ndef f(FIELD): return getattr(args, FIELD)",
    ],
)
def test_what_is_no_reading_is_left_alone(line: str) -> None:
    """Writes, definitions, `hasattr`, parameters, a class's default, and the word in a text."""
    assert found(line) == []


@pytest.mark.parametrize(
    "line",
    [
        "b = args.prefill_attention_backend or args.attention_backend",
        "b = args.decode_attention_backend if args.decode_attention_backend is not None else args.attention_backend",
        "b = args.attention_backend if half is None else decode_attention_backend",
        "b = flags.get('prefill_attention_backend', flags.get('attention_backend'))",
        "b = getattr(args, 'prefill_attention_backend', args.attention_backend)",
        "b = getattr(args, f'{half}_attention_backend') or args.attention_backend",
        "if args.attention_backend is None and args.prefill_attention_backend is None: pass",
        "if not args.attention_backend and not (d := args.decode_attention_backend): pass",
        "for name in (FIELD, 'x'): pass\nfor name in ('attention_backend', 'prefill_attention_backend', "
        "'decode_attention_backend'):\n  use(getattr(args, name))",
    ],
)
def test_the_fallback_of_a_half_is_a_note(line: str) -> None:
    """A pair is made like that; it belongs in one place, but it is not the base field alone."""
    assert [level for level, _ in found(line)] == ["note"]


@pytest.mark.parametrize(
    "body",
    [
        "b = args.prefill_attention_backend\n  if b is None:\n    b = args.attention_backend",
        "b = args.prefill_attention_backend\n  if not b:\n    b = args.attention_backend",
        "b = getattr(args, 'decode_attention_backend', None)\n  if b is not None: pass\n"
        "  else: b = args.attention_backend",
        "if args.prefill_attention_backend is None:\n    args.prefill_attention_backend = args.attention_backend",
        "if args.prefill_attention_backend:\n    b = args.prefill_attention_backend\n"
        "  else:\n    b = args.attention_backend",
        "if not args.prefill_attention_backend: return args.attention_backend",
        "b = args.prefill_attention_backend\n  c = b or args.attention_backend",
    ],
)
def test_a_pair_made_in_statements_is_a_note_too(body: str) -> None:
    """The commonest way to write it: the half, and where it is None the base."""
    assert [level for level, _ in found(f"def f(args):\n  {body}")] == ["note"]


@pytest.mark.parametrize(
    "body",
    [
        "return args.attention_backend or args.prefill_attention_backend",
        "return args.attention_backend if phase == 'decode' else args.prefill_attention_backend",
        "return args.attention_backend if args.attention_backend is not None else args.prefill_attention_backend",
        "if args.prefill_attention_backend is None:\n    return args.attention_backend == 'fa3'",
        "if args.prefill_attention_backend:\n    return args.attention_backend",
        "if args.prefill_attention_backend is None:\n    return not args.attention_backend",
        "b = args.page_size\n  if b is None:\n    b = args.attention_backend",
    ],
)
def test_a_base_that_wins_over_a_half_is_a_fault(body: str) -> None:
    """The base first, the base by the phase, the base where the half is set: no half falls back on it."""
    assert [level for level, _ in found(f"def f(args, phase):\n  {body}")] == ["fault"]


def test_beside_another_question_it_is_still_alone() -> None:
    """Only a half of the same field is company."""
    assert [level for level, _ in found("x = args.kv_cache_dtype or args.attention_backend")] == ["fault"]
    assert [level for level, _ in found("x = args.prefill_attention_backend == args.attention_backend")] == ["fault"]


VALUE_OF_ITS_OWN = """
class Tower:
    def __init__(self, attention_backend):
        self.attention_backend = attention_backend
    def forward(self):
        return self.attention_backend == "sdpa"
"""
THREE_FIELDS = """
class Args:
    attention_backend: str | None = None
    prefill_attention_backend: str | None = None
    def deterministic(self):
        return self.attention_backend == "fa3"
"""


def test_a_class_that_keeps_a_value_of_that_name_and_no_halves_is_a_note() -> None:
    """What it was given was read elsewhere, and is a fault there; a class with the halves has no excuse."""
    assert found(VALUE_OF_ITS_OWN) == [("note", 6)]
    assert found(THREE_FIELDS) == [("fault", 6)]


def test_a_line_that_reads_it_twice_is_one_finding() -> None:
    """The finding says where, what and what to do."""
    (finding,) = base_field(
        parsed("class A:\n  def f(self): x = args.attention_backend; use(args.attention_backend)"), FIELD
    )
    assert (finding.rule, finding.file, finding.line, finding.subject) == ("base-field", "engine.py", 2, "A.f")
    assert finding.text == "needs the half that is meant, got args.attention_backend"
    assert "resolved pair" in finding.fix


def test_of_a_fault_and_a_note_on_one_line_the_fault_stands() -> None:
    """Whichever is read first."""
    alone, beside = "x = args.attention_backend", "y = args.prefill_attention_backend or args.attention_backend"
    assert found(f"{alone}; {beside}") == found(f"{beside}; {alone}") == [("fault", 1)]


def test_an_engine_may_call_the_field_otherwise() -> None:
    """`--field`: the halves follow its name."""
    assert found("cfg.attn", "attn") == [("fault", 1)]
    assert found("cfg.prefill_attn or cfg.attn", "attn") == [("note", 1)]
    assert found("cfg.attention_backend", "attn") == []
