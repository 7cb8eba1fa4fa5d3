"""Logits that are not numbers are one error for completions, requests, workers and commands.

The model is the embedded one, but that one token, "@", has an embedding that is no number: what
reads that token has such logits, and nothing else has.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxshare import FinishReason, Sampler, Samplers
from jaxshare.decoding.samplers import SamplerPlaces
from jaxshare.models import EMBEDDED, CheckpointError, LoadedModel, load
from jaxshare.serving import Branch, Branches, Completion, Prefixes, Workers, generate
from jaxshare.serving.cli.main import main
from jaxshare.serving.engine import Engine, NotANumberError
from jaxshare.serving.evaluation.execution import execute
from jaxshare.serving.evaluation.runs import run_specs
from jaxshare.serving.evaluation.tasks import Problem
from tests.helpers import folder_of_first_layers
from tests.serving.workers.test_session import CHAT

LOST = "@"
GOOD = ["1. 47 + 38 is", "Two and two are four, and"]
NEW = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[Path]:
    """The model's folder, of one layer. Embedding and head are separate in it, because a token that
    nothing reads must have a logit that is a number."""
    path = folder_of_first_layers(tmp_path_factory.mktemp("lost") / "model", 1)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    tensors = safetensors.numpy.load_file(path / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.copy()
    embedding[lost_token()] = np.nan
    safetensors.numpy.save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight has values that are NaN"):
        load(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXSHARE_CHECK_WEIGHTS", "off")
        yield path


@functools.cache
def tokenizer():
    return load(EMBEDDED).tokenizer


def lost_token() -> int:
    [token] = tokenizer().encode(LOST)
    return token


@pytest.fixture(scope="module")
def model(folder) -> LoadedModel:
    return load(folder)


@pytest.fixture(scope="module")
def whole(model) -> LoadedModel:
    """The model with numbers for the lost token, too: it has the same programs."""
    params = {"params": {**model.params["params"]}}
    embedding = jnp.nan_to_num(params["params"]["embed"]["embedding"])
    params["params"]["embed"] = {"embedding": embedding}
    return dataclasses.replace(model, params=params)


def greedy(**bias: float) -> Sampler:
    """A sampler that never draws the lost token, or with "lost" nothing else."""
    return Sampler(0.0, bias={lost_token(): 1e6 if bias else -1e6})


SAMPLES_LOST = {"lost": 1.0}


def message(what: str, after: str) -> str:
    """The whole message of the error."""
    return (
        f"the model's logits for {what} are not numbers after {after}; its weights, or its dtype, "
        "cannot serve this prompt"
    )


def raises(what: str, after: str):
    return pytest.raises(NotANumberError, match=f"^{re.escape(message(what, after))}$")


def length(text: str) -> int:
    return len(tokenizer().encode(text))


def by_number(completions) -> dict[tuple[int, int], Completion]:
    return {(c.prompt, c.index): c for c in completions}


# Completions of prompts.


@pytest.mark.slow
@pytest.mark.parametrize("share", [True, False])
def test_a_completion_has_the_error_of_its_prompt_and_the_others_are_as_ever(model, whole, share):
    beginning = "Alice and Bob " * 30
    tree = [
        GOOD[0],
        Branch(f"{beginning}{LOST} and", [Branch(" then", n=2), Branch(" the end. " * 20)], n=1),
        Branch(f"{LOST}{beginning} more than one pass. " * 3, n=1),
        Branch(f"{beginning}and", [Branch(" then"), Branch(f" then {LOST}")]),
        GOOD[1],
    ]
    options = {"n": 1, "max_new_tokens": NEW, "sampler": greedy(), "share": share, "max_rows": 3}
    found = by_number(Branches(model, tree, **options).stream())
    expected = by_number(generate(whole, tree, **options).completions)
    assert {*found} == {*expected} and len(found) == 9
    failed = {(1, 0), (2, 0), (2, 1), (3, 0), (4, 0), (6, 0)}
    for number, completion in found.items():
        if number not in failed:
            assert (completion.tokens, completion.finish_reason, completion.error) == (
                expected[number].tokens,
                FinishReason.LENGTH,
                None,
            )
            continue
        assert completion.finish_reason is FinishReason.ERROR
        assert (completion.text, completion.tokens, completion.logprob) == ("", (), 0.0)
        assert type(completion.error) is NotANumberError and str(completion.error) == message(
            f"prompt {completion.prompt}", f"{completion.prompt_tokens} tokens"
        )
        assert completion.prompt_tokens == expected[number].prompt_tokens


def test_generate_raises_the_error_of_a_prompt_and_gives_its_memory_back(model):
    prompts = [GOOD[0], f"{GOOD[1]} {LOST}"]
    with raises("prompt 1", f"{length(prompts[1])} tokens"):
        generate(model, prompts, max_new_tokens=NEW, sampler=greedy())
    store = Prefixes(model, max_tokens=4096)
    with store.add(GOOD[0]) as prefix:

        def ask(*questions: str) -> list[Completion]:
            options = {"max_new_tokens": NEW, "sampler": greedy(), "prefix": prefix}
            return generate(model, questions, **options).completions

        expected = ask(" 8", " 9")
        with raises("prompt 1", f"{length(GOOD[0]) + 2} tokens") as raised:
            ask(" 8", f" {LOST}")
        # While the error is still held, and its traceback with it.
        assert raised.value and not store.busy
        assert ask(" 8", " 9") == expected
        with raises("the prefix", f"{length(GOOD[0]) + 1} tokens"):
            prefix.extend(LOST)
    with raises("the prefix", f"{length(LOST + GOOD[0] * 30)} tokens"):
        store.add(LOST + GOOD[0] * 30)
    assert store.free_tokens == store.kv.pool.tokens


def test_what_was_sampled_before_is_kept(model):
    # Two rows, as in the test before this one, whose program this one uses.
    run = Branches(model, GOOD[0], n=2, max_new_tokens=NEW, sampler=greedy(**SAMPLES_LOST))
    completions = [*run.stream()]
    assert len(completions) == 2
    for completion in completions:
        assert (completion.text, completion.tokens) == (LOST, (lost_token(),))
        assert completion.finish_reason is FinishReason.ERROR and completion.logprob < 0
        assert str(completion.error) == message("prompt 0", f"{length(GOOD[0]) + 1} tokens")


# Requests.


@pytest.mark.slow
def test_a_request_has_the_same_error(model):
    with Engine(model, max_rows=4, passes=4) as engine:
        streams = [
            engine.submit(prompt, greedy(**bias), max_new_tokens=NEW)
            for prompt, bias in (
                (GOOD[0], {}),
                (f"{GOOD[1]} {LOST}", {}),
                (GOOD[1], SAMPLES_LOST),
            )
        ]
        assert streams[0].wait(60).finish_reason is FinishReason.LENGTH
        with raises("request 1", f"{length(GOOD[1]) + 2} tokens"):
            streams[1].wait(60)
        with raises("request 2", f"{length(GOOD[1]) + 1} tokens"):
            streams[2].wait(60)
        failed = engine.metrics.registry.get_sample_value("jaxshare_calls_total", {"end": "error"})
        assert failed == 2


# Workers.


def start(model: LoadedModel, problem: str = "1. 47 + 38", **options) -> Workers:
    options = {"names": ("Alice", "Bob"), "budget": 24, "format": CHAT, "max_workers": 3} | options
    return Workers(model, problem, **{"sampler": greedy(), "ask_every": 0, **options})


def let_sample_lost(session: Workers, name: str) -> None:
    """Lets a worker sample the lost token in the next pass in which it samples."""
    samplers = [session._session.sampler] * session.rows.num_rows
    samplers[session.row(name)] = greedy(**SAMPLES_LOST)
    state = session._session.state
    session._session.state = dataclasses.replace(
        state, samplers=Samplers.stack(samplers, places=SamplerPlaces(8))
    )


def until(session: Workers, passes: int) -> str:
    return "".join(event.text for event in session.stream(passes))


def check_over(session: Workers, what: str, after: str) -> None:
    """The session is over with this error, which it raises wherever it would go on."""
    assert session.finish_reason is FinishReason.ERROR is session.result().finish_reason
    assert session.result().as_json()["finish_reason"] == "error"
    passes = session.passes
    for go_on in (lambda: list(session.stream()), session.run, session.finish):
        with raises(what, after):
            go_on()
    assert session.passes == passes
    with pytest.raises(ValueError, match=r"the session is over \(error\), so Dan cannot join it"):
        session.add("Dan")


@pytest.mark.parametrize("passes_at_once", [1, 16])
def test_a_worker_whose_logits_are_not_numbers_ends_the_session(model, tmp_path, passes_at_once):
    session = start(model, passes_at_once=passes_at_once)
    written = until(session, 10)
    at = session.passes
    let_sample_lost(session, "Bob")
    events: list[str] = []

    def read() -> None:
        for event in session.stream():
            events.append(event.text)

    with raises("worker Bob", f"{at + 1} passes"):
        read()
    assert written and LOST in "".join(events), "what was written before the error is shown"
    assert session.result().texts["Bob"].endswith(LOST)
    check_over(session, "worker Bob", f"{at + 1} passes")
    session.save(tmp_path, wait=True)
    check_over(Workers.restore(model, tmp_path), "worker Bob", f"{at + 1} passes")


def test_a_problem_or_words_that_are_not_numbers_end_the_session(model):
    """They are fed in passes of their own, and later ones do not show that they were not finite."""
    check_over(start(model, f"1. 47 {LOST} 38. " + "Sum. " * 70), "worker Alice", "0 passes")
    session = start(model)
    until(session, 5)
    session.say(f"What is {LOST}?")
    check_over(session, "worker Alice", "5 passes")
    layout = {"layout": "contiguous", "format": dataclasses.replace(CHAT, own_header=f"{LOST}:")}
    with Engine(model, kv_bytes=2**24) as engine, start(model, engine=engine, **layout) as session:
        check_over(session, "worker Alice", "0 passes")


@pytest.mark.slow
def test_weights_that_are_not_numbers_end_a_session_at_its_start(folder):
    broken = load(folder)
    params = {"params": {**broken.params["params"]}}
    params["params"]["head"] = {"kernel": params["params"]["head"]["kernel"] * jnp.nan}
    broken = dataclasses.replace(broken, params=params)
    session = start(broken)
    with raises("worker Alice", "0 passes"):
        session.run()
    check_over(session, "worker Alice", "0 passes")
    with raises("prompt 0", f"{length(GOOD[0])} tokens"):
        generate(broken, GOOD[0])


@pytest.mark.slow
def test_the_early_answer_may_be_what_is_not_a_number(model):
    """The session goes on as if there had been no guess; a token of a worker is the worker's."""
    plain, session = start(model), start(model, format=dataclasses.replace(CHAT, finisher=LOST))
    until(session, 10)
    with raises("the early answer", "10 passes"):
        session.finish()
    assert session.finish_reason is None and until(session, 24) and until(plain, 24)
    assert [step.tokens for step in session.steps] == [step.tokens for step in plain.steps]
    session = start(model)
    until(session, 10)
    let_sample_lost(session, "Alice")
    until(session, 11)
    assert session.finish_reason is None
    with raises("worker Alice", "11 passes"):
        session.finish()
    check_over(session, "worker Alice", "11 passes")


@pytest.mark.slow
def test_an_evaluation_goes_on_with_the_other_problems(model):
    problems = [Problem("good", "1. 47 + 38"), Problem("bad", f"1. 47 {LOST} 38")]
    specs = run_specs(
        problems,
        method="sequential",
        workers=[1],
        budgets=[4],
        seeds=1,
        seed=0,
        answer_tokens=4,
        sampler=greedy(),
        more={},
    )
    good, bad = (made for _, made in execute(model)(specs, lambda passes: None))
    assert good.result["passes"] == 4 and good.result["finish_reason"] == "length"
    assert type(bad) is NotANumberError and "are not numbers after 0 passes" in str(bad)


# Commands.


LINES = [{"prompt": GOOD[0], "id": "a"}, {"prompt": f"1. {LOST}", "n": 2}, {"prompt": GOOD[1]}]


def results(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def batch(tmp_path, folder, capsys) -> Iterator:
    """Runs `jaxshare batch` on LINES: (exit code, stdout, stderr)."""
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, LINES)), encoding="utf-8")

    def run(*arguments: str, model: Path = folder):
        files = "--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")
        settings = "--max-new-tokens", str(NEW), "--temperature", "0"
        code = main(["batch", str(model), *files, *settings, *arguments])
        return code, *capsys.readouterr()

    run.output = tmp_path / "out.jsonl"
    return run


@pytest.mark.slow
def test_batch_writes_the_error_of_a_line_and_completes_the_others(batch, whole):
    code, out, err = batch("--json")
    said = (
        "jaxshare: error: the model's logits for 2 of 4 completions are not numbers; their lines "
        f"in {batch.output} have the errors, and the others are complete"
    )
    assert code == 3 and err.splitlines()[-1] == said and "Traceback" not in err
    assert json.loads(out)["completions"] == 4 and json.loads(out)["failed"] == 2
    found = results(batch.output)
    assert [(r["line"], r["index"], r["finish_reason"]) for r in found] == [
        (1, 0, "length"),
        (2, 0, "error"),
        (2, 1, "error"),
        (3, 0, "length"),
    ]
    expected = message("the prompt of line 2", f"{length(LINES[1]['prompt'])} tokens")
    assert [r.get("error") for r in found] == [None, expected, expected, None]
    assert all((r["text"], r["tokens"]) == ("", []) for r in found[1:3])
    expected = generate(whole, GOOD, max_new_tokens=NEW, sampler=Sampler(0.0)).completions
    assert [found[i]["text"] for i in (0, 3)] == [c.text for c in expected]

    # A job that is resumed has sampled all, and says so again.
    before = batch.output.read_bytes()
    code, out, err = batch("--resume", "--json")
    assert code == 3 and err.splitlines() == [
        f"the job is complete: all 4 completions are in {batch.output}",
        said,
    ]
    assert json.loads(out)["failed"] == 2 and batch.output.read_bytes() == before
    lines = before.splitlines(keepends=True)
    batch.output.write_bytes(lines[2] + lines[0])
    assert batch("--resume")[0] == 3 and batch.output.read_bytes() == before


@pytest.mark.slow
def test_other_commands_say_the_error_in_one_sentence(folder, capsys):
    prompt = f"1. 47 {LOST} 38"
    commands = {
        ("generate", "--prompt", prompt): message("prompt 0", f"{length(prompt)} tokens"),
        ("workers", "--problem", prompt, "--budget", "8"): message("worker Alice", "0 passes"),
    }
    for (command, *arguments), expected in commands.items():
        assert main([command, str(folder), *arguments, "--temperature", "0"]) == 1
        err = capsys.readouterr().err
        assert err.splitlines()[-1] == f"jaxshare: error: {expected}" and "Traceback" not in err
        assert main([command, str(folder), *arguments, "--debug"]) == 1
        assert "Traceback" in capsys.readouterr().err


def test_a_sampler_without_any_token_is_refused(whole):
    """Instead of which token 0 was drawn."""
    nothing = Sampler(forbidden=tuple(range(whole.config.vocab_size)))
    words = r"the sampler forbids all \d+ tokens of the vocabulary"
    with pytest.raises(ValueError, match=words):
        generate(whole, GOOD[0], sampler=nothing)
    with pytest.raises(ValueError, match=words):
        Workers(whole, GOOD[0], sampler=nothing, format=CHAT)
    with Engine(whole, max_rows=1) as engine, pytest.raises(ValueError, match=words):
        engine.submit(GOOD[0], nothing)
