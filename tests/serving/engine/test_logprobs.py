"""Log-probabilities of sampled tokens and of the likeliest ones in their places."""

import json

import numpy as np
import pytest

from jaxshare import Sampler, models
from jaxshare.serving import generate
from jaxshare.serving.cli.main import main as jaxshare
from jaxshare.serving.engine import Engine
from tests.serving.engine.test_engine import MODEL, ROWS, WARM
from tests.serving.engine.test_sampling_params import PROMPT, VOCAB, logits_after


def expected(tokens, count: int) -> list[list[tuple[int, float]]]:
    """By plain causal attention in each place, sorted."""
    found = []
    for end in range(len(tokens)):
        logits = logits_after((*PROMPT, *tokens[:end]))
        logprobs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        order = np.argsort(-logits, kind="stable")[:count]
        found.append([(int(token), float(logprobs[token])) for token in order])
    return found


def check(completion, count: int) -> None:
    assert completion.top_logprobs is not None
    assert len(completion.top_logprobs) == len(completion.tokens) == len(completion.logprobs)
    wanted = expected(completion.tokens, VOCAB)
    for place, (found, all_of_them) in enumerate(zip(completion.top_logprobs, wanted, strict=True)):
        assert [token for token, _ in found] == [token for token, _ in all_of_them[:count]]
        values = [value for _, value in found]
        assert values == pytest.approx([value for _, value in all_of_them[:count]], abs=1e-5)
        own = dict(all_of_them)[completion.tokens[place]]
        assert completion.logprobs[place] == pytest.approx(own, abs=1e-5)


def test_requests_get_as_many_as_they_ask_for():
    """Beside others that ask for none, in one engine; more than before make places for more."""
    with Engine(MODEL, max_rows=ROWS, passes=3) as engine:
        for count in (2, 20):
            streams = [
                engine.submit(PROMPT, WARM, seed=n, max_new_tokens=9, logprobs=True, top_logprobs=k)
                for n, k in enumerate((0, count, 1))
            ]
            none, several, one = (stream.wait() for stream in streams)
            assert none.top_logprobs is None
            check(several, count)
            check(one, 1)
        again = engine.submit(PROMPT, WARM, seed=1, max_new_tokens=9).wait()
        assert again.tokens == several.tokens and again.top_logprobs is None


def test_beside_a_logits_cache_as_many_as_it_keeps():
    with Engine(MODEL, max_rows=ROWS, logits_cache=10**5, kept_logits=8) as engine:
        first, again = (
            engine.submit(PROMPT, WARM, seed=3, max_new_tokens=9, resample="stepwise").wait()
            for _ in range(2)
        )
        check(
            engine.submit(
                PROMPT, WARM, seed=3, max_new_tokens=9, logprobs=True, top_logprobs=8
            ).wait(),
            8,
        )
        assert first.tokens == again.tokens and again.replayed_tokens > 0
        with pytest.raises(ValueError, match="top_logprobs is 9, but the engine's Logits Cache k"):
            engine.submit(PROMPT, WARM, top_logprobs=9)


@pytest.mark.parametrize("on_engine", [False, True])
def test_completions_of_a_run_have_them(on_engine):
    """They are of the model's own distributions, whatever the settings do to these."""
    params = Sampler(1.2, top_k=3, repetition_penalty=1.3)
    with Engine(MODEL, max_rows=ROWS) as engine:
        more = {"engine": engine} if on_engine else {}
        found = generate(
            MODEL, PROMPT, n=3, sampler=params, max_new_tokens=6, top_logprobs=5, **more
        )
    for completion in found.completions:
        check(completion, 5)


def test_on_the_command_line(capsys):
    prompt = ["--prompt", "1. 47 + 38", "--max-new-tokens", "3", "--json"]
    jaxshare(["generate", str(models.EMBEDDED), *prompt, "--top-logprobs", "2"])
    [completion] = json.loads(capsys.readouterr().out)["completions"]
    for place, token, logprob in zip(
        completion["top_logprobs"], completion["tokens"], completion["logprobs"], strict=True
    ):
        assert len(place) == 2 and place[0][1] >= place[1][1]
        if place[0][0] == token:
            assert place[0][1] == pytest.approx(logprob, abs=1e-5)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"top_logprobs": 21}, "top_logprobs is 21; it must be at most 20"),
        ({"top_logprobs": -1}, "top_logprobs is -1; it must be at least 0"),
        ({"top_logprobs": "5"}, "top_logprobs is '5'; it must be an integer"),
        (
            {"top_logprobs": 3, "resample": "stepwise"},
            "top_logprobs cannot be had with resample",
        ),
    ],
)
def test_numbers_out_of_range_are_refused(wrong, words):
    with (
        Engine(MODEL, max_rows=ROWS, logits_cache=10**5) as engine,
        pytest.raises((ValueError, TypeError), match=words),
    ):
        engine.submit(PROMPT, WARM, **wrong)
