"""The decode loop against a plain loop over whole sequences.

And against itself in other numbers of dispatches.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshare import DecodeState, FinishReason, KVCache, Layout, Sampler, decode
from jaxshare.decoding.changes import Changes
from jaxshare.models.layers import forward
from jaxshare.seeds import stream_seed
from tests.helpers import (
    CAPACITIES,
    LISTED,
    MODEL,
    MOST,
    QUEUE,
    ROWS,
    TINY,
    VOCAB,
    WIDEST,
    mostly_slow,
    on_device,
    pad_rows,
    padded,
    reasons,
    run,
    tiny_cache,
    tiny_params,
    tiny_state,
)

RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, VOCAB, n).tolist() for n in (5, 13, 1, 16)]
ROWS_ALONE = [[1], [2], [3], [4]]


@functools.cache
def _causal():
    return jax.jit(lambda p, tokens: MODEL.apply(p, tokens, method="causal"))


def logits_after(tokens: list[int]) -> np.ndarray:
    """The logits, float[V], after a whole sequence, by plain causal attention."""
    row = padded(tokens, [64])
    return np.asarray(_causal()(tiny_params(), on_device(row)))[0, len(tokens) - 1]


@functools.cache
def _greedy(prompt: tuple[int, ...], n: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(int(np.argmax(logits_after(tokens))))
    return tokens[len(prompt) :]


def greedy(prompt: list[int], n: int = MOST) -> list[int]:
    return list(_greedy(tuple(prompt), n))


def test_greedy_equals_a_plain_loop():
    done = run(tiny_state(PROMPTS))
    assert done.outputs() == [greedy(p) for p in PROMPTS]
    assert len({tuple(o) for o in done.outputs()}) == ROWS and all(
        len(set(o)) > 3 for o in done.outputs()
    )
    assert reasons(done) == [FinishReason.LENGTH] * 4
    # The last sampled token has not been fed.
    assert np.asarray(done.cache.lengths).tolist() == [0, *(len(p) + MOST - 1 for p in PROMPTS), 0]
    done.cache.check()


@pytest.mark.parametrize("width", mostly_slow([1, 64]))
def test_the_width_changes_nothing_but_the_number_of_passes(width):
    narrow, wide = run(tiny_state(PROMPTS), width=width), run(tiny_state(PROMPTS))
    assert narrow.outputs() == wide.outputs() == [greedy(p) for p in PROMPTS]
    np.testing.assert_allclose(narrow.logprobs, wide.logprobs, atol=2e-5)
    longest = max(map(len, PROMPTS))
    assert int(wide.passes) == MOST  # one feeds all prompts; the short ones start at once
    assert int(narrow.passes) == (longest + MOST - 1 if width == 1 else MOST)


@pytest.mark.slow
@pytest.mark.parametrize("width", [4, 1])
def test_the_record_has_what_each_pass_has_fed(width):
    prompts, passes = [p[:6] for p in PROMPTS], 7
    state = DecodeState.create(
        tiny_cache(),
        Layout.from_blocks(ROWS_ALONE),
        prompts,
        vocab_size=VOCAB,
        max_new_tokens=passes,
        max_width=4,
        record=passes,
    )
    begun = np.asarray(state.cache.lengths)
    state = decode(MODEL, tiny_params(), state, passes=passes, width=width)
    counts = np.asarray(state.record.counts)
    fed = np.asarray(state.record.tokens)
    for row, prompt in enumerate(prompts):
        found = [t for p in range(passes) for t in fed[p, row, : counts[p, row]].tolist()]
        assert found == [*prompt, *greedy(prompt)][: len(found)]
    lengths = begun + np.cumsum(np.pad(counts, ((0, 0), (1, len(begun) - 5))), axis=0)
    np.testing.assert_array_equal(state.record.lengths, lengths)
    assert counts.all()


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(1.3, top_k=30)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("cut", [1, 7])
def test_several_dispatches_equal_one(cut, sampler):
    whole = run(tiny_state(PROMPTS, samplers=sampler, seeds=[3, 1, 4, 1]))
    part = tiny_state(PROMPTS, samplers=sampler, seeds=[3, 1, 4, 1])
    for dispatch in range(1, 100):
        part = run(part, passes=cut)
        assert int(part.passes) <= dispatch * cut
        if not np.asarray(part.running).any():
            break
    for name in ("tokens", "num_sampled", "reasons", "passes", "num_pending"):
        np.testing.assert_array_equal(getattr(part, name), getattr(whole, name))
    np.testing.assert_array_equal(part.cache.lengths, whole.cache.lengths)
    np.testing.assert_allclose(part.logprobs, whole.logprobs, atol=1e-6)


def test_a_dispatch_runs_no_pass_once_a_row_has_finished_where_it_is_not_to():
    """One that is made before the host knows; a row that is not in use has not finished."""
    prompts = [*PROMPTS[:3], []]
    rows = [*ROWS_ALONE[:3], []]
    state = tiny_state(prompts, rows, max_new_tokens=[4, 9, 9, 1])
    whole = run(tiny_state(prompts, rows, max_new_tokens=[4, 9, 9, 1]))
    state = run(state, passes=2, unless_finished=True)
    assert int(state.passes) == 2
    state = run(state, passes=4, unless_finished=True)  # the first row ends in the midst of it
    assert int(state.passes) == 6 and reasons(state)[0] == FinishReason.LENGTH
    before = state.outputs()
    state = run(state, passes=4, unless_finished=True)
    assert int(state.passes) == 6 and state.outputs() == before
    assert run(state).outputs() == whole.outputs()


def test_blocks_get_more_room_and_keep_lengths_that_the_host_does_not_know():
    cache, small = tiny_cache(), tiny_cache([0, *(len(p) + 3 for p in PROMPTS), 0])
    whole = run(tiny_state(PROMPTS))
    table = np.stack([cache.offsets, cache.lengths, cache.capacities, cache.phases])
    state = run(tiny_state(PROMPTS, cache=small), passes=3)
    listed, width = np.asarray(state.layout.blocks), state.pending.shape[1]
    changes = Changes.none(width, listed, table, keeps_lengths=True)
    done = run(state, changes=changes)
    assert done.outputs() == whole.outputs()
    np.testing.assert_array_equal(done.cache.lengths, whole.cache.lengths)
    np.testing.assert_array_equal(done.cache.capacities, table[2])
    done.cache.check()


def test_no_passes_still_samples_what_is_ready_and_no_more():
    done = run(
        tiny_state([[], [], [], PROMPTS[3]], logits=on_device(logits_after(PROMPTS[0]))), passes=0
    )
    assert [len(o) for o in done.outputs()] == [1, 1, 1, 0] and int(done.passes) == 0
    assert not np.asarray(done.cache.lengths).any()
    again = run(done, passes=0)
    assert [len(o) for o in again.outputs()] == [1, 1, 1, 0]


def test_an_ended_state_stays_as_it_is():
    done = run(tiny_state(PROMPTS))
    tokens, passes, lengths = (
        np.asarray(done.tokens),
        int(done.passes),
        np.asarray(done.cache.lengths),
    )
    again = run(done)
    np.testing.assert_array_equal(again.tokens, tokens)
    np.testing.assert_array_equal(again.cache.lengths, lengths)
    assert int(again.passes) == passes


def test_stop_tokens_end_a_row_and_are_kept():
    free = [greedy(p) for p in PROMPTS]
    stop = free[1][4]
    cut = [row[: row.index(stop) + 1] if stop in row else row for row in free]
    done = run(tiny_state(PROMPTS, stops=[stop]))
    assert done.outputs() == cut and len(cut[1]) <= 5
    assert reasons(done) == [
        FinishReason.STOP if stop in row else FinishReason.LENGTH for row in free
    ]
    # the stop token is not fed
    assert int(done.cache.lengths[2]) == len(PROMPTS[1]) + len(cut[1]) - 1
    # one of several; a stop token that is also the last of a budget is a stop
    several = run(tiny_state(PROMPTS, stops=[stop, free[0][2]]))
    assert reasons(several)[:2] == [FinishReason.STOP] * 2
    last = run(tiny_state(PROMPTS, stops=[stop], max_new_tokens=[MOST, len(cut[1]), MOST, MOST]))
    assert reasons(last)[1] == FinishReason.STOP and last.outputs()[1] == cut[1]


def test_budgets_of_none_one_and_many():
    done = run(tiny_state(PROMPTS, max_new_tokens=[0, 1, MOST, 3]))
    assert done.outputs() == [[], greedy(PROMPTS[1], 1), greedy(PROMPTS[2]), greedy(PROMPTS[3], 3)]
    assert reasons(done) == [FinishReason.LENGTH] * 4
    # A prompt is fed even where nothing may be sampled.
    assert int(done.cache.lengths[1]) == len(PROMPTS[0]) and int(done.cache.lengths[2]) == len(
        PROMPTS[1]
    )


def test_only_budgets_of_none():
    cache, layout = tiny_cache(), pad_rows(ROWS_ALONE, ROWS, LISTED)
    made = DecodeState.create(
        cache, layout, PROMPTS, vocab_size=VOCAB, max_new_tokens=0, queue=QUEUE, max_width=WIDEST
    )
    assert made.tokens.shape == (ROWS, 0)
    assert tiny_state(PROMPTS, max_new_tokens=0).tokens.shape == (ROWS, MOST)
    done = run(tiny_state(PROMPTS, max_new_tokens=0))
    assert done.outputs() == [[]] * 4 and reasons(done) == [FinishReason.LENGTH] * 4


def test_a_block_that_fills_ends_its_row_before_anything_is_lost():
    room = [len(PROMPTS[0]) + 4, 48, 1, 16]
    cache = tiny_cache([64, *room, 0])
    done = run(tiny_state(PROMPTS, cache=cache))
    free = [greedy(p) for p in PROMPTS]
    assert reasons(done) == [
        FinishReason.CACHE_FULL,
        FinishReason.LENGTH,
        FinishReason.CACHE_FULL,
        FinishReason.CACHE_FULL,
    ]
    # Sampled tokens are kept, the token without room included.
    assert done.outputs() == [free[0][:5], free[1], free[2][:1], free[3][:1]]
    assert np.asarray(done.cache.lengths).tolist() == [
        0,
        room[0],
        len(PROMPTS[1]) + MOST - 1,
        1,
        16,
        0,
    ]
    done.cache.check()
    # The rows' caches are intact: with more room they go on where they stopped.
    roomy = dataclasses.replace(done.cache, capacities=on_device(CAPACITIES, jnp.int32))
    more = run(
        tiny_state(
            [[row[-1]] for row in done.outputs()],
            cache=roomy,
            max_new_tokens=[MOST - 5, 0, MOST - 1, MOST - 1],
        )
    )
    assert [a + b for a, b in zip(done.outputs(), more.outputs(), strict=True)] == free


def test_a_prompt_that_does_not_fit_ends_its_row_with_nothing():
    cache = tiny_cache([64, 48, 12, 48, 48, 0])
    done = run(tiny_state(PROMPTS, cache=cache))
    assert reasons(done) == [
        FinishReason.LENGTH,
        FinishReason.CACHE_FULL,
        FinishReason.LENGTH,
        FinishReason.LENGTH,
    ]
    assert done.outputs() == [greedy(PROMPTS[0]), [], greedy(PROMPTS[2]), greedy(PROMPTS[3])]
    done.cache.check()


def test_logprobs_are_those_of_the_model():
    samplers = [
        Sampler(),
        Sampler(1.5),
        Sampler(0.7, top_k=3),
        Sampler(1.0, bias={5: 4.0}, forbidden=(6,)),
    ]
    done = run(tiny_state(PROMPTS, samplers=samplers, seeds=11))
    for r, (prompt, output) in enumerate(zip(PROMPTS, done.outputs(), strict=True)):
        for i, token in enumerate(output):
            logits = logits_after(prompt + output[:i]).astype(np.float64)
            expected = logits[token] - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
            assert float(done.logprobs[r, i]) == pytest.approx(expected, abs=2e-4)


def test_rows_not_in_use_do_nothing():
    done = run(tiny_state([PROMPTS[0], [], PROMPTS[2]], [[1], [], [3]]))
    assert done.outputs() == [greedy(PROMPTS[0]), [], greedy(PROMPTS[2]), []]
    assert reasons(done) == [
        FinishReason.LENGTH,
        FinishReason.UNUSED,
        FinishReason.LENGTH,
        FinishReason.UNUSED,
    ]
    assert np.asarray(done.cache.lengths).tolist() == [
        0,
        len(PROMPTS[0]) + MOST - 1,
        0,
        1 + MOST - 1,
        0,
        0,
    ]


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(1.2)], ids=["greedy", "sampled"])
def test_a_prefix_prefilled_once_and_sampled_at_once(sampler):
    """Rows with nothing to feed start from the prefix's logits.

    They go on as if the whole prompt had been fed to each.
    """
    prefix = PROMPTS[1]
    tokens = np.zeros((ROWS, 16), np.int32)
    tokens[0, : len(prefix)] = prefix
    logits, cache = forward(
        TINY,
        tiny_params(),
        tokens,
        [len(prefix), 0, 0, 0],
        tiny_cache(),
        pad_rows([[0]], ROWS, LISTED),
    )
    shared = run(
        tiny_state(
            [[]] * 4,
            [[0, 1], [0, 2], [0, 3], [0, 4]],
            cache=cache,
            logits=logits[0],
            samplers=sampler,
        )
    )
    alone = run(tiny_state([prefix] * 4, samplers=sampler))
    assert shared.outputs() == alone.outputs()
    assert int(shared.cache.lengths[0]) == len(prefix) and int(shared.cache.lengths[1]) == MOST - 1
    if sampler.temperature == 0:
        assert shared.outputs() == [greedy(prefix)] * 4
    else:
        assert len({tuple(o) for o in shared.outputs()}) == 4


def test_each_row_may_start_from_its_own_logits():
    own = on_device(np.stack([logits_after(p) for p in PROMPTS]))
    done = run(tiny_state([[]] * 4, logits=own), passes=0)
    assert [o[0] for o in done.outputs()] == [greedy(p, 1)[0] for p in PROMPTS]


def test_one_seed_for_all_gives_each_row_a_stream_of_its_own():
    a = run(tiny_state(PROMPTS, samplers=Sampler(1.5), seeds=20))
    b = run(
        tiny_state(
            PROMPTS, samplers=Sampler(1.5), seeds=[20, *(stream_seed(20, r) for r in (1, 2, 3))]
        )
    )
    c = run(
        tiny_state(
            PROMPTS, samplers=Sampler(1.5), seeds=[20, *(stream_seed(20, r) for r in (1, 2)), 24]
        )
    )
    assert a.outputs() == b.outputs()
    assert c.outputs()[:3] == a.outputs()[:3] and c.outputs()[3] != a.outputs()[3]


def test_feeding_goes_on_where_a_row_stopped():
    """More text is fed to rows that ended, while others run.

    Sampled tokens stay, and the rest is as if all had been one prompt.
    """
    extra = RNG.integers(0, VOCAB, 9).tolist()
    done = run(tiny_state(PROMPTS, max_new_tokens=[3, MOST, MOST, MOST]), passes=6)
    first = done.outputs()
    assert [len(o) for o in first] == [3, 6, 6, 6] and reasons(done)[0] == FinishReason.LENGTH
    fed = dataclasses.replace(done, max_new_tokens=done.max_new_tokens.at[0].set(8)).feed(
        0, [first[0][-1], *extra]
    )
    assert reasons(fed) == [FinishReason.RUNNING] * 4
    after = run(fed)
    assert after.outputs()[0] == first[0] + greedy(PROMPTS[0] + first[0] + extra, 5)
    assert after.outputs()[1:] == [greedy(p) for p in PROMPTS[1:]]


def test_fed_tokens_follow_pending_ones():
    waiting = tiny_state([PROMPTS[0], *PROMPTS[1:]]).feed(0, [7, 8]).feed(0, [9])
    assert run(waiting).outputs() == [
        greedy([*PROMPTS[0], 7, 8, 9]),
        *(greedy(p) for p in PROMPTS[1:]),
    ]
    # also in the middle of a prompt that is fed one token a pass
    part = run(tiny_state(PROMPTS), passes=4, width=1).feed(3, [7, 8])
    assert run(part).outputs()[3] == greedy([*PROMPTS[3], 7, 8])


@pytest.mark.parametrize(
    ("row", "tokens", "words"),
    [
        (0, [], "row 0 is given no tokens to feed"),
        (3, [1], "row 3 is not in use"),
        (
            1,
            [1] * (QUEUE - 12),
            f"row 1 would have {QUEUE + 1} tokens pending, but its queue holds {QUEUE}",
        ),
    ],
)
def test_feeding_refuses(row, tokens, words):
    with pytest.raises(ValueError, match=words):
        tiny_state(PROMPTS[:3], [[1], [2], [3]]).feed(row, tokens)


def test_a_row_ended_from_outside_stops():
    done = run(tiny_state(PROMPTS), passes=4).end(1)
    assert reasons(done)[1] == FinishReason.STOP
    after = run(done)
    assert after.outputs() == [greedy(p, 4 if r == 1 else MOST) for r, p in enumerate(PROMPTS)]


def test_stop_on_finish_comes_back_when_a_row_ends():
    """Rows that ended before the dispatch do not count."""
    state = tiny_state(PROMPTS, max_new_tokens=[3, 5, 5, 9])
    seen = []
    for _ in range(3):
        state = run(state, stop_on_finish=True)
        seen.append([len(o) for o in state.outputs()])
    assert seen == [[3, 3, 3, 3], [3, 5, 5, 5], [3, 5, 5, 9]]
    assert state.outputs() == [greedy(p, n) for p, n in zip(PROMPTS, (3, 5, 5, 9), strict=True)]


@pytest.mark.parametrize(
    "max_idle, lengths",
    [
        (0, [[3, 3, 3, 3], [3, 5, 5, 5], [3, 5, 5, 9]]),
        (1, [[3, 4, 4, 4], [3, 5, 5, 5], [3, 5, 5, 9]]),
        # Two passes of one row; three rows would idle next.
        (2, [[3, 5, 5, 5], [3, 5, 5, 9], [3, 5, 5, 9]]),
        (5, [[3, 5, 5, 6], [3, 5, 5, 9], [3, 5, 5, 9]]),
        (10**12, [[3, 5, 5, 9]] * 3),
    ],
)
def test_rows_that_have_finished_may_idle_for_so_many_passes(max_idle, lengths):
    """Before the dispatch returns; rows that ended before it do not count."""
    state = tiny_state(PROMPTS, max_new_tokens=[3, 5, 5, 9])
    for expected in lengths:
        state = run(state, stop_on_finish=True, max_idle=max_idle)
        assert [len(o) for o in state.outputs()] == expected
    assert state.outputs() == [greedy(p, n) for p, n in zip(PROMPTS, (3, 5, 5, 9), strict=True)]


def prefilled(cache: KVCache, prompts: dict[int, list[int]]) -> tuple[jnp.ndarray, KVCache]:
    """Feeds prompts of up to 16 tokens to blocks.

    The logits after each, in their order, and the cache.
    """
    tokens, count = np.zeros((ROWS, 16), np.int32), [0] * ROWS
    for r, prompt in enumerate(prompts.values()):
        tokens[r, : len(prompt)], count[r] = prompt, len(prompt)
    logits, cache = forward(
        TINY, tiny_params(), tokens, count, cache, pad_rows([[b] for b in prompts], ROWS, LISTED)
    )
    return logits[: len(prompts)], cache


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(1.2, top_k=30)], ids=["greedy", "sampled"])
def test_a_row_that_has_ended_is_given_something_new(sampler):
    """A row below a shared prefix, with its own seed and budget.

    It and the others write what they would in a fresh state.
    """
    first, later = PROMPTS[1], [PROMPTS[0], PROMPTS[2], PROMPTS[3], PROMPTS[1]]
    settings = {"samplers": sampler, "seeds": [3, 1, 4, 1], "max_new_tokens": [5, MOST, MOST, MOST]}
    undisturbed = run(tiny_state(later, **settings)).outputs()
    prefix, cache = prefilled(tiny_cache(), {0: first})
    state = run(tiny_state(later, cache=cache, **settings), stop_on_finish=True)
    assert (
        reasons(state) == [FinishReason.LENGTH, *[FinishReason.RUNNING] * 3]
        and state.outputs()[0] == undisturbed[0]
    )
    state = dataclasses.replace(state, cache=state.cache.clear(1))
    before = int(state.passes)
    state = state.admit([0], [[0, 1]], prefix, seeds=[2**32 - 5], max_new_tokens=[10])
    assert reasons(state)[0] == FinishReason.RUNNING and state.outputs()[0] == []
    done = run(state)
    fresh = run(
        tiny_state([first], [[1]], samplers=sampler, seeds=[2**32 - 5, 0, 0, 0], max_new_tokens=10)
    )
    assert done.outputs() == [fresh.outputs()[0], *undisturbed[1:]] and len(done.outputs()[0]) == 10
    np.testing.assert_allclose(done.logprobs[0, :10], fresh.logprobs[0, :10], atol=2e-5)
    assert reasons(done) == [FinishReason.LENGTH] * 4
    assert int(done.passes) - before == 10 - 1  # it samples at once, and its last token is not fed
    assert np.asarray(done.cache.lengths).tolist() == [
        len(first),
        10 - 1,
        *(len(p) + MOST - 1 for p in later[1:]),
        0,
    ]
    done.cache.check()


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_rows_that_were_not_in_use_are_given_something(count):
    """Any number of rows at once, a power of two or not; the rest stays unused."""
    logits, cache = prefilled(tiny_cache(), {b: p for b, p in enumerate(PROMPTS[:count], 1)})
    state = tiny_state([], [], cache=cache)
    rows, blocks = [3, 0, 2, 1][:count], [[b + 1] for b in range(count)]
    state = state.admit(
        rows, blocks, logits, seeds=[0] * count, max_new_tokens=[MOST, 1, 7, 0][:count]
    )
    expected = [[]] * ROWS
    for r, prompt, budget in zip(rows, PROMPTS[:count], [MOST, 1, 7, 0], strict=False):
        expected[r] = greedy(prompt, budget)
    done = run(state)
    assert done.outputs() == expected
    assert reasons(done) == [
        FinishReason.LENGTH if r in rows else FinishReason.UNUSED for r in range(ROWS)
    ]


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(1.2)], ids=["greedy", "sampled"])
def test_several_rows_change_places(sampler):
    """Three of four rows get each other's blocks, in another order, while the fourth writes on."""
    settings = {"samplers": sampler, "seeds": [7, 8, 9, 10]}
    undisturbed = run(tiny_state(PROMPTS, **settings)).outputs()
    state = run(tiny_state(PROMPTS, **settings), passes=4)
    for row, reason in (
        (0, FinishReason.STOP),
        (2, FinishReason.PAUSED),
        (3, FinishReason.CACHE_FULL),
    ):
        state = state.end(row, reason)
    cache = state.cache
    for block in (1, 3, 4):
        cache = cache.clear(block)
    new = {4: PROMPTS[2], 1: PROMPTS[3], 3: PROMPTS[1]}
    logits, cache = prefilled(cache, new)
    state = dataclasses.replace(state, cache=cache)
    state = state.admit(
        [3, 0, 2],
        [[1], [3], [4]],
        logits[on_device([1, 2, 0])],
        seeds=[1, 2, 3],
        max_new_tokens=[MOST, 4, 9],
    )
    done = run(state)
    alone = run(
        tiny_state(
            [PROMPTS[1], [], PROMPTS[2], PROMPTS[3]],
            [[1], [], [2], [3]],
            samplers=sampler,
            seeds=[2, 0, 3, 1],
            max_new_tokens=[4, 0, 9, MOST],
        )
    ).outputs()
    assert done.outputs() == [alone[0], undisturbed[1], alone[2], alone[3]] and [
        len(o) for o in alone
    ] == [4, 0, 9, MOST]


def test_admission_ends_at_a_stop_and_can_be_repeated():
    """The same row three times; what it sampled before leaves no trace."""
    stop = greedy(PROMPTS[1])[3]
    expected = greedy(PROMPTS[1])[: greedy(PROMPTS[1]).index(stop) + 1]
    state = tiny_state([], [], stops=[stop])
    for budget in (MOST, 1, MOST):
        logits, cache = prefilled(state.cache.clear(2), {2: PROMPTS[1]})
        state = dataclasses.replace(state, cache=cache).admit(
            [1], [[2]], logits, seeds=[0], max_new_tokens=[budget]
        )
        state = run(state)
        assert state.outputs() == [[], expected[:budget], [], []]
        assert reasons(state)[1] == (FinishReason.STOP if budget > 1 else FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("row", "blocks", "more", "words"),
    [
        (1, [2], {}, "row 1 is running; end it before it is given something new"),
        (4, [1], {}, "there is no row 4; the state has rows 0 to 3"),
        (-1, [1], {}, "there is no row -1"),
        (0, [], {}, "row 0 would list 0 blocks, but the layout has room for 1 to 3"),
        (0, [0, 3, 4, 1], {}, "row 0 would list 4 blocks, but the layout has room for 1 to 3"),
        (
            0,
            [1],
            {"max_new_tokens": [-1]},
            "max_new_tokens of row 0 is -1; it must be at least 0",
        ),
        (0, [0, 2], {}, "rows 0 and 1 both write block 2"),
        (0, [0, 0], {}, "row 0 lists block 0 twice"),
        (0, [6], {}, "row 0 lists block 6, but the cache has blocks 0 to 5"),
        (0, [0, -1, 1], {}, "row 0 lists block -1; blocks are numbered"),
        (0, [1], {"seeds": []}, "seeds has 0 entries, but 1 rows are to be admitted"),
        (0, [1], {"max_new_tokens": [1, 2]}, "max_new_tokens has 2 entries, but 1 rows"),
    ],
)
def test_admission_refuses(row, blocks, more, words):
    """A refusal leaves the state usable."""
    state = run(tiny_state(PROMPTS, max_new_tokens=[1, MOST, MOST, MOST]), stop_on_finish=True)
    with pytest.raises(ValueError, match=words):
        state.admit(
            [row], [blocks], jnp.zeros((1, VOCAB)), **{"seeds": [0], "max_new_tokens": [4], **more}
        )
    assert run(state).outputs() == [greedy(PROMPTS[0], 1), *map(greedy, PROMPTS[1:])]


def test_admission_counts():
    state = run(tiny_state(PROMPTS, max_new_tokens=[1, 1, 1, 1]))
    with pytest.raises(ValueError, match="logits has 1 entries, but 2 rows are to be admitted"):
        state.admit([0, 1], [[1], [2]], jnp.zeros((1, VOCAB)), seeds=[0, 0], max_new_tokens=[1, 1])
    with pytest.raises(ValueError, match=r"rows must name each row once; got \[0, 0\]"):
        state.admit([0, 0], [[1], [2]], jnp.zeros((2, VOCAB)), seeds=[0, 0], max_new_tokens=[1, 1])


def test_a_row_that_is_retired_lists_nothing_and_another_may_write_its_block():
    state = run(tiny_state(PROMPTS, max_new_tokens=[1, 1, MOST, MOST]))
    block = int(state.layout.written[0])
    logits, cache = prefilled(state.cache.clear(block), {block: PROMPTS[0]})
    state = dataclasses.replace(state, cache=cache)
    with pytest.raises(ValueError, match=f"rows 0 and 1 both write block {block}"):
        state.admit([1], [[block]], logits, seeds=[0], max_new_tokens=[3])
    state = state.retire([0]).admit([1], [[block]], logits, seeds=[0], max_new_tokens=[3])
    assert (
        reasons(state)
        == [FinishReason.UNUSED, FinishReason.RUNNING, FinishReason.LENGTH, FinishReason.LENGTH]
        and int(state.layout.written[0]) == -1
    )
    assert run(state).outputs()[1] == greedy(PROMPTS[0], 3)


def test_former_names_work_and_warn():
    state = tiny_state(PROMPTS, max_new_tokens=[3, 5, 5, 9])
    with pytest.warns(DeprecationWarning, match="until_any is now stop_on_finish"):
        state = run(state, until_any=True)
    assert reasons(state) == [FinishReason.LENGTH, *[FinishReason.RUNNING] * 3]
    with pytest.warns(DeprecationWarning, match="kept is now num_top_logits"):
        state = tiny_state(PROMPTS, kept=5)
    with pytest.warns(DeprecationWarning, match="kept is now top_logits"):
        kept = state.kept
    assert kept is state.top_logits and kept.tokens.shape[-1] == 5
    with pytest.warns(DeprecationWarning, match="drawn is now num_sampled"):
        assert state.drawn.tolist() == [0] * ROWS
    with pytest.warns(DeprecationWarning) as warned:
        made = DecodeState.create(
            tiny_cache(), state.layout, PROMPTS, vocab_size=VOCAB, budgets=3, room=7
        )
    assert {str(each.message).partition(";")[0] for each in warned} == {
        "budgets is now max_new_tokens",
        "room is now capacity",
    }
    assert made.max_new_tokens.tolist() == [3] * ROWS and made.tokens.shape == (ROWS, 7)
    with pytest.raises(TypeError, match="argument 'rooms'"):
        DecodeState.create(tiny_cache(), state.layout, PROMPTS, vocab_size=VOCAB, rooms=7)
    with pytest.raises(AttributeError, match="no attribute 'mirth'"):
        _ = state.mirth


@pytest.mark.parametrize("capacity", mostly_slow([MOST, 3, 1]))
def test_a_state_with_little_room_for_outputs_waits_until_they_are_taken(capacity):
    """What is taken between dispatches is, put together, what one dispatch samples, and goes on as
    the plain loop."""
    whole = run(tiny_state(PROMPTS, max_new_tokens=[MOST, 2, 0, 5]))
    budgets = [2 * MOST if capacity == MOST else MOST, 2, 0, 5]
    state, outputs = tiny_state(PROMPTS, max_new_tokens=budgets, capacity=capacity), []
    logprobs = [[] for _ in PROMPTS]
    for _ in range(2 * MOST):
        state = run(state)
        outputs.append(state.outputs())
        for row, new in enumerate(outputs[-1]):
            logprobs[row] += state.logprobs[row, : len(new)].tolist()
        if not bool(state.running.any()):
            break
        assert len(max(outputs[-1], key=len)) == capacity
        state = state.without_outputs()
    joined = [[*itertools.chain(*parts)] for parts in zip(*outputs, strict=True)]
    assert joined == [greedy(p, n) for p, n in zip(PROMPTS, budgets, strict=True)]
    assert reasons(state) == reasons(whole)
    for row, output in enumerate(whole.outputs()):
        assert joined[row][: len(output)] == output
        assert logprobs[row][: len(output)] == whole.logprobs[row, : len(output)].tolist()


@pytest.mark.parametrize("more", [{"passes": -1}, {"width": 0}, {"width": WIDEST + 1}])
def test_decode_refuses(more):
    with pytest.raises(
        ValueError,
        match=f"passes must be at least 0, and width from 1 to the state's max_width, {WIDEST}",
    ):
        run(tiny_state(PROMPTS), **more)


def test_the_state_is_frozen():
    made = tiny_state(PROMPTS)
    for field in dataclasses.fields(made):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(made, field.name, None)


def test_the_cache_is_given_away():
    """The cache is donated: only the returned state stays usable."""
    cache = tiny_cache()
    run(tiny_state(PROMPTS, cache=cache), passes=1)
    assert all(a.is_deleted() for a in (*cache.keys, *cache.values))


@pytest.mark.parametrize(
    ("prompts", "more", "words"),
    [
        ([[1], [2], [3], [4], [5]], {}, "prompts has 5 entries, but the layout has 4 rows"),
        (PROMPTS, {"samplers": [Sampler()]}, "samplers has 1 entries, but the layout has 4 rows"),
        (PROMPTS, {"seeds": [1, 2]}, "seeds has 2 entries"),
        (PROMPTS, {"max_new_tokens": [1]}, "max_new_tokens has 1 entries"),
        (
            [[1], [VOCAB], [3], [4]],
            {},
            f"prompt of row 1 has token {VOCAB}, outside the vocabulary of {VOCAB}",
        ),
        ([[1], [2], [3, -1], [4]], {}, "prompt of row 2 has token -1"),
        ([[1], [2], [], [4]], {}, "row 2 has an empty prompt and no logits to sample from"),
        ([[1], [2], [3]], {}, "row 3 has an empty prompt"),
        (
            PROMPTS,
            {"max_new_tokens": [1, 2, -3, 4]},
            "max_new_tokens of row 2 is -3; it must be at least 0",
        ),
        (PROMPTS, {"max_new_tokens": -1}, "max_new_tokens of row 0 is -1"),
    ],
)
def test_bad_input_is_refused(prompts, more, words):
    cache, layout = tiny_cache(), pad_rows(ROWS_ALONE, ROWS, LISTED)
    with pytest.raises(ValueError, match=words):
        DecodeState.create(cache, layout, prompts, vocab_size=VOCAB, **more)


def test_a_layout_that_cannot_be_is_refused():
    cache = tiny_cache()
    for blocks, words in (
        ([[9]], "row 0 lists block 9, but the cache has blocks 0 to 5"),
        ([[1, 1]], "row 0 lists block 1 twice"),
        ([[0, 1], [2, 1]], "rows 0 and 1 both write block 1"),
    ):
        with pytest.raises(ValueError, match=words):
            DecodeState.create(
                cache, Layout(on_device(blocks, jnp.int32)), [[1]] * len(blocks), vocab_size=VOCAB
            )


def test_forward_refuses_what_can_be_known_before():
    layout = pad_rows(ROWS_ALONE[:3], ROWS, LISTED)

    def go(tokens=((1, 2),) * 4, count=(1, 1, 1, 0), cache=None, layout=layout):
        forward(
            TINY,
            tiny_params(),
            tokens,
            count,
            KVCache.create(TINY, (4, 1, 4, 4), jnp.float32) if cache is None else cache,
            layout,
        )

    for arguments, words in (
        ({"tokens": ((1, 2),) * 3}, r"R = 4, the layout's rows"),
        ({"count": (1, 1)}, r"R = 4, the layout's rows"),
        (
            {"count": (3, 0, 0, 0)},
            r"count must lie between 0 and the 2 tokens given; got \[3, 0, 0, 0\]",
        ),
        ({"count": (-1, 0, 0, 0)}, "count must lie between 0"),
        ({"count": (0, 0, 0, 1)}, "row 3 brings 1 tokens but lists no block"),
        (
            {"tokens": ((1, VOCAB),) * 4, "count": (0, 2, 0, 0)},
            f"tokens must lie between 0 and {VOCAB - 1}",
        ),
        ({"count": (2, 0, 0, 0)}, "row 0 brings 2 tokens, but block 1 holds 0 of at most 1"),
        (
            {"layout": Layout(on_device([[0], [0], [1], [2]], jnp.int32))},
            "rows 0 and 1 both write block 0",
        ),
        (
            {"layout": Layout(on_device([[0], [4], [1], [2]], jnp.int32))},
            "row 1 lists block 4, but the cache has blocks 0 to 3",
        ),
        (
            {"layout": Layout(on_device([[0, 0], [3, 2], [1, -1], [-1, -1]], jnp.int32))},
            "row 0 lists block 0 twice",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            go(**arguments)
    faulty = KVCache.create(TINY, (4, 4, 4, 4), jnp.float32)
    with pytest.raises(ValueError, match="the cache is not usable any more"):
        go(cache=dataclasses.replace(faulty, faults=jnp.int32(1)))
