"""Results that are made once, however many threads ask for them."""

import concurrent.futures
import threading

import pytest

from jaxshare.made_once import made_once

THREADS = 8


def test_threads_that_ask_together_get_one_object():
    made, together = [], threading.Barrier(THREADS)

    @made_once(maxsize=4)
    def make(name: str, *, size: int = 0) -> object:
        """A docstring."""
        made.append((name, size))
        return object()

    def ask(_: int) -> tuple[object, object]:
        together.wait()
        return make("a"), make("b", size=2)

    with concurrent.futures.ThreadPoolExecutor(THREADS) as threads:
        found = {*threads.map(ask, range(THREADS))}
    assert len(found) == 1 and sorted(made) == [("a", 0), ("b", 2)]
    assert make.__doc__ == "A docstring."


def test_the_last_results_are_kept_and_an_error_is_not():
    made = []

    @made_once(maxsize=2)
    def make(number: int) -> int:
        made.append(number)
        if number < 0:
            raise ValueError(number)
        return number if number < 2 else make(number - 2)

    assert [make(n) for n in (0, 1, 0, 2, 0)] == [0, 1, 0, 0, 0]
    assert made == [0, 1, 2], "0 was asked for again before 1 was"
    for _ in range(2):
        with pytest.raises(ValueError):
            make(-1)
    assert made[3:] == [-1, -1]
