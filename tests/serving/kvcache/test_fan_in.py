"""Fan-in groups: when they change, and that they serve the blocks that rows share."""

from hypothesis import given
from hypothesis import strategies as st

from jaxshare.serving.kvcache.fan_in import FanInGroups, group_sizes

LONG = 4096


def test_groups_hold_the_largest_fan_in_and_those_far_below_it():
    assert group_sizes([], 64) == group_sizes([1, 1, 64, 40], 64) == ()
    assert group_sizes([8] * 8, 64) == (8,)
    assert group_sizes([9, 32, 2, 2, 3], 64) == (2, 32)


def test_they_stay_while_fan_ins_change_within_a_bucket():
    groups = FanInGroups(64)
    assert groups.update([5] * 8, [LONG] * 8) == (8,)
    for fan_in in (4, 6, 8, 3):
        assert groups.update([fan_in] * 8, [LONG] * 8) == (8,)
    assert groups.update([20, 20], [LONG] * 2) == (8, 32), "those so far come again"
    assert groups.update([5] * 8, [LONG] * 8) == (8, 32)
    assert groups.update([2, 2, 20], [LONG] * 3) == (2, 32), "there are two at most"


def test_few_rows_and_few_tokens_are_not_worth_another_program():
    assert group_sizes([4] * 4, 16) == FanInGroups(16).update([4] * 4, [LONG] * 4) == ()
    assert FanInGroups(64).update([4] * 7, [16] * 7) == ()
    assert FanInGroups(64).update([4] * 8, [16] * 8) == (4,), "each is read as a tile"
    assert FanInGroups(64).update([64, 40], [LONG] * 2) == (), "all rows read them together"
    assert FanInGroups(64, (8,)).update([], []) == (8,)


def test_the_first_blocks_that_sessions_share_choose_the_first_groups():
    groups = FanInGroups(64)
    assert groups.update([], [], lasting=True) == ()
    assert groups.update([4, 4, 1], [16] * 3, lasting=True) == (4,)
    assert groups.update([16, 16], [16] * 2, lasting=True) == (4,), "another program must pay"
    assert FanInGroups(64).update([4, 4, 1], [16] * 3) == (), "requests come and go"
    compiled = FanInGroups(64)
    compiled.keep()
    assert compiled.update([4, 4, 1], [16] * 3, lasting=True) == ()


@given(st.lists(st.lists(st.integers(1, 64), max_size=6), max_size=12))
def test_every_group_is_a_power_of_two_and_they_serve_the_last_blocks(steps):
    groups = FanInGroups(64)
    for fan_ins in steps:
        sizes = groups.update(fan_ins, [LONG] * len(fan_ins))
        assert len(sizes) <= 2 and list(sizes) == sorted(sizes)
        assert all(size >= 2 and size & (size - 1) == 0 and size <= 32 for size in sizes)
        few = [fan_in for fan_in in fan_ins if 1 < fan_in <= 32]
        assert not few or max(few) <= max(sizes)
        assert groups.update(fan_ins, [LONG] * len(fan_ins)) == sizes, "asked again, they stay"
