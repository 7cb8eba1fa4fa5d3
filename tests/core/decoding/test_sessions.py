"""Sessions of rows in one decode state: rows that run in step, beside others, and what each writes
alone."""

import dataclasses
import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxshare import DecodeState, FinishReason, KVCache, Layout, Sampler, decode
from jaxshare.decoding.array_rows import with_row
from jaxshare.decoding.automaton import ByteAutomaton, TokenAutomata
from jaxshare.decoding.pieces import num_pieces
from jaxshare.decoding.row_transfer import (
    PlacedRows,
    goes_on_from_logits,
    on_host,
    put_rows,
    take_rows,
)
from jaxshare.decoding.samplers import SamplerPlaces
from jaxshare.decoding.sessions import Sessions
from jaxshare.decoding.steps import Steps
from tests.helpers import MODEL, TINY, VOCAB, mostly_slow, on_device, tiny_params

HOT = Sampler(temperature=1.5)
CAPACITY, QUEUE, OPENINGS, LONGEST, LISTED, WIDTH = 24, 32, 4, 6, 4, 6
PIECES = num_pieces(2, WIDTH)
BLOCKS, TOKENS_IN_ALL = 10, 2 * (160 + 2 * 40) + 2 * (160 + 40)


@st.composite
def sessions_of_rows(draw):
    """The first row of each row's session; rows of several may be mixed."""
    count = draw(st.integers(1, 8))
    first: list[int] = []
    for row in range(count):
        first.append(draw(st.sampled_from([*{f for f in first if first[f] == f}, row])))
    return np.asarray(first, np.int32), np.asarray([draw(st.booleans()) for _ in range(count)])


@hypothesis.settings(max_examples=40)
@hypothesis.given(sessions_of_rows(), st.integers(1, 30))
def test_sums_and_ranks_are_those_of_python(drawn, room):
    first, marked = drawn
    check_sums_and_ranks(Sessions(on_device(first)), first, marked, room)
    alone = np.arange(len(first), dtype=np.int32)
    check_sums_and_ranks(Sessions(None), alone, marked, room)


def check_sums_and_ranks(sessions, first, marked, room):
    members = {f: [r for r in range(len(first)) if first[r] == f] for f in sorted({*first})}
    expected_any = [any(marked[m] for m in members[f]) for f in first]
    before = [sum(marked[m] for m in members[f] if m < r) for r, f in enumerate(first)]
    total = [sum((m + 1) * marked[m] for m in members[f]) for f in first]
    np.testing.assert_array_equal(sessions.any(on_device(marked)), expected_any)
    np.testing.assert_array_equal(sessions.before(on_device(marked)), before)
    counts = on_device((np.arange(len(first)) + 1) * marked, jnp.int32)
    np.testing.assert_array_equal(sessions.total(counts), total)
    fits, used = np.zeros(len(first), bool), 0
    for rows in members.values():
        used += sum(counts[r] for r in rows)
        fits[rows] = used <= room
    np.testing.assert_array_equal(sessions.first_that_fit(counts, room), fits)


def every(period: int, marked: int = 0) -> ByteAutomaton:
    """Marks each `period`-th byte that is `marked` modulo 3."""

    def step(state, byte):
        after = (state + (byte % 3 == marked)) % period
        return after, after == 0 and byte % 3 == marked

    return ByteAutomaton.build(0, step)


TOKENS = [bytes([token % 256]) * (1 + token % 2) for token in range(VOCAB)]


@functools.cache
def lifted(period: int, marked: int = 0):
    return every(period, marked).lift(TOKENS)


def test_each_row_reads_with_its_own_automaton():
    kinds = [(2, 0), (5, 1), (3, 2)]
    automata = TokenAutomata.of([lifted(*kind) for kind in kinds], vocab_size=VOCAB, max_entries=99)
    assert automata.table.shape == (99,)
    which = np.asarray([0, 3, 1, 2, 1])
    states, texts = automata.starts[which], np.random.default_rng(0).integers(0, VOCAB, (7, 5))
    told = [0] * len(which)
    for tokens in texts:
        states, marks = automata.step(on_device(which), states, on_device(tokens))
        for row, kind in enumerate(which):
            marked = False
            if kind:
                told[row], marked = every(*kinds[kind - 1]).read(TOKENS[tokens[row]], told[row])
            assert (int(states[row]), bool(marks[row])) == (told[row], marked)


def test_sessions_with_automata_of_about_the_same_size_have_tables_of_one_shape():
    ends = [lifted(period) for period in (3, 5)]
    small, large = (Steps.create(each, lifted(31, 1), [-1], capacity=1) for each in ends)
    assert ends[0].transitions.size < ends[1].transitions.size
    assert small.automata.table.shape == large.automata.table.shape


class Part:
    """A session of two workers, or a row by itself, and its blocks: a history, and one a row.

    Args:
      number: makes it different from the others.
      rows: 2 for a session whose steps move to the history, 1 for a row by itself.
    """

    def __init__(self, number: int, rows: int):
        self.number, self.rows = number, rows
        self.blocks = [[0, 2, 1], [0, 1, 2]] if rows == 2 else [[0, 1]]
        self.capacities = [160, *[40] * rows]

    def state(self, *, automata: TokenAutomata | None = None) -> DecodeState:
        """Alone."""
        cache = KVCache.create(TINY, self.capacities, jnp.float32)
        rng = np.random.default_rng(self.number)
        steps = Steps.none(self.rows, automata or TokenAutomata.of(vocab_size=VOCAB), **ROOM)
        if self.rows == 2:
            steps = Steps.create(
                lifted(3 + self.number),
                lifted(31, 1),
                [0, 0],
                seed=self.number,
                ask_every=5 + self.number,
                **ROOM,
            )
            for row in range(2):
                sizes = rng.integers(0, LONGEST + 1, (OPENINGS, 2))
                pairs = [tuple(rng.integers(0, VOCAB, n).tolist() for n in two) for two in sizes]
                steps = steps.prepare(row, 2, pairs)
        state = DecodeState.create(
            cache,
            Layout.from_blocks(self.blocks, width=LISTED),
            [rng.integers(0, VOCAB, 1 + 3 * r + self.number).tolist() for r in range(self.rows)],
            vocab_size=VOCAB,
            samplers=HOT,
            seeds=self.number,
            max_new_tokens=20,
            capacity=CAPACITY,
            queue=QUEUE,
            places=SamplerPlaces(2),
            max_width=WIDTH,
            steps=steps,
        )
        own = jnp.zeros(1, jnp.int32) if self.rows == 1 else state.session
        return dataclasses.replace(state, session=own, seeds=state.seeds + 7 * self.number)


ROOM = {"capacity": CAPACITY, "openings": OPENINGS, "longest": LONGEST}
SAMPLED = ("tokens", "num_sampled", "reasons", "clock")


def run(state: DecodeState, passes: int = 100, **more) -> DecodeState:
    return decode(MODEL, tiny_params(), state, passes=passes, width=WIDTH, **more)


@functools.cache
def alone(number: int, rows: int, last_pass: int = 10**6) -> DecodeState:
    state = Part(number, rows).state()
    return run(dataclasses.replace(state, last_pass=jnp.full(rows, last_pass, jnp.int32)))


def together(parts: list[Part], last_pass: list[int]) -> tuple[DecodeState, list[np.ndarray]]:
    """One state with the rows of all parts, and a few that are not in use, and where they are.

    It has the same shapes for all parts, so that tests share a program.
    """
    states = [part.state() for part in parts]
    num_rows = 8
    capacities = [n for part in parts for n in part.capacities]
    capacities += [0] * (BLOCKS - len(capacities))
    capacities[-1] += TOKENS_IN_ALL - sum(capacities)
    tables = [lifted(3 + part.number) for part in parts]
    automata = TokenAutomata.of(
        [table for one in tables for table in (one, lifted(31, 1))],
        vocab_size=VOCAB,
        max_automata=8,
        max_entries=1024,
    )
    state = DecodeState.create(
        KVCache.create(TINY, capacities, jnp.float32),
        Layout.from_blocks([], num_rows=num_rows, width=LISTED + 1),
        [],
        vocab_size=VOCAB,
        capacity=CAPACITY,
        queue=QUEUE,
        places=SamplerPlaces(2),
        max_width=WIDTH,
        steps=Steps.none(num_rows, automata, **ROOM),
    )
    free, block, placed = [*range(num_rows)][::-1], 0, []
    for i, (part, small) in enumerate(zip(parts, states, strict=True)):
        rows = np.asarray(sorted(free.pop(-1 - (i % 2)) for _ in range(part.rows)))
        small = dataclasses.replace(small, last_pass=jnp.full(part.rows, last_pass[i], jnp.int32))
        placed.append(PlacedRows(small, rows, block, 2 * i))
        block += len(part.capacities)
    return put_rows(state, placed), [each.rows for each in placed]


@pytest.mark.parametrize(
    ("pieces", "dispatch"),
    mostly_slow(
        [(PIECES, 7), (PIECES, 100), (PIECES + 1, 7), (PIECES + 1, 100), (None, 7), (None, 100)],
        several=True,
    ),
)
def test_sessions_in_one_state_write_what_each_writes_alone(pieces, dispatch):
    """Two sessions and two rows by themselves, in rows that are mixed; openings need wide passes
    of several pieces, for which there is not room at once."""
    parts = [Part(0, 2), Part(1, 1), Part(2, 2), Part(3, 1)]
    state, places = together(parts, [10**6] * 4)
    for _ in range(60):
        state = run(state, dispatch, pieces=pieces)
        if not bool(state.running.any()):
            break
    assert int(state.cache.faults) == 0
    block, reached = 0, set()
    for i, (part, rows) in enumerate(zip(parts, places, strict=True)):
        small = take_rows(state, rows, block=block, automaton=2 * i)
        expected = alone(part.number, part.rows)
        for name in SAMPLED:
            np.testing.assert_array_equal(
                getattr(small, name), getattr(expected, name), err_msg=f"{name} of {i}"
            )
        for name in ("marks", "sampled_at", "number", "asked", "since", "due", "targets"):
            if part.rows == 2:
                found, wanted = (getattr(each.steps, name) for each in (small, expected))
                np.testing.assert_array_equal(found, wanted, err_msg=f"{name} of {i}")
        np.testing.assert_array_equal(small.session, expected.session)
        np.testing.assert_array_equal(
            state.cache.lengths[block : block + len(part.capacities)], expected.cache.lengths
        )
        np.testing.assert_array_equal(small.layout.blocks[:, :LISTED], expected.layout.blocks)
        reached |= {int(mark) for mark in np.asarray(expected.steps.marks).reshape(-1)}
        block += len(part.capacities)
    assert {0, 1, 5} <= reached, "steps have ended, and questions were asked"


def test_a_session_stops_at_its_last_pass_and_goes_on_from_there():
    parts, last = [Part(0, 2), Part(3, 1), Part(2, 2)], [6, 3, 9]
    state, places = together(parts, last)
    state = run(state, pieces=PIECES)
    for part, rows, passes in zip(parts, places, last, strict=True):
        expected = alone(part.number, part.rows, passes)
        assert state.clock[rows].tolist() == [passes] * part.rows
        for name in SAMPLED:
            np.testing.assert_array_equal(getattr(state, name)[rows], getattr(expected, name))
    state = dataclasses.replace(state, last_pass=state.last_pass + 10**6)
    state = run(state, pieces=PIECES)
    for part, rows in zip(parts, places, strict=True):
        expected = alone(part.number, part.rows)
        np.testing.assert_array_equal(state.tokens[rows], expected.tokens)


def test_a_session_halts_where_one_of_its_rows_finishes_and_others_go_on():
    parts = [Part(0, 2), Part(2, 2)]
    state, places = together(parts, [10**6] * 2)
    state = dataclasses.replace(
        state,
        halts=jnp.zeros(state.layout.num_rows, bool).at[places[0]].set(True),
        max_new_tokens=with_row(state.max_new_tokens, places[0][1], 4),
    )
    state = run(state, pieces=PIECES)
    halted, other = places
    assert state.reasons[halted].tolist() == [FinishReason.RUNNING, FinishReason.LENGTH]
    assert state.num_sampled[halted][1] == 4 and state.num_sampled[halted][0] < 20
    assert (state.clock[halted] < state.clock[other]).all()
    np.testing.assert_array_equal(state.tokens[other], alone(2, 2).tokens)


def test_rows_that_wait_for_the_host_may_idle_for_so_many_passes():
    """Both rows of a session that halts, and that of one that has had its passes."""

    def halting(max_idle: int, halts: bool = True) -> tuple[DecodeState, list[np.ndarray]]:
        state, places = together([Part(0, 2), Part(2, 2)], [10**6] * 2)
        state = dataclasses.replace(
            state,
            halts=jnp.zeros(state.layout.num_rows, bool).at[places[0]].set(halts),
            max_new_tokens=with_row(state.max_new_tokens, places[0][1], 4),
        )
        return run(state, pieces=PIECES, max_idle=max_idle), places

    first, (halted, other) = halting(0)
    for max_idle, more in ((1, 0), (2, 1), (5, 2)):
        state, _ = halting(max_idle)
        assert state.clock[halted].tolist() == first.clock[halted].tolist()
        assert state.clock[other].tolist() == (first.clock[other] + more).tolist()
    state, _ = halting(0, halts=False)
    np.testing.assert_array_equal(state.tokens[other], alone(2, 2).tokens)
    for max_idle in (0, 3):
        state, (ended, other) = together([Part(3, 1), Part(2, 2)], [3, 9])
        state = run(state, pieces=PIECES, max_idle=max_idle)
        assert state.clock[ended].tolist() == [3]
        assert state.clock[other].tolist() == [3 + max_idle] * 2


def test_a_step_that_does_not_fit_ends_its_own_session():
    parts = [Part(0, 2), Part(2, 2)]
    state, places = together(parts, [10**6] * 2)
    capacities = state.cache.capacities.at[0].set(3)
    cache = dataclasses.replace(state.cache, capacities=capacities)
    state = run(dataclasses.replace(state, cache=cache), pieces=PIECES)
    assert FinishReason.CACHE_FULL in state.reasons[places[0]].tolist()
    assert not bool(state.running.any()) and int(state.cache.faults) == 0
    np.testing.assert_array_equal(state.tokens[places[1]], alone(2, 2).tokens)


@pytest.mark.parametrize("pieces", [PIECES, None])
def test_an_early_piece_without_numbers_ends_its_row(pieces):
    state, places = together([Part(5, 1), Part(2, 2)], [10**6] * 2)
    [row], prompt = places[0], np.asarray(Part(5, 1).state().pending[0, :6])
    assert num_pieces(1, len(prompt)) == 2 and len({*prompt.tolist()}) > 1
    parameters = tiny_params()["params"]
    table = parameters["embed"]["embedding"].at[prompt[0]].set(jnp.nan)
    lost = {"params": {**parameters, "embed": {"embedding": table}}}
    state = decode(MODEL, lost, state, passes=1, width=WIDTH, pieces=pieces)
    assert int(state.reasons[row]) == FinishReason.ERROR
    assert (np.asarray(state.reasons)[places[1]] != FinishReason.ERROR).all()


def test_rows_that_are_taken_and_put_back_are_the_same():
    state, places = together([Part(0, 2), Part(1, 1)], [10**6] * 2)
    state = run(state, 5)
    kept = jax.tree.map(np.array, dataclasses.replace(state, cache=state.cache))
    back = put_rows(state, [PlacedRows(take_rows(state, rows), rows) for rows in places])
    for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(back), strict=True):
        np.testing.assert_array_equal(a, b)


def test_rows_that_change_places_with_each_dispatch_write_what_they_write_alone():
    """Rows bring what they need to go on, logits where there is nothing to feed, and whatever another
    has left in their places is not theirs: here logits that are no numbers."""
    parts, rng = [Part(0, 2), Part(1, 1), Part(2, 2)], np.random.default_rng(0)
    state, places = together(parts, [10**6] * 3)
    blocks = [sum(len(part.capacities) for part in parts[:i]) for i in range(3)]
    logits = rng.normal(size=(1, VOCAB)).astype(np.float32)

    def without_prompt(state: DecodeState, rows) -> DecodeState:
        return dataclasses.replace(
            state,
            num_pending=on_device(state.num_pending).at[rows].set(0),
            has_logits=on_device(state.has_logits).at[rows].set(True),
            logits=state.logits.at[rows].set(logits),
        )

    expected = [alone(0, 2), run(without_prompt(parts[1].state(), np.arange(1))), alone(2, 2)]
    state = without_prompt(state, places[1])
    # As in a state that has run, and is about to feed what it has sampled.
    state = dataclasses.replace(state, has_logits=state.has_logits.at[places[2]].set(True))
    kept = [
        take_rows(state, rows, block=block, automaton=2 * i)
        for i, (rows, block) in enumerate(zip(places, blocks, strict=True))
    ]
    brought = []
    for _ in range(40):
        free, placed = rng.permutation(8).tolist(), []
        for i, part in enumerate(kept):
            places[i] = np.asarray(sorted(free.pop() for _ in range(parts[i].rows)))
            brought.append(bool(goes_on_from_logits(part).any()))
            placed.append(PlacedRows(part, places[i], blocks[i], 2 * i, brought[-1]))
        lost = jnp.full_like(state.logits, jnp.nan)
        empty = dataclasses.replace(state.retire([*range(8)]), logits=lost)
        state = run(put_rows(empty, placed), 3, pieces=PIECES)
        kept = [
            take_rows(on_host(state), rows, block=block, automaton=2 * i, before=part)
            for i, (rows, block, part) in enumerate(zip(places, blocks, kept, strict=True))
        ]
    assert any(brought) and not all(brought)
    assert int(state.cache.faults) == 0 and not any(part.running.any() for part in kept)
    for part, wanted in zip(kept, expected, strict=True):
        for name in SAMPLED:
            np.testing.assert_array_equal(getattr(part, name), getattr(wanted, name), err_msg=name)
        # Of rows that have ended with nothing to feed the logits are kept.
        ended = np.asarray(wanted.num_pending == 0)
        assert part.has_logits.tolist() == ended.tolist()
        np.testing.assert_allclose(part.logits[ended], wanted.logits[ended], atol=1e-5)


@pytest.mark.parametrize("pieces", [0, 1])
def test_decode_refuses_room_for_too_few_pieces(pieces):
    state, _ = together([Part(0, 2)], [1])
    with pytest.raises(ValueError, match=f"pieces is {pieces}; .* it must be at least 2"):
        run(state, pieces=pieces)
