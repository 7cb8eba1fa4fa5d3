"""Sliding windows, softcaps and sinks in block attention, against the oracle of test_attention.py."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jaxshare import KVCache, Layout, block_attention, make_plan
from jaxshare.attention.block_share import block_attention_share
from tests.core.attention.test_attention import GQA, PROMPT, WIDE, cases, check
from tests.helpers import TINY, Scoring, mostly_slow, rotated

SINKS = (0.5, -1.0, 3.0, 0.0)
ALL_THREE = Scoring(70, 1.5, SINKS)
GENERAL = ("xla", "reference")


@settings(max_examples=30)
@given(cases(GQA))
def test_one_token_a_row(case):
    check(dataclasses.replace(GQA, scoring=ALL_THREE), case, implementations=GENERAL)


@pytest.mark.slow
@settings(max_examples=25)
@given(case=cases(dataclasses.replace(GQA, groups=(2, 3))))
def test_windows_over_blocks_that_groups_of_rows_see(case):
    shape = dataclasses.replace(GQA, groups=(2, 3), scoring=Scoring(window=130))
    check(shape, case, implementations=("xla",))


@pytest.mark.parametrize("window", mostly_slow([3, 1, 128]))
@settings(max_examples=15)
@given(case=cases(WIDE))
def test_ragged_tokens(window, case):
    """A window of one token is the token itself; one of three is narrower than a row's tokens."""
    check(dataclasses.replace(WIDE, scoring=Scoring(window)), case, implementations=("xla",))


@pytest.mark.slow
@settings(max_examples=8)
@given(case=cases(PROMPT))
def test_prompts_beside_single_tokens(case):
    check(dataclasses.replace(PROMPT, scoring=Scoring(50, 2.0)), case, implementations=("xla",))


def test_tiles_outside_the_window_are_not_read():
    """Also of blocks that several rows see: the first token that any of them sees decides."""
    cache = KVCache.create(TINY, (4096, 4096, 256, 256), jnp.float32)
    cache = dataclasses.replace(cache, lengths=jnp.asarray([4096, 4000, 20, 30]))
    layout = Layout.from_blocks([[0, 1, 2], [1, 0, 3]])
    count = jnp.ones(2, jnp.int32)
    planned = jax.jit(make_plan, static_argnames=("width", "window"))
    plan = planned(cache, layout, count, width=1, window=256)
    # Row 0 is at 8,116 and sees 235 tokens of block 1 from 3,765 on; row 1 is at 8,126, and sees 225
    # of block 0 from 3,871 on.
    assert int(plan.read_tokens) == (4000 - 3765) + (4096 - 3871) + 21 + 31
    whole = planned(cache, layout, count, width=1)
    assert int(whole.read_tokens) == 4000 + 4096 + 21 + 31
    # of 64 tokens: 58 to 62 of block 1, 60 to 63 of block 0, and one of each own block
    assert int(plan.private.count) == 5 + 4 + 1 + 1 and int(plan.shared.count) == 0


@pytest.mark.slow
def test_a_window_wider_than_the_text_changes_nothing():
    rng = np.random.default_rng(0)
    cache = KVCache.create(TINY, (64, 64), jnp.float32)
    layout, count = Layout.from_blocks([[0, 1]]), jnp.asarray([4])
    new = [jnp.asarray(rng.normal(size=(1, 4, n, 16)), jnp.float32) for n in (4, 2, 2)]

    @functools.partial(jax.jit, static_argnames="window")
    def attended(window: int) -> jax.Array:
        plan = make_plan(cache, layout, count, 4, window=window)
        filled = cache.append(0, *new[1:], plan)
        return block_attention(new[0], filled.keys[0], filled.values[0], plan)

    np.testing.assert_allclose(attended(window=1000), attended(window=0), atol=1e-6)


def test_shares_are_of_what_the_window_leaves():
    """A block outside the window has none; with one token of a block in it, its share is that
    token's weight."""
    rng = np.random.default_rng(1)
    cache = KVCache.create(TINY, (64, 64, 64), jnp.float32)
    keys = rng.normal(size=cache.keys[0].shape)  # as they are in the arena: rotated already
    lengths, q, rope = [40, 10, 1], rng.normal(size=(4, 16)), TINY.rope
    cache = dataclasses.replace(cache, lengths=jnp.asarray([40, 10, 0]))
    layout = Layout.from_blocks([[0, 1, 2]])

    def scores(slot: int, visible: int) -> np.ndarray:
        """Of the last so many tokens of a block, [4, visible]."""
        query = rotated(q, np.asarray(50 - sum(lengths[:slot])), rope, rope.attention_factor)
        end = int(cache.offsets[slot]) + lengths[slot]
        k = keys[:, end - visible : end]
        return 3.0 * np.tanh(np.einsum("kgd,ksd->kgs", query.reshape(2, 2, 16), k) / 12.0)

    @functools.partial(jax.jit, static_argnames="window")
    def share_of(q, keys, window):
        plan = make_plan(cache, layout, jnp.asarray([1]), 1, window=window)
        return block_attention_share(q, keys, plan, 0.25, softcap=3.0)

    for window, visible in ((5, [0, 4, 1]), (12, [1, 10, 1])):
        share = np.asarray(share_of(*map(jnp.float32, (q[None, None], keys)), window=window))[0, 0]
        sums = [np.exp(scores(*of)).sum(axis=-1).reshape(4) for of in enumerate(visible)]
        expected = np.stack(sums, axis=-1) / np.sum(sums, axis=0)[:, None]
        np.testing.assert_allclose(share, expected, atol=1e-5)
