"""Texts that end a completion: in a run, on an engine and on the command line."""

import dataclasses
import functools
import json

import pytest

from jaxshare import FinishReason, Sampler, models
from jaxshare.serving import Branch, generate
from jaxshare.serving.cli.main import main as jaxshare
from jaxshare.serving.engine import Engine

PROMPT, HOT, LENGTH = "1. 47 + 38", Sampler(0.4), 40


@functools.cache
def embedded() -> models.LoadedModel:
    """A model whose texts have whole characters, so that every cut of them is a text."""
    return models.load(models.EMBEDDED)


@functools.cache
def whole(seed: int = 0):
    """A completion that no text ends."""
    return generate(embedded(), PROMPT, sampler=HOT, seed=seed, max_new_tokens=LENGTH).completions[
        0
    ]


def cut(stop: str, completion) -> tuple[str, list[int]]:
    """The text before the first `stop`, and the fewest tokens whose text has it."""
    decode = embedded().tokenizer.decode
    tokens = list(completion.tokens)
    count = next(n for n in range(1, len(tokens) + 1) if stop in decode(tokens[:n]))
    return completion.text[: completion.text.index(stop)], tokens[:count]


def stops() -> list[str]:
    """Parts of the text: of one token, across the border of two, and of many."""
    tokens, decode = whole().tokens, embedded().tokenizer.decode
    ends = [len(decode(list(tokens[:n]))) for n in range(1, 20)]
    text = whole().text
    return [text[ends[3] : ends[4]], text[ends[5] - 1 : ends[5] + 1], text[ends[2] : ends[12]]]


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("on_engine", [False, True])
def test_a_text_ends_before_its_stop_or_with_it(number, on_engine):
    stop, model = stops()[number], embedded()
    expected, tokens = cut(stop, whole())
    more = {"sampler": HOT, "max_new_tokens": LENGTH}
    with Engine(model, passes=5) as engine:
        if on_engine:
            more["engine"] = engine
        [before] = generate(model, PROMPT, stop=stop, **more).completions
        [after] = generate(model, PROMPT, stop=[stop], include_stop=True, **more).completions
    assert (before.text, after.text) == (expected, expected + stop)
    for completion in (before, after):
        assert completion.finish_reason is FinishReason.STOP_TEXT
        assert list(completion.tokens) == tokens
        assert completion.logprobs == pytest.approx(whole().logprobs[: len(tokens)], abs=1e-5)


@pytest.mark.slow
def test_the_first_of_several_to_be_complete_ends_it_and_others_go_on():
    """Not the one that begins first: it is complete only later."""
    model = embedded()
    wanted = [stops()[2], stops()[0]]
    assert whole().text.index(wanted[0]) < whole().text.index(wanted[1])
    branches = Branch(PROMPT, n=3)
    found = generate(
        model, branches, sampler=HOT, max_new_tokens=LENGTH, stop=wanted, seed=0
    ).completions
    alone = generate(model, branches, sampler=HOT, max_new_tokens=LENGTH, seed=0).completions
    assert found[0].text == cut(wanted[1], whole())[0]
    for completion, other in zip(found, alone, strict=True):
        ends = [at + len(stop) for stop in wanted if (at := other.text.find(stop)) >= 0]
        text = other.text[: min(ends, default=None)]
        assert (
            completion.text
            == text[: min(map(text.find, filter(text.endswith, wanted)), default=None)]
        )


def test_the_checkpoint_s_stop_texts_are_the_default():
    stop = stops()[1]
    assert models.Generation.from_json({"stop_strings": stop}, {}).stop_texts == (stop,)
    generation = dataclasses.replace(embedded().generation, stop_texts=(stop,))
    model = dataclasses.replace(embedded(), generation=generation)
    more = {"sampler": HOT, "max_new_tokens": LENGTH}
    assert generate(model, PROMPT, **more).completions[0].text == cut(stop, whole())[0]
    assert generate(model, PROMPT, stop=(), **more).completions[0].text == whole().text


def test_batch_and_generate_end_texts_on_the_command_line(tmp_path, capsys):
    given = tmp_path / "in.jsonl"
    given.write_text(json.dumps({"prompt": PROMPT}) + "\n")
    common = ["--max-new-tokens", "40", "--temperature", "1", "--seed", "3"]
    model = models.EMBEDDED
    jaxshare(["generate", str(model), "--prompt", PROMPT, "--json", *common])
    text = json.loads(capsys.readouterr().out)["completions"][0]["text"]
    stop = text[5:8]
    expected = text[: text.index(stop)]
    jaxshare(["generate", str(model), "--prompt", PROMPT, "--json", *common, "--stop", stop])
    found = json.loads(capsys.readouterr().out)["completions"][0]
    assert (found["text"], found["finish_reason"]) == (expected, "stop_text")
    out = tmp_path / "out.jsonl"
    more = ["--stop", stop, "--include-stop", "--stop", "never to be found"]
    jaxshare(["batch", str(model), "--input", str(given), "--output", str(out), *common, *more])
    assert json.loads(out.read_text().splitlines()[0])["text"] == expected + stop


@pytest.mark.parametrize(
    ("stop", "words"), [("", "stop is ''; give texts that are not empty"), ([3], "stop is")]
)
def test_stops_that_are_no_texts_are_refused(stop, words):
    with pytest.raises(ValueError, match=words):
        generate(embedded(), PROMPT, stop=stop)
