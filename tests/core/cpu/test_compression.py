"""The kernel that keeps the largest logits of rows, against a sort and sums by NumPy."""

import jax
import numpy as np
import pytest

from jaxshare import cpu
from jaxshare.decoding.top_logits import compress_logits

pytestmark = pytest.mark.skipif(not cpu.available(), reason="there are no kernels for this CPU")


def expected(logits, kept_at, k):
    """The fields of `TopLogits`, of one row: by a stable sort, and sums of float64."""
    order = np.argsort(-logits, kind="stable")[:k]
    tokens = np.sort(order)
    wide = logits.astype(np.float64)
    mass = np.exp((wide - wide.max()) / kept_at)
    at_1 = np.exp(wide - wide.max())
    mass[tokens] = at_1[tokens] = 0
    return tokens, logits[tokens], np.cumsum(mass)[tokens], mass.sum(), at_1.sum()


def drawn(kind, rows, vocab, rng):
    logits = (3 * rng.normal(size=(rows, vocab))).astype(np.float32)
    if kind == "ties":
        logits = np.round(logits) + np.float32(0)  # of one zero
    if kind == "banned":
        logits[:, rng.random(vocab) < 0.6] = -np.inf
        logits[:, 0] = 1
    if kind == "far":
        logits *= 40
    return logits


@pytest.mark.parametrize("kind", ["plain", "ties", "banned", "far"])
@pytest.mark.parametrize(
    ("rows", "vocab", "k"),
    [(6, 402, 64), (1, 5, 5), (3, 7, 2), (2, 1, 1), (2, 513, 40), (3, 33, 16), (2, 5000, 128)],
)
def test_kept_logits_and_masses_are_those_of_a_sort(rows, vocab, k, kind):
    rng = np.random.default_rng(rows * vocab)
    logits = drawn(kind, rows, vocab, rng)
    temperature = rng.choice([0.0, 0.2, 1.0, 1.7], rows).astype(np.float32)
    found = jax.jit(compress_logits, static_argnums=2)(logits, temperature, k)
    for row in range(rows):
        kept_at = temperature[row] or np.float32(1)
        fields = expected(logits[row], np.float64(kept_at), k)
        got = (found.tokens, found.logits, found.below, found.rest, found.rest_at_1)
        for name, value, want in zip(
            ["tokens", "kept", "below", "rest", "at_1"], got, fields, strict=True
        ):
            if name in ("tokens", "kept"):
                np.testing.assert_array_equal(np.asarray(value)[row], want)
            else:
                np.testing.assert_allclose(np.asarray(value)[row], want, rtol=2e-6, atol=1e-30)
        assert found.kept_at[row] == kept_at


@pytest.mark.parametrize("odd", [np.nan, np.inf])
def test_a_row_that_is_odd_has_no_masses(odd):
    logits = np.random.default_rng(0).normal(size=(3, 100)).astype(np.float32)
    logits[1, 50] = odd
    found = jax.jit(compress_logits, static_argnums=2)(logits, np.ones(3, np.float32), 8)
    for name in ("below", "rest", "rest_at_1"):
        is_odd = np.isnan(np.asarray(getattr(found, name))).reshape(3, -1).all(axis=1)
        np.testing.assert_array_equal(is_odd, [False, True, False])
