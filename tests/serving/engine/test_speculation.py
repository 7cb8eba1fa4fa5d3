"""Drafts for a request that has parted from an earlier output, and the pass that verifies them."""

import jax.numpy as jnp
import numpy as np

from jaxshare import KVCache, Layout, Sampler, Samplers
from jaxshare.serving.engine.speculation import DraftLookup, verify
from tests.helpers import MODEL, TINY, VOCAB, run, tiny_params, tiny_state


def test_it_goes_on_where_the_answer_would_then_where_it_was_alike():
    drafts = DraftLookup(np.asarray([1, 2, 3, 4, 5, 6, 7, 8, 2, 3, 4, 9]))
    assert drafts.draft([1, 2, 11], 4) == [4, 5, 6, 7]  # one token took another's place
    assert drafts.draft([1, 2, 11, 12], 4) == []  # nothing is alike
    assert drafts.draft([1, 2, 11, 2, 3, 4], 3) == [5, 6, 7]  # of two places the nearer one
    assert drafts.draft([0] * 9 + [2, 3, 4], 3) == [9]
    assert drafts.draft([1, 2, 11, 2, 3, 4], 0) == []
    assert drafts.matches([7, 8, 2]) and not drafts.matches([8, 7, 2])


def test_who_guesses_wrong_again_and_again_guesses_no_more():
    drafts = DraftLookup(np.arange(100))
    for _ in range(5):
        drafts.report(0, 8)
    assert drafts.draft([4, 5, 6], 2) == [7, 8]
    drafts.report(8, 8)
    for _ in range(2):
        drafts.report(1, 8)
    assert drafts.draft([4, 5, 6], 2) == [] and not drafts.matches([4, 5, 6])


def test_an_answer_that_is_short_or_empty_guesses_nothing_but_itself():
    assert DraftLookup(np.asarray([], np.int32)).draft([], 4) == []
    assert DraftLookup(np.asarray([5, 6])).draft([4], 4) == [6]


def test_a_pass_over_guesses_draws_what_one_pass_a_token_would():
    """The same tokens as the decode loop's, for a prompt that is fed with its output."""
    prompt, hot, seed, new = [5, 17, 3, 44, 9], Sampler(temperature=1.3, top_p=0.95), 11, 8
    made = run(
        tiny_state([prompt], ((1,),), max_new_tokens=new, samplers=hot, seeds=seed)
    ).outputs()[0]
    for right in (0, 3, new - 1):
        guessed = [*made[:right], *[(token + 1) % VOCAB for token in made[right : new - 1]]]
        tokens, count = np.zeros((1, 16), np.int32), len(prompt) + len(guessed)
        tokens[0, :count] = [*prompt, *guessed]
        cache = KVCache.create(TINY, (64,), jnp.float32)
        _, drawn, finite, kept = verify(
            MODEL,
            tiny_params(),
            cache,
            Layout.from_blocks([[0]]),
            tokens,
            np.asarray([count]),
            Samplers.stack([hot]),
            np.asarray([[0, seed]], np.uint32),
            np.asarray([1 - len(prompt)]),
            4,
        )
        found = np.asarray(drawn)[0, len(prompt) - 1 : count].tolist()
        assert found[: right + 1] == made[: right + 1] and bool(finite[0])
        assert kept.tokens.shape == (1, 16, 4)
