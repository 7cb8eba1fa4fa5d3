"""Samples from top logits, against the sampler on the full logits: decided samples are the same
tokens, and most are decided."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshare import Sampler, Samplers
from jaxshare.decoding.samplers import SamplerPlaces
from jaxshare.decoding.sampling import uniforms
from jaxshare.decoding.top_logits import TopLogits, compress_logits
from jaxshare.serving.logits_cache.replay import (
    UNDECIDED,
    decide,
    probabilities,
    redraw,
    rows,
    uniform_run,
)
from tests.core.decoding.test_sampling import expected_probabilities, keys
from tests.helpers import mostly_slow, on_device

KEEP = jax.jit(compress_logits, static_argnums=2)
SAMPLE = jax.jit(
    lambda samplers, logits, seeds, positions: samplers.sample(logits, keys(seeds), positions)
)
ROWS, SLOTS = 512, 8


def kept_of(logits: np.ndarray, temperature: float, k: int) -> TopLogits:
    return jax.tree.map(
        np.asarray, KEEP(on_device(logits), jnp.full(len(logits), temperature, jnp.float32), k)
    )


def fresh(logits: np.ndarray, sampler: Sampler, seed: int, position: int) -> np.ndarray:
    """A device's samples from the full logits at consecutive positions."""
    samplers = Samplers.stack([sampler] * len(logits), places=SamplerPlaces(SLOTS))
    positions = position + jnp.arange(len(logits), dtype=jnp.int32)
    return np.asarray(
        SAMPLE(samplers, on_device(logits), jnp.full(len(logits), seed, jnp.uint32), positions)
    )


def compare(
    logits: np.ndarray, sampler: Sampler, kept_at: float, k: int, seed: int = 0, position: int = 0
) -> float:
    """Checks that decided samples equal the fresh ones; returns the decided share."""
    kept = kept_of(logits, kept_at, k)
    again = redraw(kept, sampler, seed, position)
    decided = again != UNDECIDED
    np.testing.assert_array_equal(again[decided], fresh(logits, sampler, seed, position)[decided])
    return float(decided.mean())


@functools.cache
def peaked(vocab: int, spread: float = 1.0, seed: int = 0) -> np.ndarray:
    """Logits like a real model's: a few likely tokens, and a long tail with little mass."""
    rng = np.random.default_rng(seed)
    ranks = rng.permuted(np.broadcast_to(np.arange(vocab), (ROWS, vocab)), axis=1)
    return (-2.2 * spread * np.log1p(ranks) + 0.3 * rng.normal(size=(ROWS, vocab))).astype(
        np.float32
    )


CUTS = {
    "plain": {},
    "top_k": {"top_k": 5},
    "top_k of many": {"top_k": 100},
    "top_k of all": {"top_k": 5000},
    "top_p": {"top_p": 0.9},
    "least top_p": {"top_p": 1e-6},
    "most top_p": {"top_p": 0.9999},
    "min_p": {"min_p": 0.05},
    "most min_p": {"min_p": 1.0},
    "all": {"top_k": 20, "top_p": 0.8, "min_p": 0.02},
    "bias": {"bias": {3: 2.0, 5: -3.0}},
    "forbidden": {"forbidden": (0, 2, 9)},
    "all and bias": {"top_k": 7, "top_p": 0.95, "bias": {3: 9.0, 8: -1.0}, "forbidden": (1,)},
}


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("temperature", mostly_slow([0.4, 1.7]))
@pytest.mark.parametrize("k", mostly_slow([40, 300, 3], 2))
def test_decided_draws_are_the_fresh_ones(cuts, temperature, k):
    logits = peaked(300)
    for kept_at, position in ((temperature, 0), (1.0, 100)):
        share = compare(
            logits, Sampler(temperature, **cuts), kept_at, k, seed=17, position=position
        )
        if k == 300:
            assert share >= 0.99


@pytest.mark.parametrize(
    "cuts",
    mostly_slow((c for name, c in reversed(CUTS.items()) if name != "most top_p"), 4),
    ids=[n for n in reversed(CUTS) if n != "most top_p"],
)
def test_nearly_all_is_decided_where_nearly_all_the_mass_is_kept(cuts):
    logits, temperature, k = peaked(2000, 1.5), 0.8, 60
    mass = np.exp(logits.astype(np.float64) / temperature)
    kept_mass = np.sort(mass, axis=1)[:, -k:].sum(axis=1) / mass.sum(axis=1)
    assert kept_mass.min() > 0.999
    shares = [
        compare(logits, Sampler(temperature, **cuts), temperature, k, seed, 7) for seed in range(4)
    ]
    assert np.mean(shares) > 0.99


def test_most_is_decided_at_neighbouring_temperatures():
    logits = peaked(2000, 1.5)
    for temperature in (0.6, 0.8, 0.9, 1.0):
        assert compare(logits, Sampler(temperature), 0.7, 100, 3) > 0.97


@pytest.mark.parametrize("seed", mostly_slow(range(4)))
def test_draws_of_anything_agree(seed):
    """Random logits (flat to sharp, tied, of low precision), temperatures, cuts, biases and
    bans."""
    rng = np.random.default_rng(seed)
    for turn in range(30):
        vocab = (8, 300)[turn % 2]
        logits = (rng.normal(size=(ROWS, vocab)) * rng.choice([0.5, 2.0, 5.0])).astype(np.float32)
        if turn % 4 == 0:
            logits = np.array(on_device(logits).astype(jnp.bfloat16).astype(jnp.float32))
        if turn % 7 == 0:
            logits = np.round(logits)
        if turn % 5 == 0:
            logits[:, rng.integers(0, vocab, 2)] = -np.inf
        k = int(rng.choice([vocab, vocab // 2, 3]))
        cuts = {
            "top_k": int(rng.integers(1, vocab + 3)),
            "top_p": float(rng.choice([0.3, 0.9, 0.99])),
            "min_p": float(rng.choice([0.01, 0.3, 1.0])),
            "bias": {int(rng.integers(vocab + 2)): float(rng.normal() * 3)},
            "forbidden": tuple(rng.integers(0, vocab, 2).tolist()),
        }
        chosen = {name: value for name, value in cuts.items() if rng.random() < 0.35}
        kept_at, temperature = (
            rng.choice([0.0, 0.5, 1.0, 1.3]),
            rng.choice([0.0, 0.3, 0.5, 1.0, 2.0]),
        )
        compare(
            logits,
            Sampler(float(temperature), **chosen),
            float(kept_at),
            k,
            int(rng.integers(1 << 31)),
            int(rng.integers(1000)),
        )


@pytest.mark.parametrize("vocab", mostly_slow([700, 5, 20_000]))
def test_near_an_edge_the_device_is_never_contradicted(vocab):
    """Distributions in which the sample falls as close to the edge of a token as float32 rounds,
    and a little further."""
    count = 256
    u = uniform_run(5, 0, count).astype(np.float64)
    rng = np.random.default_rng(vocab)
    half = vocab // 2
    logits = rng.normal(size=(count, vocab)).astype(np.float32)
    weights = np.exp(logits.astype(np.float64))
    left, right = weights[:, :half].sum(axis=1), weights[:, half:].sum(axis=1)
    # Scaling the left half moves its end to u, give or take.
    off = rng.choice([-1, 1], count) * 10.0 ** rng.uniform(-9, -3, count)
    wanted = np.clip(u * (1 + off), 1e-3, 1 - 1e-3)
    logits[:, :half] += np.log(wanted / (1 - wanted) * right / left)[:, None].astype(np.float32)
    for k in {vocab, min(vocab, 1000)}:
        compare(logits, Sampler(1.0), 1.0, k, 5)


def test_float32_sums_of_a_device_stay_well_inside_the_guard():
    """The largest distance from a token's exact edge at which its neighbour is sampled, over flat
    and steep distributions."""
    worst = 0.0
    for spread, vocab in ((0.0, 5000), (1.0, 5000), (3.0, 5000)):
        logits = (np.random.default_rng(1).normal(size=(64, vocab)) * spread).astype(np.float32)
        edges = np.cumsum(
            np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True)), axis=1
        )
        edges /= edges[:, -1:]
        for seed in range(4):
            token = fresh(logits, Sampler(1.0), seed, 0)
            u = np.asarray(
                uniforms(keys(jnp.full(64, seed, jnp.uint32)), jnp.arange(64, dtype=jnp.int32)),
                np.float64,
            )
            row = np.arange(64)
            begin = np.where(token > 0, edges[row, np.maximum(token - 1, 0)], 0)
            worst = max(worst, float((begin - u).max()), float((u - edges[row, token]).max()))
    assert worst < 2e-6


def test_greedy_is_decided_unless_a_token_that_is_not_kept_may_win():
    logits = np.asarray([[0, 3, 1, 2], [2, 0, 2, 2], [0, 0, 1, 5]], np.float32)
    kept = kept_of(logits, 0.0, 2)
    assert redraw(kept, Sampler(), 0, 0).tolist() == [1, UNDECIDED, 3]
    assert redraw(kept_of(logits, 0.0, 4), Sampler(), 0, 0).tolist() == [1, 0, 3]
    assert redraw(kept, Sampler(bias={0: 9.0}), 0, 0).tolist() == [UNDECIDED, 0, UNDECIDED]
    assert redraw(kept, Sampler(forbidden=(1, 3)), 0, 0).tolist() == [UNDECIDED] * 3
    assert redraw(kept, Sampler(forbidden=(0,)), 0, 0).tolist() == [1, UNDECIDED, 3]


def test_a_distribution_of_nothing_decides_nothing():
    for logits in ([[np.nan, 1.0, 2.0]], [[-np.inf] * 3]):
        for sampler in (Sampler(), Sampler(1.0), Sampler(1.0, top_k=1), Sampler(0.5, top_p=0.5)):
            assert redraw(
                kept_of(np.asarray(logits, np.float32), 1.0, 3), sampler, 0, 0
            ).tolist() == [UNDECIDED]
    assert redraw(
        kept_of(np.zeros((1, 3), np.float32), 1.0, 3), Sampler(1.0, forbidden=(0, 1, 2)), 0, 0
    ).tolist() == [UNDECIDED]


def test_extreme_temperatures_and_logits():
    rng = np.random.default_rng(4)
    logits = (rng.normal(size=(ROWS, 50)) * np.float32(1e4)).astype(np.float32)
    for temperature, kept_at in itertools.product(
        (1e-40, 1e-20, 1e-3, 1e4, 1e20), (1e-3, 1.0, 1e4)
    ):
        compare(logits, Sampler(temperature), kept_at, 10, 9)
        compare(logits, Sampler(temperature, top_p=0.9, top_k=30), kept_at, 10, 9)


def test_random_numbers_are_those_of_the_row():
    want = uniforms(keys(jnp.full(9, 2**32 - 1, jnp.uint32)), jnp.arange(30, 39, dtype=jnp.int32))
    np.testing.assert_array_equal(uniform_run(2**32 - 1, 30, 9), want)
    assert len(uniform_run(1, 0, 0)) == 0 and len(uniform_run(1, 0, 1)) == 1
    assert (
        redraw(
            rows(kept_of(np.zeros((1, 3), np.float32), 1.0, 2), slice(0, 0)), Sampler(1.0), 0, 0
        ).tolist()
        == []
    )


@pytest.mark.parametrize(
    "cuts",
    [{}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.1}, {"bias": {1: 1.0}, "forbidden": (2,)}],
    ids=str,
)
def test_probabilities_are_those_of_the_sampler(cuts):
    logits = peaked(40)[:8]
    chances, rest = probabilities(kept_of(logits, 0.7, 40), Sampler(0.7, **cuts))
    np.testing.assert_allclose(
        chances, [expected_probabilities(row, Sampler(0.7, **cuts)) for row in logits], atol=1e-6
    )
    np.testing.assert_array_equal(rest, 0)


def test_the_chance_of_the_rest_is_what_the_kept_ones_leave():
    logits = peaked(40)[:8]
    kept = kept_of(logits, 0.7, 6)
    chances, rest = probabilities(kept, Sampler(0.7))
    want = np.take_along_axis(
        np.asarray([expected_probabilities(row, Sampler(0.7)) for row in logits]),
        kept.tokens,
        axis=1,
    )
    np.testing.assert_allclose(chances, want, atol=1e-6)
    np.testing.assert_allclose(rest, 1 - want.sum(axis=1), atol=1e-6)


VOCAB, LENGTH, CALLS = 6, 3, 100_000


@functools.cache
def markov() -> np.ndarray:
    """A model of 6 tokens: float32[6, 6], the logits after each."""
    return (np.random.default_rng(8).normal(size=(VOCAB, VOCAB)) * 1.2).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampler",
    mostly_slow(
        [
            Sampler(1.0, top_k=5, top_p=0.95, bias={1: 1.0}, forbidden=(3,)),
            Sampler(1.0),
            Sampler(1.6, top_k=4),
            Sampler(0.9, top_p=0.85, min_p=0.1),
        ]
    ),
    ids=str,
)
def test_replayed_sequences_are_distributed_as_fresh_ones(sampler):
    """Chi-square of 100,000 sequences of 3 tokens against exact enumeration; undecided tokens are
    sampled from the full logits."""
    logits = markov()
    seeds = jnp.arange(CALLS, dtype=jnp.uint32) + 1_000_000
    samplers = Samplers.stack([sampler] * CALLS, places=SamplerPlaces(2))
    last, code, replayed = np.zeros(CALLS, np.int64), np.zeros(CALLS, np.int64), {VOCAB: 0, 2: 0}
    kept = {k: kept_of(logits, 1.0, k) for k in replayed}
    for position in range(LENGTH):
        positions = jnp.full(CALLS, position, jnp.int32)
        u = np.asarray(uniforms(keys(seeds), positions))
        token = np.asarray(SAMPLE(samplers, on_device(logits[last]), seeds, positions)).astype(
            np.int64
        )
        for k in kept:
            drawn = np.full(CALLS, UNDECIDED)
            # one distribution for all rows in this state
            for state in range(VOCAB):
                here = np.flatnonzero(last == state)
                same = jax.tree.map(
                    lambda a, s=state, h=here: np.broadcast_to(a[s], (len(h), *a.shape[1:])),
                    kept[k],
                )
                drawn[here] = decide(same, sampler, u[here])
            # The sequences are the same, whether replayed from all tokens, from 2 of each
            # distribution, or sampled afresh.
            decided = drawn != UNDECIDED
            np.testing.assert_array_equal(drawn[decided], token[decided])
            replayed[k] += decided.sum()
            token = np.where(decided, drawn, token)
        last = token
        code = code * VOCAB + last
    step = np.stack([expected_probabilities(row, sampler) for row in logits])
    p = np.einsum("a,ab,bc->abc", step[0], step, step).ravel() * CALLS
    seen = np.bincount(code, minlength=VOCAB**LENGTH)
    assert not seen[p == 0].any()
    often = p >= 5
    statistic = np.sum((seen[often] - p[often]) ** 2 / p[often])
    assert statistic <= often.sum() + 5 * math.sqrt(2 * often.sum())
    assert replayed[VOCAB] > 0.999 * CALLS * LENGTH and replayed[2] > 0.05 * CALLS * LENGTH
