"""Exchanging bytes: what it is handed, and what it refuses."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from backstamp import exchange as exchanging
from backstamp.errors import BadInput, RankMissing
from backstamp.exchange import exchange


def swap(through: object, rank: int | None, world_size: int | None, payload: bytes = b"x", **changes: object) -> dict:
    """One exchange with a short timeout."""
    return exchange(through, payload, rank, world_size, **{"timeout_s": 0.3, "key": "k", **changes})


@pytest.fixture
def other_group() -> Iterator[dist.ProcessGroup]:
    """The main group of a job on a backend that is not gloo."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_group_without_gloo_is_refused(other_group: dist.ProcessGroup) -> None:
    """NCCL, or whatever else: a dead rank would be a hang."""
    with pytest.raises(BadInput, match=r"a group of cpu:fake.*where a dead rank would be a hang") as caught:
        swap(other_group, None, None)
    assert 'new_group(backend="gloo")' in caught.value.fix


@pytest.fixture
def gloo_group() -> Iterator[dist.ProcessGroup]:
    """A gloo group of this process alone."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_group_knows_its_rank_and_refuses_another(gloo_group: dist.ProcessGroup) -> None:
    """Its own rank and size may be said, and must then be right."""
    assert swap(gloo_group, None, None) == swap(gloo_group, 0, 1) == {0: b"x"}
    for wrong in ((1, 1), (0, 2), (1, None), (None, 2)):
        with pytest.raises(BadInput, match="its own rank 0 of 1"):
            swap(gloo_group, *wrong)


def test_what_is_no_store_and_no_group_is_refused() -> None:
    """A mistake in the call, told before anybody waits."""
    with pytest.raises(BadInput, match="needs the job's store or a gloo group, got object"):
        swap(object(), 0, 2)


@pytest.mark.parametrize("place", [(None, 2), (0, None), (2, 2), (-1, 2)])
def test_a_store_needs_the_rank_and_the_world_size(place: tuple[int | None, int | None]) -> None:
    """A store does not know who asks."""
    with pytest.raises(BadInput, match="needs rank and world_size"):
        swap(dist.HashStore(), *place)


@pytest.mark.parametrize("timeout_s", [0, -1.0])
def test_a_timeout_that_is_none_is_refused(timeout_s: float) -> None:
    """No waiting for ever, and none in the past."""
    with pytest.raises(BadInput, match="seconds > 0"):
        swap(dist.HashStore(), 0, 1, timeout_s=timeout_s)


def test_a_rank_that_is_not_there_is_named() -> None:
    """Alone of three within the timeout."""
    with pytest.raises(RankMissing, match="got rank 0 answered, ranks 1, 2 did not") as caught:
        swap(dist.HashStore(), 0, 3)
    assert caught.value.needed == "a plan from every rank within 0.3 s"
    assert isinstance(caught.value, TimeoutError)


def test_a_second_round_never_reads_the_first_ones_values() -> None:
    """A draft's plan after its target's, through one store and one key."""
    store, shown = dist.HashStore(), {}

    def rank_1() -> None:
        for word in (b"b", b"d"):
            shown[word] = swap(store, 1, 2, word, timeout_s=30)

    other = threading.Thread(target=rank_1)
    other.start()
    assert swap(store, 0, 2, b"a", timeout_s=30) == {0: b"a", 1: b"b"}
    assert swap(store, 0, 2, b"c", timeout_s=30) == {0: b"c", 1: b"d"}
    other.join()
    assert shown == {b"b": {0: b"a", 1: b"b"}, b"d": {0: b"c", 1: b"d"}}


def test_a_rank_stays_until_the_others_have_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process may serve the store, and would take it along before the others know what became of them."""
    monkeypatch.setattr(exchanging, "_LEAVE_S", 60.0)
    store = dist.HashStore()
    store.set("k/1/1", "b")
    rank_0 = threading.Thread(target=swap, args=(store, 0, 2), kwargs={"timeout_s": 60})
    rank_0.start()
    store.wait(["k/1/read/0"], timedelta(seconds=10))
    rank_0.join(0.3)
    assert rank_0.is_alive()
    store.set("k/1/read/1", "1")
    rank_0.join(60)
    assert not rank_0.is_alive()


class ClosedStore(dist.Store):
    """A store that answered while rank 1 was there and closed then."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def add(self, key: str, value: int) -> int:
        """A first round."""
        return 1

    def set(self, key: str, value: str) -> None:
        """Taken."""

    def wait(self, keys: list[str], timeout: object) -> None:
        """Late the first time, gone then."""
        raise RuntimeError("connection closed\x1b[31m")

    def check(self, keys: list[str]) -> bool:
        """Ranks 0 and 1 are there when first asked."""
        self.asked += 1
        if self.asked > 3:
            raise RuntimeError("connection closed\x1b[31m")
        return keys[0] in ("k/1/0", "k/1/1")


def test_a_store_that_closes_says_who_had_answered() -> None:
    """What was known before it closed is told, and its text is made printable."""
    with pytest.raises(RankMissing) as caught:
        swap(ClosedStore(), 0, 3, timeout_s=30)
    assert caught.value.found.startswith(
        "ranks 0, 1 answered, rank 2 did not; the store does not answer: connection closed"
    )
    assert "\x1b" not in caught.value.message
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_rank_that_comes_after_the_others_gave_up_has_agreed_with_nobody() -> None:
    """flashinfer #3186: all the values are there, and whoever showed them has gone."""
    store = dist.HashStore()
    for rank in (0, 1):
        with pytest.raises(RankMissing, match="2 did not"):
            swap(store, rank, 3)
    with pytest.raises(RankMissing, match=r"rank \d, which had given up before rank 2 came"):
        swap(store, 2, 3)
