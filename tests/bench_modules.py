"""The modules of bench/ for a test: bench/ is no package, and its names are nobody else's to keep."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

BENCH = Path(__file__).parent.parent / "bench"


@contextmanager
def bench_modules(*names: str) -> Iterator[tuple[ModuleType, ...]]:
    """Import modules of bench/, and forget all of them again."""
    own = {path.stem for path in BENCH.glob("*.py")}
    kept = {name: sys.modules.pop(name) for name in own & set(sys.modules)}
    sys.path.insert(0, str(BENCH))
    try:
        yield tuple(importlib.import_module(name) for name in names)
    finally:
        sys.path.remove(str(BENCH))
        for name in own:
            sys.modules.pop(name, None)
        sys.modules.update(kept)
