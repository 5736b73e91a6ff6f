"""Fixtures of this suite: quiet, seeded, and one plugin of wrong kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers.utils import logging

import backstamp
from engines.transformers.tests.wrong_kernels import WrongKernels


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Transformers logs generation configs; tensors this small are slower on many threads."""
    logging.set_verbosity_error()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def wrong_kernels() -> Iterator[None]:
    """The wrong kernels, installed for one test."""
    backstamp.register("wrong", WrongKernels())
    yield
    backstamp.unregister("wrong")
