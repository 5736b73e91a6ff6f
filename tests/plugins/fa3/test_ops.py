"""The operator of a build is called by position: nothing of a call is lost on one whose arguments are others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from backstamp_fa3 import ops

OWN = ", ".join(f"Tensor? {name}=None" for name in ops._OWN[3:] if name not in ("softmax_scale", "softcap"))
SAME = ", ".join(f"Tensor? {name}=None" for name in ops._SAME)


@pytest.fixture
def define():
    """Defines `fwd` of a namespace on the CPU: what it is called with is answered by `seen`."""
    libraries, seen = [], []

    def make(namespace: str, more: str) -> list[tuple[object, ...]]:
        library = torch.library.Library(namespace, "DEF")
        library.define(f"fwd(Tensor q, Tensor k, Tensor v, {OWN}, {SAME}, float? softmax_scale=None{more}) -> Tensor[]")
        library.impl("fwd", lambda *given: seen.append(given) or [given[0], given[0]], "CPU")
        libraries.append(library)
        return seen

    yield make
    for library in libraries:
        library._destroy()


@pytest.mark.parametrize(
    ("more", "has_sinks", "missing"),
    [("", False, "softcap"), (", float softcap=0.0", True, "sinks")],
)
def test_a_build_that_lacks_an_argument_is_refused_when_it_is_loaded(define, more, has_sinks, missing) -> None:
    """By position it would be left out, and the answer be another's."""
    define(f"acme_{missing}", more)
    with pytest.raises(ImportError, match=f"needs {missing}, got none"):
        ops.load(ops.OpName("torch", f"acme_{missing}", has_sinks=has_sinks))


class Operator:
    """Stands for an operator of the given arguments, and their defaults where they have one: keeps what it is given."""

    def __init__(self, defaults: dict[str, object]) -> None:
        kept = [
            SimpleNamespace(
                name=name, default_value=default, has_default_value=lambda default=default: default is not ...
            )
            for name, default in defaults.items()
        ]
        self._schema = SimpleNamespace(arguments=kept)
        self.given: dict[str, object] = {}

    def __call__(self, *given):
        self.given = dict(zip((argument.name for argument in self._schema.arguments), given, strict=True))
        return (None, torch.zeros(4, 2))


def test_an_argument_of_a_later_release_keeps_its_default() -> None:
    """In the operator's own order, with what the call says of every other."""
    names = [*reversed(ops._OWN), "later", *ops._SAME, "only_here"]
    op = Operator({name: {"later": 7, "only_here": 1}.get(name, ...) for name in names})
    batch = SimpleNamespace(qo_indptr="starts", kv_lens="lens", max_q_len=3, max_kv_len=9)
    call = SimpleNamespace(
        **{name: name for name in ("q", "k", "v", "q_v", "out", "sinks", "leftpad", "causal")},
        step=SimpleNamespace(batch=batch, page_table="table"),
        layer=SimpleNamespace(scale=0.5, softcap=2.0),
        kv_indptr=None,
        window=(8, 0),
        with_lse=True,
    )
    lse = ops.ForwardOp(op, {"only_here": False}).attend(call)
    assert lse.shape == (2, 4)
    assert (op.given["later"], op.given["only_here"]) == (7, False)
    own = {
        "q": "q",
        "k": "k",
        "v": "v",
        "q_v": "q_v",
        "out": "out",
        "leftpad_k": "leftpad",
        "is_causal": "causal",
        "cu_seqlens_q": "starts",
        "cu_seqlens_k": None,
        "seqused_k": "lens",
        "page_table": "table",
        "max_seqlen_q": 3,
        "max_seqlen_k": None,
        "softmax_scale": 0.5,
        "softcap": 2.0,
        "window_size_left": 8,
        "window_size_right": 0,
    }
    assert {name: op.given[name] for name in ops._OWN} == own
