"""Samplers against plain float64 numpy.

The tokens that can be drawn are compared exactly, frequencies by statistics with fixed seeds.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxshare import Sampler, Samplers
from jaxshare.decoding.history import History
from jaxshare.decoding.samplers import SamplerPlaces
from jaxshare.decoding.sampling import _draw, logprob, uniforms
from jaxshare.decoding.truncation import truncation_bounds
from tests.helpers import mostly_slow

ROWS, ROUNDS = 4096, 8
"""Draws are made ROWS at a time, ROUNDS positions each."""


@jax.jit
def keys(seeds):
    """uint32[R, 2] of seeds below 2**32."""
    return jnp.stack([jnp.zeros_like(seeds), seeds], axis=-1)


@jax.jit
def sample(samplers, logits, seeds, positions):
    return samplers.sample(logits, keys(seeds), positions)


def expected_probabilities(logits: np.ndarray, s: Sampler) -> np.ndarray:
    """The oracle, [V] from [V]: sort, truncate, renormalise."""
    logits = np.asarray(logits, np.float64).copy()
    for token, value in s.bias.items():
        logits[token] += value
    logits[list(s.forbidden)] = -np.inf
    logits = logits / s.temperature
    keep = np.ones(len(logits), bool)
    if s.top_k:
        keep &= logits >= np.sort(logits)[::-1][min(s.top_k, len(logits)) - 1]
    p = np.where(keep, np.exp(logits - logits.max()), 0)
    p /= p.sum()
    if s.top_p < 1:
        order = np.argsort(-p, kind="stable")
        needed = int(np.searchsorted(np.cumsum(p[order]), s.top_p)) + 1
        keep &= p >= p[order[needed - 1]]
    keep &= np.exp(logits - logits.max()) >= s.min_p
    p = np.where(keep, p, 0)
    return p / p.sum()


def gentle(vocab: int, seed: int = 0) -> np.ndarray:
    """Logits so flat that every token is drawn often enough to be seen."""
    return (np.random.default_rng(seed).normal(size=vocab) * 0.5).astype(np.float32)


def counts(sampler: Sampler, logits: np.ndarray, rounds: int = ROUNDS) -> np.ndarray:
    samplers = jax.tree.map(
        lambda a: jnp.repeat(a, ROWS, axis=0), Samplers.stack([sampler], places=SamplerPlaces(4))
    )
    spread = jnp.broadcast_to(jnp.asarray(logits), (ROWS, len(logits)))
    seen = np.zeros(len(logits), np.int64)
    for position in range(rounds):
        tokens = sample(
            samplers,
            spread,
            jnp.arange(ROWS, dtype=jnp.uint32),
            jnp.full(ROWS, position, jnp.int32),
        )
        seen += np.bincount(np.asarray(tokens), minlength=len(logits))
    assert seen.sum() == ROWS * rounds and len(seen) == len(logits)
    return seen


SETTINGS = [
    Sampler(0.8, top_k=40, top_p=0.5, min_p=0.4),
    Sampler(1.0, top_k=3, bias={3: 9.0}, forbidden=(1,)),
    Sampler(temperature=1.0),
    Sampler(temperature=0.5),
    Sampler(temperature=2.0),
    Sampler(1.0, top_k=1),
    Sampler(1.0, top_k=7),
    Sampler(1.0, top_k=10_000),
    Sampler(1.0, top_p=0.3),
    Sampler(0.7, top_p=0.9),
    Sampler(1.0, top_p=1e-6),
    Sampler(1.0, min_p=0.3),
    Sampler(1.0, min_p=1.0),
    Sampler(1.0, top_k=20, top_p=0.8),
    Sampler(1.0, bias={3: 2.0, 5: -3.0}, forbidden=(0, 2)),
]


@pytest.mark.parametrize("sampler", mostly_slow(SETTINGS, 2), ids=str)
def test_draws_follow_the_distribution(sampler):
    compare(sampler, gentle(300))


@pytest.mark.parametrize("vocab", mostly_slow([256, 7, 1000]))
def test_draws_follow_the_distribution_whatever_the_vocabulary(vocab):
    compare(Sampler(1.0), gentle(vocab, 1))


def compare(sampler: Sampler, logits: np.ndarray) -> None:
    p = expected_probabilities(logits, sampler)
    draws = ROWS * ROUNDS
    seen = counts(sampler, logits)
    rare = (p > 0) & (p * draws < 9)
    assert not seen[p == 0].any()
    assert (seen[(p > 0) & ~rare] > 0).all()
    inside = p > 0
    statistic, freedom = (
        np.sum((seen[inside] - p[inside] * draws) ** 2 / (p[inside] * draws)),
        inside.sum() - 1,
    )
    assert statistic <= freedom + 5 * math.sqrt(2 * freedom)


@jax.jit
def allowed(samplers, logits):
    """The tokens, bool[R, V], that truncation leaves in."""
    none, first = History.empty(len(logits)), jnp.zeros(len(logits), jnp.int32)
    all_admitted = jnp.zeros((len(logits), 0), jnp.uint32)
    scaled = samplers.changed(logits, none, all_admitted, first) / samplers.temperature[:, None]
    floor, _ = truncation_bounds(scaled, samplers.top_k, samplers.top_p, samplers.min_p)
    return scaled >= floor


@settings(max_examples=60)
@given(
    st.integers(0, 10**6),
    st.sampled_from([0, 1, 2, 5, 50, 500]),
    st.sampled_from([0.05, 0.5, 0.93, 1.0]),
    st.sampled_from([0.0, 0.01, 0.3]),
    st.sampled_from([0.3, 1.0, 1.7]),
)
def test_the_support_is_exact(seed, top_k, top_p, min_p, temperature):
    """Peaked logits, as models have.

    Tokens too rare to be seen by drawing are in or out exactly as in numpy.
    """
    logits = (np.random.default_rng(seed).normal(size=(1, 300)) * 3).astype(np.float32)
    sampler = Sampler(temperature, top_k, top_p, min_p)
    expected = expected_probabilities(logits[0], sampler) > 0
    np.testing.assert_array_equal(
        allowed(Samplers.stack([sampler], places=SamplerPlaces(1)), logits)[0], expected
    )


def test_greedy_takes_the_likeliest_and_the_first_of_equals():
    logits = np.asarray(
        [[0.0, 3.0, 3.0, -1.0], [5.0, 1.0, 2.0, 5.0], [-4.0, -3.0, -2.0, -1.0]], np.float32
    )
    tokens = sample(
        Samplers.stack([Sampler()] * 3),
        logits,
        jnp.arange(3, dtype=jnp.uint32),
        jnp.zeros(3, jnp.int32),
    )
    assert np.asarray(tokens).tolist() == [1, 0, 3] and tokens.dtype == jnp.int32


def test_greedy_obeys_bias_and_bans():
    logits = np.asarray([[0.0, 3.0, 2.0, -1.0]] * 3, np.float32)
    samplers = Samplers.stack(
        [Sampler(forbidden=(1,)), Sampler(bias={3: 4.5}), Sampler(bias={1: -2.0}, forbidden=(2, 3))]
    )
    assert np.asarray(
        sample(samplers, logits, jnp.zeros(3, jnp.uint32), jnp.zeros(3, jnp.int32))
    ).tolist() == [2, 3, 1]


def test_a_ban_outweighs_a_bias():
    samplers = Samplers.stack([Sampler(bias={1: 50.0}, forbidden=(1,))])
    assert (
        int(
            sample(
                samplers,
                np.zeros((1, 4), np.float32),
                jnp.zeros(1, jnp.uint32),
                jnp.zeros(1, jnp.int32),
            )[0]
        )
        != 1
    )


def test_ties_are_kept_together():
    """Three tokens tie for the second place.

    top_k = 2 and a top_p that ends among them keep all three.
    """
    logits = np.full(300, -5.0, np.float32)
    logits[[10, 100, 200]], logits[299] = 1.0, 1.2
    for sampler in (Sampler(1.0, top_k=2), Sampler(1.0, top_p=0.5), Sampler(1.0, min_p=0.8)):
        seen = counts(sampler, logits, rounds=1)
        assert set(np.flatnonzero(seen)) == {10, 100, 200, 299}
    assert set(np.flatnonzero(counts(Sampler(1.0, top_k=1), logits, rounds=1))) == {299}


def test_negative_and_signed_zero_logits_are_ordered():
    logits = np.asarray([-0.0, 0.0, -1e-30, -7.0, 1e-30] + [-9.0] * 295, np.float32)
    assert set(np.flatnonzero(counts(Sampler(1.0, top_k=2), logits, rounds=1))) <= {0, 1, 4}
    assert set(np.flatnonzero(counts(Sampler(1.0, top_k=5), logits))) == {0, 1, 2, 3, 4}


def test_rows_keep_their_own_settings():
    """One batch of all settings.

    Each row draws from its own support, and greedy rows are greedy.
    """
    samplers = [*SETTINGS, Sampler(), Sampler(forbidden=(4,))]
    vocab, draws = 300, 200
    logits = np.stack([gentle(vocab, r) for r in range(len(samplers))])
    stacked = Samplers.stack(samplers, places=SamplerPlaces(4))
    seen = np.zeros(logits.shape, bool)
    for position in range(draws):
        tokens = sample(
            stacked,
            logits,
            jnp.arange(len(samplers), dtype=jnp.uint32),
            jnp.full(len(samplers), position, jnp.int32),
        )
        seen[np.arange(len(samplers)), np.asarray(tokens)] = True
    for r, sampler in enumerate(samplers[:-2]):
        support = expected_probabilities(logits[r], sampler) > 0
        assert not (seen[r] & ~support).any()
        assert seen[r].sum() >= (8 if support.sum() > 30 else 1)
    assert np.flatnonzero(seen[-2]).tolist() == [np.argmax(logits[-2])]
    assert np.flatnonzero(seen[-1]).tolist() == [
        max((t for t in range(vocab) if t != 4), key=lambda t: logits[-1][t])
    ]


def test_a_draw_depends_on_its_seed_and_position_alone():
    """Alone, in batches of any size, in any row, beside any other settings."""
    logits = gentle(300)
    seeds, positions = (
        np.asarray([5, 5, 9, 2**32 - 1, 0], np.uint32),
        np.asarray([0, 7, 0, 3, 2**31 - 1], np.int32),
    )
    chosen = [
        Sampler(1.0),
        Sampler(0.7, top_p=0.9),
        Sampler(1.0, top_k=40),
        Sampler(1.5, min_p=0.2),
        Sampler(1.0),
    ]
    one = [slice(i, i + 1) for i in range(len(chosen))]
    alone = [
        int(
            sample(
                Samplers.stack(chosen[i], places=SamplerPlaces(0)),
                logits[None],
                seeds[i],
                positions[i],
            )[0]
        )
        for i in one
    ]
    order = [3, 0, 4, 1, 2]
    others = [Sampler(), Sampler(2.0, top_k=3)]
    stacked = Samplers.stack([*others, *(chosen[i] for i in order)], places=SamplerPlaces(0))
    batch = sample(
        stacked,
        np.stack([gentle(300, 8), gentle(300, 9), *[logits] * 5]),
        jnp.asarray([1, 1, *seeds[order]], jnp.uint32),
        jnp.asarray([0, 0, *positions[order]], jnp.int32),
    )
    assert np.asarray(batch)[2:].tolist() == [alone[i] for i in order]


def test_uniforms_are_those_of_jax():
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, (500, 2), dtype=np.uint32)
    positions = np.r_[0:10, rng.integers(0, 2**31 - 1, 489), 2**31 - 1].astype(np.int32)
    words[:4] = [[0, 0], [0, 2**32 - 1], [2**32 - 1, 0], [2**32 - 1, 2**32 - 1]]

    def draw(words, position):
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, position))

    np.testing.assert_array_equal(uniforms(words, positions), jax.vmap(draw)(words, positions))
    np.testing.assert_array_equal(
        jax.jit(uniforms)(words[:1], positions[:1]), jax.vmap(draw)(words[:1], positions[:1])
    )


def test_uniforms_differ_by_seed_and_by_position_and_are_uniform():
    seeds, positions = np.meshgrid(np.arange(200, dtype=np.uint32), np.arange(200, dtype=np.int32))
    u = np.asarray(uniforms(keys(jnp.asarray(seeds.ravel())), jnp.asarray(positions.ravel())))
    assert u.min() >= 0 and u.max() < 1
    assert len(np.unique(u)) > 0.995 * u.size  # 2**23 values: about 95 pairs of 40000 coincide
    # Kolmogorov-Smirnov, 1%
    assert np.abs(np.sort(u) - (np.arange(u.size) + 0.5) / u.size).max() < 1.6 / math.sqrt(u.size)
    grid = u.reshape(200, 200)
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.02


@pytest.mark.parametrize("seed", range(8))
def test_tokens_of_weight_zero_are_never_drawn(seed):
    """Uniform numbers exactly at the borders between tokens, where rounding decides.

    They are multiples of 2**-23.
    """
    rng, vocab = np.random.default_rng(seed), 1000
    weights = np.exp(rng.normal(size=vocab) * 3).astype(np.float32)
    weights[rng.random(vocab) < 0.5] = 0
    border = np.cumsum(weights.astype(np.float64)) / weights.sum(dtype=np.float64)
    ticks = np.unique(np.clip(np.round(border * 2**23)[:, None] + np.arange(-8, 9), 0, 2**23 - 1))
    ticks = np.resize(ticks, 8704)
    tokens = np.asarray(drawn(jnp.asarray(weights), jnp.asarray(ticks / 2**23, jnp.float32)))
    assert (tokens >= 0).all() and (tokens < vocab).all()
    assert not (weights[tokens] == 0).any()
    below, above = np.concatenate([[0], border])[tokens], border[tokens]
    assert (ticks / 2**23 > below - 2e-6).all() and (ticks / 2**23 < above + 2e-6).all()


@jax.jit
def drawn(weights, uniform):
    return _draw(jnp.broadcast_to(weights, (uniform.shape[0], weights.shape[0])), uniform)


@pytest.mark.parametrize("places", [(0,), (999,), (255, 256), (511, 512, 999)])
def test_the_first_and_the_last_uniform_number_stay_inside(places):
    weights = np.zeros(1000, np.float32)
    weights[list(places)] = 0.1
    uniform = jnp.resize(jnp.asarray([0.0, 0.5, 1 - 2**-24, 1 - 2**-23, 1.0]), 8704)
    tokens = np.asarray(drawn(jnp.asarray(weights), uniform))
    assert (
        set(tokens) <= set(places)
        and tokens[0] == places[0]
        and tokens[2] == tokens[4] == places[-1]
    )


def test_logprob_is_the_models_own():
    logits = (np.random.default_rng(0).normal(size=(5, 300)) * 4).astype(np.float32)
    tokens = np.asarray([0, 299, 7, 7, 100], np.int32)
    exact = logits.astype(np.float64)
    expected = exact[np.arange(5), tokens] - np.log(np.exp(exact).sum(axis=1))
    np.testing.assert_allclose(jax.jit(logprob)(logits, tokens), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("settings_", "words"),
    [
        ({"temperature": -0.1}, "temperature is -0.1; it must be at least 0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"top_k": -1}, "top_k is -1; it must be at least 0"),
        ({"top_p": 0.0}, "top_p is 0.0; it must be above 0 and at most 1"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"min_p": -0.5}, "min_p is -0.5; it must be between 0 and 1"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"bias": {-3: 1.0}}, "names token -3; tokens are numbered from 0"),
        ({"forbidden": (4, -1)}, "names token -1"),
    ],
)
def test_settings_out_of_range_are_refused(settings_, words):
    with pytest.raises(ValueError, match=words):
        Sampler(**settings_)


@pytest.mark.parametrize("bias", [math.nan, math.inf])
def test_a_bias_that_is_no_number_is_refused(bias):
    with pytest.raises(ValueError, match="bias"):
        Sampler(bias={3: bias})


def test_settings_at_the_ends_of_their_ranges_are_taken():
    Sampler(0.0, 0, 1.0, 0.0)
    Sampler(100.0, 10**6, 1e-9, 1.0)
    assert Sampler() == Sampler(temperature=0.0)


def test_stack_makes_room_for_bias_and_refuses_too_little():
    samplers = [Sampler(bias={1: 2.0}), Sampler(forbidden=(4, 5)), Sampler()]
    stacked = Samplers.stack(samplers)
    assert stacked.edit_tokens.shape == stacked.edit_values.shape == (3, 2)
    assert Samplers.stack(samplers, places=SamplerPlaces(5)).edit_tokens.shape == (3, 5)
    with pytest.raises(
        ValueError, match="sampler 1 has 2 biased or forbidden tokens; there are places for 1"
    ):
        Samplers.stack(samplers, places=SamplerPlaces(1))


def test_samplers_are_frozen():
    for thing in (Sampler(), Samplers.stack([Sampler()])):
        for field in dataclasses.fields(thing):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(thing, field.name, 1)
