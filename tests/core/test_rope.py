"""Frequencies against formulas written down again, angles against float64, rotation against complex
numbers."""

import cmath
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxshare import Rope
from jaxshare.rope import rotate
from tests.helpers import rotated

# two roundings of up to half a rotation, 1.2e-7 each, and the errors of cos and sin; a float32
# product errs by 0.06
ANGLE_TOLERANCE = 4e-7


def by_definition(dim: int, theta: float) -> list[float]:
    return [1.0 / math.exp(2 * i / dim * math.log(theta)) for i in range(dim // 2)]


def frequencies_close(rope: Rope, expected: list[float]) -> None:
    assert len(rope.frequencies) == len(expected) == rope.rotary_dim // 2
    np.testing.assert_allclose(rope.frequencies, expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("dim", "theta"), [(2, 10_000.0), (64, 10_000.0), (80, 500_000.0), (128, 1e6)]
)
def test_default_frequencies(dim, theta):
    frequencies_close(Rope.default(dim, theta), by_definition(dim, theta))
    assert Rope.default(dim, theta).attention_factor == 1.0


def test_linear_divides_positions():
    frequencies_close(Rope.linear(64, 10_000.0, 4.0), [f / 4 for f in by_definition(64, 10_000.0)])


@pytest.mark.parametrize(
    ("factor", "low", "high", "original"),
    [(8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192), (2.0, 2.0, 3.0, 256)],
)
def test_llama3_frequencies(factor, low, high, original):
    expected, kinds = [], set()
    for f in by_definition(64, 500_000.0):
        wavelength = 2 * math.pi / f
        if wavelength < original / high:
            expected.append(f)
            kinds.add("kept")
        elif wavelength > original / low:
            expected.append(f / factor)
            kinds.add("divided")
        else:
            smooth = (original / wavelength - low) / (high - low)
            expected.append((1 - smooth) * f / factor + smooth * f)
            kinds.add("between")
    assert {"kept", "divided"} <= kinds
    frequencies_close(Rope.llama3(64, 500_000.0, factor, low, high, original), expected)


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(
    ("theta", "factor", "original", "fast", "slow"),
    [
        (10_000.0, 16.0, 4096, 32.0, 1.0),
        (1e6, 4.0, 32768, 32.0, 1.0),
        (150_000.0, 32.0, 4096, 8.0, 2.0),
    ],
)
def test_yarn_frequencies(theta, factor, original, fast, slow, truncate):
    dim = 64
    base = by_definition(dim, theta)

    # the real-valued pair whose wavelength fits `rotations` times into the original context
    def place(rotations: float) -> float:
        return math.log(original / (2 * math.pi * rotations), theta) * dim / 2

    first, last = place(fast), place(slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    expected, kinds = [], set()
    for i, f in enumerate(base):
        if i <= first:
            expected.append(f)
            kinds.add("kept")
        elif i >= last:
            expected.append(f / factor)
            kinds.add("divided")
        else:
            share = (i - first) / (last - first)
            expected.append(f * (1 - share) + f / factor * share)
            kinds.add("between")
    assert kinds == {"kept", "divided", "between"}
    rope = Rope.yarn(dim, theta, factor, original, fast, slow, truncate=truncate)
    frequencies_close(rope, expected)
    assert rope.attention_factor == pytest.approx(1 + math.log(factor) / 10, rel=1e-12)


def test_yarn_clips_the_ramp_to_the_pairs():
    # Every pair rotates less than once in a context of 4 tokens: all are divided. In one of 10**9
    # tokens none is.
    frequencies_close(
        Rope.yarn(16, 10_000.0, 4.0, 4),
        [f if i == 0 else f / 4 for i, f in enumerate(by_definition(16, 10_000.0))],
    )
    frequencies_close(Rope.yarn(16, 10_000.0, 4.0, 10**9), by_definition(16, 10_000.0))


def test_yarn_attention_factors():
    yarn = lambda **more: Rope.yarn(64, 10_000.0, 40.0, 4096, **more).attention_factor  # noqa: E731
    assert yarn(attention_factor=1.25) == 1.25
    assert yarn(attention_factor=1.25, mscale=2.0, mscale_all_dim=1.0) == 1.25
    assert yarn(mscale=0.707, mscale_all_dim=0.5) == pytest.approx(
        (1 + 0.0707 * math.log(40)) / (1 + 0.05 * math.log(40)), rel=1e-12
    )
    assert yarn(mscale=0.707) == pytest.approx(1 + 0.1 * math.log(40), rel=1e-12)
    assert Rope.yarn(64, 10_000.0, 1.0, 4096).attention_factor == 1.0


def test_longrope_frequencies():
    divisors = [1.0 + 0.5 * i for i in range(24)]
    rope = Rope.longrope(48, 10_000.0, divisors, 1.19)
    frequencies_close(
        rope, [f / d for f, d in zip(by_definition(48, 10_000.0), divisors, strict=True)]
    )
    assert rope.attention_factor == 1.19


POSITIONS = np.unique(
    np.concatenate(
        [
            np.arange(-40, 41),
            2 ** np.arange(21),
            -(2 ** np.arange(21)),
            2 ** np.arange(21) - 1,
            [65537, 999_999, 1_000_000, -65537, -999_999, -1_000_000],
            np.random.default_rng(0).integers(-1_000_000, 1_000_001, 3000),
        ]
    )
).astype(np.int32)


@pytest.mark.parametrize(
    "rope",
    [
        Rope.default(64, 10_000.0),
        Rope.llama3(128, 500_000.0, 8.0, 1.0, 4.0, 8192),
        Rope.linear(32, 1e6, 3.0),
        Rope.longrope(8, 10_000.0, [0.1, 0.5, 1.0, 30.0], 1.0),
    ],
    ids=["default", "llama3", "linear", "fast"],
)
def test_angles_are_accurate_to_a_million(rope):
    cos, sin = jax.jit(rope.cos_sin)(jnp.asarray(POSITIONS))
    assert cos.dtype == sin.dtype == jnp.float32 and cos.shape == (
        len(POSITIONS),
        rope.rotary_dim // 2,
    )
    # float64 carries a million radians to 1e-10.
    angle = POSITIONS.astype(np.float64)[:, None] * np.asarray(rope.frequencies)
    assert np.abs(np.asarray(cos, np.float64) - np.cos(angle)).max() < ANGLE_TOLERANCE
    assert np.abs(np.asarray(sin, np.float64) - np.sin(angle)).max() < ANGLE_TOLERANCE


def test_angles_up_to_two_to_the_31():
    rope = Rope.default(64, 10_000.0)
    positions = np.asarray([2**24, 2**27 + 1, -(2**30) - 3, 2**31 - 1], np.int32)
    cos, sin = rope.cos_sin(jnp.asarray(positions))
    angle = positions.astype(np.longdouble)[:, None] * np.asarray(rope.frequencies, np.longdouble)
    assert np.abs(np.asarray(cos) - np.cos(angle)).max() < 1e-4
    assert np.abs(np.asarray(sin) - np.sin(angle)).max() < 1e-4


@settings(max_examples=30)
@given(st.integers(-500_000, 500_000), st.integers(-500_000, 500_000))
def test_rotations_compose(a, b):
    rope = Rope.default(32, 10_000.0)
    x = jnp.asarray(np.random.default_rng(abs(a)).normal(size=(3, 32)), jnp.float32)
    twice = rotate(rotate(x, *rope.cos_sin(jnp.int32(a))), *rope.cos_sin(jnp.int32(b)))
    np.testing.assert_allclose(twice, rotate(x, *rope.cos_sin(jnp.int32(a + b))), atol=4e-6)
    np.testing.assert_allclose(
        twice, rotated(np.asarray(x)[None], np.asarray([a + b]), rope)[0], atol=4e-6
    )


def test_rotation_is_multiplication_by_a_unit_number():
    rope = Rope.default(6, 100.0)
    x = np.asarray([1.0, 2.0, -3.0, 0.5, -1.0, 4.0], np.float32)
    out = np.asarray(rotate(jnp.asarray(x), *rope.cos_sin(jnp.int32(5))))
    for i, f in enumerate(rope.frequencies):
        expected = complex(x[i], x[i + 3]) * cmath.exp(5j * f)
        assert out[i] == pytest.approx(expected.real, abs=2e-6) and out[i + 3] == pytest.approx(
            expected.imag, abs=2e-6
        )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_partial_rotary_leaves_the_rest(dtype):
    rope = Rope.default(8, 10_000.0)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(5, 2, 20)), dtype)
    out = rotate(x, *(t[:, None] for t in rope.cos_sin(jnp.arange(1, 6))))
    assert out.dtype == dtype and out.shape == x.shape
    assert (out[..., 8:] == x[..., 8:]).all()
    assert (np.abs(np.asarray(out[..., :8] - x[..., :8], np.float32)).max(axis=-1) > 0.05).all()
    tolerance = {jnp.float32: 1e-6, jnp.bfloat16: 2**-8}[dtype]
    np.testing.assert_allclose(
        np.asarray(out, np.float64),
        rotated(np.asarray(x, np.float64), np.arange(1, 6), rope),
        rtol=tolerance,
        atol=tolerance,
    )


def test_the_attention_factor_scales_each_side_once():
    plain = Rope.default(16, 10_000.0)
    rope = dataclasses.replace(plain, attention_factor=1.5)
    at = jnp.arange(-3, 9)
    for scaled, unscaled, expected in zip(
        rope.cos_sin(at), rope.cos_sin(at, scaled=False), plain.cos_sin(at), strict=True
    ):
        np.testing.assert_array_equal(unscaled, expected)
        np.testing.assert_allclose(scaled, 1.5 * expected, rtol=1e-6)
    q, k = (jnp.asarray(np.random.default_rng(s).normal(size=16), jnp.float32) for s in (0, 1))
    with_factor = rotate(q, *rope.cos_sin(jnp.int32(9))) @ rotate(k, *rope.cos_sin(jnp.int32(4)))
    without = rotate(q, *plain.cos_sin(jnp.int32(9))) @ rotate(k, *plain.cos_sin(jnp.int32(4)))
    assert float(with_factor) == pytest.approx(1.5**2 * float(without), rel=1e-5)


@settings(max_examples=30)
@given(st.integers(-3000, 3000), st.sampled_from([0, 1, 4095, 65_530, 999_000, 1_000_000]))
def test_products_depend_on_the_difference_alone(difference, at):
    rope = Rope.default(64, 10_000.0)
    rng = np.random.default_rng(difference + 5000)
    q, k = (jnp.asarray(rng.normal(size=64), jnp.float32) for _ in range(2))
    moved = rotate(q, *rope.cos_sin(jnp.int32(at + difference))) @ rotate(
        k, *rope.cos_sin(jnp.int32(at))
    )
    exact = float(
        np.sum(
            rotated(np.asarray(q)[None, None], np.asarray([difference]), rope)[0, 0]
            * np.asarray(k, np.float64)
        )
    )
    assert float(moved) == pytest.approx(exact, abs=2e-5)


def test_a_rope_is_hashable_and_frozen():
    rope = Rope.default(8, 10_000.0)
    assert hash(rope) == hash(Rope.default(8, 10_000.0)) and rope == Rope.default(
        8, 10_000.0
    ) != Rope.default(8, 10_001.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        rope.attention_factor = 2.0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Rope.default(7, 10_000.0), "even number of entries, at least 2; got 7"),
        (lambda: Rope.default(0, 10_000.0), "at least 2; got 0"),
        (lambda: Rope.linear(-2, 10_000.0, 2.0), "at least 2; got -2"),
        (lambda: Rope.default(8, 0.0), "theta must be positive; got 0.0"),
        (lambda: Rope.default(8, -5.0), "theta must be positive; got -5.0"),
        (lambda: Rope.default(8, math.nan), "theta must be positive; got nan"),
        (
            lambda: Rope.longrope(8, 10_000.0, [1.0, 2.0], 1.0),
            "needs 4 factors, one for each rotated pair; got 2",
        ),
    ],
)
def test_bad_input(make, words):
    with pytest.raises(ValueError, match=words):
        make()
