"""The answers to lm_eval's requests, against those of its own backend `hf`.

The requests and results are in fixtures/lm_eval, written by scripts/lm_eval/make_expected.py;
`make lm-eval` runs lm_eval itself. Here a stand-in has what jaxshare uses of it.
"""

import copy
import dataclasses
import functools
import importlib
import json
import sys
import types
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from jaxshare import Sampler
from jaxshare.models import Generation, LoadedModel
from jaxshare.models.chat_rendering import ChatTemplateError
from jaxshare.serving.evaluation.lm_eval.__main__ import main
from jaxshare.serving.evaluation.lm_eval.generation import HarnessSettings
from jaxshare.serving.evaluation.lm_eval.harness import Harness
from jaxshare.serving.scoring import passes
from tests.helpers import TINY, one_layer, tiny_params
from tests.paths import FIXTURES

FOLDER = FIXTURES / "lm_eval"
EXPECTED = json.loads((FOLDER / "expected.json").read_text(encoding="utf-8"))
BOS = 0


@functools.cache
def harness() -> Harness:
    return Harness.load(str(FOLDER / "model"), dtype="float32")


def requests(kind: str) -> tuple[list[Any], list[Any]]:
    """The arguments and the results of all requests of a kind."""
    some = [request for request in EXPECTED["requests"] if request["kind"] == kind]
    return [tuple(each["arguments"]) for each in some], [each["result"] for each in some]


def test_loglikelihoods_are_those_of_hf():
    pairs, expected = requests("loglikelihood")
    done: list[int] = []
    found = harness().loglikelihoods(pairs, done.append)
    np.testing.assert_allclose(
        [value for value, _ in found], [value for value, _ in expected], atol=1e-4
    )
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert {greedy for _, greedy in found} == {True, False}
    assert done == [*range(1, len(pairs) + 1)]


def test_examples_before_questions_are_read_once(monkeypatch):
    counts: list[int] = []
    run = passes.score_positions

    def counted(module, params, tokens, count, *rest):
        counts.append(int(np.sum(count)))
        return run(module, params, tokens, count, *rest)

    monkeypatch.setattr(passes, "score_positions", counted)
    pairs, _ = requests("loglikelihood")
    harness().loglikelihoods(pairs)
    texts = [harness().texts.pair(*pair).tokens.tolist() for pair in pairs]
    assert sum(counts) == len({tuple(text[:i]) for text in texts for i in range(1, len(text))})
    assert sum(counts) < sum(map(len, texts)) / 5


def test_loglikelihoods_of_pages_are_those_of_hf():
    """The last page is longer than the model's context."""
    pages, expected = requests("loglikelihood_rolling")
    texts = [text for (text,) in pages]
    assert len(harness().texts.encode(texts[-1])) > 256
    found = harness().rolling_loglikelihoods([*texts, ""])
    np.testing.assert_allclose(found[:-1], expected, atol=1e-4, rtol=1e-6)
    assert found[-1] == pytest.approx(harness().rolling_loglikelihoods(["<s>"])[0])


def test_answers_are_those_of_hf():
    """Some end before a stop text, and some at their most tokens."""
    given, expected = requests("generate_until")
    done: list[int] = []
    assert harness().answers(given, lambda: done.append(1)) == expected
    assert len(done) == len(given)
    assert any(text.endswith("\n\nQuestion: What ") for text in expected)


# The tokens of requests.


def test_the_scored_part_of_a_pair_is_its_continuation():
    texts, encode = harness().texts, harness().texts.model.tokenizer.encode
    pair = texts.pair("Question: 8", " legs")
    assert pair.tokens.tolist() == encode("Question: 8 legs")
    assert pair.tokens[0] == BOS
    assert pair.start == len(encode("Question: 8"))


def test_spaces_at_the_end_of_a_context_belong_to_the_continuation():
    apart, together = (
        harness().texts.pair("Answer:  ", "ice"),
        harness().texts.pair("Answer:", "  ice"),
    )
    assert (apart.tokens.tolist(), apart.start) == (together.tokens.tolist(), together.start)
    spaces = harness().texts.pair("  ", "ice")
    assert spaces.start == 1 and spaces.tokens[0] == BOS


def test_without_a_context_the_start_of_a_text_is_before_it():
    texts, encode = harness().texts, harness().texts.model.tokenizer.encode
    plain = encode("ice", add_special_tokens=False)
    for given in ("ice", "<s>ice"):
        pair = texts.pair("", given)
        assert (pair.tokens.tolist(), pair.start) == ([BOS, *plain], 1)


def test_a_text_that_starts_as_a_template_does_gets_no_second_start():
    texts = harness().texts
    assert texts.encode("<s>ice") == texts.encode("ice")
    bare = dataclasses.replace(texts, add_bos=False)
    assert bare.encode("ice") == texts.encode("ice")[1:]


def test_long_pairs_are_cut_at_the_left():
    texts = dataclasses.replace(harness().texts, max_length=4)
    whole = harness().texts.pair("Question: How many legs", " has a spider")
    cut = texts.pair("Question: How many legs", " a")
    assert len(cut.tokens) == 5  # the last one is scored, but not fed
    assert (
        cut.tokens.tolist()
        == harness().texts.pair("Question: How many legs", " a").tokens[-5:].tolist()
    )
    assert len(whole.tokens) > 5
    with pytest.raises(ValueError, match=r"' has a spider' has [0-9]+ tokens; it must have"):
        texts.pair("Question: How many legs", " has a spider")
    with pytest.raises(ValueError, match="the continuation '' has 0 tokens; it must have 1 to 4"):
        texts.pair("Question", "")
    with pytest.raises(ValueError, match="the continuation '<s>' has 0 tokens"):
        texts.pair("", "<s>")


def test_windows_score_each_token_once_after_as_many_as_fit():
    """The example of lm_eval's documentation: ten tokens in a context of four."""
    texts = dataclasses.replace(harness().texts, max_length=4, add_bos=False)
    text = "0123456789"
    t = texts.encode(text)
    assert len(t) == 10
    found = [(window.tokens.tolist(), window.start) for window in texts.windows(text)]
    assert found == [([BOS, *t[:4]], 1), (t[3:8], 1), (t[5:10], 3)]
    assert [*texts.windows("")] == []


# Settings of requests.


@pytest.mark.parametrize(
    ("given", "stops", "length", "sampler"),
    [
        ({}, (), 256, Sampler()),
        ({"until": "\n", "max_gen_toks": 5}, ("\n",), 5, Sampler()),
        ({"until": ["a", "", "b"], "max_new_tokens": 7}, ("a", "b"), 7, Sampler()),
        ({"until": None, "max_gen_toks": 5, "max_tokens": 9}, (), 5, Sampler()),
        ({"do_sample": False, "temperature": 0.7}, (), 256, Sampler()),
        ({"do_sample": True}, (), 256, Sampler()),
        ({"temperature": 0.7}, (), 256, Sampler(0.7, 40, 0.9)),
        ({"do_sample": True, "temperature": 1, "top_p": 0.5}, (), 256, Sampler(1, 40, 0.5)),
        ({"temperature": 1, "top_k": 3, "min_p": 0.1}, (), 256, Sampler(1, 3, 0.9, 0.1)),
        ({"num_beams": 1, "repetition_penalty": 1.0, "use_cache": True}, (), 256, Sampler()),
        ({"repetition_penalty": 1.2}, (), 256, Sampler(repetition_penalty=1.2)),
        ({"top_k": 3, "no_repeat_ngram_size": 2}, (), 256, Sampler(no_repeat_ngram_size=2)),
    ],
)
def test_settings_are_read_as_tasks_mean_them(given, stops, length, sampler):
    found = HarnessSettings.of(given, Sampler(0.6, 40, 0.9))
    assert (found.stops, found.max_new_tokens, found.sampler) == (stops, length, sampler)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"num_beams": 4}, ValueError, "the setting num_beams=4 of a request is not supported"),
        ({"penalty_alpha": 0.6}, ValueError, "penalty_alpha=0.6 of a request is not"),
        ({"repetition_penalty": 0}, ValueError, "repetition_penalty is 0.0; it must be above 0"),
        ({"max_gen_toks": 0}, ValueError, "max_gen_toks is 0; it must be at least 1"),
        ({"until": [3]}, ValueError, r"until is \[3\]; give texts that are not empty"),
        ({"until": 3}, TypeError, "until is 3; it must be a list"),
        ({"temperature": "warm"}, TypeError, "temperature is 'warm'; it must be a number"),
        ({"temperature": -1}, ValueError, "temperature is -1.0; it must be at least 0"),
    ],
)
def test_settings_that_are_not_supported_are_refused(given, error, message):
    with pytest.raises(error, match=message):
        HarnessSettings.of(given, Sampler())


def test_prompts_leave_room_for_the_answer():
    texts = dataclasses.replace(harness().texts, max_length=10)
    assert texts.prompt("Question: How many", 6) == texts.encode("Question: How many")[-4:]
    with pytest.raises(ValueError, match="max_gen_toks is 10, but the context holds 10 tokens"):
        texts.prompt("Question", 10)
    bare = dataclasses.replace(texts, add_bos=False)
    with pytest.raises(ValueError, match="a context to generate from is empty; give at least"):
        bare.prompt("", 5)


def test_sampled_answers_follow_from_the_seed():
    given = [("Question: What", {"temperature": 2.0, "max_gen_toks": 12})] * 3
    first = harness().answers(given)
    assert first == harness().answers(given)
    assert len({*first}) == 3
    other = dataclasses.replace(harness(), engine_options={"max_rows": 16, "seed": 1})
    assert other.answers(given) != first


# Chats.

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What do bees make?"},
    {"role": "assistant", "content": "They make"},
]


def test_chats_are_rendered_as_transformers_does():
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "model")
    whole = tokenizer.apply_chat_template(CHAT[:2], tokenize=False, add_generation_prompt=True)
    assert harness().render(CHAT[:2]) == whole
    going_on = tokenizer.apply_chat_template(CHAT, tokenize=False, continue_final_message=True)
    assert harness().render(CHAT, goes_on=True) == going_on
    assert CHAT[-1]["content"] == "They make"
    assert harness().chat_template(True) == tokenizer.chat_template
    assert harness().chat_template(False) is None


def with_template(template: str) -> Harness:
    model = harness().texts.model
    tokenizer = copy.deepcopy(model.tokenizer)
    tokenizer.chat_template = template
    texts = dataclasses.replace(
        harness().texts, model=dataclasses.replace(model, tokenizer=tokenizer)
    )
    return dataclasses.replace(harness(), texts=texts, template_options={"enable_thinking": False})


def test_a_system_message_that_a_template_refuses_is_left_out():
    strict = with_template(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
        "{{ m.content }}|{% endfor %}{{ enable_thinking }}"
    )
    assert strict.render(CHAT[:2]) == "What do bees make?|False"
    never = with_template("{{ raise_exception('never') }}")
    for chat in (CHAT, CHAT[1:]):
        with pytest.raises(ChatTemplateError, match="never"):
            never.render(chat)
    with pytest.raises(ValueError, match="leaves out the last message, so that it cannot go on"):
        with_template("{{ messages[0].content }}").render(CHAT, goes_on=True)
    with pytest.raises(ValueError, match="the chat template 'tool_use' is asked for by name"):
        harness().chat_template("tool_use")


# Loading.


def test_a_model_is_described():
    facts = harness().describe()
    assert facts["model_dtype"] == "float32"
    assert facts["model_num_parameters"] == sum(
        np.prod(shape) for shape in shapes_of_safetensors(FOLDER / "model" / "model.safetensors")
    )


def shapes_of_safetensors(path) -> list[list[int]]:
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return [tensor["shape"] for name, tensor in header.items() if name != "__metadata__"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_length": 257}, ValueError, "max_length is 257; it must be at most 256"),
        ({"prefix_token_id": 320}, ValueError, "prefix_token_id is 320; it must be at most 319"),
        ({"max_rows": 0}, ValueError, "max_rows is 0; it must be at least 1"),
        ({"seed": "x"}, TypeError, "seed is 'x'; it must be an integer"),
    ],
)
def test_bad_options_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        Harness.load(harness().texts.model, **options)


def test_models_that_cannot_be_asked_are_refused():
    with pytest.raises(
        TypeError, match="pretrained is 3; it must be a folder, a hub id or a model"
    ):
        Harness.load(3)  # pyright: ignore[reportArgumentType]
    bare = LoadedModel(TINY, tiny_params(), None, Generation())
    with pytest.raises(ValueError, match="the model folder has no tokenizer, and requests are"):
        Harness.load(bare)
    # Without a token for the start of texts, that of their end comes before them.
    assert Harness.load(one_layer()).texts.prefix_token == one_layer().tokenizer.eos_token_id


# What lm_eval sees.


class Hook:
    """Remembers results, as lm_eval's cache does."""

    def __init__(self):
        self.kept: list[tuple[str, Any, Any]] = []

    def add_partial(self, kind, arguments, result):
        self.kept.append((kind, arguments, result))


@pytest.fixture
def stand_in(monkeypatch) -> dict[str, Any]:
    """Modules with the part of lm_eval that jaxshare uses; returns what is registered."""
    registered: dict[str, Any] = {}

    class LM:
        def __init__(self):
            self.cache_hook = Hook()

    class Registry:
        @staticmethod
        def register(name, target):
            registered[name] = target

    def register_model(name):
        return lambda found: registered.setdefault(name, found)

    contents = {
        "lm_eval": {},
        "lm_eval.models": {},
        "lm_eval.api": {},
        "lm_eval.api.model": {"LM": LM},
        "lm_eval.api.registry": {"register_model": register_model, "model_registry": Registry},
        "lm_eval.__main__": {"cli_evaluate": lambda: registered.setdefault("ran", True)},
    }
    for name, values in contents.items():
        module = types.ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "jaxshare.serving.evaluation.lm_eval.model", raising=False)
    return registered


@pytest.mark.slow
def test_the_model_answers_instances_of_requests(stand_in):
    module = importlib.import_module("jaxshare.serving.evaluation.lm_eval.model")
    model = module.JaxshareLM(harness().texts.model, batch_size=1, device="cuda:0", max_rows=4)
    assert stand_in == {"jaxshare": module.JaxshareLM}
    found = {}
    for kind in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
        given, _ = requests(kind)
        instances = [types.SimpleNamespace(args=each) for each in given[:3]]
        found[kind] = getattr(model, kind)(instances)
    pairs, pages, answers = (requests(kind)[1][:3] for kind in found)
    np.testing.assert_allclose(found["loglikelihood"], pairs, atol=1e-4)
    np.testing.assert_allclose(found["loglikelihood_rolling"], pages, atol=1e-4, rtol=1e-6)
    assert found["generate_until"] == answers
    kept = [(kind, arguments) for kind, arguments, _ in model.cache_hook.kept]
    assert kept[:3] == [("loglikelihood", pair) for pair in requests("loglikelihood")[0][:3]]
    assert len(kept) == 9
    assert model.apply_chat_template(CHAT[:2]) == harness().render(CHAT[:2])
    assert model.apply_chat_template(CHAT, False) == harness().render(CHAT, goes_on=True)
    assert model.chat_template(True) == harness().chat_template(True)
    assert "/" not in model.tokenizer_name and model.tokenizer_name.endswith("lm_eval__model")
    assert model.get_model_info() == harness().describe()


def test_the_command_registers_the_model_and_runs_lm_eval(stand_in):
    assert main() == 0
    assert stand_in == {
        "jaxshare": "jaxshare.serving.evaluation.lm_eval.model:JaxshareLM",
        "ran": True,
    }


def test_without_lm_eval_the_command_says_what_has_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main() == 1
    assert "`pip install 'jaxshare[lm-eval]'` has it" in capsys.readouterr().err
