"""Ids of children: of bounded length, one for each place in the tree, and the same in every run."""

import asyncio
import itertools

import pytest

from jaxshare.serving.agents import Reply, Runtime, Single, agent, llm, spawn, tool
from jaxshare.serving.agents.journal import Journal
from jaxshare.serving.agents.places import FIRST, branch_after, place_of
from tests.serving.agents.test_children import Each


class Model:
    async def answer(self, call):
        return Reply(f"{call.messages[-1].content}{call.state[-1]}")


async def told(value):
    return value


@agent
async def child(number):
    return await tool(told, number)


@agent
async def asks_child(number):
    return await spawn(child, number), await spawn(child, number)


@agent
async def spawns(waits, calls):
    total = 0
    for number in range(waits):
        total += await spawn(child, number)
    said = [await llm("a") for _ in range(calls)]
    return total, said, await spawn(asks_child, 1)


def ids_of(program, *args, model=None, **options):
    runtime = Runtime(model or Model(), **options)
    asyncio.run(runtime.run(program, *args))
    ids = [run.id for run in runtime.runs]
    assert len(set(ids)) == len(ids)
    return ids


def test_places_of_all_paths_differ():
    paths = [path for length in range(14) for path in itertools.product((0, 1), repeat=length)]
    paths += [(0,) * 20 + rest for rest in itertools.product((-1, 0, 1, 2, 10, 12), repeat=4)]
    places = set()
    for path in paths:
        branch = FIRST
        for length, step in enumerate(path):
            branch = branch_after(branch, length, step)
        places.add(place_of(path, branch))
    assert len(places) == len(paths) and max(map(len, places)) < 24


def test_an_id_does_not_grow_with_the_waits_before():
    ids = ids_of(spawns, 400, 0)
    assert ids[:3] == ["spawns", "spawns/child@0", "spawns/child@0.0"]
    assert ids[398:401] == [f"spawns/child@{length}:0" for length in (398, 399, 400)]
    grandchildren = [f"spawns/asks_child@401:0/child@0{more}" for more in ("", ".0")]
    assert ids[401:] == ["spawns/asks_child@401:0", *grandchildren]


@pytest.mark.parametrize("restore", [None, "replay"])
def test_ids_are_those_of_other_runs(restore, tmp_path):
    made = agent(restore=restore)(spawns.function).under(Each(2))
    with Journal.open(tmp_path / "run") as journal:
        ids = ids_of(made, 10, 3, journal=journal)
    assert len([id for id in ids if "/asks_child@14" in id]) == 3 * 2**3
    with Journal.open(tmp_path / "run") as journal:
        assert sorted(ids_of(made, 10, 3, model=object(), journal=journal)) == sorted(ids)
    assert sorted(ids_of(made, 10, 3)) == sorted(ids)


@agent
async def yields():
    heard = ""
    while True:
        heard += str((yield heard))


@agent
async def talks(turns):
    made = spawn(yields)
    for _ in range(turns):
        await made.next()
        made.resume(await llm("a"))
    return await made.next()


def test_forks_of_forks_have_ids_of_bounded_length():
    done = None

    async def go():
        nonlocal done
        runtime = Runtime(Model())
        done = await runtime.run(talks.under(Each(2)), 6)
        return runtime

    runtime = asyncio.run(go())
    ids = [run.id for run in runtime.runs]
    assert len(ids) == 1 + 2**6 == len(set(ids))
    assert max(map(len, ids)) < 40 and all(id.count("~") <= 1 for id in ids)
    assert done is not None
    values = {state.value for state in done.states if state.finished}
    assert values == {"a" + "a".join(each) for each in itertools.product("01", repeat=6)}


def test_ids_are_those_of_a_single_path_under_any_supervisor():
    alone = ids_of(spawns.under(Single()), 10, 1)
    assert set(alone) <= set(ids_of(spawns.under(Each(2)), 10, 1))
