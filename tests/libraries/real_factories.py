"""The first-party plugins' own factories, over stand-ins of the kernel libraries that are not installed here.

In: rows of the catalogue, inside one `with`. Out: the `load` that `construction.build` takes: it puts up the stand-ins
of a row's libraries, then imports the row's real factory. Plugin modules are imported anew inside, and the ones from
before are back after it, so that nothing bound to a stand-in outlives it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch

from backstamp.catalogue import Catalogue, Row
from backstamp.factory_loading import Factory, load_factory
from backstamp.installation import library_name
from tests.libraries.fake import FakeLibrary
from tests.plugins.dsa import flash_mla
from tests.plugins.dsa.test_npu import ATTEND, METADATA
from tests.plugins.fa3.kernels import MODULES as OPERATOR_MODULES
from tests.plugins.fa3.operators import fake_operator
from tests.plugins.flashinfer.library import make_library
from tests.plugins.linear_attn import behave as linear
from tests.plugins.trtllm import flashinfer_mha, flashinfer_mla

__all__ = ["STAND_INS", "real_factories"]


@contextmanager
def real_factories() -> Iterator[Callable[[Row, Catalogue], Factory]]:
    """Yield a `load` for `build`: every factory is the plugin's own."""
    standing: set[str] = set()
    with _fresh_plugins(), pytest.MonkeyPatch.context() as patch, ExitStack() as operators:

        def load(row: Row, catalogue: Catalogue) -> Factory:
            for name in {library_name(text) for text in row.offer.requires} & STAND_INS.keys() - standing:
                STAND_INS[name](patch, operators)
                standing.add(name)
            factory = load_factory(row, catalogue)
            if row.offer.kernel == "intel_amx":
                _stand_in_for_amx(patch)
            return factory

        yield load


@contextmanager
def _fresh_plugins() -> Iterator[None]:
    """Drop every plugin's package; afterwards drop what was imported meanwhile, and put back what was there.

    Whole packages: a submodule that is put back alone is no longer the attribute of its package.
    """
    before = _plugin_modules()
    for name in before:
        del sys.modules[name]
    try:
        yield
    finally:
        for name in _plugin_modules():
            del sys.modules[name]
        sys.modules.update(before)


def _plugin_modules() -> dict[str, ModuleType]:
    return {name: module for name, module in sys.modules.items() if name.startswith("backstamp_")}


def _recorded(*records: str) -> Callable[[pytest.MonkeyPatch, ExitStack], None]:
    """A library whose modules hold all a factory imports, each where it was recorded."""

    def stand_in(patch: pytest.MonkeyPatch, operators: ExitStack) -> None:
        for record in records:
            FakeLibrary(record, patch)

    return stand_in


def _operator(distribution: str) -> Callable[[pytest.MonkeyPatch, ExitStack], None]:
    """A build of FA3: its PyTorch operator, by its recorded schema."""

    def stand_in(patch: pytest.MonkeyPatch, operators: ExitStack) -> None:
        module = OPERATOR_MODULES[distribution]
        operators.enter_context(fake_operator(distribution, module, patch, _never_called))

    return stand_in


def _flashinfer(patch: pytest.MonkeyPatch, operators: ExitStack) -> None:
    library = make_library(patch)
    for path, behaviour in (flashinfer_mha.BEHAVIOURS | flashinfer_mla.BEHAVIOURS).items():
        library.on(path, behaviour)
    linear.flashinfer(patch)


def _custom_ops(patch: pytest.MonkeyPatch, operators: ExitStack) -> None:
    """The package that registers the operators of sparse attention on Ascend, with their schemas."""
    patch.setitem(sys.modules, "custom_ops", ModuleType("custom_ops"))
    library = torch.library.Library("custom", "FRAGMENT")
    operators.callback(library._destroy)
    for schema in (METADATA, ATTEND):
        library.define(schema)


def _stand_in_for_amx(patch: pytest.MonkeyPatch) -> None:
    """The CPU the plan is for has AMX tiles, this one may not: the factory's own question of it is not asked."""
    patch.setattr(sys.modules["backstamp_cpu.backend"], "check_amx", lambda who: None)


def _never_called(**arguments: Any) -> tuple[Any, ...]:
    raise AssertionError("a factory builds, and attends to nothing")


#: How each library is stood in for, by distribution.
STAND_INS: dict[str, Callable[[pytest.MonkeyPatch, ExitStack], object]] = {
    "amd-aiter": _recorded("amd-aiter", "amd-aiter-dsv4"),
    "custom-ops": _custom_ops,
    "fla-core": lambda patch, operators: linear.fla_core(patch),
    "flashinfer-python": _flashinfer,
    "mate": _recorded("mate"),
    "sgl-flash-mla": lambda patch, operators: flash_mla.install(patch),
    "tokenspeed-mla": _recorded("tokenspeed-mla"),
    "torch-npu": _recorded("torch-npu"),
    **{name: _recorded(name) for name in ("flash-attn-4", "tokenspeed-fa4")},
    **{name: _operator(name) for name in OPERATOR_MODULES},
}
