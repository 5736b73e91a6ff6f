"""The static check: no predicate answers yes about no backend (case 13; SGLang #34264, the None trap)."""

from __future__ import annotations

import pytest

from backstamp.source_lint.none_is_yes import RULE, none_is_yes
from tests.linted import parsed, said

FIELD = "attention_backend"
NONE = "backend: str | None"


def found(text: str) -> list[str]:
    """The level of each finding."""
    return [level for level, _ in said(list(none_is_yes(parsed(text), FIELD)))]


@pytest.mark.parametrize(
    "body",
    [
        "return backend != 'fa3'",
        "return 'fa3' != backend",
        "return backend not in ('torch_native', 'intel_amx')",
        "return backend not in {'torch_native'}",
        "return backend not in frozenset(['torch_native'])",
        "return backend not in REFUSED_BACKENDS",
        "return not backend == 'triton'",
        "return not (backend == 'triton')",
        "return not backend in ['triton']",
        "return not (backend == 'a' or backend == 'b')",
        "return backend != 'a' and backend != 'b'",
        "return has_triton() and backend not in ('torch_native',)",
        "return backend not in ('a',) and has_triton() and not is_hip()",
        "return bool(backend != 'fa3')",
        "return True if backend != 'fa3' else False",
        "return False if backend == 'fa3' else has_triton()",
        "return backend != Backend.FA3",
        "if backend == 'fa3': return False\n  return True",
        "if backend in ('a', 'b'):\n    return False\n  return has_triton()",
        "if backend == 'a':\n    return False\n  elif backend == 'b':\n    return False\n  else:\n    return True",
        "if not has_triton(): return False\n  log(backend)\n  return backend != 'fa3'",
        "with lock:\n    return backend != 'fa3'",
        "assert has_triton()\n  return backend != 'fa3'",
        "if backend == 'fa3': raise ValueError\n  return True",
        "return (backend == 'a') or backend != 'b'",
        "result = 1\n  return backend != 'fa3'",
        "if backend == 'a': return True\n  if backend == 'b': return False\n  return True",
        "if has_triton():\n    self.ok = backend != 'fa3'\n  return backend != 'fa3'",
        "ok = backend not in ('a', 'b')\n  return ok",
        "refused = backend in REFUSED\n  return not refused",
        "ok: bool = backend != 'a'\n  if ok: return True\n  return False",
        "names = ('a', 'b')\n  return backend not in names",
        "match backend:\n    case 'a' | 'b': return False\n    case _: return True",
        "match backend:\n    case Backend.A: return False\n  return has_triton()",
        "return not any(backend == x for x in REFUSED)",
        "return not any(x == backend for x in ('a', 'b'))",
        "return all(backend != x for x in ['a', 'b'])",
        "return {'a': False}.get(backend, True)",
        "return (backend or '') not in ('a', 'b')",
        "return (backend or '') != 'a'",
        "return all(b not in ('a',) for b in (backend, draft_backend))",
    ],
)
def test_a_deny_list_says_yes_of_none(body: str) -> None:
    """In one expression or in statements, alone or beside other questions."""
    assert found(f"def supports({NONE}) -> bool:\n  {body}") == ["fault"]


@pytest.mark.parametrize(
    "body",
    [
        "return backend == 'fa3'",
        "return backend in ('fa3', 'fa4')",
        "return not (backend != 'fa3')",
        "return backend is not None and backend != 'fa3'",
        "return bool(backend) and backend not in ('a',)",
        "return backend and backend != 'fa3'",
        "return backend is None or backend != 'fa3'",
        "return backend not in (None, 'fa3')",
        "return backend not in NAMES",
        "if backend is None: raise ValueError\n  return backend != 'fa3'",
        "if backend is None:\n    return False\n  return backend != 'fa3'",
        "ok = backend is not None and backend not in ('a', 'b')\n  return ok",
        "ok = backend in ('a', 'b')\n  return ok",
        "ok = not ok\n  return ok or backend == 'a'",
        "match backend:\n    case None: return False\n    case 'a': return False\n    case _: return True",
        "match backend:\n    case 'a' | 'b': return True\n    case _: return False",
        "match backend:\n    case str() if backend != 'a': return True\n    case _: return False",
        "return any(backend == x for x in ('a', 'b'))",
        "return not any(backend == x for x in ('a', None))",
        "return {'a': True}.get(backend, False)",
        "return {'a': True, 'b': False}.get(backend)",
        "return {'a': False, None: False}.get(backend, True)",
        "return (backend or '') not in ('', 'a')",
        "return (backend or 'a') not in ('a', 'b')",
        "return all(b in ('a',) for b in (backend, draft_backend))",
        "if isinstance(backend, str):\n    return backend != 'fa3'\n  return False",
        "if not backend: return False\n  return backend != 'fa3'",
        "assert backend is not None\n  return backend != 'fa3'",
        "assert backend\n  return backend != 'fa3'",
        "backend = backend or 'triton'\n  return backend != 'fa3'",
        "if backend is None: backend = 'triton'\n  return backend != 'fa3'",
        "if backend == 'fa3': return True\n  return False",
        "if backend != 'fa3': return False\n  return True",
        "if backend == 'a':\n    return has_a()\n  return has_b()",
        "if backend == 'fa3': log(1)\n  return has_triton()",
        "return backend.lower() != 'fa3'",
        "return backend != other",
        "return other or backend == 'fa3'",
        "for x in y:\n    if backend != x: return True\n  return backend != 'fa3'",
        "if backend == 'fa3': raise ValueError",
    ],
)
def test_a_predicate_that_refuses_or_minds_none_is_left_alone(body: str) -> None:
    """An allow list, a refusal of None first, another value in its place; and what is not followed."""
    names = "NAMES = ('fa3', None)\n"
    assert found(f"{names}def supports({NONE}) -> bool:\n  {body}") == []


@pytest.mark.parametrize(
    "text",
    [
        "def f(backend: Optional[str]): return backend != 'a'",
        "def f(backend: typing.Optional[str]): return backend != 'a'",
        "def f(backend: 'str | None'): return backend != 'a'",
        "def f(backend: Union[str, None]): return backend != 'a'",
        "def f(backend=None): return backend != 'a'",
        "def f(*, decode_attention_backend=None): return decode_attention_backend != 'a'",
        "async def f(x, /, backend_name: str = None): return backend_name != 'a'",
        "f = lambda backend=None: backend != 'a'",
        "def f(args): return args.attention_backend != 'a'",
        "def f(args): return args.attention_backend not in LISTED_ELSEWHERE",
        "def f(args): return args.prefill_attention_backend not in ('a', 'b')",
        "def f(args):\n  backend = args.decode_attention_backend\n  return backend != 'a'",
        "class A:\n  def __init__(self, args): self.use_triton = args.decode_attention_backend != 'a'",
        "class A:\n  def __init__(self, args):\n    log(args)\n"
        "    self.use_triton = has_triton() and not args.decode_attention_backend == 'a'",
        "class A:\n  def __init__(self, backend=None): self.use_triton = backend not in ('a', 'b')",
        "def f(args): return getattr(args, 'draft_backend', None) != 'a'",
        "def f(args): return getattr(args, 'attention_backend') != 'a'",
        "def f(flags): return flags.get('attn_backend') != 'a'",
        "def f(flags): return flags['prefill_attention_backend'] != 'a'",
        "def f(): return os.environ.get('ATTENTION_BACKEND') not in ('a',)",
        "def f(): return (b := os.getenv('X_BACKEND')) != 'a'",
        "class A:\n  backend: str | None = None\n  def f(self): return self.backend != 'a'",
        "class A:\n  def __init__(self, b=None): self.backend = b\n  def f(self): return self.backend != 'a'",
        "class A:\n  def __init__(self): self.backend = None\n  @property\n  def f(self): return self.backend != 'a'",
    ],
)
def test_where_none_is_known_to_arrive_it_is_a_fault(text: str) -> None:
    """An optional parameter or field, a lookup without a default, a field of the launch that may be unset."""
    assert found(text) == ["fault"]


@pytest.mark.parametrize(
    "text",
    [
        # SGLang 0.5.23: `support_triton(backend: str)`, which was asked about None all the same
        "def support_triton(backend: str) -> bool:\n"
        "  return platform.supports_triton and backend not in ['torch_native', 'intel_amx']",
        "def f(backend): return backend != 'a'",
        "def f(runner): return runner.attn_backend != 'a'",
        "def f(flags): return flags['draft_backend'] != 'a'",
        "class A:\n  def __init__(self, b: str): self.backend = b\n  def f(self): return self.backend != 'a'",
        "class A:\n  def f(self): return self.backend != 'a'",
        "any(lambda backend: backend != 'a')",
    ],
)
def test_where_that_cannot_be_told_it_is_a_note(text: str) -> None:
    """An annotation as `str` keeps nobody from handing over None."""
    assert found(text) == ["note"]


@pytest.mark.parametrize(
    "text",
    [
        "def f(mode: str | None): return mode != 'a'",
        "def f(backends=None): return backends != 'a'",
        "def f(moe_a2a_backend): return moe_a2a_backend != 'none'",
        "def f(backend): return backend not in ('auto', 'x')",
        "def f(backend: Backend): return backend != Backend.DISABLED",
        "def f(phase): return config[phase].backend != Backend.DISABLED",
        "def f(args): return getattr(args, 'backend', 'x') != 'a'",
        "def f():\n  prefill_backend, decode_backend = pair()\n  return prefill_backend != 'a'",
        "def f():\n  backend = resolve()\n  return backend != 'a'",
        "def f(backend=None) -> str: return 'x' if backend != 'a' else 'y'",
        "def f(backend=None): return {'x': 1} if backend != 'a' else None",
        "def f(backend=None):\n  if backend == 'a':\n    return\n  make(backend)\n  return",
        "def f(backend=None):\n  if backend != 'a': raise ValueError(backend)",
        "def f(backend=None) -> Layout:\n  if backend == 'a': return False\n  return make()",
        "def f(backend=None):\n  if backend == 'a': return False\n  return [make()]",
        "uses_triton = backend != 'a'",
        "class A:\n  def __init__(self, runner): self.use_triton = runner.attn_backend != 'a'",
        "class A:\n  def __init__(self, backend: str): self.use_triton = backend != 'a'",
        "class A:\n  def __init__(self, backend=None): self.needs_fallback = backend != 'a'",
        "class A:\n  def __init__(self, backend=None):\n    if backend is None: backend = 'b'\n"
        "    self.use_triton = backend != 'a'",
        "class A:\n  def __init__(self, backend=None):\n    if backend is not None:\n"
        "      self.use_triton = backend != 'a'",
        "class A:\n  def __init__(self, backend=None): self.label = 'x' if backend != 'a' else 'y'",
        "class A:\n  kind: Kind\n  def f(self): return self.other != 'a'",
    ],
)
def test_what_is_no_such_question_is_left_alone(text: str) -> None:
    """Other fields, a word of its own for none, an enumeration, what a function resolved, what answers no yes or no."""
    assert found(text) == []


@pytest.mark.parametrize("name", ["needs_fallback", "is_unset", "unsupported", "_rejects_backend"])
def test_a_question_whose_yes_refuses_is_a_note(name: str) -> None:
    """No backend at all needs the fallback too; the name says it, and only a reader can tell."""
    assert found(f"def {name}({NONE}): return backend != 'a'") == ["note"]
    assert found(f"def supports_{name[:3]}({NONE}): return backend != 'a'") == ["fault"]


def test_the_finding_says_which_comparison_answers() -> None:
    """Where, about what, and what to do."""
    text = "class A:\n  def f(self, backend=None):\n    if x: return False\n    return backend != 'fa3'"
    (finding,) = none_is_yes(parsed(text), FIELD)
    assert (finding.rule, finding.subject, finding.line) == (RULE, "A.f", 4)
    assert finding.text == "needs a no, or an error, where backend is None, got yes by backend != 'fa3'"
    assert finding.fix == "List the backends that may, or refuse None first"


def test_a_body_with_too_many_branches_is_not_followed() -> None:
    """Every branch doubles the ways through; a table of refusals that long is read by a person."""
    refusals = [f"  if backend == 'b{at}': return False\n" for at in range(40)]
    for count, levels in ((8, ["fault"]), (40, [])):
        assert found(f"def f(backend=None):\n{''.join(refusals[:count])}  return True") == levels
