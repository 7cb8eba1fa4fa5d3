"""Clocks and random numbers in agents whose states are restored by replays."""

import asyncio
import os
import random
import secrets
import subprocess
import sys
import time
import uuid
from random import choice as picks
from time import monotonic

import numpy as np
import pytest

from jaxshare.serving.agents import DivergedError, Reply, Runtime, agent, llm
from jaxshare.serving.agents.journal import Journal
from tests.serving.agents.test_children import Each, paths_of


class Model:
    async def answer(self, call):
        return Reply(str(call.state[-1]))


class Thing:
    def __init__(self, name):
        self.name = name


async def reads_all():
    things = [Thing("a"), Thing("b"), Thing("c")]
    found = [time.time(), monotonic(), time.perf_counter_ns()]
    found += [await llm("one")]
    found += [random.random(), random.randint(0, 10**9), random.gauss(0, 1)]
    found += [secrets.token_hex(4), os.urandom(4), str(uuid.uuid4())]
    await llm("two")
    numbers = list(range(10))
    random.shuffle(numbers)
    chosen = random.choice(things)
    chosen.name += "!"
    found += [numbers, [one.name for one in things], [one.name for one in random.sample(things, 2)]]
    found += [random.choices("xyz", weights=[1, 2, 3], k=5), picks([1, 2, 3])]
    found += [np.random.default_rng().integers(10**9), np.random.default_rng(3).integers(100)]
    found += [await llm("three")]
    return found


def test_a_replay_reads_what_was_read():
    done = asyncio.run(Runtime(Model()).run(agent(restore="replay")(reads_all).under(Each(2))))
    paths = {tuple(branches): state for branches, state in paths_of(done)}
    assert len(paths) == 8 and not any(state.error for state in paths.values())
    for first in (0, 1):
        for second in (0, 1):
            one, other = (paths[first, second, third].value for third in (0, 1))
            # All before the last answer is the same, and that is not.
            assert one[:-1] == other[:-1] and (one[-1], other[-1]) == ("0", "1")
    assert paths[0, 0, 0].value[:3] == paths[1, 1, 1].value[:3]
    # What is read after an answer is read anew on every path.
    assert len({str(paths[first, 0, 0].value[4:10]) for first in (0, 1)}) == 2
    for state in paths.values():
        assert sum(name.endswith("!") for name in state.value[11]) == 1


async def reads_in_another_order():
    if len(ORDER) % 2:
        time.time()
    else:
        random.random()
    ORDER.append(1)
    return await llm("one")


ORDER = []


def test_a_replay_that_reads_something_else_is_named():
    made = agent(restore="replay")(reads_in_another_order).under(Each(2))
    done = asyncio.run(Runtime(Model()).run(made))
    [error] = [state.error for _, state in paths_of(done) if state.error]
    assert isinstance(error, DivergedError)
    assert "reads time.time in line" in str(error) and "its record has random.random" in str(error)


async def reads_by_a_library():
    # The same numbers, drawn by code of Python's own library: not recorded, as caches may skip it.
    return subprocess.list2cmdline(["a"]), await llm("one"), time.time() > 0


def test_what_is_not_an_agents_own_is_left_alone():
    before = random.getstate()
    value = random.random()
    random.setstate(before)
    done = asyncio.run(Runtime(Model()).run(agent(reads_by_a_library).under(Each(2))))
    assert not any(state.error for _, state in paths_of(done))
    random.setstate(before)
    assert random.random() == value and abs(time.time() - time.time()) < 1
    for function in (random.choice, random.sample):
        with pytest.raises((ValueError, IndexError)):
            function([], 3) if function is random.sample else function([])


def test_a_single_path_wraps_nothing():
    code = (
        "import asyncio, time, random\n"
        "from jaxshare.serving.agents import Runtime, Reply, agent, llm\n"
        "class Model:\n"
        "    async def answer(self, call): return Reply('1')\n"
        "before = time.time, random.choice\n"
        "async def reads(): return time.time(), await llm('a')\n"
        "asyncio.run(Runtime(Model()).run(agent(restore='replay')(reads)))\n"
        "assert (time.time, random.choice) == before\n"
    )
    assert not subprocess.run([sys.executable, "-c", code], check=False).returncode


async def reads_less_often():
    first = time.time()
    if not ORDER:
        first = time.time()
    ORDER.append(1)
    said = await llm("one")
    return first, said, time.time()


def test_a_replay_that_reads_less_is_named():
    ORDER.clear()
    made = agent(restore="replay")(reads_less_often).under(Each(2))
    done = asyncio.run(Runtime(Model()).run(made))
    [error] = [state.error for _, state in paths_of(done) if state.error]
    assert isinstance(error, DivergedError) and "it leaves out time.time" in str(error)


async def helper(name):
    before = time.perf_counter()
    said = await llm(name)
    return before, said, time.perf_counter()


async def waits_for_helpers():
    found = [await helper("one"), time.perf_counter()]
    found += [await helper("two")]
    return found


@pytest.mark.parametrize("restore", [None, "replay"])
def test_helpers_read_what_they_read(restore):
    done = asyncio.run(
        Runtime(Model()).run(agent(restore=restore)(waits_for_helpers).under(Each(2)))
    )
    paths = {tuple(branches): state for branches, state in paths_of(done)}
    assert len(paths) == 4 and not any(state.error for state in paths.values())
    assert len({state.value[0][0] for state in paths.values()}) == 1
    for first in (0, 1):
        one, other = (paths[first, second].value for second in (0, 1))
        assert one[:2] == other[:2] and one[2][0] == other[2][0] and one[2][2] != other[2][2]


async def remembers_when():
    begun, name = time.time(), uuid.uuid4()
    said = await llm(f"at {begun} {name}")
    later = [time.monotonic(), random.random(), os.urandom(3)]
    await llm(f"then {later}")
    return begun, name, said, later


@pytest.mark.parametrize("restore", [None, "replay"])
def test_a_journal_has_what_was_read(tmp_path, restore):
    made = agent(restore=restore)(remembers_when)

    def value(model, journal, program=made):
        return asyncio.run(Runtime(model, journal=journal).run(program)).accepted.value

    with Journal.open(tmp_path / "run") as journal:
        first = value(Model(), journal)
    with Journal.open(tmp_path / "run") as journal:
        assert value(None, journal) == first
    # A run that was killed after its first answer goes on with what it had read before.
    lines = (tmp_path / "run").read_text().splitlines(keepends=True)
    (tmp_path / "killed").write_text("".join(lines[:3]))
    with Journal.open(tmp_path / "killed", pickles=True) as journal:
        again = value(Model(), journal)
    assert again[:3] == first[:3] and again[3] != first[3]
    # Searches, too, and journals in memory.
    kept = Journal()
    searched = made.under(Each(2))
    one = asyncio.run(Runtime(Model(), journal=kept).run(searched))
    other = asyncio.run(Runtime(None, journal=kept).run(searched))
    assert [state.value for _, state in paths_of(one)] == [
        state.value for _, state in paths_of(other)
    ]
