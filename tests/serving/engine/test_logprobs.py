"""Log-probabilities of sampled tokens and of the likeliest ones in their places."""

import itertools
import json

import numpy as np
import pytest

from jaxshare import FinishReason, Sampler, models
from jaxshare.serving import Branch, generate
from jaxshare.serving.cli.main import main as jaxshare
from jaxshare.serving.engine import Engine
from tests.helpers import mostly_slow
from tests.serving.engine.test_engine import (
    MODEL,
    ROWS,
    WARM,
    Stepped,
    done,
    engine_of,
    speaking,  # noqa: F401
)
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


def drawn_with(before, tokens, params: Sampler) -> np.ndarray:
    """The logarithms of the chances of the token after these, by the definitions, in NumPy.

    The settings are bias, presence_penalty, temperature, top_k and top_p, in this order.
    """
    logits = logits_after((*PROMPT, *before, *tokens)).copy()
    for token, value in params.bias.items():
        logits[token] += value
    logits[[*{*tokens}]] -= params.presence_penalty
    if not params.temperature:
        return np.where(np.arange(VOCAB) == logits.argmax(), 0.0, -np.inf)
    logits /= params.temperature
    order = np.argsort(-logits)
    if params.top_k:
        logits[order[params.top_k :]] = -np.inf
    chances = np.exp(logits - logits.max())
    chances /= chances.sum()
    before = np.cumsum(chances[order]) - chances[order]
    chances[order[before >= params.top_p]] = 0.0
    with np.errstate(divide="ignore"):
        return np.log(chances / chances.sum())


AS_DRAWN = {
    "plain": Sampler(1.0),
    "all": Sampler(0.8, top_k=9, top_p=0.9, bias={4: 1.5, 9: -2.0}, presence_penalty=0.7),
    "greedy": Sampler(presence_penalty=0.7),
}


@pytest.mark.parametrize("on_engine", mostly_slow([True, False]))
def test_processed_ones_are_of_the_chances_that_tokens_are_drawn_with(on_engine):
    """Beside raw ones, which stay what they are."""
    count = 7
    nodes = [Branch((n, n + 1), sampler=each) for n, each in enumerate(AS_DRAWN.values())]
    with Engine(MODEL, max_rows=ROWS, passes=3) as engine:
        raw = engine.submit(
            PROMPT, AS_DRAWN["all"], seed=3, max_new_tokens=9, logprobs=True, top_logprobs=count
        )
        found = generate(
            MODEL,
            Branch(PROMPT, nodes),
            max_new_tokens=9,
            logprobs="processed",
            top_logprobs=count,
            **({"engine": engine} if on_engine else {}),
        ).completions
        check(raw.wait(), count)
    for n, (params, completion) in enumerate(zip(AS_DRAWN.values(), found, strict=True)):
        assert completion.logprobs is not None and completion.top_logprobs is not None
        assert completion.logprob == pytest.approx(sum(completion.logprobs))
        for end, token in enumerate(completion.tokens):
            expected = drawn_with((n, n + 1), completion.tokens[:end], params)
            assert completion.logprobs[end] == pytest.approx(expected[token], abs=1e-5)
            order = np.argsort(-expected, kind="stable")[:count]
            likeliest = [token for token in order if expected[token] > -np.inf]
            top = completion.top_logprobs[end]
            assert [token for token, _ in top] == likeliest
            assert [value for _, value in top] == pytest.approx(expected[likeliest], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", mostly_slow([True, "processed", False]))
def test_what_comes_in_a_stream_is_what_the_completion_has(speaking, kind):  # noqa: F811
    """With a stop text and a stop token, too; a stop token is in no chunk."""
    prompt = "1. 47 + 38"
    with engine_of(speaking, passes=3) as engine:

        def ask(kind=True, count=0, **more):
            stream = engine.submit(
                prompt, WARM, seed=1, max_new_tokens=40, logprobs=kind, top_logprobs=count, **more
            )
            return [*stream.chunks()], stream.wait()

        whole = ask()[1]
        ends = {"stop": whole.text[17:20]}
        for count, end in itertools.product((0, 2), ({}, ends)):
            for include_stop in (False, True) if end else (False,):
                chunks, completion = ask(kind, count, include_stop=include_stop, **end)
                assert (
                    len(chunks) > 2 and completion.tokens == whole.tokens[: len(completion.tokens)]
                )
                assert "".join(each.text for each in chunks) == completion.text
                assert joined(chunks, "tokens") == completion.tokens
                for name, asked in (("logprobs", kind), ("top_logprobs", count)):
                    if asked:
                        assert joined(chunks, name) == getattr(completion, name)
                    else:
                        assert getattr(completion, name) is None
                        assert all(getattr(each, name) is None for each in chunks)
                assert completion.finish_reason is (
                    FinishReason.STOP_TEXT if end else FinishReason.LENGTH
                )
        stopping = Sampler(0.7, stop_token_ids=(whole.tokens[20],))
        stream = engine.submit(prompt, stopping, seed=1, max_new_tokens=40, logprobs=True)
        chunks, completion = [*stream.chunks()], stream.wait()
        assert completion.finish_reason is FinishReason.STOP
        assert joined(chunks, "tokens") == completion.tokens[:-1]
        assert joined(chunks, "logprobs") == completion.logprobs[:-1]


def joined(chunks, name: str) -> tuple:
    return tuple(value for chunk in chunks if chunk.tokens for value in getattr(chunk, name))


def test_chunks_that_do_not_come_in_time():
    engine = Stepped(max_rows=ROWS)
    stream = engine.submit(PROMPT, WARM, max_new_tokens=4)
    with pytest.raises(TimeoutError, match=r"the request has sampled nothing within 0\.01 seconds"):
        next(stream.chunks(0.01))
    engine.settle()
    assert joined([*stream.chunks(0.01)], "tokens") == done(stream).tokens


@pytest.mark.slow
def test_beside_a_logits_cache_as_many_as_it_keeps():
    sizes = dict(max_rows=ROWS, logits_cache=10**5, kept_logits=8)
    with Engine(MODEL, resample_always=True, **sizes) as engine:
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


@pytest.mark.slow
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


MODULE = """
from jaxshare import register_logits_processor


def only(logits, tokens, size, state, *, token):
    return logits.at[token.astype(int)].add(1000.0), state


register_logits_processor("only", only, parameters={"token": 5})
"""


@pytest.mark.slow
def test_processors_and_processed_log_probabilities_on_the_command_line(
    capsys, tmp_path, monkeypatch
):
    """In `generate` and in `batch`, where a line can name others."""
    (tmp_path / "my_processors.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    lines = [
        {"prompt": "1. 47 + 38"},
        {"prompt": "2.", "processors": {"only": {"token": 9}}},
        {"prompt": "3.", "processors": ["nobody's"]},
    ]
    (tmp_path / "in").write_text("\n".join(map(json.dumps, lines)))
    more = ["--max-new-tokens", "3", "--temperature", "1", "--json", "--logprobs", "processed"]
    more += ["--top-logprobs", "2", "--processors-from", "my_processors"]
    more += ["--processor", "only,token=7"]
    files = ["--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]
    jaxshare(["generate", str(models.EMBEDDED), "--prompt", "1. 47 + 38", *more])
    [one] = json.loads(capsys.readouterr().out)["completions"]
    assert jaxshare(["batch", str(models.EMBEDDED), *files, *more]) == 3
    report = json.loads(capsys.readouterr().out)
    assert (
        'processors names "nobody\'s", which is not registered' in report["bad_lines"][0]["error"]
    )
    first, second = map(json.loads, (tmp_path / "out").read_text().splitlines())
    for found, token in ((one, 7), (first, 7), (second, 9)):
        assert found["tokens"] == [token] * 3 and found["logprob"] == 0.0
        assert found["logprobs"] == [0.0] * 3 and found["top_logprobs"] == [[[token, 0.0]]] * 3
    assert jaxshare(["batch", str(models.EMBEDDED), *files, *more, "--resume"]) == 3


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (["--processors-from", "no_such_module"], "--processors-from is 'no_such_module', which c"),
        (["--processor", "only,token"], "--processor is 'only,token'; it must be a name and numb"),
        (["--processor", "no_such"], "processors names 'no_such', which is not registered"),
        (["--top-logprobs", "21", "--json"], "top_logprobs is 21; it must be at most 20"),
        (["--top-logprobs", "2"], "--top-logprobs needs --json"),
    ],
)
def test_options_of_the_command_line_that_are_refused(capsys, option, words):
    assert jaxshare(["generate", str(models.EMBEDDED), "--prompt", "1.", *option]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.slow
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
        (
            {"logprobs": "drawn"},
            "logprobs is 'drawn'; it must be True, False, 'raw', 'processed' or 'both'",
        ),
        ({"logprobs": 1}, "logprobs is 1; it must be True, False, 'raw', 'processed' or 'both'"),
        ({"logprobs": "processed", "resample": "stepwise"}, "logprobs cannot be had with resample"),
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
