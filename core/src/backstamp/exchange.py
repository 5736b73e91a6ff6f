"""Bytes of every rank to every rank, with a timeout of its own: through the job's store, or a gloo group.

In: this rank's bytes and a way to the others. Out: every rank's bytes, or one error that names which ranks answered
and which did not. It unpickles nothing, uses no NCCL and no collective: a collective that misses one rank cannot say
which.

.. versionadded:: 0.2
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final, NoReturn, Protocol, runtime_checkable

from backstamp.errors import BadInput, RankMissing
from backstamp.text import plain

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup, Work

__all__ = ["Store", "exchange"]

#: How often within its timeout a store is asked who answered so far, to be known even if the store is gone later.
_ASKED: Final = 5
#: How long a rank that has everything waits for the others to have it too: one of them may host the store.
_LEAVE_S: Final = 1.0
#: What a store or a gloo group raises where the other end is gone or late.
_LOST: Final = (RuntimeError, OSError)


@runtime_checkable
class Store(Protocol):
    """What is read of a `torch.distributed` store; values are ASCII."""

    def set(self, key: str, value: str, /) -> None:
        """Put a value."""

    def get(self, key: str, /) -> bytes:
        """A value."""

    def add(self, key: str, value: int, /) -> int:
        """Count up and return the count."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys are there, at once."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """Return when all keys are there, or raise."""


def exchange(
    through: Store | ProcessGroup,
    payload: bytes,
    rank: int | None,
    world_size: int | None,
    *,
    timeout_s: float,
    key: str,
) -> dict[int, bytes]:
    """Every rank's ASCII payload, this one's included.

    Raises:
        RankMissing: somebody did not answer within `timeout_s` seconds. BadInput: `through` is neither a store nor a
        group with gloo, or rank and world size do not fit.
    """
    if timeout_s <= 0:
        raise BadInput("agreement, timeout_s", needed="seconds > 0", found=str(timeout_s))
    deadline = time.monotonic() + timeout_s
    if isinstance(through, Store):
        if rank is None or world_size is None or not 0 <= rank < world_size:
            raise BadInput(
                "agreement through a store", needed="rank and world_size", found=f"rank {rank} of {world_size}"
            )
        return _StoreExchange(through, key, rank, world_size, timeout_s, deadline).run(payload)
    return _GlooExchange.of(through, rank, world_size, timeout_s, deadline).run(payload)


@dataclass(frozen=True, slots=True)
class _StoreExchange:
    """One round through a store; rounds are counted by each rank, so that no round reads an earlier one's values."""

    store: Store
    key: str
    rank: int
    world_size: int
    timeout_s: float
    deadline: float

    def run(self, payload: bytes) -> dict[int, bytes]:
        missing = list(range(self.world_size))
        try:
            at = f"{self.key}/{self.store.add(f'{self.key}/rounds/{self.rank}', 1)}"
            self.store.set(f"{at}/{self.rank}", payload.decode("ascii"))
            self._await(at, missing)
            late = tuple(missing)
            if late:
                self.store.set(f"{at}/given_up", str(self.rank))
            shown = {} if late else {rank: self.store.get(f"{at}/{rank}") for rank in range(self.world_size)}
        except _LOST as cause:
            _raise_missing(self, missing, f"; the store does not answer: {cause}", cause)
        self._leave(at, late)
        if late:
            _raise_missing(self, late)
        self._check_kept(at)
        return shown

    def _check_kept(self, at: str) -> None:
        """A rank that comes when the others have given the round up has agreed with nobody."""
        try:
            if not self.store.check([f"{at}/given_up"]):
                return
            other = self.store.get(f"{at}/given_up").decode("ascii")
        except _LOST:
            # the store went with its host, which leaves only after it has read what all have shown
            return
        raise RankMissing(
            f"agreement of {self.world_size} ranks, rank {self.rank}",
            needed=f"every rank within the same {self.timeout_s:g} s",
            found=f"rank {other}, which had given up before rank {self.rank} came",
            fix="Start the ranks closer together, or allow a longer timeout_s on all",
        )

    def _await(self, at: str, missing: list[int]) -> None:
        """Strike out the ranks that have shown something, until none is left or the deadline has come."""
        while missing:
            slice_s = max(0.01, min(self.timeout_s / _ASKED, self.deadline - time.monotonic()))
            try:
                self.store.wait([f"{at}/{rank}" for rank in missing], timedelta(seconds=slice_s))
                missing.clear()
            except _LOST:
                # late, or gone: a store that is gone raises here again
                missing[:] = [rank for rank in missing if not self.store.check([f"{at}/{rank}"])]
                if time.monotonic() >= self.deadline:
                    return

    def _leave(self, at: str, missing: Sequence[int]) -> None:
        """Stay until the others have read: the process of one rank serves the store to all."""
        try:
            self.store.set(f"{at}/read/{self.rank}", "1")
            others = [f"{at}/read/{rank}" for rank in range(self.world_size) if rank not in missing]
            self.store.wait(others, timedelta(seconds=_LEAVE_S))
        except _LOST:
            # whoever is late or gone now has said what it had to say
            return


@dataclass(frozen=True, slots=True)
class _GlooExchange:
    """One round of sends and receives between every two ranks of a gloo group."""

    group: ProcessGroup
    rank: int
    world_size: int
    timeout_s: float
    deadline: float

    @classmethod
    def of(
        cls, group: ProcessGroup, rank: int | None, world_size: int | None, timeout_s: float, deadline: float
    ) -> _GlooExchange:
        import torch.distributed as dist

        if not isinstance(group, dist.ProcessGroup):
            raise BadInput("agreement", needed="the job's store or a gloo group", found=type(group).__name__)
        backends = dist.get_backend_config(group)
        if "cpu:gloo" not in backends.split(","):
            raise BadInput(
                "agreement",
                needed="the job's store or a gloo group",
                found=f"a group of {backends}, where a dead rank would be a hang",
                fix='Hand in the store the job was started with, or torch.distributed.new_group(backend="gloo")',
            )
        real = dist.get_rank(group), dist.get_world_size(group)
        if rank not in (None, real[0]) or world_size not in (None, real[1]):
            raise BadInput(
                "agreement through a group",
                needed=f"its own rank {real[0]} of {real[1]}, or neither",
                found=f"rank {rank} of {world_size}",
            )
        return cls(group, *real, timeout_s, deadline)

    def run(self, payload: bytes) -> dict[int, bytes]:
        import torch

        size = torch.tensor([len(payload)], dtype=torch.int64)
        sizes = {peer: torch.zeros(1, dtype=torch.int64) for peer in self._peers()}
        self._swap(size, sizes, tag=0)
        body = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        bodies = {peer: torch.empty(int(sizes[peer]), dtype=torch.uint8) for peer in self._peers()}
        self._swap(body, bodies, tag=1)
        shown = {peer: bytes(body.tolist()) for peer, body in bodies.items()}
        return {**shown, self.rank: payload}

    def _peers(self) -> list[int]:
        return [peer for peer in range(self.world_size) if peer != self.rank]

    def _swap(self, mine: Tensor, theirs: dict[int, Tensor], tag: int) -> None:
        """Send one tensor to every peer and fill one from each."""
        import torch.distributed as dist

        works: dict[int, list[Work | None]] = {}
        missing: dict[int, Exception] = {}
        for peer, tensor in theirs.items():
            try:
                works[peer] = [
                    dist.isend(mine, group=self.group, group_dst=peer, tag=tag),
                    dist.irecv(tensor, group=self.group, group_src=peer, tag=tag),
                ]
            except _LOST as cause:
                missing[peer] = cause
        for peer, started in works.items():
            # the receive first: what a peer has sent counts, even if it has left since
            for work in reversed(started):
                left = max(0.01, self.deadline - time.monotonic())
                try:
                    if work is not None:
                        work.wait(timedelta(seconds=left))
                except _LOST as cause:
                    missing[peer] = cause
                    break
        if missing:
            _raise_missing(self, sorted(missing), "", next(iter(missing.values())))


def _raise_missing(
    seat: _StoreExchange | _GlooExchange, missing: Iterable[int], what: str = "", cause: Exception | None = None
) -> NoReturn:
    late = [rank for rank in missing if rank != seat.rank]
    answered = [rank for rank in range(seat.world_size) if rank not in late]
    raise RankMissing(
        f"agreement of {seat.world_size} ranks, rank {seat.rank}",
        needed=f"a plan from every rank within {seat.timeout_s:g} s",
        found=f"{_ranks(answered)} answered, {_ranks(late)} did not{plain(what)}",
        fix=f"Look at the end of the log of {_ranks(late)}: it died, hangs, or does not call `agree`",
    ) from cause


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks)) or 'none'}"
