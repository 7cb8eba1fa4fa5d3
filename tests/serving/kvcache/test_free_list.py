"""The free list, against a set of free tokens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxshare.arena import alignment
from jaxshare.serving.kvcache.free_list import FreeList
from jaxshare.serving.kvcache.pool import whole_tiles

SIZE = 700


def stretches(free: set[int]) -> list[tuple[int, int]]:
    """The runs of a set."""
    begins = [n for n in sorted(free) if n - 1 not in free]
    ends = [n + 1 for n in sorted(free) if n + 1 not in free]
    return list(zip(begins, ends, strict=True))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_what_is_free_is_what_was_not_taken(data):
    free_list, free, taken = FreeList(SIZE), set(range(SIZE)), []
    for _ in range(data.draw(st.integers(1, 30))):
        kind, size = (
            data.draw(st.sampled_from(["take", "high", "packed", "grow", "back", "merge"])),
            data.draw(st.integers(1, 300)),
        )
        runs = stretches(free)
        if kind in ("take", "high", "packed"):
            step = 1 if kind == "packed" else alignment(size)
            could = [
                at for begin, end in runs for at in range(begin, end - size + 1) if at % step == 0
            ]
            at = free_list.take(size, high=kind == "high", aligned=kind != "packed")
            assert at == ((max if kind == "high" else min)(could) if could else None)
            if at is not None:
                taken.append((at, size))
                free -= set(range(at, at + size))
        elif kind == "grow" and taken:
            i = data.draw(st.integers(0, len(taken) - 1))
            begin, had = taken[i]
            there = set(range(begin + had, begin + had + size)) <= free
            assert free_list.take_at(begin + had, size) == there
            if there:
                taken[i] = begin, had + size
                free -= set(range(begin + had, begin + had + size))
        elif kind == "back" and taken:
            begin, had = taken.pop(data.draw(st.integers(0, len(taken) - 1)))
            some = data.draw(st.integers(0, had))  # a part may stay
            free_list.give_back(begin + some, had - some)
            free |= set(range(begin + some, begin + had))
            taken += [(begin, some)] * (some > 0)
        elif kind == "merge":
            within = data.draw(st.none() | st.integers(1, SIZE))
            wide = [
                (last[1] - first[0], first[0], last[1])
                for i, first in enumerate(runs)
                for last in runs[i:]
                if sum(first[0] <= n < last[1] for n in free) >= size
                and last[1] - first[0] <= (within or SIZE)
            ]
            found = free_list.merge(size, within)
            assert (found is None) == (not wide)
            if found:
                begin, end = found
                assert end - begin == min(wide)[0] and (end - begin, begin, end) in wide
                # The taken runs move to the front, and the rest is one free run.
                inside = sorted(run for run in taken if begin <= run[0] < end)
                taken, at = [run for run in taken if run not in inside], begin
                for _, had in inside:
                    taken.append((at, had))
                    at += had
                free = (free - set(range(begin, end))) | set(range(at, end))
                free_list.give_back(at, end - at)
        assert free_list.free == len(free)
        assert free_list.largest == max((end - begin for begin, end in stretches(free)), default=0)


def test_low_and_high_runs_are_kept_apart():
    """Prompts are below, rows above.

    The tokens of ended rows are one free run again, whatever the order in which rows end.
    """
    runs = FreeList(1024)
    assert [runs.take(size) for size in (130, 60, 256)] == [0, 130, 256]
    rows = [runs.take(50, high=True) for _ in range(6)]
    assert rows == [1024 - 50 * (i + 1) for i in range(6)]
    for i in (1, 4, 0, 5, 3, 2):
        assert rows[i] is not None
        runs.give_back(rows[i], 50)
    assert runs.take(512) == 512


@pytest.mark.parametrize(
    ("limit", "tokens"),
    [(1, 1), (127, 127), (128, 128), (255, 128), (2047, 1920), (2048, 2048), (2559, 2048)],
)
def test_whole_tiles(limit, tokens):
    assert whole_tiles(limit) == tokens
