"""How often Python looks for garbage: more seldom within blocks, and as before after them."""

import gc
import subprocess
import sys

import pytest

from jaxshare.garbage import NEW_OBJECTS, collect_seldom, seldom_collected


@pytest.fixture(autouse=True)
def restored():
    former = gc.get_threshold()
    yield
    gc.set_threshold(*former)


def collections_of(objects: int) -> int:
    before = sum(each["collections"] for each in gc.get_stats())
    kept = [[] for _ in range(objects)]
    assert len(kept) == objects
    return sum(each["collections"] for each in gc.get_stats()) - before


def test_blocks_collect_seldom_and_restore_what_was():
    gc.set_threshold(700, 10, 10)
    often = collections_of(20_000)
    with seldom_collected():
        assert collections_of(20_000) <= 1 < 20 < often
    assert gc.get_threshold() == (700, 10, 10)


def test_the_last_of_overlapping_blocks_restores():
    gc.set_threshold(500, 10, 10)
    first, second = seldom_collected(), seldom_collected()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold()[0] == NEW_OBJECTS
    second.__exit__(None, None, None)
    assert gc.get_threshold()[0] == 500


@pytest.mark.parametrize("set_before", [0, 2 * NEW_OBJECTS])
def test_what_a_program_has_set_stays(set_before):
    gc.set_threshold(set_before, 10, 10)
    collect_seldom()
    assert gc.get_threshold()[0] == set_before
    with seldom_collected():
        assert gc.get_threshold()[0] == set_before
        gc.set_threshold(900)
    assert gc.get_threshold()[0] == 900


def test_a_block_that_fails_restores():
    gc.set_threshold(700, 10, 10)
    with pytest.raises(KeyError), seldom_collected():
        raise KeyError
    assert gc.get_threshold()[0] == 700


def test_python_ends_without_looking_at_what_there_was():
    program = """
import atexit, gc
from jaxshare.garbage import leave_at_exit
atexit.register(lambda: print(gc.get_freeze_count()))
leave_at_exit()
leave_at_exit()
kept = [[] for _ in range(10_000)]
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) >= 10_000
