"""Agreement of processes through a store, which here is a dictionary: turns come in one order, and
every process is told why another one cannot go on."""

import json
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from jaxshare.serving.engine import ClosedError, EngineError, agreement
from jaxshare.serving.engine.agreement import END, FollowerLock, LeaderLock
from jaxshare.serving.kvcache.device_lock import DeviceLock, Turn


class DictStore:
    """Keys in memory, with the errors of the real store."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.num_written = 0
        self._changed = threading.Condition()

    def put(self, key: str, value: str) -> None:
        with self._changed:
            if key in self.values:
                raise RuntimeError(f"ALREADY_EXISTS: {key}")
            self.values[key] = value
            self.num_written += 1
            self._changed.notify_all()

    def get(self, key: str, seconds: float) -> str | None:
        with self._changed:
            self._changed.wait_for(lambda: key in self.values, seconds)
            return self.values.get(key)

    def delete(self, key: str) -> None:
        with self._changed:
            del self.values[key]


@pytest.fixture(autouse=True)
def short_looks(monkeypatch):
    monkeypatch.setattr(agreement, "_POLL_SECONDS", 0.05)


def group(others: int = 1) -> tuple[DictStore, LeaderLock, list[FollowerLock]]:
    store = DictStore()
    leader = LeaderLock(store, "e", tuple(range(1, others + 1)))
    return store, leader, [FollowerLock(store, "e", i + 1, 0) for i in range(others)]


def use(lock: DeviceLock, order: list, name: str, *, delay: float = 0.0, more: Any = None) -> None:
    """Has a turn after some time, and notes what it is about."""
    time.sleep(delay)
    with lock.held(Turn(name, lambda: {"more": more, "released": []})) as agreed:
        order.append((name, agreed["more"]))


def test_turns_of_many_threads_come_in_the_order_of_the_first_process():
    store, leader, followers = group(2)
    names = [f"session {i}" for i in range(5)]
    orders: list[list] = [[], [], []]
    with ThreadPoolExecutor(15) as threads:
        found = []
        for i, name in enumerate(names):
            for lock, order, delays in zip(
                (leader, *followers),
                orders,
                (names, names[::-1], names[2:] + names[:2]),
                strict=True,
            ):
                delay = 0.1 * delays.index(name)
                found.append(threads.submit(use, lock, order, name, delay=delay, more=i))
        for each in found:
            each.result(20)
    assert orders[0] == [(name, i) for i, name in enumerate(names)]
    assert orders[1] == orders[2] == orders[0]
    # The keys of turns that are over are gone, but for one.
    assert [*store.values] == ["e/4/go"] and store.num_written == 5 * 4


def test_an_idle_engine_writes_nothing():
    store, leader, (follower,) = group()
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(use, follower, [], "step")
        time.sleep(0.3)
        assert not waits.done() and not store.num_written
        use(leader, [], "step")
        waits.result(5)


def test_what_a_process_cannot_do_is_said_in_all_of_them_before_any_goes_on():
    _, leader, (one, two) = group(2)
    began = []

    def refuse(agreed):
        raise EngineError("it has no such request")

    def run(lock: DeviceLock, **more) -> None:
        with lock.held(Turn("step", lambda: {"released": []}, **more)):
            began.append(lock)

    with ThreadPoolExecutor(3) as threads:
        found: list[Future] = [
            threads.submit(run, leader),
            threads.submit(run, one),
            threads.submit(run, two, prepare=refuse),
        ]
        for each, message in zip(
            found,
            (
                "process 2 cannot go on: it has no such request",
                "the engine of process 0 has failed",
                "^it has no such request",
            ),
            strict=True,
        ):
            with pytest.raises(EngineError, match=message):
                each.result(10)
    assert not began
    for lock in (leader, one, two):  # and the engine is over
        with pytest.raises(EngineError, match="make another in every process"):
            run(lock)


def test_a_process_with_another_program_is_told_what_the_first_one_does(monkeypatch):
    monkeypatch.setattr(agreement, "LATE_SECONDS", 0.3)
    _, leader, (follower,) = group()
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(use, leader, [], "session 3")
        other = threads.submit(use, follower, [], "step")
        with pytest.raises(EngineError, match="process 0 is at the turn 'session 3', to which"):
            other.result(10)
        with pytest.raises(EngineError, match=r"process 1 cannot go on: .*same program"):
            first.result(10)


def test_a_process_that_never_comes_is_named(monkeypatch):
    monkeypatch.setattr(agreement, "ANSWER_SECONDS", 0.2)
    _, leader, _ = group()
    with pytest.raises(EngineError, match=r"process 1 has not come to the turn 'step' within 0\.2"):
        use(leader, [], "step")


@pytest.mark.parametrize("first", [0, 1])
def test_an_error_of_one_process_between_turns_ends_the_others(first):
    _, leader, (follower,) = group()
    with ThreadPoolExecutor(2) as threads:
        done = [threads.submit(use, lock, [], "step") for lock in (leader, follower)]
        for each in done:
            each.result(5)
        failed, other = (leader, follower) if first == 0 else (follower, leader)
        failed.fail(RuntimeError("no memory"))
        with pytest.raises(EngineError, match="no memory"):
            threads.submit(use, other, [], "step").result(5)
        with pytest.raises(EngineError, match="no memory"):
            use(failed, [], "step")


def test_an_error_during_a_turn_of_another_thread_is_told_after_it():
    _, leader, (follower,) = group()
    inside, go_on = threading.Event(), threading.Event()

    def busy() -> None:
        with follower.held(Turn("session 0")):
            inside.set()
            go_on.wait(5)

    with ThreadPoolExecutor(2) as threads:
        turn = threads.submit(busy)
        use(leader, [], "session 0")
        inside.wait(5)
        follower.fail(RuntimeError("no memory"))
        go_on.set()
        turn.result(5)
        with pytest.raises(EngineError, match=r"process 1 cannot go on: .*no memory"):
            use(leader, [], "step")


def test_the_end_is_told_to_threads_that_wait():
    _, leader, (follower,) = group()
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(use, follower, [], "session 0")
        with leader.held(Turn(END)):
            pass
        with pytest.raises(ClosedError, match="process 0 has shut the engine down; make another"):
            waits.result(5)
    for lock in (follower, leader):  # twice does no harm
        with lock.held(Turn(END)):
            pass
        with pytest.raises(ClosedError, match=r"shut.* down; make another"):
            use(lock, [], "step")


def test_records_are_plain_data():
    _, leader, (follower,) = group()
    seen: list = []
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(use, follower, seen, "step")
        use(leader, [], "step", more=[2**63 + 1, 0.1, "ä"])
        waits.result(5)
    assert seen == [("step", json.loads(json.dumps([2**63 + 1, 0.1, "ä"])))]
