"""States are copied only where they may be fired again, and are right where they are anyway."""

import asyncio
import itertools
import random

import pytest

from jaxshare.serving.agents import (
    BestOfN,
    DivergedError,
    Runtime,
    SelfConsistency,
    Single,
    TreeOfThoughts,
    agent,
    courses,
    llm,
    spawn,
    tool,
)
from jaxshare.serving.agents.compiler.program import snapshot
from jaxshare.serving.agents.keeping import PER_WAIT, SMALL
from tests.serving.agents.test_children import Each, paths_of
from tests.serving.agents.test_ids import Model, told


@agent
async def works():
    found = []
    for number in range(3):
        found.append(await tool(told, number))
        found.append(await llm(f"{number}"))
    return found


def states_of(supervisor, program=works, *args):
    done = asyncio.run(Runtime(Model()).run(program.under(supervisor), *args))
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


RECORDS = 2 * SMALL


@agent
async def holds(waits, records):
    held = [{"number": number, "said": []} for number in range(records)]
    for number in range(waits):
        held[number % records]["said"].append(await llm(f"{number}"))
    return [one["said"] for one in held if one["said"]]


class Follows(Each):
    """Follows one path, may fire all its states again, and fires these again at its end."""

    def __init__(self, *places):
        super().__init__(1)
        self.places = places

    def commit(self, state):
        super().commit(state)
        if state.ended and not any(state.path):
            self.over = not self.places
            self._ready = [each for each in ancestors_of(state) if len(each.path) in self.places]
            self._open = len(self._ready)


def ancestors_of(state):
    found = []
    while state.parent is not None:
        state = state.parent
        found.append(state)
    return found[::-1]


def sizes_of(done):
    """The number of objects in the copy of each state, before its end."""
    frames = [state.frame for state in done.states if not state.ended]
    return [frame.size for frame in frames if frame is not None]


@pytest.mark.parametrize(("records", "waits"), [(SMALL // 4, 40), (RECORDS, 40), (RECORDS, 900)])
def test_a_state_that_is_kept_costs_no_more_than_its_waits_pay_for(records, waits):
    done, _ = states_of(Follows(), holds, waits, records)
    sizes = sizes_of(done)
    if records < SMALL:
        assert len(sizes) == waits + 1  # of all: each has few objects
        return
    assert sum(sizes) <= SMALL + PER_WAIT * waits
    large = [size for size in sizes if size > SMALL]
    assert all(size >= 2 * records for size in large)  # a record has two objects
    assert (len(large) >= 3) == bool(large) == (waits == 900)


def test_a_copy_that_is_too_large_is_seldom_tried(monkeypatch):
    tried = []

    def counted(frame, program, **options):
        tried.append(frame)
        return snapshot(frame, program, **options)

    monkeypatch.setattr(courses, "snapshot", counted)
    done, _ = states_of(Follows(), holds, 400, 100 * SMALL)
    assert len(done.states) == 402
    assert 4 <= len(tried) <= 8  # the first state, the second, and then each time twice as late


@pytest.mark.parametrize("records", [SMALL // 4, RECORDS])
def test_states_are_restored_by_either_way_as_they_were(records):
    waits, places = 120, (1, 2, 60, 119, 120)
    _, states = states_of(Follows(*places), holds, waits, records)
    ends = [state for state in states if state.ended]
    assert len(ends) == 1 + len(places)
    for state in ends:
        said = [f"{number}{state.path[number + 1]}" for number in range(waits)]
        assert state.value == [[each] for each in said], state.path
    again = {state.restored for state in states if any(state.path)} - {"original"}
    assert again == ({"copy"} if records < SMALL else {"replay"})


@agent
async def grows(step):
    held = []
    for number in range(5):
        held += [{"number": number} for _ in range(step)]
        await llm(f"{number}")
    return len(held)


class Delays(Model):
    def __init__(self, order):
        self.order = random.Random(order)

    async def answer(self, call):
        for _ in range(self.order.randrange(5)):
            await asyncio.sleep(0)
        return await super().answer(call)


def test_the_choice_does_not_depend_on_speed():
    def chosen(order):
        done = asyncio.run(Runtime(Delays(order)).run(grows.under(Each(2)), SMALL // 3))
        return {state.path: (state.restored, bool(state.frame)) for state in done.states}

    seen = [chosen(order) for order in range(4)]
    assert all(each == seen[0] for each in seen)
    assert {restored for restored, _ in seen[0].values()} == {"", "original", "copy", "replay"}


@agent(restore="copy")
async def holds_by_copies(waits, records):
    held = [[number] for number in range(records)]
    for _ in range(waits):
        held[0].append(await llm("a"))
    return held[0]


@agent
async def sleeps_first(waits, records):
    held = [[number] for number in range(records)]
    await asyncio.sleep(0)
    for _ in range(waits):
        held[0].append(await llm("a"))
    return held[0]


@agent
async def takes_what_has_no_copy(numbers, waits, records):
    held = [[next(numbers)] for _ in range(records)]
    del numbers
    for _ in range(waits):
        held[0].append(await llm("a"))
    return held[0]


@pytest.mark.parametrize(
    ("program", "args", "ways"),
    [
        (holds_by_copies, list, {"copy"}),
        (sleeps_first, list, {"copy", "replay"}),
        (takes_what_has_no_copy, lambda: [iter_once(RECORDS)], {"copy", "replay"}),
    ],
)
def test_a_copy_is_never_given_up_where_there_is_no_other_way(program, args, ways):
    _, states = states_of(Each(2), program, *args(), 3, RECORDS)
    ends = [state for state in states if state.ended]
    assert len(ends) == 8 and not any(state.error for state in ends)
    for state in ends:
        answers = [f"a{step}" for step in state.path[-3:]]
        assert state.value == [0, *answers]
    again = [state for state in states if state.path and state.path[-1]]
    assert {state.restored for state in again} == ways
    # The later ones are run on from the copy of the first.
    assert {state.restored for state in again if not any(state.path[:-1])} >= {"copy"}


def iter_once(count):
    return (number for number in range(count))


TURNS = itertools.count()


async def depends_on_the_outside(records):
    held = [[number] for number in range(records)]
    await llm(f"turn {next(TURNS)}")
    held.append(await llm("end"))
    return held[-1]


def test_a_program_that_diverges_though_it_could_be_copied_is_told_how():
    few, _ = states_of(Each(2), agent(depends_on_the_outside), 10)
    assert not any(state.error for state in few.states)
    _, states = states_of(Each(2), agent(depends_on_the_outside), RECORDS)
    errors = [state.error for state in states if state.error]
    assert errors and all(isinstance(error, DivergedError) for error in errors)
    assert "llm('turn" in str(errors[0])
    assert str(errors[0]).endswith(
        'make that a tool, or have all states copied, whatever they hold: @agent(restore="copy")'
    )
    copied, _ = states_of(Each(2), agent(restore="copy")(depends_on_the_outside), RECORDS)
    assert not any(state.error for state in copied.states)


@pytest.mark.parametrize("supervisor", [BestOfN(3, lambda state: 1.0), SelfConsistency(3)])
def test_paths_that_part_at_the_start_alone_copy_nothing_else(supervisor):
    _, states = states_of(supervisor)
    assert len([state for state in states if state.finished]) == 3
    kept = [state.path for state in states if state.frame is not None and not state.ended]
    assert kept == [()]


def test_a_state_that_is_kept_by_its_record_has_variables():
    told = []

    async def tells(waits, records):
        held, number = [[] for _ in range(records)], -1
        for number in range(waits):
            held[number].append(await llm("a"))
            told.append(number)
        return held[0]

    done, states = states_of(Follows(1), agent(tells), 3, RECORDS)
    assert told == [0, 1, 2, 0, 1, 2]
    kept = [state for state in states if state.asks_model and not any(state.path)]
    assert len(kept) == 3 and not any(state.course or state.frame for state in kept)
    for state in kept:
        number, found = len(state.path) - 1, state.variables
        assert found["number"] == number and found["waits"] == 3
        assert found["held"][: number + 1] == [["a0"]] * number + [[]]
    assert len(states) == len(done.states) == 5 + 3
