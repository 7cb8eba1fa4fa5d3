"""States are copied only where they may be fired again, and are right where they are anyway."""

import asyncio

import pytest

from jaxshare.serving.agents import Reply, Runtime, Single, TreeOfThoughts, agent, llm, spawn, tool
from tests.serving.agents.test_children import Each, paths_of


class Model:
    async def answer(self, call):
        return Reply(f"{call.messages[-1].content}{call.state[-1]}")


async def told(value):
    return value


@agent
async def works():
    found = []
    for number in range(3):
        found.append(await tool(told, number))
        found.append(await llm(f"{number}"))
    return found


def states_of(supervisor, program=works):
    done = asyncio.run(Runtime(Model()).run(program.under(supervisor)))
    return done, done.states


def test_a_single_path_copies_nothing():
    done, states = states_of(Single())
    assert done.accepted.value == [0, "00", 1, "10", 2, "20"]
    assert len(states) == 8 and not any(state.frame for state in states[:-1])
    assert {state.restored for state in states[1:]} == {"original"}


def test_a_search_copies_the_states_that_it_fires_again():
    _, states = states_of(TreeOfThoughts(2, 1, lambda state: sum(state.path)))
    for state in states:
        if not state.ended and state.parent is not None:
            assert (state.frame is not None) == (state.asks_model and state.fired > 0), state


class Liar(Each):
    """Fires states again that it has said it would not."""

    def refires(self, state):
        return False


def test_a_state_that_is_fired_against_its_supervisors_word_is_replayed():
    done, states = states_of(Liar(2))
    assert {state.restored for state in states[1:]} == {"original", "replay"}
    for branches, state in paths_of(done):
        assert state.value == [
            value
            for number, branch in enumerate(branches)
            for value in (number, f"{number}{branch}")
        ]


@agent
async def child():
    found = []
    for number in range(3):
        found.append((yield number))
        found.append(await tool(told, number))
    yield found


@agent
async def parent():
    made, got = spawn(child), []
    for _ in range(3):
        got.append(await made.next())
        made.resume(await llm("x"))
    return await made.next()


@pytest.mark.parametrize("supervisor", [Single(), Each(2)])
def test_a_child_is_copied_where_its_parents_paths_can_part(supervisor):
    runtime = Runtime(Model())
    done = asyncio.run(runtime.run(parent.under(supervisor)))
    kept = [bool(state.frame) for state in runtime.runs[1].states if state.fired and state.path]
    assert any(kept) == isinstance(supervisor, Each)
    for branches, state in paths_of(done):
        told_in_turn = [f"x{branch}" for branch in branches]
        assert state.value == [
            part for pair in zip(told_in_turn, range(3), strict=True) for part in pair
        ]
