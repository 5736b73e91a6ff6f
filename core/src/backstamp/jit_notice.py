"""Say once that a kernel is being compiled, while it is: what serving waits for is never a silence.

In: the kernel, and what of it is compiled. Out: lines of the logger `backstamp.compile`, none where the work was in a
cache and took no time. It compiles nothing itself and touches no device.

.. versionadded:: 0.2
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

__all__ = ["Announcer", "compiling"]

#: Seconds before the first line: loading what an earlier process compiled takes less.
QUIET_SECONDS: Final = 1.0
#: Seconds between lines of progress.
PROGRESS_SECONDS: Final = 15.0

_NOTHING: Final = nullcontext()
_LOG: Final = logging.getLogger("backstamp.compile")
_told: set[tuple[str, str]] = set()


@contextmanager
def compiling(kernel: str, what: str) -> Iterator[None]:
    """Announce the work inside, where it takes long, for example `compiling("flashinfer", "prefill fa3 bf16 d128")`.

    A second entry for the same kernel and work says nothing. An exception inside passes through, and what it stopped
    is announced again.
    """
    if (kernel, what) in _told:
        yield
        return
    _told.add((kernel, what))
    done = threading.Event()
    # a daemon: an interrupted compile must not keep the process
    ticker = threading.Thread(target=_tell, args=(kernel, what, done), daemon=True)
    started = time.monotonic()
    ticker.start()
    try:
        yield
    except BaseException:
        _told.discard((kernel, what))
        raise
    finally:
        done.set()
        ticker.join()
    seconds = time.monotonic() - started
    if seconds >= QUIET_SECONDS:
        _LOG.warning("%s: compiled %s in %.0f s", kernel, what, seconds)


class Announcer:
    """Runs a kernel's launches, each new variant inside `compiling`; a known one costs one look into a set."""

    def __init__(self, kernel: str) -> None:
        self._kernel = kernel
        self._seen: set[tuple[object, ...]] = set()

    def first(self, *variant: object) -> AbstractContextManager[None]:
        """What a launch of this variant runs inside; the announcement names its parts, but not the empty ones."""
        return _NOTHING if variant in self._seen else self._announced(variant)

    @contextmanager
    def _announced(self, variant: tuple[object, ...]) -> Iterator[None]:
        with compiling(self._kernel, " ".join(str(part) for part in variant if part != "")):
            yield
        # what failed is no known variant
        self._seen.add(variant)


def _tell(kernel: str, what: str, done: threading.Event) -> None:
    waited = QUIET_SECONDS
    if done.wait(QUIET_SECONDS):
        return
    _LOG.warning("%s: compiling %s; once, `backstamp warm` does it before serving", kernel, what)
    while not done.wait(PROGRESS_SECONDS):
        waited += PROGRESS_SECONDS
        _LOG.warning("%s: still compiling %s, %.0f s so far", kernel, what, waited)
