"""Stored prefixes: calls with them against calls with the whole prompts, and a store's life."""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from jaxshare import Sampler
from jaxshare.serving.branches.generate import generate
from jaxshare.serving.branches.prefix import Prefixes
from jaxshare.serving.branches.prompt_tree import Branch
from jaxshare.serving.branches.run import Branches
from tests.serving.branches.test_branches import (
    HOT,
    model,
    plain_greedy,
    plain_logits,
    texts,
    token_bytes,
    with_stops,
)

_RNG = np.random.default_rng(4)
DOCUMENT, BOOK, CHAPTER, FIRST, SECOND = (
    _RNG.integers(3, 402, size).tolist() for size in (300, 12, 5, 4, 7)
)
QUESTIONS = [FIRST, SECOND]
NEW = 8


@functools.cache
def the_store() -> Prefixes:
    """A store for all tests, so that they share programs."""
    return Prefixes(model(), max_tokens=512)


@pytest.fixture
def store() -> Iterator[Prefixes]:
    """An empty store, which every test must leave empty."""
    empty = the_store()
    yield empty
    if empty.busy or empty.free_tokens != 512:
        the_store.cache_clear()  # a failing test must not fail the others
    assert not empty.busy
    assert empty.free_tokens == 512


def greedy(prompts: list[list[int]]) -> list[list[int]]:
    """Two greedy completions of each prompt."""
    return [plain_greedy(tokens, NEW)[0] for tokens in prompts for _ in range(2)]


def test_completions_below_a_prefix_are_those_of_whole_prompts(store):
    """The document is longer than one pass of prefill."""
    with store.add(DOCUMENT) as document:
        assert document.tokens == 300
        np.testing.assert_allclose(document.logits, plain_logits(DOCUMENT)[-1], atol=1e-3)
        done = generate(
            model(),
            QUESTIONS,
            n=2,
            max_new_tokens=NEW,
            sampler=Sampler(),
            prefix=document,
            share=True,
        )
        assert [[*c.tokens] for c in done.completions] == greedy(
            [DOCUMENT + question for question in QUESTIONS]
        )
        assert (done.prompt_tokens, done.unique_tokens) == (304 + 307, 300 + 4 + 7)
        # A small pass for each question, and then one for each token that is fed: the document is not
        # prefilled again.
        assert done.passes == 2 + max(len(c.tokens) for c in done.completions) - 1
        assert (
            done.kv_bytes
            == (311 + sum(len(c.tokens) - 1 for c in done.completions)) * token_bytes()
        )


@pytest.mark.slow
def test_samples_below_a_prefix_are_those_of_whole_prompts(store):
    options = {"n": 2, "max_new_tokens": NEW, "sampler": HOT, "seed": 3, "share": True}
    whole = generate(model(), [BOOK + question for question in QUESTIONS], **options)
    with store.add(BOOK) as book:
        again = generate(model(), QUESTIONS, prefix=book, **options)
    assert texts(again) == texts(whole)
    np.testing.assert_allclose(
        [c.logprob for c in again.completions], [c.logprob for c in whole.completions], atol=1e-3
    )
    assert (again.kv_bytes, again.unique_tokens, again.prompt_tokens) == (
        whole.kv_bytes,
        whole.unique_tokens,
        whole.prompt_tokens,
    )
    # A small pass for each question; the book is prefilled before, in a pass that `whole` counts.
    assert (again.passes, whole.passes) == (2 + 7, 1 + 2 + 7)


def test_extensions_see_what_precedes_them(store):
    """A book with two chapters side by side, and the book with the first chapter in one piece."""
    book = store.add(BOOK)
    chapter, other = book.extend(CHAPTER), book.extend(SECOND)
    piece = store.add(BOOK + CHAPTER)
    assert (book.tokens, chapter.tokens, piece.tokens) == (12, 17, 17)
    assert store.free_tokens == 512 - 12 - 5 - 7 - 17  # the book is stored once for both chapters
    for prefix, tokens in (
        (book, BOOK),
        (chapter, BOOK + CHAPTER),
        (other, BOOK + SECOND),
        (piece, BOOK + CHAPTER),
    ):
        np.testing.assert_allclose(prefix.logits, plain_logits(tokens)[-1], atol=1e-3)
    for prefix, tokens in ((other, BOOK + SECOND), (piece, BOOK + CHAPTER)):
        done = generate(
            model(),
            QUESTIONS,
            n=2,
            max_new_tokens=NEW,
            sampler=Sampler(),
            prefix=prefix,
            share=True,
        )
        assert [[*c.tokens] for c in done.completions] == greedy(
            [tokens + question for question in QUESTIONS]
        )
    sampled = [
        texts(
            generate(
                model(),
                QUESTIONS,
                n=2,
                max_new_tokens=NEW,
                sampler=HOT,
                seed=3,
                prefix=prefix,
                share=True,
            )
        )
        for prefix in (chapter, piece)
    ]
    assert sampled[0] == sampled[1]
    for prefix in (chapter, other, book, piece):
        prefix.drop()


def test_without_prompts_the_prefix_itself_is_continued(store):
    with store.add(BOOK) as book:
        done = generate(model(), None, n=4, max_new_tokens=NEW, sampler=Sampler(), prefix=book)
        assert [[*c.tokens] for c in done.completions] == [plain_greedy(BOOK, NEW)[0]] * 4
        np.testing.assert_allclose(
            [c.logprob for c in done.completions], plain_greedy(BOOK, NEW)[1], atol=1e-3
        )
        assert (done.prompt_tokens, done.unique_tokens) == (12, 12)
        assert done.passes == 7  # only sampled tokens are fed
        sampled = generate(model(), None, n=4, max_new_tokens=NEW, sampler=HOT, prefix=book)
        assert len({tuple(c.tokens) for c in sampled.completions}) == 4
        with pytest.raises(ValueError, match="n is 0; ask for at least 1 completion"):
            generate(model(), None, n=0, prefix=book)


def test_prefixes_are_text_too(store):
    """The text after a prefix does not start a prompt, so no special token is put before it."""
    tokenizer = model().tokenizer
    with store.add("Solve: 47 + 38") as problem, problem.extend("=") as sign:
        tokens = tokenizer.encode("Solve: 47 + 38") + tokenizer.encode(
            "=", add_special_tokens=False
        )
        done = generate(
            model(), ["4", "8"], n=2, max_new_tokens=NEW, sampler=Sampler(), prefix=sign, share=True
        )
        assert [[*c.tokens] for c in done.completions] == greedy(
            [tokens + tokenizer.encode(text, add_special_tokens=False) for text in ("4", "8")]
        )
        assert done.prompt_tokens == 2 * (len(tokens) + 1)


def test_waves_below_a_prefix():
    """Four rows run six completions, in a store with just enough room.

    Other prefixes leave room for two questions and the sampled tokens.
    """
    store = Prefixes(with_stops(), max_tokens=512)
    book = store.add(BOOK)
    tree = [Branch(tokens, n=2) for tokens in (FIRST, SECOND, CHAPTER)]
    options = {"max_new_tokens": NEW, "sampler": HOT, "prefix": book, "share": True, "max_rows": 4}
    loose = generate(with_stops(), tree, **options)
    assert store.free_tokens == 500
    store.add([5] * 384)
    store.add([6] * 72)
    assert store.free_tokens == 7 + 5 + 4 * 8
    tight = generate(with_stops(), tree, **options)
    assert store.free_tokens == 44
    assert texts(tight) == texts(loose)
    assert len({len(c.tokens) for c in loose.completions}) > 1
    assert tight.kv_bytes <= (12 + 44) * token_bytes()


def test_dropping_makes_room(store):
    big = _RNG.integers(3, 402, 250).tolist()
    first, second = store.add(big), store.add(big[:200])
    with pytest.raises(
        ValueError,
        match=r"the prefix has 250 tokens, but of the store's 512 the largest piece that is free "
        r"has \d+; drop",
    ):
        store.add(big)
    with pytest.raises(
        ValueError,
        match=r"need room for 66 tokens, .* but there is room for 62 tokens, .*; drop a prefix",
    ):
        generate(model(), FIRST, max_new_tokens=62, prefix=second)
    first.drop()
    first.drop()  # the second time frees nothing
    third = store.add(big)
    np.testing.assert_allclose(third.logits, plain_logits(big)[-1], atol=1e-3)
    second.drop()
    third.drop()


def test_a_dropped_prefix_is_of_no_use_and_one_with_extensions_stays(store):
    book = store.add(BOOK)
    chapter = book.extend(CHAPTER)
    with pytest.raises(ValueError, match="this prefix is extended by 1 more; drop those first"):
        book.drop()
    chapter.drop()
    for use in (lambda: chapter.extend(FIRST), lambda: generate(model(), FIRST, prefix=chapter)):
        with pytest.raises(
            ValueError, match="this prefix has been dropped; add it to its store again"
        ):
            use()
    book.drop()


def test_one_call_at_a_time(store):
    """A stream that is closed, or whose caller fails, gives back its blocks."""
    options = {"n": 2, "max_new_tokens": NEW, "sampler": Sampler(), "share": True}
    book = store.add(BOOK)
    expected = greedy([BOOK + question for question in QUESTIONS])
    stream = Branches(model(), QUESTIONS, prefix=book, **options).stream()
    next(stream)
    again = functools.partial(generate, model(), QUESTIONS, prefix=book, **options)
    for use in (again, lambda: store.add(FIRST), lambda: book.extend(FIRST), book.drop):
        with pytest.raises(
            ValueError,
            match="another call uses this store of prefixes; let it end, or close its stream",
        ):
            use()
    stream.close()
    assert store.free_tokens == 500
    assert [[*c.tokens] for c in again().completions] == expected

    def fail(run: Branches) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        again(on_tokens=fail)
    assert store.free_tokens == 500
    assert [[*c.tokens] for c in again().completions] == expected
    book.drop()


def test_a_prefix_belongs_to_its_model_and_brings_its_own_room(store):
    other = dataclasses.replace(model(), params=jax.tree.map(lambda x: x + 1, model().params))
    with store.add(BOOK) as book:
        with pytest.raises(
            ValueError,
            match="the prefix was prefilled by another model, or with another adapter; give the "
            "model that its store was made with",
        ):
            generate(other, FIRST, prefix=book)
        with pytest.raises(ValueError, match="max_kv_bytes and prefix are both given"):
            generate(model(), FIRST, prefix=book, max_kv_bytes=10**6)
        with pytest.raises(
            ValueError,
            match="prompt 1 has 8193 tokens and 8 more may follow, but the model's context holds "
            "8192",
        ):
            generate(model(), [FIRST, [5] * 8181], max_new_tokens=8, prefix=book)
        with pytest.raises(ValueError, match="the prefix has 8193 tokens and 1 more may follow"):
            book.extend([5] * 8181)


def test_stores_that_make_no_sense():
    with pytest.raises(
        ValueError, match="max_tokens and max_kv_bytes are both given; give one of them"
    ):
        Prefixes(model(), max_tokens=10, max_kv_bytes=10)
    with pytest.raises(
        ValueError,
        match=f"would hold 0 tokens of {token_bytes()} bytes each; give it room for at least 1",
    ):
        Prefixes(model(), max_kv_bytes=token_bytes() - 1)
    small = Prefixes(model(), max_kv_bytes=9 * token_bytes())
    with pytest.raises(ValueError, match=r"the prefix has 12 tokens, but .* 9 .* free"):
        small.add(BOOK)
    with pytest.raises(ValueError, match="the prompt is empty"):
        small.add("")
