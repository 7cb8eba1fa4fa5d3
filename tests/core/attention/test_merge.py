"""Merging partial attentions against one softmax over the union of their keys, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxshare.attention.merge import merge
from tests.helpers import on_device

QUERIES, DIM = 6, 5


def partial(scores: np.ndarray, values: np.ndarray):
    """Attention over one part, float64 inside: scores [Q, S], values [S, D]."""
    if not scores.shape[1]:
        return jnp.zeros((QUERIES, DIM)), jnp.full(QUERIES, -jnp.inf)
    top = scores.max(axis=1, keepdims=True)
    weights = np.exp(scores - top)
    out = weights @ values / weights.sum(axis=1, keepdims=True)
    return on_device(out, jnp.float32), on_device(
        top[:, 0] + np.log(weights.sum(axis=1)), jnp.float32
    )


def union(scores: list[np.ndarray], values: list[np.ndarray]):
    scores, values = np.concatenate(scores, axis=1), np.concatenate(values)
    top = scores.max(axis=1, keepdims=True)
    weights = np.exp(scores - top)
    return weights @ values / weights.sum(axis=1, keepdims=True), top[:, 0] + np.log(
        weights.sum(axis=1)
    )


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any),
    st.sampled_from([1.0, 10.0, 300.0]),
    st.integers(0, 1000),
)
def test_merging_is_a_softmax_over_the_union(sizes, spread, seed):
    rng = np.random.default_rng(seed)
    scores = [rng.normal(size=(QUERIES, n)) * spread + rng.normal() * spread for n in sizes]
    values = [rng.normal(size=(n, DIM)) for n in sizes]
    out, lse = merge(*(partial(s, v) for s, v in zip(scores, values, strict=True)))
    expected, expected_lse = union(scores, values)
    # An lse of some hundreds in float32 is good to 3e-5, and so are the weights made from it.
    np.testing.assert_allclose(out, expected, atol=1e-5 if spread < 100 else 5e-4)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gap", [80.0, 120.0, 1e4, 1e30])
def test_a_part_far_below_the_other_adds_nothing(gap):
    out = on_device([[1.0, 2.0]]), on_device([[-3.0, 7.0]])
    lse = on_device([gap / 2]), on_device([-gap / 2])
    for a, b in ((0, 1), (1, 0)):
        merged, top = merge((out[a], lse[a]), (out[b], lse[b]))
        np.testing.assert_array_equal(merged, out[0])
        np.testing.assert_array_equal(top, lse[0])


def test_parts_without_keys_change_nothing():
    rng = np.random.default_rng(0)
    some = partial(rng.normal(size=(QUERIES, 9)), rng.normal(size=(9, DIM)))
    none = jnp.zeros((QUERIES, DIM)), jnp.full(QUERIES, -jnp.inf)
    for parts in ((some, none), (none, some), (none, some, none), (some,)):
        out, lse = merge(*parts)
        np.testing.assert_allclose(out, some[0], rtol=1e-6)
        np.testing.assert_allclose(lse, some[1], rtol=1e-6)


def test_nothing_at_all_is_finite_and_stays_nothing():
    none = jnp.zeros((2, DIM)), jnp.full(2, -jnp.inf)
    out, lse = merge(none, none)
    np.testing.assert_array_equal(out, jnp.zeros((2, DIM)))
    assert jnp.isneginf(lse).all()
    # and it still merges with something
    some = jnp.ones((2, DIM)), on_device([3.0, -200.0])
    out, lse = merge((out, lse), some)
    np.testing.assert_array_equal(out, some[0])
    np.testing.assert_array_equal(lse, some[1])


def test_leading_axes_and_jit():
    rng = np.random.default_rng(1)
    shapes = (2, 3, 4, DIM), (2, 3, 4)
    parts = [
        tuple(on_device(rng.normal(size=shape), jnp.float32) for shape in shapes) for _ in range(3)
    ]
    out, lse = jax.jit(merge)(*parts)
    weights = np.exp(np.stack([np.asarray(lse_, np.float64) for _, lse_ in parts]))
    expected = (np.stack([np.asarray(o, np.float64) for o, _ in parts]) * weights[..., None]).sum(
        0
    ) / weights.sum(0)[..., None]
    np.testing.assert_allclose(out, expected, atol=1e-6)
    np.testing.assert_allclose(lse, np.log(weights.sum(0)), atol=1e-6)
