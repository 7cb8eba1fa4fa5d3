"""Automata over bytes and over tokens, against a plain reader and Python's strings."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxshare.decoding.automaton import ByteAutomaton

STEP = jax.jit(lambda automaton, state, token: automaton.step(state, token))


@functools.cache
def digits() -> ByteAutomaton:
    """Marks the digit that makes the sum of all digits so far a multiple of three."""

    def step(total, byte):
        if not ord("0") <= byte <= ord("9"):
            return total, False
        return (total + byte - ord("0")) % 3, (total + byte - ord("0")) % 3 == 0

    return ByteAutomaton.build(0, step)


def test_build_finds_every_state_once():
    automaton = digits()
    assert automaton.num_states == 3 and automaton.start == 0
    seen = ByteAutomaton.build(
        (), lambda state, byte: ((*state, byte)[-2:] if byte < 3 else state, False)
    )
    assert seen.num_states == 1 + 3 + 9  # nothing, one byte, two bytes


def test_read():
    automaton = digits()
    three, marked = automaton.read(b"a1b2")
    assert three == automaton.start and marked
    one, marked = automaton.read(b"1")
    assert one != automaton.start and not marked
    assert automaton.read(b"2", one) == (three, True)
    assert automaton.read(b"", one) == (one, False)
    assert automaton.read(b"3a1b") == (one, True)  # whatever follows the mark


@given(
    st.lists(
        st.binary(max_size=4) | st.sampled_from([b"1", b"22", b"x5"]), min_size=1, max_size=12
    ),
    st.lists(st.integers(0, 11), max_size=12),
)
def test_tokens_do_what_their_bytes_do(tokens, drawn):
    lifted = digits().lift(tokens)
    state, text = jnp.zeros(1, jnp.int32), b""
    for token in (n % len(tokens) for n in drawn):
        sums = [
            sum(map(int, re.findall(rb"\d", text + tokens[token][:n])))
            for n in range(1, len(tokens[token]) + 1)
        ]
        added = [
            tokens[token][n : n + 1].isdigit() and total % 3 == 0 for n, total in enumerate(sums)
        ]
        state, marked = STEP(lifted, state, jnp.asarray([token], jnp.int32))
        text += tokens[token]
        assert bool(marked[0]) == any(added)
        assert int(state[0]) == sum(map(int, re.findall(rb"\d", text))) % 3


@given(
    st.integers(1, 9),
    st.integers(0, 2**32 - 1),
    st.lists(st.binary(max_size=9), min_size=1, max_size=9),
)
def test_lift_of_any_automaton(states, seed, tokens):
    rng = np.random.default_rng(seed)
    transitions, marks = (
        rng.integers(0, states, (states, 256)).astype(np.int32),
        rng.random((states, 256)) < 0.1,
    )
    lifted = ByteAutomaton(transitions, marks, start=states - 1).lift(tokens)
    assert int(lifted.start) == states - 1 and lifted.classes.shape == (len(tokens),)
    expected = []
    for text in tokens:
        for before in range(states):
            state, marked = before, False
            for byte in text:
                marked, state = marked or bool(marks[state, byte]), int(transitions[state, byte])
            expected.append((state, marked))
    before, token = (
        np.tile(np.arange(states), len(tokens)),
        np.repeat(np.arange(len(tokens)), states),
    )
    after, found = (
        np.asarray(table)[before, np.asarray(lifted.classes)[token]]
        for table in (lifted.transitions, lifted.marks)
    )
    assert list(zip(after.tolist(), found.tolist(), strict=True)) == expected


def test_a_token_without_bytes_changes_nothing():
    lifted = digits().lift([b"", b"1"])
    states = jnp.arange(3)
    after, marked = lifted.step(states, jnp.zeros(3, jnp.int32))
    np.testing.assert_array_equal(after, states)
    assert not marked.any()


def test_tokens_that_do_the_same_share_a_class():
    lifted = digits().lift([b"1", b"4", b"x7", b"2", b"", b"xyz"])
    one, four, seven, two, nothing, letters = np.asarray(lifted.classes).tolist()
    assert one == four == seven and nothing == letters and len({one, two, nothing}) == 3
    assert lifted.transitions.shape == lifted.marks.shape == (3, 3)


def test_dtypes_and_jit():
    lifted, step = (
        digits().lift([b"1", b"2"]),
        jax.jit(lambda automaton, state, token: automaton.step(state, token)),
    )
    assert [leaf.dtype for leaf in jax.tree.leaves(lifted)] == [
        jnp.int32,
        jnp.int32,
        jnp.bool_,
        jnp.int32,
    ]
    rows = jnp.zeros(4, jnp.int32)
    state, marked = step(lifted, rows, jnp.asarray([0, 1, 0, 1], jnp.int32))
    assert state.dtype == jnp.int32 and marked.dtype == jnp.bool_
    assert state.tolist() == [1, 2, 1, 2] and marked.tolist() == [False] * 4
    step(digits().lift([b"2", b"1"]), rows, rows)  # other tables of the same shape are other data
    assert step._cache_size() == 1


def test_a_large_vocabulary_makes_small_tables():
    rng = np.random.default_rng(0)
    tokens = [bytes(rng.integers(32, 127, rng.integers(1, 12))) for _ in range(150_000)]
    lifted = digits().lift(tokens)
    assert lifted.classes.shape == (150_000,) and lifted.transitions.size < 1000


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: ByteAutomaton(np.zeros((2, 128), np.int32), np.zeros((2, 128), bool)),
            r"both must be \[states, 256\]",
        ),
        (
            lambda: ByteAutomaton(np.zeros((2, 256), np.int32), np.zeros((1, 256), bool)),
            r"marks \(1, 256\)",
        ),
        (
            lambda: ByteAutomaton(np.full((2, 256), 2, np.int32), np.zeros((2, 256), bool)),
            "a state outside 0 to 1",
        ),
        (
            lambda: ByteAutomaton(np.zeros((2, 256), np.int32), np.zeros((2, 256), bool), start=2),
            "a state outside 0 to 1",
        ),
        (lambda: digits().lift([]), "there are no tokens"),
    ],
)
def test_bad_input(make, words):
    with pytest.raises(ValueError, match=words):
        make()
