"""Top logits of distributions, against numpy's sort and sums in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshare.decoding.top_logits import TopLogits, compress_logits
from tests.helpers import on_device

KEEP = jax.jit(compress_logits, static_argnums=2)


def kept_of(logits: np.ndarray, temperature, k: int) -> TopLogits:
    temperatures = np.broadcast_to(np.float32(temperature), len(logits))
    return jax.tree.map(np.asarray, KEEP(on_device(logits), on_device(temperatures), k))


def check(kept: TopLogits, logits: np.ndarray, temperature: float, k: int) -> None:
    t = float(np.float32(temperature)) or 1.0
    assert kept.vocab == logits.shape[1] and (kept.kept_at == np.float32(t)).all()
    for r, row in enumerate(logits.astype(np.float64)):
        tokens = sorted(sorted(range(len(row)), key=lambda v, row=row: (-row[v], v))[:k])
        np.testing.assert_array_equal(kept.tokens[r], tokens)
        np.testing.assert_array_equal(kept.logits[r], logits[r][tokens])
        others = np.ones(len(row), bool)
        others[tokens] = False
        for at, whole in ((t, kept.rest[r]), (1.0, kept.rest_at_1[r])):
            mass = np.where(others, np.exp((row - row.max()) / at), 0)
            np.testing.assert_allclose(whole, mass.sum(), rtol=1e-5, atol=1e-36)
            if at == t:
                before = np.asarray([mass[:token].sum() for token in tokens])
                # A replay relies on an error that is small against the whole.
                assert np.abs(kept.below[r] - before).max() <= 1e-5 * mass.sum() + 1e-36


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.5])
@pytest.mark.parametrize(
    ("vocab", "k"),
    [(5, 2), (256, 1), (257, 40), (300, 299), (3000, 30), (7, 7), (7, 50), (513, 513)],
)
def test_keeps_the_largest_and_the_mass_of_the_others(vocab, k, temperature):
    logits = (np.random.default_rng(vocab + k).normal(size=(3, vocab)) * 4 + 20).astype(np.float32)
    check(kept_of(logits, temperature, k), logits, temperature, k)


def test_at_the_size_of_a_real_vocabulary():
    logits = (np.random.default_rng(0).normal(size=(2, 151_936)) * 2).astype(np.float32)
    kept = kept_of(logits, 0.7, 1000)
    assert sum(a.nbytes for a in jax.tree.leaves(kept)) <= 0.03 * logits.nbytes
    mass = np.exp((logits.astype(np.float64) - logits.max(axis=1, keepdims=True)) / np.float32(0.7))
    np.put_along_axis(mass, kept.tokens, 0, axis=1)
    before = np.take_along_axis(np.cumsum(mass, axis=1), kept.tokens, axis=1)
    assert (np.abs(kept.below - before) <= 1e-6 * mass.sum(axis=1, keepdims=True)).all()


def test_of_tied_logits_the_lower_tokens_are_kept():
    logits = np.round(np.random.default_rng(1).normal(size=(8, 200)), 0).astype(np.float32)
    check(kept_of(logits, 1.0, 17), logits, 1.0, 17)
    assert kept_of(np.zeros((1, 30), np.float32), 1.0, 4).tokens.tolist() == [[0, 1, 2, 3]]


def test_rows_have_their_own_temperatures():
    logits = np.random.default_rng(2).normal(size=(3, 50)).astype(np.float32)
    kept = kept_of(logits, [0.0, 0.5, 2.0], 5)
    for r, temperature in enumerate([1.0, 0.5, 2.0]):
        check(jax.tree.map(lambda a, r=r: a[r : r + 1], kept), logits[r : r + 1], temperature, 5)


def test_forbidden_logits_have_no_mass_and_nan_shows():
    logits = np.random.default_rng(3).normal(size=(2, 40)).astype(np.float32)
    logits[0, 5:] = -np.inf
    check(kept_of(logits[:1], 1.0, 8), logits[:1], 1.0, 8)
    logits[1, 3] = np.nan
    kept = kept_of(logits, 1.0, 8)
    assert np.isfinite(kept.rest[0]) and np.isnan(kept.rest[1])


def test_room_has_the_shape_of_what_is_kept():
    kept = kept_of(np.zeros((3, 20), np.float32), 1.0, 6)
    room = TopLogits.empty((3,), 6, 20)
    assert jax.tree.structure(room) == jax.tree.structure(kept)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), room) == jax.tree.map(
        lambda a: (a.shape, a.dtype), kept
    )
    assert TopLogits.empty((2, 4), 50, 20).tokens.shape == (2, 4, 20)


def test_at_least_one_token_has_to_be_kept():
    with pytest.raises(ValueError, match="at least 1 token"):
        compress_logits(jnp.zeros((1, 3)), jnp.ones(1), 0)
