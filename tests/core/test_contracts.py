"""Contracts, token for token in float32: sharing, and the rows that run in the same pass, change
nothing.

Where rows do read each other, the text is that of a transformer which rebuilds every row's whole
view for every token.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshare import KVCache, Sampler
from jaxshare.models.layers import forward
from tests.helpers import (
    CAPACITIES,
    LISTED,
    MOST,
    ROWS,
    TINY,
    VOCAB,
    DenseModel,
    pad_rows,
    run,
    tiny_cache,
    tiny_params,
    tiny_state,
)

RNG = np.random.default_rng(1)
PROMPTS = [RNG.integers(0, VOCAB, n).tolist() for n in (6, 11, 1, 16)]
PREFIX = RNG.integers(0, VOCAB, 18).tolist()
REST = RNG.integers(0, VOCAB, 13).tolist()
SEEDS = [7, 1, 2**31, 5]
KINDS = {"greedy": Sampler(), "sampled": Sampler(1.4, top_k=50, top_p=0.95)}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def sampler(request):
    return request.param


def cached(tokens: list[int]) -> KVCache:
    """A cache with the tokens in block 0."""
    return run(tiny_state([tokens], [[0]], max_new_tokens=0)).cache


def outputs(prompts, rows, **more) -> list[list[int]]:
    done = run(tiny_state(prompts, rows, **more))
    done.cache.check()
    return done.outputs()


def test_alone_equals_in_a_batch(sampler):
    together = outputs(PROMPTS, [[1], [2], [3], [4]], samplers=sampler, seeds=SEEDS)
    assert len({tuple(o) for o in together}) == 4 and all(len(o) == MOST for o in together)
    for r, prompt in enumerate(PROMPTS):
        prompts, rows = [[]] * ROWS, [[]] * ROWS
        prompts[r], rows[r] = prompt, [r + 1]
        assert outputs(prompts, rows, samplers=sampler, seeds=SEEDS)[r] == together[r]
    # in another row, another block, beside others, its neighbours settings of their own
    order = [2, 0, 3, 1]
    shuffled = outputs(
        [PROMPTS[i] for i in order],
        [[3], [1], [2], [4]],
        samplers=sampler,
        seeds=[SEEDS[i] for i in order],
    )
    assert shuffled == [together[i] for i in order]


def test_shared_equals_unshared(sampler):
    shared = outputs(
        PROMPTS, [[0, b] for b in (1, 2, 3, 4)], cache=cached(PREFIX), samplers=sampler, seeds=SEEDS
    )
    unshared = outputs(
        [PREFIX + p for p in PROMPTS], [[1], [2], [3], [4]], samplers=sampler, seeds=SEEDS
    )
    assert shared == unshared and len({tuple(o) for o in shared}) == 4


def test_a_prefix_in_two_blocks_equals_a_prefix_in_one(sampler):
    """A tree: the root in block 0, the next level in block 4, three leaves; and a fourth row that
    hangs from the root alone."""
    tree = run(tiny_state([PREFIX[5:]], [[0, 4]], cache=cached(PREFIX[:5]), max_new_tokens=0)).cache
    leaves = outputs(
        PROMPTS[:3], [[0, 4, 1], [0, 4, 2], [0, 3]], cache=tree, samplers=sampler, seeds=SEEDS
    )[:3]
    flat = outputs(
        [PREFIX + PROMPTS[0], PREFIX + PROMPTS[1], PREFIX[:5] + PROMPTS[2]],
        [[1], [2], [3]],
        samplers=sampler,
        seeds=SEEDS,
    )[:3]
    assert leaves == flat


def test_cold_equals_forked_inside_a_block(sampler):
    """One row continues after the whole block, two branch off inside it, one of them at its start
    and with nothing of it."""
    for at in (len(PREFIX), 1):
        cache = cached(PREFIX + REST).fork(0, at, 5)
        layout = pad_rows([[0, 1]], ROWS, LISTED).fork(0, 5)
        np.testing.assert_array_equal(layout.blocks[0], [0, 5, 1])
        warm = outputs(
            PROMPTS, [[0, 5, 1], [0, 2], [0, 3], [4]], cache=cache, samplers=sampler, seeds=SEEDS
        )
        head = (PREFIX + REST)[:at]
        cold = outputs(
            [PREFIX + REST + PROMPTS[0], head + PROMPTS[1], head + PROMPTS[2], PROMPTS[3]],
            [[0], [2], [3], [4]],
            samplers=sampler,
            seeds=SEEDS,
        )
        assert warm == cold


def test_a_fork_goes_on_where_its_block_stopped(sampler):
    """The tail has the unused capacity of the block: a row that writes it continues the text."""
    cache = cached(PREFIX + REST).fork(0, 10, 5)
    warm = outputs(PROMPTS[:2], [[0, 5], [0, 2]], cache=cache, samplers=sampler, seeds=SEEDS)[:2]
    cold = outputs(
        [PREFIX + REST + PROMPTS[0], PREFIX[:10] + PROMPTS[1]],
        [[0], [2]],
        samplers=sampler,
        seeds=SEEDS,
    )[:2]
    assert warm == cold


def test_a_moved_block_reads_as_if_written_there():
    """Greedy from a prefix put together out of two moved blocks: the values differ, since each
    block was written seeing only itself, so the judge is a dense model that is given the very same
    views."""
    dense = DenseModel(TINY, tiny_params(), len(CAPACITIES))
    parts = run(tiny_state([PREFIX, REST], [[1], [2]], max_new_tokens=0)).cache
    dense.forward([PREFIX, REST], [[1], [2]])
    moved = jax.jit(lambda c: c.move(2, 0).move(1, 0))(parts)
    dense.move(2, 0)
    dense.move(1, 0)
    assert np.asarray(moved.lengths).tolist() == [len(PREFIX) + len(REST), 0, 0, 0, 0, 0]
    assert (
        outputs([PROMPTS[0]], [[0, 3]], cache=moved)[0]
        == dense_greedy(dense, [PROMPTS[0]], [[0, 3]], MOST)[0]
    )


def test_the_same_seed_gives_the_same_text_whatever_runs_beside_it():
    own, seed, prompt = Sampler(1.2, top_p=0.97), 99, PROMPTS[1]
    texts = set()
    for beside in ([], [0], [0, 2], [2, 3, 0]):
        for sampler in (Sampler(), Sampler(2.0, min_p=0.01, bias={4: 3.0}, forbidden=(1,))):
            place = len(beside) % ROWS
            prompts = [PROMPTS[i] for i in beside]
            prompts.insert(place, prompt)
            rows = [[0, b] if b % 2 else [b] for b in range(1, 5)][: len(prompts)]
            rows[place] = [place + 1]
            samplers = [sampler] * ROWS
            samplers[place] = own
            seeds = list(range(50, 50 + ROWS))
            seeds[place] = seed
            texts.add(
                tuple(
                    outputs(prompts, rows, samplers=samplers, seeds=seeds, cache=cached(PREFIX))[
                        place
                    ]
                )
            )
    assert len(texts) == 1
    assert tuple(outputs([prompt], [[1]], samplers=own, seeds=[seed + 1, 0, 0, 0])[0]) not in texts


# workers that read each other

LAYOUTS = {
    "combined": [[0, 2, 1], [0, 1, 2]],
    "own first": [[2, 0, 1], [1, 0, 2]],
    "one way": [[0, 1], [0, 1, 2]],
    "three": [[0, 2, 1], [3, 1, 2], [1, 3]],
}


def dense_greedy(
    dense: DenseModel, fed: list[list[int]], rows: list[list[int]], n: int
) -> list[list[int]]:
    """n greedy tokens of each row, the last not fed; all rows in step, `fed` in one pass."""
    texts: list[list[int]] = [[] for _ in rows]
    while True:
        for r, logits in enumerate(dense.forward(fed, rows)):
            first, second = np.sort(logits[-1])[[-1, -2]]
            assert first - second > 1e-3, (
                "a tie that float32 may break either way; choose another seed for the test"
            )
            texts[r].append(int(np.argmax(logits[-1])))
        if len(texts[0]) == n:
            return texts
        fed = [[text[-1]] for text in texts]


@pytest.mark.parametrize("rows", LAYOUTS.values(), ids=LAYOUTS)
def test_workers_that_read_each_other_write_what_a_dense_model_writes(rows):
    dense = DenseModel(TINY, tiny_params(), len(CAPACITIES))
    dense.forward([PREFIX], [[0]])
    expected = dense_greedy(dense, PROMPTS[: len(rows)], rows, MOST)
    done = run(tiny_state(PROMPTS[: len(rows)], rows, cache=cached(PREFIX)))
    assert done.outputs()[: len(rows)] == expected
    assert np.asarray(done.cache.lengths).tolist() == [
        dense.length(b) for b in range(len(CAPACITIES))
    ]
    # They do read each other: alone, a row that lists another's block writes something else.
    alone = run(tiny_state(PROMPTS[:1], [[0, rows[0][-1]]], cache=cached(PREFIX))).outputs()[0]
    assert (alone == expected[0]) == (rows[0] == [0, 1])


def test_steps_that_end_move_to_the_history():
    """Passes of one or several tokens, ragged; worker 0 ends a step, then worker 1, then worker 0
    again. Logits of every pass."""
    rows = LAYOUTS["combined"]
    layout = pad_rows(rows, ROWS, LISTED)
    dense = DenseModel(TINY, tiny_params(), len(CAPACITIES))
    cache = cached(PREFIX)
    dense.forward([PREFIX], [[0]])
    move = jax.jit(KVCache.move)
    rng = np.random.default_rng(4)
    plan = [
        (3, 5),
        (1, 1),
        (1, 1),
        "0",
        (1, 1),
        (1, 0),
        (4, 1),
        "1",
        (1, 1),
        (0, 2),
        (1, 1),
        "0",
        (1, 1),
        (1, 1),
        "1",
        (2, 3),
        (1, 1),
    ]
    seen = 0
    for step in plan:
        if isinstance(step, str):
            source = rows[int(step)][-1]
            cache = move(cache, jnp.int32(source), jnp.int32(0))
            dense.move(source, 0)
            continue
        fed = [rng.integers(0, VOCAB, n).tolist() for n in step]
        tokens = np.zeros((ROWS, 16), np.int32)
        for r, new in enumerate(fed):
            tokens[r, : len(new)] = new
        logits, cache = forward(TINY, tiny_params(), tokens, [*step, 0, 0], cache, layout)
        for r, expected in enumerate(dense.forward(fed, rows)):
            if len(expected):
                np.testing.assert_allclose(logits[r], expected[-1], atol=2e-4)
                assert int(np.argmax(logits[r])) == int(np.argmax(expected[-1]))
                seen += 1
    assert seen == 24 and np.asarray(cache.lengths).tolist() == [
        dense.length(b) for b in range(len(CAPACITIES))
    ]
    cache.check()


def test_a_step_that_moves_while_decoding():
    """Between two dispatches worker 0's step moves; the token that ended it is the first of its
    next step."""
    rows = LAYOUTS["combined"]
    dense = DenseModel(TINY, tiny_params(), len(CAPACITIES))
    dense.forward([PREFIX], [[0]])
    before = dense_greedy(dense, PROMPTS[:2], rows, 5)
    dense.move(1, 0)
    after = dense_greedy(dense, [[text[-1]] for text in before], rows, MOST - 5)
    state = run(tiny_state(PROMPTS[:2], rows, cache=cached(PREFIX)), passes=5)
    assert state.outputs()[:2] == before
    state = dataclasses.replace(
        state, cache=jax.jit(KVCache.move)(state.cache, jnp.int32(1), jnp.int32(0))
    )
    assert run(state).outputs()[:2] == [a + b for a, b in zip(before, after, strict=True)]


def test_every_position_of_a_forward_pass_equals_plain_causal_attention():
    """`every` gives the logits of all tokens; in three ragged pieces over a cache they are those of
    the whole text."""
    text = RNG.integers(0, VOCAB, 40).tolist()
    dense = DenseModel(TINY, tiny_params(), 1)
    expected = dense.forward([text], [[0]])[0]
    cache, at = tiny_cache(), 0
    for n in (16, 11, 13):
        tokens = np.zeros((ROWS, 16), np.int32)
        tokens[0, :n] = text[at : at + n]
        logits, cache = forward(
            TINY,
            tiny_params(),
            tokens,
            [n, 0, 0, 0],
            cache,
            pad_rows([[3]], ROWS, LISTED),
            every=True,
        )
        np.testing.assert_allclose(logits[0, :n], expected[at : at + n], atol=2e-4)
        at += n
