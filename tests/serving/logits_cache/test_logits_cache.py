"""The Logits Cache against fresh sampling of a made-up model, and its trie against a plain
dictionary."""

import dataclasses
import functools
import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxshare import Sampler
from jaxshare.decoding.top_logits import TopLogits, compress_logits
from jaxshare.serving.logits_cache.cache import LogitsCache
from jaxshare.serving.logits_cache.hotspot import Distance, Hotspot
from jaxshare.serving.logits_cache.replay import UNDECIDED, redraw
from tests.core.decoding.test_sampling import expected_probabilities
from tests.serving.logits_cache.test_replay import fresh

VOCAB, STOP = 5, 4
STATE = [7, 8, 9]
PLENTY = 1 << 20


@functools.cache
def _tables() -> np.ndarray:
    """Logits by (state, token before the last, last): they depend on the past, so that a wrong path
    shows."""
    return (np.random.default_rng(3).normal(size=(3, VOCAB + 1, VOCAB + 1, VOCAB)) * 1.5).astype(
        np.float32
    )


def logits_after(state: int, tokens: list[int]) -> np.ndarray:
    padded = [VOCAB, VOCAB, *tokens]
    return _tables()[state, padded[-2], padded[-1]]


@functools.cache
def _kept(k: int) -> TopLogits:
    flat = _tables().reshape(-1, VOCAB)
    return jax.tree.map(
        np.asarray,
        jax.jit(compress_logits, static_argnums=2)(
            jnp.asarray(flat), jnp.ones(len(flat), jnp.float32), k
        ),
    )


def kept_of(state: int, tokens: list[int], begin: int, k: int) -> TopLogits:
    """The top logits of the distributions that tokens[begin:] were sampled from."""
    where = []
    for i in range(begin, len(tokens)):
        padded = [VOCAB, VOCAB, *tokens[:i]]
        where.append(np.ravel_multi_index((state, padded[-2], padded[-1]), _tables().shape[:3]))
    return jax.tree.map(lambda a: a[np.asarray(where, np.int64)], _kept(k))


@functools.cache
def _fresh_token(
    state: int, before: tuple[int, int], sampler: Sampler, seed: int, position: int
) -> int:
    return int(fresh(_tables()[(state, *before)][None], sampler, seed, position)[0])


def continued(
    state: int, tokens: list[int], sampler: Sampler, seed: int, budget: int, stops: frozenset[int]
) -> list[int]:
    """The model's own continuation of an output."""
    tokens = list(tokens)
    while len(tokens) < budget and not (tokens and tokens[-1] in stops):
        padded = [VOCAB, VOCAB, *tokens]
        tokens.append(_fresh_token(state, (padded[-2], padded[-1]), sampler, seed, len(tokens)))
    return tokens


def call(
    cache: LogitsCache,
    state: int,
    sampler: Sampler,
    seed: int,
    budget: int,
    stops: frozenset[int],
    k: int,
) -> tuple[list[int], int]:
    """Serves a request as an engine does: replay, compute the rest, write.

    Returns the output, and how much of it was replayed."""
    replayed = cache.replay([state], sampler, seed, budget, stops)
    output = continued(state, replayed, sampler, seed, budget, stops)
    cache.write(
        [state], replayed, output[len(replayed) :], kept_of(state, output, len(replayed), k)
    )
    return output, len(replayed)


SAMPLERS = [Sampler(1.0), Sampler(0.5, top_k=3), Sampler(1.5, top_p=0.9), Sampler(0.0)]


@pytest.mark.parametrize("k", [VOCAB, 2])
@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_outputs_are_those_of_fresh_sampling(sampler, k):
    cache, replayed, total = LogitsCache("m", PLENTY, k), 0, 0
    for seed in range(60):
        output, known = call(cache, 0, sampler, seed, 12, frozenset({STOP}), k)
        assert output == continued(0, [], sampler, seed, 12, frozenset({STOP}))
        replayed, total = replayed + known, total + len(output)
    assert replayed > (0.4 if k == VOCAB else 0.1) * total
    assert (
        cache.statistics.hits == 59
        and cache.statistics.misses == 1
        and cache.statistics.replayed == replayed
    )


class Brute:
    """The same as a set of token tuples whose next distribution is cached."""

    def __init__(self, k: int):
        self.k, self.known = k, set()

    def write(self, state: int, replayed: list[int], tokens: list[int]) -> bool:
        whole = [*replayed, *tokens]
        if any((state, *whole[:i]) not in self.known for i in range(len(replayed))):
            return False
        new = {(state, *whole[:i]) for i in range(len(replayed), len(whole))} - self.known
        self.known |= new
        return bool(new)

    def replay(
        self, state: int, sampler: Sampler, seed: int, budget: int, stops: frozenset[int]
    ) -> list[int]:
        output: list[int] = []
        while (
            len(output) < budget
            and (state, *output) in self.known
            and not (output and output[-1] in stops)
        ):
            # Another test checks which samples are decided.
            token = int(
                redraw(
                    kept_of(state, [*output, 0], len(output), self.k), sampler, seed, len(output)
                )[0]
            )
            if token == UNDECIDED:
                break
            output.append(token)
        return output


TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=6)
STEPS = st.one_of(
    st.tuples(st.just("write"), st.integers(0, 2), TOKENS, TOKENS),
    st.tuples(
        st.just("call"),
        st.integers(0, 2),
        st.sampled_from(SAMPLERS),
        st.integers(0, 20),
        st.integers(0, 8),
    ),
    st.tuples(
        st.just("replay"),
        st.integers(0, 2),
        st.sampled_from(SAMPLERS),
        st.integers(0, 20),
        st.integers(0, 8),
    ),
)


@settings(max_examples=60)
@given(st.lists(STEPS, max_size=25), st.sampled_from([VOCAB, 2]))
def test_the_trie_is_a_dictionary_of_what_was_written(steps, k):
    cache, brute = LogitsCache("m", PLENTY, k), Brute(k)
    for kind, state, *rest in steps:
        if kind == "write":
            replayed, tokens = rest
            whole = [*replayed, *tokens]
            new = brute.write(state, replayed, tokens)
            assert (
                cache.write([state], replayed, tokens, kept_of(state, whole, len(replayed), k))
                == new
            )
            continue
        sampler, seed, budget = rest
        replayed = cache.replay([state], sampler, seed, budget, frozenset({STOP}))
        assert replayed == brute.replay(state, sampler, seed, budget, frozenset({STOP}))
        if kind == "call":
            output = continued(state, replayed, sampler, seed, budget, frozenset({STOP}))
            assert output == continued(state, [], sampler, seed, budget, frozenset({STOP}))
            brute.write(state, replayed, output[len(replayed) :])
            cache.write(
                [state], replayed, output[len(replayed) :], kept_of(state, output, len(replayed), k)
            )
    each = sum(a.nbytes for a in jax.tree.leaves(kept_of(0, [0], 0, k))) + 4
    assert cache.bytes == len(brute.known) * each + 32 * cache.statistics.states
    assert cache.statistics.states == len({known[0] for known in brute.known})


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2), st.sampled_from(SAMPLERS), st.integers(0, 30), st.integers(1, 10)
        ),
        max_size=40,
    ),
    st.integers(0, 2000),
)
def test_under_any_bound_outputs_stay_exact_and_the_bound_holds(calls, bound):
    cache = LogitsCache("m", bound, 2)
    for state, sampler, seed, budget in calls:
        output, _ = call(cache, state, sampler, seed, budget, frozenset({STOP}), 2)
        assert output == continued(state, [], sampler, seed, budget, frozenset({STOP}))
        assert 0 <= cache.bytes <= bound
        assert (cache.bytes == 0) == (cache.statistics.runs == 0) == (cache.statistics.states == 0)


def written(cache: LogitsCache, state: int, tokens: list[int], k: int = 2) -> bool:
    return cache.write([state], [], tokens, kept_of(state, tokens, 0, k))


EACH = 2 * 12 + 12 + 4
"""Bytes of one position with 2 top logits, its token included."""


def known(cache: LogitsCache, state: int) -> bool:
    """Looks up a state without using it."""
    return cache.distance([state], Sampler(1.0), 10).positions.size > 0


def test_the_least_recently_used_makes_room():
    cache = LogitsCache("m", 2 * (4 * EACH + 32), 2)
    assert written(cache, 0, [0, 1, 2, 3]) and written(cache, 1, [0, 1, 2, 3])
    assert cache.bytes == cache.max_bytes
    cache.replay([0], Sampler(1.0), 0, 1)
    assert written(cache, 2, [1, 1])
    assert known(cache, 0) and not known(cache, 1) and known(cache, 2)
    assert cache.statistics.evicted == 1 and cache.bytes == 6 * EACH + 64


def test_leaves_go_before_what_they_hang_on():
    cache = LogitsCache("m", 32 + 7 * EACH, 2)
    assert written(cache, 0, [0, 1, 2, 3])
    assert written(cache, 0, [0, 2, 2])  # 1 more position, after the turn
    assert written(cache, 0, [0, 2, 3, 1])  # another below that one
    assert cache.statistics.runs == 3
    assert written(cache, 0, [0, 1, 0, 0, 0])  # 2 more, below the first
    assert cache.statistics.evicted == 1 and cache.statistics.runs == 3
    # what was above is still there
    assert not written(cache, 0, [0, 2, 2]) and written(cache, 0, [0, 2, 3, 1])


def test_what_is_larger_than_the_bound_is_not_kept():
    cache = LogitsCache("m", 3 * EACH + 32, 2)
    assert not written(cache, 0, [0, 1, 2, 3])
    assert written(cache, 0, [0, 1, 2]) and cache.bytes == cache.max_bytes
    assert not written(cache, 0, [0, 1, 2, 3])  # nor what makes it so
    assert not written(cache, 1, [0, 1, 2, 3]) and known(cache, 0)
    assert not written(LogitsCache("m", 0, 2), 0, [0])


def test_a_write_whose_beginning_is_gone_is_dropped():
    cache = LogitsCache("m", PLENTY, 2)
    tokens = [0, 1, 2, 3]
    assert not cache.write([0], tokens[:2], tokens[2:], kept_of(0, tokens, 2, 2))
    assert cache.bytes == 0 and not known(cache, 0)
    assert written(cache, 0, tokens[:1])
    assert not cache.write([0], tokens[:2], tokens[2:], kept_of(0, tokens, 2, 2))
    assert cache.write([0], tokens[:1], tokens[1:], kept_of(0, tokens, 1, 2))


def test_a_replay_goes_on_in_another_continuation_that_took_the_same_turn():
    cache, sampler = LogitsCache("m", PLENTY), Sampler(1.5)
    outputs = {seed: continued(0, [], sampler, seed, 8, frozenset()) for seed in range(200)}
    first = outputs[0]
    # A seed that leaves the first, and another with the same branch that leaves it later.
    pairs = [
        (a, b)
        for a, b in itertools.combinations(range(1, 200), 2)
        if outputs[a][0] == outputs[b][0] == first[0]
        and outputs[a][1] == outputs[b][1] != first[1]
        and outputs[a][2:5] == outputs[b][2:5]
        and outputs[a][5] != outputs[b][5]
    ]
    a, b = pairs[0]
    for seed in (0, a):
        written(cache, 0, outputs[seed], VOCAB)
    assert cache.replay([0], sampler, b, 8) == outputs[b][:6]
    assert cache.replay([0], sampler, a, 8) == outputs[a]
    assert cache.replay([0], sampler, a, 3) == outputs[a][:3]
    stop = outputs[a][4]
    end = outputs[a].index(stop) + 1
    assert cache.replay([0], sampler, a, 8, frozenset({stop})) == outputs[a][:end]
    assert cache.replay([0], sampler, a, 0) == []
    assert cache.replay([1], sampler, a, 8) == []


def test_long_runs_are_replayed_to_their_end():
    cache, sampler = LogitsCache("m", PLENTY), Sampler(0.7)
    output = continued(0, [], sampler, 5, 200, frozenset())
    written(cache, 0, output, VOCAB)
    replayed = cache.replay([0], sampler, 5, 500)
    assert replayed == output[: len(replayed)] and len(replayed) > 100


def test_what_is_computed_ahead_is_used_until_the_state_changes():
    cache, sampler = LogitsCache("m", PLENTY), Sampler(1.0)
    want = {seed: continued(0, [], sampler, seed, 8, frozenset()) for seed in (1, 2, 3)}
    written(cache, 0, want[1], VOCAB)
    for seed in (1, 2, 3):
        cache.prefetch([0], sampler, seed, 8).result(60)
    assert cache.replay([0], sampler, 1, 8) == want[1] and cache.statistics.ahead == 1
    assert cache.replay([0], sampler, 1, 8) == want[1] and cache.statistics.ahead == 1
    written(cache, 0, want[2], VOCAB)
    assert cache.replay([0], sampler, 2, 8) == want[2] and cache.statistics.ahead == 1
    cache.prefetch([9], sampler, 0, 8).result(60)
    assert cache.replay([9], sampler, 0, 8) == []
    cache.close()
    cache.close()
    assert cache.replay([0], sampler, 2, 8) == want[2]
    with pytest.raises(RuntimeError, match="closed"):
        cache.prefetch([0], sampler, 1, 8)


def test_threads_share_one_cache():
    cache, wrong = LogitsCache("m", 3000, 3), []

    def work(offset: int) -> None:
        for seed in range(offset, offset + 40):
            output, _ = call(cache, seed % 2, Sampler(1.0), seed % 25, 8, frozenset({STOP}), 3)
            if output != continued(seed % 2, [], Sampler(1.0), seed % 25, 8, frozenset({STOP})):
                wrong.append(seed)
            cache.prefetch([seed % 2], Sampler(1.0), (seed + 1) % 25, 8, frozenset({STOP}))

    threads = [threading.Thread(target=work, args=(n,)) for n in (0, 7, 14)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cache.close()
    assert not wrong and cache.bytes <= 3000 and cache.statistics.hits > 60


def test_hotspots_are_uncertain_weakly_peaked_and_early():
    logits = np.log(
        np.asarray([[0.97, 0.01, 0.01, 0.01], [0.25] * 4, [0.5, 0.5, 1e-9, 1e-9], [0.25] * 4])
    )
    kept = jax.tree.map(
        np.asarray, compress_logits(jnp.asarray(logits, jnp.float32), jnp.ones(4), 4)
    )
    entropy = [
        -(p := np.exp(row) / np.exp(row).sum()) @ np.log(p) * (1 - p.max()) * np.exp(-2.0 * t / 4)
        for t, row in enumerate(logits)
    ]
    order = np.argsort(entropy)[::-1]
    for k in range(5):
        hot = Hotspot(decay=2.0, top_k=k).find(kept, Sampler(1.0))
        assert set(np.flatnonzero(hot)) == set(order[:k].tolist())
    for threshold in (0.0, 0.2, 0.6, 0.99):
        want = np.asarray(entropy) > threshold * max(entropy)
        np.testing.assert_array_equal(
            Hotspot(decay=2.0, threshold=threshold).find(kept, Sampler(1.0)), want
        )
    with pytest.raises(ValueError, match="neither may be negative"):
        Hotspot(decay=-1.0)


def test_hotspot_sampling_draws_only_where_it_is_hot():
    sampler, first = Sampler(1.0), continued(0, [], Sampler(1.0), 0, 10, frozenset())
    kept = kept_of(0, first, 0, VOCAB)
    cache = LogitsCache("m", PLENTY)
    assert cache.hotspot([0], sampler, 1, 10) == []
    written(cache, 0, first, VOCAB)
    for seed in range(50):
        for top_k in (0, 2, 10):
            hot = Hotspot(top_k=top_k).find(kept, sampler)
            want = []
            for t, token in enumerate(first):
                drawn = (
                    int(fresh(logits_after(0, first[:t])[None], sampler, seed, t)[0])
                    if hot[t]
                    else token
                )
                want.append(drawn)
                if drawn != token:
                    break
            assert cache.hotspot([0], sampler, seed, 10, rule=Hotspot(top_k=top_k)) == want
    assert cache.hotspot([0], sampler, 3, 4, rule=Hotspot(top_k=0)) == first[:4]
    assert (
        cache.hotspot([0], sampler, 3, 10, frozenset({first[2]}), Hotspot(top_k=0))
        == first[: first.index(first[2]) + 1]
    )
    assert cache.hotspot([0], Sampler(0.0), 3, 10) == cache.replay([0], Sampler(0.0), 3, 10)


def test_hotspot_follows_the_latest_continuation():
    cache = LogitsCache("m", PLENTY)
    for tokens in ([0, 1, 2, 3], [0, 1, 3, 3, 0], [0, 1, 2, 3, 1], [0, 1, 3, 3, 0, 2], [0, 1, 2]):
        written(cache, 0, tokens, VOCAB)
        latest = cache.hotspot([0], Sampler(1.0), 0, 10, rule=Hotspot(top_k=0))
        assert latest[: len(tokens)] == tokens


def test_distance_is_the_total_variation_of_whole_outputs():
    """Against exact enumeration of every output of 4 tokens, fresh and by hotspots."""
    sampler, first = Sampler(0.8), [1, 0, 2, 3]
    at = dataclasses.replace(sampler)
    kept = jax.tree.map(
        np.asarray,
        compress_logits(
            jnp.stack([jnp.asarray(logits_after(0, first[:t])) for t in range(4)]),
            jnp.full(4, 0.8),
            VOCAB,
        ),
    )
    for hot in itertools.product([False, True], repeat=4):
        apart = 0.0
        for output in itertools.product(range(VOCAB), repeat=4):
            p = q = 1.0
            for t, token in enumerate(output):
                chance = expected_probabilities(logits_after(0, list(output[:t])), at)[token]
                p *= chance
                along = list(output[:t]) == first[:t]
                q *= float(token == first[t]) if along and not hot[t] else chance
            apart += abs(p - q) / 2
        distance = Distance.of(kept, sampler, np.asarray(first), np.asarray(hot))
        assert distance.sequence == pytest.approx(apart, abs=1e-5)
        own = [
            1 - expected_probabilities(logits_after(0, first[:t]), at)[first[t]] for t in range(4)
        ]
        np.testing.assert_allclose(distance.positions, np.where(hot, 0, own), atol=1e-5)
    assert Distance(np.zeros(0), 0.0).mean == 0.0


def test_another_model_is_refused():
    LogitsCache("llama", 0).check("llama")
    with pytest.raises(ValueError, match=r"'llama'.*'qwen'"):
        LogitsCache("llama", 0).check("qwen")


def test_bad_writes_are_refused_and_leave_nothing():
    cache = LogitsCache("m", PLENTY, 3)
    kept = kept_of(0, [0, 1], 0, 3)
    with pytest.raises(ValueError, match="2 tokens and 1 distributions"):
        cache.write([0], [], [0, 1], kept_of(0, [0], 0, 3))
    with pytest.raises(ValueError, match="2 kept tokens of 5; this logits cache keeps 3 of 5"):
        cache.write([0], [], [0, 1], kept_of(0, [0, 1], 0, 2))
    for name in ("logits", "below", "rest", "rest_at_1"):
        broken = np.array(getattr(kept, name))
        broken[1] = np.nan
        with pytest.raises(ValueError, match="distribution 1 is not finite"):
            cache.write([0], [], [0, 1], dataclasses.replace(kept, **{name: broken}))
    assert cache.bytes == 0
    assert not cache.write([0], [], [], kept_of(0, [], 0, 3))
    assert cache.write([0], [], [0, 1], kept)
    with pytest.raises(ValueError, match="max_bytes is -1"):
        LogitsCache("m", -1)
    with pytest.raises(ValueError, match="num_top_logits is 0"):
        LogitsCache("m", 1, 0)


def test_what_is_kept_is_a_copy():
    cache, tokens = LogitsCache("m", PLENTY), continued(0, [], Sampler(1.0), 1, 6, frozenset())
    kept = jax.tree.map(np.array, kept_of(0, tokens, 0, VOCAB))
    cache.write([0], [], tokens, kept)
    kept.logits[:] = 0
    assert cache.replay([0], Sampler(1.0), 1, 6) == tokens
