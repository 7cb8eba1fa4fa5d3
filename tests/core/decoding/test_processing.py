"""Logits processors of rows: over devices, moved between states, and in the core's own loop."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshare import DecodeState, Sampler, decode, register_logits_processor
from jaxshare.decoding.history import History
from jaxshare.decoding.processing import Processing, processed_logits
from jaxshare.decoding.row_transfer import PlacedRows, put_rows, take_rows
from jaxshare.decoding.samplers import Samplers
from jaxshare.sharding import make_mesh
from tests.helpers import LISTED, MODEL, ROWS, VOCAB, pad_rows, tiny_cache, tiny_params

RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, VOCAB, n).tolist() for n in (5, 3, 1, 6)]
ALONE = [[1], [2], [3], [4]]


def _whole(logits, tokens, size, state):
    """Looks at all of a row: its likeliest token is made less likely, and the state counts."""
    shifted = logits - jax.nn.logsumexp(logits)
    changed = shifted.at[jnp.argmax(shifted)].add(-2.5)
    return changed.at[tokens[size - 1]].add(state["calls"]), {"calls": state["calls"] + 1}


def _sum(logits, tokens, size, state, *, weight):
    return logits + weight * jnp.sin(state), state + 0.3 * logits


register_logits_processor("whole", _whole, state={"calls": 0.0})
register_logits_processor(
    "sum", _sum, state=np.zeros(VOCAB, np.float32), parameters={"weight": 2.0}, vocab_size=VOCAB
)
BOTH = Sampler(0.8, processors=("whole", "sum"))
SAMPLERS = [
    Sampler(processors=("sum",)),
    Sampler(0.8),
    BOTH,
    Sampler(0.8, processors={"sum": {"weight": 3.0}, "whole": {}}, presence_penalty=0.5),
]


def state_of(samplers, prompts=PROMPTS, **more) -> DecodeState:
    samplers = [*samplers, *[Sampler()] * (ROWS - len(samplers))]
    return DecodeState.create(
        tiny_cache(),
        pad_rows(ALONE[: len(prompts)], ROWS, LISTED),
        [*prompts, *[[]] * (ROWS - len(prompts))],
        vocab_size=VOCAB,
        samplers=samplers,
        seeds=7,
        **{"max_new_tokens": 8, "logprobs": "processed", "queue": 8, "max_width": 8} | more,
    )


def run(state: DecodeState, passes: int = 30, **more) -> DecodeState:
    return decode(MODEL, tiny_params(), state, passes=passes, width=8, **more)


@functools.cache
def whole_run() -> DecodeState:
    return run(state_of(SAMPLERS))


def test_processors_see_the_whole_vocabulary_where_devices_have_parts_of_it():
    rows, samplers = len(SAMPLERS), Samplers.stack(SAMPLERS)
    processing = Processing.stack(SAMPLERS)
    assert processing is not None
    history = History.empty(rows, VOCAB, 16)
    for row, text in enumerate(PROMPTS):
        history = history.with_text(row, text, 2)
    logits = jnp.asarray(RNG.normal(size=(rows, VOCAB)) * 3, jnp.float32)
    due = jnp.asarray([True, True, True, False])
    masks = jnp.zeros((rows, 0), jnp.uint32)

    @functools.partial(jax.jit, static_argnames="mesh")
    def process(processing, logits, mesh):
        positions = jnp.asarray([0, 0, 2, 2])
        done = processed_logits(processing, samplers, logits, history, masks, positions, due, mesh)
        return done.logits, done.processing

    one, spread = (process(processing, logits, mesh) for mesh in (None, make_mesh(tensor=2)))
    for found, expected in zip(*map(jax.tree.leaves, (spread, one)), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)
    np.testing.assert_array_equal(one[0][1], logits[1])  # has no processor
    np.testing.assert_array_equal(one[1].states[0][3], np.zeros(VOCAB))  # is not due
    np.testing.assert_array_equal(np.asarray(one[1].states[1]["calls"]), [0, 0, 1, 0])


@pytest.mark.slow
def test_dispatches_of_few_passes_and_of_few_rows_give_the_same():
    expected = whole_run()
    state = state_of(SAMPLERS)
    for _ in range(3):
        state = run(state, 2)
    for _ in range(3):
        state = run(state, 2, rows=3)
    state = run(state)
    assert state.outputs() == expected.outputs() and [*map(len, state.outputs())][:4] == [8] * 4
    np.testing.assert_array_equal(state.logprobs, expected.logprobs)
    assert state.processing is not None and expected.processing is not None
    for found, wanted in zip(
        *(jax.tree.leaves(each.processing.take(np.arange(4))) for each in (state, expected)),
        strict=True,
    ):
        np.testing.assert_array_equal(found, wanted)


def test_rows_have_the_texts_of_runs_with_fewer_processors():
    """A row without one has that of a program that has none."""
    alone = run(state_of([Sampler(), SAMPLERS[1]], logprobs=False))
    assert alone.processing is None and alone.processed is None
    assert whole_run().outputs()[1] == alone.outputs()[1]
    one = run(state_of([SAMPLERS[0], *[Sampler()] * 3]))
    assert whole_run().outputs()[0] == one.outputs()[0] != alone.outputs()[0]


@pytest.mark.slow
def test_rows_take_their_processors_into_another_state_and_back():
    """With those of its own rows, in another order and of other parameters."""
    expected, last = whole_run().outputs(), np.asarray([2, 3])
    part = take_rows(run(state_of(SAMPLERS), 5), last)
    assert part.processing is not None
    other = run(state_of([Sampler(0.8), Sampler(0.5, processors=("whole",))], PROMPTS[:2]), 2)
    assert other.processing is not None
    place = np.asarray([2, 3])
    put = put_rows(other, [PlacedRows(part, place)])
    assert put.processing is not None
    assert [each.name for each in put.processing.processors] == ["whole", "sum"]
    back = take_rows(put, place)
    assert back.processing is not None and back.processed is not None and back.processed.all()
    back = dataclasses.replace(
        back,
        processing=back.processing.only(part.processing.places),
        history=part.history,
        cache=part.cache,
    )
    for found, wanted in zip(
        *map(jax.tree.leaves, (back.processing, part.processing)), strict=True
    ):
        np.testing.assert_array_equal(found, wanted)
    done = run(back)
    assert done.outputs() == [expected[row] for row in last]
    own = put.processing.take(np.asarray([0, 1]))
    for found, wanted in zip(
        (own.numbers[:, :1], own.states[0]["calls"]),
        (other.processing.numbers[:2], other.processing.states[0]["calls"][:2]),
        strict=True,
    ):
        np.testing.assert_array_equal(found, wanted)
    assert put.processing.used.tolist() == [False, True, True, True]


@pytest.mark.slow
def test_rows_without_processors_go_where_there_are_some_and_the_other_way():
    expected = run(state_of([Sampler(), SAMPLERS[1]], logprobs=False)).outputs()[1]
    plain = take_rows(
        run(state_of([Sampler(), SAMPLERS[1]], PROMPTS[:2], logprobs=False), 3), np.asarray([1])
    )
    some = run(state_of(SAMPLERS), 2)
    part = take_rows(some, np.asarray([3]))
    put = put_rows(some, [PlacedRows(plain, np.asarray([2]))])
    assert put.processing is not None and not put.processing.used[2] and put.processing.used[3]
    back = take_rows(put, np.asarray([2]))
    assert run(dataclasses.replace(back, cache=plain.cache)).outputs()[0] == expected
    none = state_of([Sampler()], PROMPTS[:1], logprobs=False)
    put = put_rows(none, [PlacedRows(part, np.asarray([1]))])
    assert put.processing is not None and put.processed is not None
    assert put.processing.used.tolist() == [row == 1 for row in range(ROWS)]
    back = dataclasses.replace(take_rows(put, np.asarray([1])), cache=some.cache)
    assert run(back).outputs()[0] == whole_run().outputs()[3]


def test_a_row_that_starts_again_has_a_new_state():
    done = whole_run()
    logits = jnp.zeros((1, VOCAB))
    again = done.admit(
        [2], [[3]], logits, seeds=[5], max_new_tokens=[4], pending=[[1, 2]]
    ).without_outputs()
    assert done.processing is not None
    assert float(np.asarray(done.processing.states[1]["calls"])[2]) == 8
    run_again = run(again)
    assert run_again.processing is not None
    assert float(np.asarray(run_again.processing.states[1]["calls"])[2]) == 4
    assert np.all(np.asarray(run_again.logprobs)[2, :4] < 0)


def test_a_kind_of_log_probabilities_that_there_is_not():
    with pytest.raises(ValueError, match="it must be True, False, 'raw', 'processed' or 'both'"):
        state_of([Sampler()], PROMPTS[:1], logprobs="drawn")
