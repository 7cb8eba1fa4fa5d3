"""The most that a run has in memory at a time."""

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxshare.serving.branches.peak_use import footprints
from jaxshare.serving.kvcache.free_list import FreeList

SIZES = st.sampled_from((1, 5, 100, 127, 128, 129, 200, 256, 300, 512))


@settings(max_examples=60)
@given(st.lists(SIZES, max_size=5), st.lists(SIZES, min_size=1, max_size=5))
def test_blocks_low_and_rows_high_fit_in_their_footprints(blocks, rows):
    """A memory of the footprints' size has room for the blocks, in any order of their sizes."""
    runs = FreeList(sum(footprints(blocks)) + sum(footprints(rows)))
    assert all(runs.take(size, high=True) is not None for size in rows)
    assert all(runs.take(size) is not None for size in blocks)


def test_footprints_count_whole_tiles_and_gaps_where_sizes_mix():
    assert footprints([]) == [] and footprints([5, 127]) == [5, 127]
    assert footprints([128, 129]) == [128, 256]
    assert footprints([5, 129]) == [5, 256 + 127]
