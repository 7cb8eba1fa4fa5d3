"""Which texts of scripts/bench/mixed.py may differ between its sides."""

import pytest

from scripts.bench.mixed import IN_TURN, TOGETHER, Sides


def compared(ours: list, theirs: list) -> dict[str, int]:
    sides = object.__new__(Sides)
    sides.texts = {("sessions", TOGETHER): ours, ("sessions", IN_TURN): theirs}
    return sides.check("sessions")


def sessions(count: int, parted: int) -> list:
    """Sessions of 768 tokens in eight steps, of which the first ones end otherwise."""
    return [[[1] * 96] * 7 + [[1] * 95 + [2 if i < parted else 1]] for i in range(count)]


def test_rounding_may_part_one_text_for_three_thousand_tokens():
    assert compared(sessions(16, 4), sessions(16, 0)) == {"alike": 12, "of": 16}
    with pytest.raises(RuntimeError, match="sessions: 5 of 16 texts differ"):
        compared(sessions(16, 5), sessions(16, 0))


def test_one_text_may_part_where_there_are_few_tokens():
    short = [(1, 2, 3), (4, 5)]
    assert compared(short, [(1, 2, 3), (4, 6)]) == {"alike": 1, "of": 2}
    with pytest.raises(RuntimeError, match="2 of 2 texts differ"):
        compared(short, [(1, 2, 0), (4, 6)])
