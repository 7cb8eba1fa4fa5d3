"""Where an output has its first stop text, found as tokens come, against the whole text each time."""

import functools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxshare.models import EMBEDDED, load
from jaxshare.serving.engine.stream import Detokenizer


@functools.cache
def tokenizer():
    return load(EMBEDDED).tokenizer


class BytesInRuns:
    """As tokenizers with a fallback to bytes: a run of bytes (0 to 255) is characters if all of it is,
    and every other token is a word, whose space falls away at the start."""

    def decode(self, tokens) -> str:
        text, run = "", b""
        for token in [*tokens, None]:
            if token is not None and token < 256:
                run += bytes([token])
                continue
            try:
                text += run.decode()
            except UnicodeDecodeError:
                text += "\ufffd" * len(run)
            run = b""
            text += "" if token is None else f" w{token}"
        return text.removeprefix(" ")


def fewest(decode, stops, tokens) -> int | None:
    """By decoding every beginning of the tokens."""
    return next(
        (n for n in range(1, len(tokens) + 1) if any(s in decode(tokens[:n]) for s in stops)), None
    )


def check(words, tokens, stops, rng) -> None:
    """Tokens that come a few at a time end where the first of all dispatches that has one says."""
    detokenizer, end = Detokenizer(words, stops), 0
    while end < len(tokens):
        end = min(end + rng.randint(1, 9), len(tokens))
        found, whole = detokenizer.fewest_with_stop(tokens[:end]), words.decode(tokens[:end])
        assert (found is not None) == any(stop in whole for stop in stops)
        if found is not None:
            assert found == fewest(words.decode, stops, tokens[:end])
            return


@given(st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_the_first_stop_text_is_found_in_the_end_of_the_text(seed):
    """In texts of any tokens: parts of characters, special tokens, words."""
    rng = random.Random(seed)
    tokens = [rng.randrange(len(tokenizer())) for _ in range(rng.randint(1, 300))]
    text = tokenizer().decode(tokens)
    at, size = rng.randrange(len(text) + 1), rng.choice([1, 2, 5, 40])
    # One with a character that is not complete could go away again.
    stops = [
        stop for stop in (text[at : at + size], "never there") if stop and "\ufffd" not in stop
    ]
    check(tokenizer(), tokens, stops, rng)


@given(st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_characters_of_several_bytes_in_long_runs(seed):
    """Until the last byte of a run is there, all of it may be no character."""
    rng, tokens = random.Random(seed), []
    parts = [[*"\u00e4\U0001f389\u20ac".encode()], [*b"ab"], [300], [*range(300, 340)]]
    often = rng.choice([(1, 1, 1, 1), (60, 20, 1, 1)])
    while len(tokens) < 500:
        [part] = rng.choices(parts, often)
        tokens += part
    text = BytesInRuns().decode(tokens)
    at, size = rng.randrange(len(text)), rng.choice([2, 9, 60])
    stops = [text[at : at + size], "\U0001f389\U0001f389"]
    # A run that is not complete hides a stop text again, so ends are compared at each dispatch alone.
    detokenizer, end = Detokenizer(BytesInRuns(), stops), 0
    while end < len(tokens):
        end = min(end + rng.randint(1, 9), len(tokens))
        whole = BytesInRuns().decode(tokens[:end])
        found = detokenizer.fewest_with_stop(tokens[:end])
        assert (found is not None) == any(stop in whole for stop in stops)
        if found is not None:
            return


def test_a_long_output_is_decoded_a_few_times_in_all():
    """Not again at each dispatch, whatever the length of the stop text."""

    class Counting(BytesInRuns):
        count = 0

        def decode(self, tokens) -> str:
            self.count += len(tokens)
            return super().decode(tokens)

    rng = random.Random(0)
    tokens = [rng.randrange(256, 400) for _ in range(4096)]
    words = Counting()
    detokenizer = Detokenizer(words, ["\n\n", "nowhere in it" * 4])
    for end in range(16, len(tokens) + 1, 16):
        assert detokenizer.fewest_with_stop(tokens[:end]) is None
    assert words.count < 12 * len(tokens)


@pytest.mark.parametrize("stops", [(), ("x",)])
def test_nothing_is_found_where_there_is_nothing(stops):
    assert Detokenizer(BytesInRuns(), stops).fewest_with_stop([]) is None
    assert Detokenizer(None, ()).fewest_with_stop([3, 4]) is None
