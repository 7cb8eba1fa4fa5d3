"""truncation_bounds against a sort in float64 NumPy: by the kernel of a CPU, by that of a GPU,
interpreted, and by XLA with few and with many thresholds a pass.

Where a sum of masses comes within rounding of what top_p or typical_p ask for, either side of it is
right. Tests of exact thresholds have masses that are powers of two and so have no rounding. The
others allow for `SLACK`: what is kept has to lie between what the oracle keeps for a share that much
smaller and that much larger, which nearly always are the same.
"""

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxshare import Sampler, Samplers, cpu
from jaxshare.decoding import truncation
from jaxshare.decoding.truncation import truncation_bounds
from jaxshare.pallas.device import Device, assume_device
from jaxshare.sharding import make_mesh
from tests.helpers import mostly_slow

SLACK = 4e-6
"""As a share of the whole mass."""
ROWS = 8
LOG_2 = float(np.float32(np.log(2)))
"""Its multiples by 1, 2, 4 and 8 have exponentials that are powers of two in float32."""
INF = float("inf")


@contextlib.contextmanager
def _without_kernels(bits: int) -> Iterator[None]:
    with (
        mock.patch.object(cpu, "floor_and_top", lambda *_: None),
        mock.patch.object(cpu, "typical", lambda *_: None),
        mock.patch.object(truncation, "_BITS_ON_CPU", bits),
    ):
        yield


def _by_xla(bits: int) -> Callable:
    def bounds(*arguments):
        with _without_kernels(bits):
            return truncation_bounds(*arguments)

    return jax.jit(bounds)


def _by_gpu(*arguments):
    with assume_device(Device("interpreted", 90, 3, interpret=True)):
        return truncation_bounds(*arguments)


BY = {
    "kernel": jax.jit(truncation_bounds),
    "2 bits": _by_xla(2),
    "4 bits": _by_xla(4),
    "gpu": jax.jit(_by_gpu),
}
ways = pytest.mark.parametrize("way", mostly_slow(["kernel", "4 bits", "2 bits", "gpu"], 2))


def found_by(way: str, logits, top_k=0, top_p=1.0, min_p=0.0, typical_p=None) -> np.ndarray:
    """The tokens, bool[R, V], between the bounds, which NumPy compares with the logits."""
    logits = np.asarray(logits, np.float32)
    settings = [(top_k, "int32"), (top_p, "float32"), (min_p, "float32")]
    settings += [] if typical_p is None else [(typical_p, "float32")]
    arrays = [np.broadcast_to(np.asarray(value, kind), len(logits)) for value, kind in settings]
    low, high = (np.asarray(each) for each in BY[way](logits, *arrays))
    assert low.shape == high.shape == (len(logits), 1) and low.dtype == high.dtype == "float32"
    return (logits >= low) & (logits <= high)


def likeliest(values: np.ndarray, masses: np.ndarray, share: float) -> np.ndarray:
    """The smallest set of the largest values with at least this share of all mass, and ties."""
    order = np.argsort(-values, kind="stable")
    cumulative = np.cumsum(masses[order])
    last = min(int(np.searchsorted(cumulative, share * cumulative[-1])), len(order) - 1)
    return values >= values[order[last]]


def expected(
    logits, top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0, *, slack: float = 0.0
) -> np.ndarray:
    """The tokens of one row, bool[V], that the definitions keep: sort, cut, renormalise; shares are
    larger by `slack`."""
    x = np.asarray(logits, np.float32).astype(np.float64)
    keep = np.ones(len(x), bool)
    if 0 < top_k < len(x):
        keep = x >= np.sort(x)[-top_k]

    def masses() -> np.ndarray:
        left = np.where(keep, np.exp(x - x.max()), 0)
        return left / left.sum()

    if top_p < 1:
        keep &= likeliest(np.where(keep, x, -INF), masses(), float(np.float32(top_p)) + slack)
    if min_p > 0:
        keep &= np.exp(x - x.max()) >= float(np.float32(min_p)) * (1 - 1e-7)
    if typical_p < 1:
        p = masses()
        surprise = -np.log(p, out=np.full(len(p), -INF), where=p > 0)
        entropy = np.sum(p[p > 0] * surprise[p > 0])
        nearness = np.where(p > 0, -np.abs(surprise - entropy), -INF)
        keep &= likeliest(nearness, p, float(np.float32(typical_p)) + slack)
    return keep


def check(way: str, logits, **settings) -> None:
    """Every row has what the oracle keeps, but for rounding."""
    found = found_by(way, logits, **settings)
    for r, row in enumerate(np.asarray(logits, np.float32)):
        own = {name: np.broadcast_to(v, len(logits))[r] for name, v in settings.items()}
        less, more = (expected(row, **own, slack=s) for s in (-SLACK, SLACK))
        inside = (~less | found[r]) & (~found[r] | more)
        assert inside.all(), (r, own, np.flatnonzero(~inside))


def normal(vocab: int, deviation: float = 3.0, seed: int = 0, rows: int = ROWS) -> np.ndarray:
    rng = np.random.default_rng([vocab, seed])
    return (rng.normal(size=(rows, vocab)) * deviation).astype(np.float32)


K = [0, 1, 2, 7, 50, 299, 300, 301]
P = [1.0, 0.9, 0.5, 0.05, 2.0**-126, 1 - 2.0**-24, 0.99, 1.0]
TYPICAL = [1.0, 0.9, 0.5, 0.2, 0.05, 2.0**-126, 1 - 2.0**-24, 0.7]


@ways
@given(
    st.integers(0, 10**6),
    st.sampled_from([0.01, 1.0, 3.0, 30.0]),
    st.lists(st.sampled_from([0, 1, 2, 5, 50, 299, 300, 10**9]), min_size=ROWS, max_size=ROWS),
    st.lists(st.sampled_from([2.0**-126, 0.05, 0.5, 0.93, 1.0]), min_size=ROWS, max_size=ROWS),
    st.lists(st.sampled_from([0.0, 0.01, 0.3, 1.0]), min_size=ROWS, max_size=ROWS),
    st.sampled_from([None, 0.5, 1.5]),
)
def test_the_kept_are_those_of_a_sort(way, seed, deviation, top_k, top_p, min_p, grid):
    """Any settings side by side; on a grid, many logits are equal."""
    logits = normal(300, deviation, seed)
    if grid is not None:
        logits = np.round(logits / grid).astype(np.float32) * np.float32(grid)
    check(way, logits, top_k=top_k, top_p=top_p, min_p=min_p)


@ways
@pytest.mark.parametrize("vocab", mostly_slow([257, 1, 769, 2, 255, 256]))
def test_vocabularies(way, vocab):
    for deviation in (0.0, 1.0, 10.0):
        check(way, normal(vocab, deviation), top_k=K, top_p=P)
    check(way, normal(vocab), top_k=[0, 1, 2, 3, vocab, vocab - 1, vocab + 1, 2**31 - 1])
    check(way, normal(vocab), top_p=P[::-1])


@pytest.mark.parametrize("vocab", [8, 15, 16, 17, 31, 33, 511, 512, 513, 1025, 20_001])
def test_vocabularies_of_the_kernel(vocab):
    """At the edges of its vectors and blocks, more groups than k and fewer."""
    for deviation in (0.3, 3.0):
        check("kernel", normal(vocab, deviation), top_k=K, top_p=P)
        check("kernel", normal(vocab, deviation, 1), top_k=[vocab // 2] * ROWS)
        check("kernel", normal(vocab, deviation, 2), top_p=P)
        check("kernel", normal(vocab, deviation, 3), top_k=K, typical_p=TYPICAL)


@pytest.mark.slow
@ways
@pytest.mark.parametrize("deviation", [0.1, 3.0])
def test_sums_over_a_large_vocabulary(way, deviation):
    """Where thousands of tokens are near the threshold, sums must be right to `SLACK`."""
    logits = normal(40_000, deviation)
    check(way, logits, top_p=P, top_k=[0, 0, 0, 0, 0, 0, 9_000, 30_000])
    check(way, logits, typical_p=TYPICAL)


@pytest.mark.parametrize("rows", [1, 3, 70])
def test_numbers_of_rows(rows):
    logits = normal(300, rows=rows)
    check("kernel", logits, top_k=np.resize(K, rows), top_p=np.resize(P[::-1], rows))


@ways
def test_a_row_does_not_depend_on_the_rows_beside_it(way):
    logits = normal(300)
    together = found_by(way, logits, top_k=K, top_p=P, typical_p=TYPICAL)
    for r in range(ROWS):
        others = np.roll(logits, r, axis=0) * np.float32(0.5)
        others[0] = logits[r]
        settings = {"top_k": [K[r], *[3] * 7], "top_p": [P[r], *[0.3] * 7]}
        settings["typical_p"] = [TYPICAL[r], *[0.4] * 7]
        np.testing.assert_array_equal(found_by(way, others, **settings)[0], together[r])


def numbers(*groups: tuple[float, int], vocab: int = 300) -> np.ndarray:
    """One row of these logits, each as often as it says and the rest -inf, in any order."""
    row = np.concatenate([np.full(n, value, np.float32) for value, n in groups])
    row = np.pad(row, (0, vocab - len(row)), constant_values=-INF)
    return np.random.default_rng(len(row)).permutation(row)


def sizes(way: str, row: np.ndarray, **settings) -> list[int]:
    """The number of tokens that each of ROWS settings keeps of the same logits."""
    return found_by(way, np.tile(row, (ROWS, 1)), **settings).sum(axis=1).tolist()


@ways
def test_ties_with_the_last_are_kept(way):
    row = numbers((0.0, 2), (-1.0, 3), (-2.0, 4), (-700.0, 91))
    assert sizes(way, row, top_k=[1, 2, 3, 5, 6, 9, 10, 100]) == [2, 2, 5, 5, 9, 9, 100, 100]
    assert sizes(way, row, top_k=[101, 300, 0, 1, 1, 1, 1, 1])[:3] == [300, 300, 300]


@ways
def test_sums_that_reach_the_share_exactly(way):
    """2, 2, 1 and 1/16 of mass: a total of 81/16, whose products with these shares are exact."""
    row = numbers((0.0, 2), (-LOG_2, 4), (-2 * LOG_2, 4), (-8 * LOG_2, 16), (-300.0, 50))
    masses = np.exp(row, dtype=np.float64)
    assert np.isclose(masses.sum(), 81 / 16)
    whole = numbers((0.0, 2), (-LOG_2, 4), (-INF, 1))
    just_above, just_below = np.nextafter(np.float32(0.5), np.float32([1, 0]))
    shares = [2.0**-126, just_below, 0.5, just_above, 0.75, 1 - 2.0**-24, 0.25, 1.0]
    assert sizes(way, whole, top_p=shares) == [2, 2, 2, 6, 6, 6, 2, 300]
    eighths = numbers((0.0, 4), (-LOG_2, 4), (-2 * LOG_2, 8))
    shares = [0.5, just_above, 0.75, np.nextafter(np.float32(0.75), np.float32(1))]
    shares += [1 - 2.0**-24, 0.25, 2.0**-126, just_below]
    assert sizes(way, eighths, top_p=shares) == [4, 8, 8, 16, 16, 4, 4, 4]
    # Of what top_k has left, 4 and 2 of mass, two thirds are the first four.
    shares = [0.6, 0.6666, 0.6667, 0.7, 0.3, 0.99, 1 - 2.0**-24, 1.0]
    assert sizes(way, eighths, top_k=5, top_p=shares) == [4, 4, 8, 8, 4, 8, 8, 8]


@ways
def test_all_equal(way):
    for value in (0.0, -5.0, 3e38, -3e38, 1e-40):
        row = np.full(300, value, np.float32)
        assert sizes(way, row, top_k=K, top_p=P) == [300] * ROWS


@ways
def test_minus_infinity(way):
    """It has no mass; a row of nothing else keeps everything, as top_k does that reaches it."""
    row = numbers((1.0, 1), (0.5, 2))
    assert sizes(way, row, top_k=[1, 2, 3, 4, 0, 0, 0, 0]) == [1, 3, 3, 300, 300, 300, 300, 300]
    assert sizes(way, row, top_p=1 - 2.0**-24) == [3] * ROWS
    assert sizes(way, np.full(300, -INF), top_k=K, top_p=P) == [300] * ROWS


@ways
def test_signed_zeros_are_equal(way):
    row = numbers((0.0, 3), (-0.0, 4), (-1e-30, 2), (1e-30, 1))
    assert sizes(way, row, top_k=K) == [300, 1, 8, 8, 300, 300, 300, 300]
    assert sizes(way, numbers((-0.0, 4), (0.0, 3)), top_p=0.5) == [7] * ROWS
    assert sizes(way, numbers((-0.0, 4), (0.0, 3)), top_k=1, top_p=0.5) == [7] * ROWS


@ways
def test_subnormal_numbers_differ(way):
    tiny = 2.0**-149
    row = numbers((3 * tiny, 1), (2 * tiny, 1), (tiny, 1), (0.0, 2), (-tiny, 1), (-2 * tiny, 1))
    assert sizes(way, row, top_k=[1, 2, 3, 4, 5, 6, 7, 8]) == [1, 2, 3, 5, 5, 6, 7, 300]


@ways
def test_numbers_that_differ_by_a_bit(way):
    """300 neighbours, among which only the last bits decide, and one far from them."""
    start = np.float32(-3.7).view(np.int32)
    row = np.random.default_rng(0).permutation(start + np.arange(300)).astype(np.int32)
    row = row.view(np.float32)
    row[5] = 2.0
    for settings in ({"top_k": [1, 2, 3, 50, 256, 298, 299, 300]}, {"top_k": K, "top_p": P}):
        check(way, np.tile(row, (ROWS, 1)), **settings)


@ways
@given(
    st.lists(
        st.one_of(
            st.floats(-100, 0, width=32),
            st.floats(width=32, allow_nan=False, allow_infinity=False),
            st.sampled_from([0.0, -0.0, -INF, -1.0]),
        ),
        min_size=ROWS,
        max_size=ROWS,
    ),
    st.lists(st.integers(0, 9), min_size=ROWS, max_size=ROWS),
)
def test_top_k_of_any_numbers(way, values, top_k):
    """Of every size, with no mass to be rounded."""
    check(way, np.tile(np.float32(values), (ROWS, 1)), top_k=top_k)


@ways
def test_a_number_that_is_none_harms_only_its_own_row(way):
    logits = normal(300)
    alone = found_by(way, logits, top_k=K, top_p=P)
    for value in (np.nan, np.float32(np.nan) * -1):
        logits[3, 7] = value
        found = found_by(way, logits, top_k=K, top_p=P)
        others = np.arange(ROWS) != 3
        np.testing.assert_array_equal(found[others], alone[others])


@ways
@given(
    st.integers(0, 10**6),
    st.sampled_from([0.1, 1.0, 3.0, 10.0]),
    st.sampled_from([0, 2, 50]),
    st.sampled_from([0.5, 0.9, 1.0]),
    st.sampled_from([0.0, 0.05]),
    st.permutations(TYPICAL),
)
def test_typical_is_nearest_to_the_entropy(way, seed, deviation, top_k, top_p, min_p, typical_p):
    settings = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "typical_p": typical_p}
    check(way, normal(300, deviation, seed), **settings)


@ways
def test_typical_can_leave_the_likeliest_out(way):
    """One token of probability 1/4 and 96 of 1/128: the entropy is 5.75 bits, from which 2 bits of
    surprise are farther than 7 are. The 96 have three quarters."""
    row = numbers((0.0, 1), (-5 * float(np.log(2)), 96))
    found = found_by(way, np.tile(row, (ROWS, 1)), typical_p=[0.1, 0.5, 0.74, 0.76, 0.9, 1, 1, 1])
    assert found.sum(axis=1).tolist() == [96, 96, 96, 97, 97, 300, 300, 300]
    assert not found[:3, np.argmax(row)].any() and found[3:, np.argmax(row)].all()


@ways
def test_typical_of_one_token_and_of_equal_ones(way):
    assert sizes(way, numbers((4.0, 1)), typical_p=TYPICAL) == [300, *[1] * 7]
    assert sizes(way, numbers((4.0, 7)), typical_p=TYPICAL) == [300, *[7] * 7]
    assert sizes(way, np.full(300, -2.0), typical_p=TYPICAL) == [300] * ROWS
    check(way, normal(1, rows=ROWS), typical_p=TYPICAL)


@pytest.mark.slow
def test_without_typical_the_bounds_are_the_same():
    logits = normal(300)
    for way in BY:
        without = found_by(way, logits, top_k=K, top_p=P)
        np.testing.assert_array_equal(
            without, found_by(way, logits, top_k=K, top_p=P, typical_p=1.0)
        )


@pytest.mark.parametrize("bits", mostly_slow([4, 2]))
def test_no_loop_is_in_the_program(bits):
    """So that no device waits for the host between passes."""
    logits = jax.ShapeDtypeStruct((ROWS, 300), "float32")
    rows = [jax.ShapeDtypeStruct((ROWS,), kind) for kind in ("int32", *["float32"] * 3)]
    assert " while(" not in _by_xla(bits).lower(logits, *rows).compile().as_text()


def test_over_a_mesh_rows_are_cut_as_on_one_device():
    mesh = make_mesh(tensor=2)
    samplers = Samplers.stack([Sampler(1.3, k, p) for k, p in zip(K, P, strict=True)])
    seeds = jnp.arange(2 * ROWS, dtype=jnp.uint32).reshape(ROWS, 2)
    arguments = samplers, normal(300), seeds, jnp.arange(ROWS)
    draw = jax.jit(Samplers.sample, static_argnames="mesh")
    np.testing.assert_array_equal(draw(*arguments), draw(*arguments, mesh=mesh))
