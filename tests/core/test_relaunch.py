"""Code at hand is launched with every argument in the kernel's order, and only for the like of what it was made for."""

from __future__ import annotations

import pytest
import torch

from backstamp import relaunch
from backstamp.relaunch import alignments, launch
from tests.compiled_code import shifted


class Compiler:
    """Keeps what it is launched with; answers code that keeps it too, or nothing as an interpreter does."""

    def __init__(self, has_code: bool = True) -> None:
        self.has_code = has_code
        self.first: list[tuple[object, ...]] = []
        self.again: list[tuple[object, ...]] = []

    def __getitem__(self, grid):
        def run(*arguments, **named):
            self.first.append((grid, arguments, named))
            return Code(self) if self.has_code else None

        return run


class Code:
    """What a compile answers."""

    def __init__(self, compiler: Compiler) -> None:
        self.compiler = compiler

    def __getitem__(self, grid):
        return lambda *arguments: self.compiler.again.append((grid, arguments))


def test_code_is_launched_again_with_constants_behind_the_arguments():
    """The first launch names constants and options; the second needs neither, on any grid and with any values."""
    kernel, codes = Compiler(), {}
    launch(kernel, codes, "like", (3, 1, 1), ("q", 1), lambda: {"BLOCK": 16, "SPLIT": True}, num_warps=4)
    launch(kernel, codes, "like", (5, 2, 1), ("other", 7), lambda: 1 / 0, num_warps=4)
    assert kernel.first == [((3, 1, 1), ("q", 1), {"BLOCK": 16, "SPLIT": True, "num_warps": 4})]
    assert kernel.again == [((5, 2, 1), ("other", 7, 16, True))]


def test_what_is_unlike_is_looked_at_anew():
    """Each like has its own code."""
    kernel, codes = Compiler(), {}
    for like in ("one", "two", "one", "two"):
        launch(kernel, codes, like, (1, 1, 1), (), lambda like=like: {"LIKE": like})
    assert [named for *_, named in kernel.first] == [{"LIKE": "one"}, {"LIKE": "two"}]
    assert [arguments for _, arguments in kernel.again] == [("one",), ("two",)]


def test_an_interpreter_leaves_no_code():
    """It is launched the long way each time."""
    kernel, codes = Compiler(has_code=False), {}
    for _ in range(2):
        launch(kernel, codes, "like", (1, 1, 1), (), dict)
    assert (len(kernel.first), kernel.again, codes) == (2, [], {})


def test_tensors_are_alike_by_their_absence_and_by_addresses_of_16():
    """One answer each, in order: what another layer's tensors hold, and where else they lie, is no matter."""
    even = torch.zeros(8, dtype=torch.bfloat16)
    assert alignments(even, None, shifted(even)) == (True, None, False)
    assert alignments(even[4:], even[7:]) == (False, False)
    assert alignments(torch.zeros(64)[4:], torch.ones(3, 4)) == alignments(even, even) == (True, True)
    assert alignments() == ()


def test_on_rocm_storage_of_2_gib_is_other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton reads what fits in 32-bit offsets by them there."""
    storage = torch.empty(1 << 31, dtype=torch.uint8, device="meta")
    small, large = storage[:-1].clone(), storage
    assert relaunch.alignments(small) == relaunch.alignments(large)
    monkeypatch.setattr(relaunch, "_is_rocm", lambda: True)
    assert relaunch.alignments(small) != relaunch.alignments(large)
    assert relaunch.alignments(small) == relaunch.alignments(small.clone())
