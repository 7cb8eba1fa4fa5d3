"""Rows under grammars in the bare decode loop, against automata that are run in Python."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshare import DecodeState, FinishReason, Grammar, KVCache, Layout, Sampler, Samplers
from jaxshare.decoding.grammar_rows import NO_GRAMMAR, SERVED, admitted, register_server
from jaxshare.decoding.grammar_tables import MOST_FORCED, GrammarTable, GrammarTables
from jaxshare.decoding.samplers import SamplerPlaces
from tests.helpers import TINY, mostly_slow, run, tiny_state

VOCAB, STOP, ROWS, X = TINY.vocab_size, 2, 3, 40


def chain(*sets: tuple[int, ...], loops: bool = False) -> GrammarTable:
    """A grammar whose n-th token is one of the n-th set, and then a stop token, or all over."""
    classes = np.arange(VOCAB, dtype=np.int32)
    transitions = np.full((len(sets) + 2, VOCAB), -1, np.int32)
    for state, tokens in enumerate(sets):
        transitions[state, list(tokens)] = state + 1
    transitions[len(sets), STOP] = len(sets) + 1
    if loops:
        transitions[len(sets), list(sets[0])] = 1
    return GrammarTable(classes, transitions)


def tables(*grammars: GrammarTable) -> GrammarTables:
    """All of them one after the other, with a state and a grammar of no use between."""
    made = jax.tree.map(np.array, GrammarTables.empty(VOCAB, 200, 4, 20_000))
    state = transition = 1
    for number, grammar in enumerate(grammars, start=1):
        size = grammar.num_states
        put = slice(state, state + size)
        forced, after, count = grammar.forced([STOP])
        made.masks[put], made.grammar[put] = grammar.masks(), number
        made.classes[number] = grammar.classes
        made.first[put] = transition + np.arange(size) * VOCAB
        flat = np.where(grammar.transitions < 0, -1, grammar.transitions + state).reshape(-1)
        made.transitions[transition : transition + len(flat)] = flat
        made.forced[put], made.after[put], made.num_forced[put] = forced, after + state, count
        state, transition = state + size, transition + len(flat)
    return jax.device_put(made)


ONE = chain((5, 6), (7,), (8,), (9,), (10, 11), (12,))
"""Forces 7, 8 and 9 after its first token, and 12 after its fifth."""
LONG = chain((5, 6), *[(n,) for n in range(20, 50)], (60, 61))
"""Forces 30 tokens, twice as many as are fed at once."""
LOOP = chain((5, 6, 7), loops=True)


def start(*grammars: int | None, capacity: int = X, count: int = 38, scored=False) -> DecodeState:
    """Three rows with prompts of one token, under these tables; None for a row without."""
    first = [1, 1 + ONE.num_states, 1 + ONE.num_states + LONG.num_states]
    state = DecodeState.create(
        KVCache.create(TINY, [48] * ROWS, jnp.float32),
        Layout(np.arange(ROWS, dtype=np.int32)[:, None]),
        [[3], [4], [13]],
        vocab_size=VOCAB,
        max_new_tokens=count,
        capacity=capacity,
        stops=[STOP],
        seeds=[1, 2, 3],
        samplers=Sampler(1.0),
        places=SamplerPlaces(1),
        queue=16,
        max_width=16,
        logprobs=True,
    )
    states = [NO_GRAMMAR if g is None else first[g] for g in grammars]
    rows = dataclasses.replace(
        state.grammars, states=jnp.asarray(states, jnp.int32), tables=tables(ONE, LONG, LOOP)
    )
    return dataclasses.replace(state, grammars=rows, scored=jnp.full(ROWS, scored))


def texts(state: DecodeState) -> list[list[int]]:
    return state.outputs()


def fits(grammar: GrammarTable, tokens: list[int]) -> bool:
    return grammar.read(tokens) >= 0


def test_rows_write_what_their_tables_admit_beside_one_that_is_free():
    state = run(start(0, 2, None))
    one, loop, free = texts(state)
    assert fits(ONE, one) and one[-1] == STOP and len(one) == 7
    assert fits(LOOP, loop)
    alone = run(start(None, None, None))
    assert free == texts(alone)[2]
    assert not fits(ONE, texts(alone)[0])


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 16, 17, 38])
def test_forced_tokens_end_at_the_most_tokens_and_are_those_of_one_by_one(count):
    whole = texts(run(start(1, 0, None, scored=True)))
    state = run(start(1, 0, None, count=count))
    assert texts(state) == [text[:count] for text in whole]
    ended = [FinishReason(int(reason)) for reason in state.reasons]
    expected = [
        FinishReason.STOP if STOP in text[:count] else FinishReason.LENGTH for text in whole
    ]
    assert ended == expected


@pytest.mark.parametrize("capacity", mostly_slow([17, 1, 3, 16]))
def test_outputs_with_little_room_are_taken_in_parts(capacity):
    whole, parts = texts(run(start(1, 0, None))), [[], [], []]
    state = start(1, 0, None, capacity=capacity)
    while bool(state.running.any()):
        state = run(state)
        for part, new in zip(parts, texts(state), strict=True):
            part += new
        state = state.without_outputs()
    assert parts == whole


def test_forced_tokens_take_one_pass_for_as_many_as_are_fed_at_once():
    fast = int(run(start(1, 1, 1)).passes)
    slow = int(run(start(1, 1, 1, scored=True)).passes)
    # A token is sampled in each pass; of 30 that are forced 15 come along with the one before, the
    # next is sampled with no choice, and the rest comes along with that.
    assert slow - fast == MOST_FORCED + 30 - MOST_FORCED - 1


def test_a_ban_that_leaves_no_token_ends_the_row_before_it_samples():
    state = start(0, 0, None)
    given = [Sampler(1.0, forbidden=(8,)), Sampler(1.0), Sampler(1.0)]
    samplers = Samplers.stack(given, places=SamplerPlaces(1))
    state = run(dataclasses.replace(state, samplers=samplers))
    found = [FinishReason(int(reason)) for reason in state.reasons]
    assert found[:2] == [FinishReason.NO_TOKEN, FinishReason.STOP]
    assert texts(state)[0][1:] == [7] and len(texts(state)[0]) == 2


class Reader:
    """A server that reads tables along in Python, and forces what they force."""

    def __init__(self, *grammars: GrammarTable | None):
        self.grammars = grammars
        self.states = [grammar.start if grammar else 0 for grammar in grammars]
        self.calls: list[str] = []

    def _only(self, row: int) -> int | None:
        """The token that must come next in a row."""
        grammar = self.grammars[row]
        assert grammar
        found = np.flatnonzero(grammar.transitions[self.states[row]] >= 0)
        return int(found[0]) if len(found) == 1 and found[0] != STOP else None

    def advance(self, tokens, sampled, room, least):
        self.calls.append("advance")
        forced, count = np.zeros((len(tokens), MOST_FORCED), int), np.zeros(len(tokens), int)
        for row in np.flatnonzero(sampled):
            grammar = self.grammars[row]
            assert grammar
            self.states[row] = int(grammar.transitions[self.states[row], tokens[row]])
            while count[row] < room[row] and (token := self._only(row)) is not None:
                forced[row, count[row]] = token
                count[row] += 1
                self.states[row] = int(grammar.transitions[self.states[row], token])
        return forced, count

    def masks(self, rows):
        self.calls.append("masks")
        whole = [
            grammar.masks()[state] if grammar else np.full(-(-VOCAB // 32), 2**32 - 1, np.uint32)
            for grammar, state in zip(self.grammars, self.states, strict=True)
        ]
        return np.stack(whole)[:rows]


@pytest.mark.parametrize("more", mostly_slow([{"scored": True}, {"capacity": 3}, {}]), ids=str)
def test_rows_that_the_host_reads_along_write_what_tables_make_them_write(more):
    expected = [*texts(run(start(1, 0, None)))]
    reader = Reader(LONG, ONE, None)
    state = start(None, None, None, **more)
    rows = state.grammars.with_server(register_server(reader))
    states = jnp.asarray([SERVED, SERVED, NO_GRAMMAR], jnp.int32)
    state = dataclasses.replace(state, grammars=rows.with_states(states))
    parts = [[], [], []]
    while bool(state.running.any()):
        state = run(state)
        for part, new in zip(parts, texts(state), strict=True):
            part += new
        state = state.without_outputs()
    assert parts == expected
    # The masks of the first draws, and then those after each draw: never out of order.
    assert reader.calls[:3] == ["masks", "advance", "masks"]
    assert all(a != b for a, b in zip(reader.calls, reader.calls[1:], strict=False))


def test_a_server_that_fails_leaves_no_token_and_the_others_go_on():
    class Broken(Reader):
        def advance(self, tokens, sampled, room, least):
            raise RuntimeError("no masks today")

    broken = Broken(ONE, None, None)
    state = start(None, None, None)
    rows = state.grammars.with_server(register_server(broken))
    states = jnp.asarray([SERVED, NO_GRAMMAR, NO_GRAMMAR], jnp.int32)
    state = run(dataclasses.replace(state, grammars=rows.with_states(states)))
    assert FinishReason(int(state.reasons[0])) is FinishReason.NO_TOKEN
    assert len(texts(state)[0]) == 1  # with the masks that it had at first
    assert texts(state)[1:] == texts(run(start(None, None, None)))[1:]


@pytest.mark.parametrize(("vocab", "first"), [(33, 0), (64, 32), (101, 40), (31, 0)])
def test_bits_admit_single_tokens(vocab, first):
    rng = np.random.default_rng(vocab)
    whole = -(-(vocab + first) // 32)
    words = rng.integers(0, 2**32, (ROWS, whole), dtype=np.uint32)
    words[1] = 2**32 - 1
    logits = rng.normal(size=(ROWS, vocab)).astype(np.float32)
    found = np.asarray(admitted(jnp.asarray(logits), jnp.asarray(words), first))
    for row in range(ROWS):
        for n in range(vocab):
            bit = int(words[row, (n + first) // 32]) >> (n + first) % 32 & 1
            assert found[row, n] == (logits[row, n] if bit else -np.inf)


def test_rows_without_grammars_carry_nothing():
    state = tiny_state([[3], [4], [5], [6]])
    assert not state.grammars.in_use
    assert state.grammars.masks(state.running).shape == (4, 0)
    params = Sampler(grammar=Grammar.choices(["a"]))
    with pytest.raises(ValueError, match="sampler of row 0 has a grammar"):
        DecodeState.create(
            state.cache, state.layout, [[3]] * 4, vocab_size=VOCAB, samplers=params, max_width=16
        )
