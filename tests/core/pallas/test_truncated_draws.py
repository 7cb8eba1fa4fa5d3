"""Draws by the kernel of a GPU, interpreted on the CPU, against those of XLA, which shares no code
with it.

Bounds are held against a sort in tests/core/decoding/test_truncation.py. A draw may differ where a
sum's rounding decides, which with random numbers of 24 bits and some hundred draws does not come.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshare import Sampler, Samplers
from jaxshare.decoding.history import History
from jaxshare.pallas import truncated_draws
from jaxshare.pallas.device import H200, Device, assume_device
from tests.helpers import mostly_slow

INTERPRETED = Device("interpreted", 90, multiprocessors=3, interpret=True)
SAMPLERS = [
    Sampler(),
    Sampler(0.7, top_k=50, top_p=0.9, min_p=0.05),
    Sampler(1.0, top_k=1),
    Sampler(1.0, top_p=0.5),
    Sampler(1.5),
    Sampler(0.3, typical_p=0.5),
    Sampler(3.0, top_k=200, top_p=0.99),
    Sampler(2.0, min_p=0.2),
]
"""Settings of all kinds side by side."""
ROWS = len(SAMPLERS)


@jax.jit
def by_xla(samplers, logits, seeds, positions, history=None, masks=None):
    return samplers.sample(logits, seeds, positions, history=history, masks=masks)


@jax.jit
def by_kernel(samplers, logits, seeds, positions, history=None, masks=None):
    with assume_device(INTERPRETED):
        return samplers.sample(logits, seeds, positions, history=history, masks=masks)


def compare(logits, samplers=None, draws: int = 3, **more) -> np.ndarray:
    """The tokens of the last draw, after all are found equal."""
    samplers = Samplers.stack(SAMPLERS) if samplers is None else samplers
    found = np.empty(0)
    for position in range(draws):
        rng = np.random.default_rng([position, 7])
        seeds = rng.integers(0, 2**32, (ROWS, 2)).astype(np.uint32)
        given = samplers, jnp.asarray(logits), seeds, np.full(ROWS, position, np.int32)
        found, expected = (np.asarray(draw(*given, **more)) for draw in (by_kernel, by_xla))
        assert found.dtype == np.int32
        np.testing.assert_array_equal(found, expected)
    return found


def normal(vocab: int, deviation: float = 3.0) -> np.ndarray:
    rng = np.random.default_rng(vocab)
    return (rng.normal(size=(ROWS, vocab)) * deviation).astype(np.float32)


@pytest.mark.parametrize("vocab", mostly_slow([300, 1, 128, 129, 12_000]))
def test_draws_are_those_of_xla(vocab):
    compare(normal(vocab))
    compare(np.round(normal(vocab)))  # where many are equal
    compare(np.where(normal(vocab) > 1, normal(vocab), -np.inf))


@pytest.mark.slow
@pytest.mark.parametrize("deviation", [0.01, 3.0])
def test_many_tiles(monkeypatch, deviation):
    """Where places keep four of each 8 logits: of flat ones thresholds take passes over the row."""
    monkeypatch.setattr(truncated_draws, "_TILE", 128)
    jax.clear_caches()
    logits = normal(1001, deviation)
    compare(logits)
    logits[:, 5::128] += 9.0  # more than four of the largest are at one place
    compare(logits)
    jax.clear_caches()


def test_rows_without_a_token():
    """No logit is left, or one is not a number."""
    logits = normal(300)
    logits[0] = logits[1] = -np.inf
    logits[2, 7], logits[3, 9] = np.nan, -np.float32(np.nan)
    found = compare(logits)
    assert (found[:4] == -1).all() and (found[4:] >= 0).all()


def test_ties_at_the_last_that_is_kept_and_the_first_of_the_largest():
    logits = np.full((ROWS, 300), -7, np.float32)
    logits[:, :6] = 1, 5, 5, 3, 3, 3
    cut = Samplers.stack([Sampler(1.0, top_k=3)] * ROWS)
    drawn = np.unique([compare(logits, cut, 1)] + [compare(logits, cut, n) for n in (9, 17)])
    assert {*drawn.tolist()} <= {1, 2, 3, 4, 5}
    assert compare(logits, Samplers.stack([Sampler()] * ROWS), 1).tolist() == [1] * ROWS


@pytest.mark.slow
def test_changes_of_logits_come_before():
    """Biases, penalties, bans and the masks of grammars."""
    vocab, likely = 300, np.zeros((ROWS, 300), np.float32)
    likely[:, [3, 40, 41]] = 12, 11.5, 11
    own = {"repetition_penalty": 1.3, "presence_penalty": 2.0, "bias": {41: 1.0, 7: 12.0}}
    samplers = [dataclasses.replace(each, **own) for each in SAMPLERS]
    history = History.for_samplers(samplers, [9] * ROWS, vocab)
    for row in range(ROWS):
        history = history.with_text(row, [3, 40, 3], 1)
    masks = np.full((ROWS, 10), 2**32 - 1, np.uint32)
    masks[:4] = 0
    masks[:4, 1] = 1 << 8 | 1 << 9  # tokens 40 and 41
    found = compare(likely, Samplers.stack(samplers), history=history, masks=jnp.asarray(masks))
    assert {*found[:4].tolist()} <= {40, 41} and 7 in found[4:]


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-24])
def test_the_first_and_the_last_number_stay_inside(uniform):
    logits = np.full((ROWS, 1000), -np.inf, np.float32)
    logits[:, [255, 256, 999]] = 0.0
    one, none = jnp.ones(ROWS), jnp.zeros(ROWS)
    drawn = truncated_draws.drawn(
        jnp.asarray(logits), one, none.astype(int), one, none, one, none + uniform, INTERPRETED
    )
    assert drawn.tolist() == [255 if uniform == 0 else 999] * ROWS


def test_it_is_for_float32_on_nvidia_gpus_from_ampere_on():
    logits = jnp.zeros((2, 5))
    assert truncated_draws.draws_on(logits) is None
    with assume_device(H200):
        assert truncated_draws.draws_on(logits) == H200
        assert truncated_draws.draws_on(logits.astype(jnp.bfloat16)) is None
    with assume_device(dataclasses.replace(H200, capability=75)):
        assert truncated_draws.draws_on(logits) is None
