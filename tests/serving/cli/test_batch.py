"""Batch jobs: a stand-in for the engine whose texts are known, jobs broken off at any byte, and
real ones killed."""

import argparse
import contextlib
import fcntl
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from jaxshare import FinishReason, Sampler, progress
from jaxshare.models import Generation, chat_rendering
from jaxshare.serving import checksums
from jaxshare.serving.branches.batch_input import read_input
from jaxshare.serving.cli import arguments, batch
from jaxshare.serving.cli.main import main
from jaxshare.serving.engine.completion import Completion
from jaxshare.serving.errors import InUseError

BOS, USER, REPLY = 256, 257, 258
CONTEXT, VOCAB = 100, 300


class Tokenizer:
    """A token is a byte; a prompt starts with BOS, a message with USER, a reply with REPLY."""

    chat_template = (
        "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('roles must be user') }}"
        "{% endif %}<user>{{ m.content }}{% endfor %}<reply>"
    )
    added_tokens_decoder = {USER: AddedToken("<user>"), REPLY: AddedToken("<reply>")}  # noqa: RUF012
    special_tokens_map = {}  # noqa: RUF012

    def get_vocab(self) -> dict[str, int]:
        return {**{chr(byte): byte for byte in range(256)}, "<reply>": REPLY}

    def encode(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> list[int]:
        tokens = [BOS] * add_special_tokens
        for part in re.split("(<user>|<reply>)", text):
            tokens += {"<user>": [USER], "<reply>": [REPLY]}.get(part, part.encode())
        return tokens

    def get_chat_template(self) -> str:
        return self.chat_template


def model(tokenizer=Tokenizer, *, fingerprint="one", dtype="float32", stop_tokens=(), **sampling):
    config = types.SimpleNamespace(
        max_positions=CONTEXT, vocab_size=VOCAB, architecture="LlamaForCausalLM"
    )
    return types.SimpleNamespace(
        tokenizer=tokenizer and tokenizer(),
        config=config,
        params={"some": np.zeros(1, jnp.dtype(dtype))},
        dtype=jnp.dtype(dtype),
        fingerprint=fingerprint,
        approximate_kv=None,
        adapters=None,
        adapter=None,
        generation=Generation(stop_tokens, Sampler(**{"temperature": 0.5, "top_k": 7, **sampling})),
    )


def text(seed: int, tokens, index: int) -> str:
    """The text of the stand-in: a function of all that a completion may depend on, with characters
    that JSON escapes."""
    return f'{seed}|{",".join(map(str, tokens))}|{index}\nü☃\u2028"'


class Engine:
    """Finishes completions in an order that has nothing to do with that of the prompts, and breaks
    off after `lives` of them."""

    lives: int | None = None
    error: BaseException = RuntimeError("killed")
    made: "list[Engine]"
    says: tuple[str, ...] = ()

    def __init__(
        self,
        model,
        prompts,
        *,
        n,
        max_new_tokens,
        sampler,
        stop,
        include_stop,
        seed,
        share,
        max_rows,
        max_kv_bytes,
        skip,
    ):
        self.prompts, self.most, self.seed, self.skip = prompts, max_new_tokens, seed, skip
        self.settings = {
            "n": n,
            "sampler": sampler,
            "share": share,
            "max_rows": max_rows,
            "max_kv_bytes": max_kv_bytes,
        }
        self.sampled_tokens, self.passes, self.seconds, self.kv_bytes, self.unique_tokens = (
            0,
            0,
            0.5,
            4096,
            77,
        )
        self.compile_seconds = 2.5
        self.rows, self.notes = 3, self.says
        self.wrote: list[tuple[int, int]] = []
        self.made.append(self)

    def stream(self, on_pass=None):
        wanted = [
            (p, i)
            for p, branch in enumerate(self.prompts)
            for i in range(branch.n)
            if (p, i) not in self.skip
        ]
        random.Random(len(wanted)).shuffle(wanted)
        for prompt, index in wanted:
            if self.lives == len(self.wrote):
                raise self.error
            length = 1 + (prompt + index) % self.most
            self.sampled_tokens += length
            self.passes += 1
            on_pass(self)
            self.wrote.append((prompt, index))
            yield Completion(
                text(self.seed, self.prompts[prompt].text, index),
                tuple(range(length)),
                FinishReason.LENGTH if length == self.most else FinishReason.STOP,
                logprob=-length / 3,
                prompt=prompt,
                index=index,
            )


def job_in(folder: Path, read_printed=lambda: ("", "")):
    """Returns what runs a job in a folder: job(lines, options...) -> (exit code, stdout, stderr);
    lines are text, bytes or values."""

    def run(
        lines,
        *arguments: str,
        sampling=(),
        load=model,
        name: str = "out.jsonl",
        of: str | Path = "some/model",
        **engine,
    ):
        texts = [line if isinstance(line, (bytes, str)) else json.dumps(line) for line in lines]
        (folder / "in.jsonl").write_bytes(
            b"\n".join(text.encode() if isinstance(text, str) else text for text in texts)
        )
        parser = argparse.ArgumentParser()
        batch.add_arguments(parser)
        options = parser.parse_args(
            [
                str(of),
                "--input",
                str(folder / "in.jsonl"),
                "--output",
                str(folder / name),
                *arguments,
            ]
        )
        options.dtype = engine.pop("dtype", "float32")
        run.engines = []
        code = batch.run_job(
            options, dict(sampling), load, type("Used", (Engine,), {"made": run.engines, **engine})
        )
        return code, *read_printed()

    run.folder, run.output, run.job = folder, folder / "out.jsonl", folder / "out.jsonl.job"
    return run


@pytest.fixture
def job(tmp_path, capsys):
    """`job_in` an empty folder."""
    return job_in(tmp_path, capsys.readouterr)


def results(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def flipped(content: bytes, at: int) -> bytes:
    """The content with one bit of a byte flipped, another bit in each."""
    return content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :]


def begun(job: dict) -> dict:
    """The file of a complete job as it was before the end."""
    return checksums.sealed(
        checksums.unsealed(job) | {"finished": None, "output": None, "lines": None}
    )


def tokens(string: str) -> list[int]:
    return [BOS, *string.encode()]


LINES = [
    {"prompt": "one"},
    "",
    "  ",
    {"tokens": [5, 6], "id": "zwö", "n": 3},
    '"bare"',
    {"messages": [{"role": "user", "content": "hi"}], "id": 2.5},
]
PROMPTS = [
    (1, 1, tokens("one"), 2),
    (4, "zwö", [5, 6], 3),
    (5, 5, tokens("bare"), 2),
    (6, 2.5, [USER, *b"hi", REPLY], 2),
]
"""(line, id, tokens, n) of LINES with --n 2."""


def test_every_completion_is_in_the_output_in_the_order_of_the_input(job):
    code, out, err = job(LINES, "--n", "2", "--max-new-tokens", "3", "--seed", "9")
    assert code == 0 and out == ""
    expected, engine = [], job.engines[0]
    for place, (line, name, prompt, n) in enumerate(PROMPTS):
        for index in range(n):
            length = 1 + (place + index) % 3
            expected.append(
                {
                    "id": name,
                    "line": line,
                    "index": index,
                    "text": text(9, prompt, index),
                    "tokens": [*range(length)],
                    "finish_reason": "length" if length == 3 else "stop",
                    "logprob": round(-length / 3, 4),
                }
            )
    assert engine.wrote != sorted(engine.wrote) and results(job.output) == expected
    assert [(list(branch.text), branch.n) for branch in engine.prompts] == [
        (prompt, n) for _, _, prompt, n in PROMPTS
    ]
    assert err.startswith("9 completions of 4 prompts; ") and err.count("\n") == 1
    assert {path.name for path in job.folder.iterdir()} == {
        "in.jsonl",
        "out.jsonl",
        "out.jsonl.job",
    }


def test_what_the_engine_has_chosen_is_said_before_it_runs(job, monkeypatch):
    monkeypatch.setattr(
        Engine, "says", ("3 rows at a time: all completions", "costs of two CPU cores")
    )
    code, out, err = job(LINES, "--json")
    assert code == 0 and err.splitlines()[:2] == [
        "jaxshare: 3 rows at a time: all completions",
        "jaxshare: costs of two CPU cores",
    ]
    assert json.loads(out)["rows"] == 3


def test_a_job_of_equal_texts_is_announced_once(job, caplog):
    job(LINES, "--n", "2", sampling={"temperature": 0.0})
    [record] = caplog.records
    assert record.getMessage().startswith(
        "all 3 completions of a prompt will be equal, because temperature 0 takes the likeliest "
        "token"
    )
    caplog.clear()
    job([{"prompt": "one"}], name="b", sampling={"temperature": 0.0})
    job(LINES, "--n", "2", name="c", sampling={"temperature": 0.1})
    assert not caplog.records


def test_settings_reach_the_engine(job):
    job(
        LINES,
        "--max-new-tokens",
        "20",
        "--max-rows",
        "8",
        "--max-kv-bytes",
        "1.5MiB",
        "--share",
        "never",
        sampling={"temperature": 0.25, "min_p": 0.1},
    )
    assert job.engines[0].settings == {
        "n": 1,
        "sampler": Sampler(0.25, top_k=7, min_p=0.1),
        "share": False,
        "max_rows": 8,
        "max_kv_bytes": 1572864,
    }
    assert job.engines[0].most == 20
    job(LINES, "--share", "always", name="b")
    assert job.engines[0].settings == {
        "n": 1,
        "sampler": Sampler(0.5, top_k=7),
        "share": True,
        "max_rows": None,
        "max_kv_bytes": None,
    }
    job(LINES, name="c")
    assert job.engines[0].settings["share"] is None


def test_a_line_or_a_node_may_have_sampling_settings_of_its_own(job):
    lines = [
        {"prompt": "a"},
        {"prompt": "b", "temperature": 0, "min_p": 0.25},
        {"tokens": [5], "top_k": 3, "top_p": 0.5},
    ]
    given = {"temperature": 0.75}
    assert job(lines, sampling=given)[0] == 0
    samplers = [branch.sampler for branch in job.engines[0].prompts]
    assert samplers == [None, Sampler(0, 7, min_p=0.25), Sampler(0.75, 3, 0.5)]
    tree = {
        "text": "a",
        "top_k": 9,
        "children": ["b", {"text": "c", "temperature": 2, "children": ["d"]}, "e"],
    }
    assert job([tree], "--tree", sampling=given, name="b")[0] == 0
    samplers = [branch.sampler for branch in job.engines[0].prompts]
    assert samplers == [Sampler(0.75, 9), Sampler(2, 9), Sampler(0.75, 9)]


def test_a_line_may_say_how_it_is_answered(job):
    """As far as the context goes, by its own number of tokens."""
    lines = [
        {"prompt": "a", "max_tokens": 3, "stop": "x", "include_stop": True, "seed": 4},
        {"prompt": "b", "stop": [], "min_length": 5, "sequence_bias": [[[3, 4], 1.5]]},
        {"prompt": "c", "max_tokens": CONTEXT},
        {"prompt": "d", "best_of": 2},
    ]
    code, _, printed = job(lines)
    assert code == 3 and "line 3: the prompt has" in printed
    assert 'line 4: has the unknown field "best_of"' in printed
    assert [branch.sampler for branch in job.engines[0].prompts] == [
        Sampler(0.5, 7, max_tokens=3, stop=("x",), include_stop=True, seed=4),
        Sampler(0.5, 7, stop=(), min_length=5, sequence_bias=(((3, 4), 1.5),)),
    ]


def test_trees(job):
    tree = {
        "id": "t",
        "text": "ab",
        "n": 1,
        "children": [
            {"text": "c", "children": ["d", {"text": "e", "n": 3}]},
            {"tokens": [9, 8], "n": 1, "children": [{"text": "f"}]},
        ],
    }
    # the first is no JSON
    assert job(["alone", tree], "--tree", "--n", "2", "--max-new-tokens", "4")[0] == 3
    job(['"alone"', tree], "--tree", "--n", "2", "--max-new-tokens", "4", name="b")
    leaves = {
        ("t", ()): (tokens("ab"), 1),
        ("t", (0, 0)): (tokens("abcd"), 2),
        ("t", (0, 1)): (tokens("abce"), 3),
        ("t", (1,)): ([*tokens("ab"), 9, 8], 1),
        ("t", (1, 0)): ([*tokens("ab"), 9, 8, *b"f"], 2),
    }
    expected = [(1, 1, [], i, text(0, tokens("alone"), i)) for i in range(2)] + [
        (2, name, [*path], i, text(0, prompt, i))
        for (name, path), (prompt, n) in leaves.items()
        for i in range(n)
    ]
    assert [
        (r["line"], r["id"], r["branch"], r["index"], r["text"]) for r in results(job.folder / "b")
    ] == expected


def test_chat_puts_prompts_into_the_template(job):
    job([{"prompt": "hi"}, {"tokens": [1]}], "--chat")
    assert [list(branch.text) for branch in job.engines[0].prompts] == [[USER, *b"hi", REPLY], [1]]


def test_results_are_written_as_they_finish_and_the_job_before_them(job):
    seen = []

    def watch(self, on_pass=None):
        for completion in Engine.stream(self, on_pass):
            seen.append((job.job.exists(), len(job.output.read_bytes().splitlines())))
            yield completion

    job(LINES, stream=watch)
    assert seen == [(True, i) for i in range(len(seen))] and len(seen) == 6


BAD = [
    ('{"prompt": "x"', "is not JSON in UTF-8 (Expecting"),
    (b'{"prompt": "\xff"}', "is not JSON in UTF-8 ('utf-8' codec"),
    ('{"prompt": "\\ud800"}', "is not JSON in UTF-8 ('utf-8' codec"),
    ("[1, 2]", "is [1, 2]; it must be a JSON object or a string"),
    ("null", "is null; it must be"),
    ("[" * 100_000, "is nested too deeply"),
    ('{"prompt": ""}', 'has an empty "prompt"'),
    ('""', "empty"),
    ('{"prompt": ["x"]}', 'has no text as its "prompt"'),
    ("{}", 'must have one of "prompt", "messages" and "tokens"'),
    ('{"prompt": "x", "tokens": [1]}', "must have one of"),
    ('{"prompt": "x", "Id": 3}', 'unknown field "Id"; known are id, messages, n'),
    (
        '{"text": "x"}',
        'unknown field "text" ("text" and "children" are of a tree, which --tree reads)',
    ),
    ('{"prompt": "x", "n": 0}', "has 0 as its n; ask for at least 1"),
    ('{"prompt": "x", "n": true}', "has true as its n"),
    ('{"prompt": "x", "n": null}', "has null as its n"),
    ('{"prompt": "x", "n": "3"}', 'has "3" as its n'),
    ('{"prompt": "x", "temperature": "hot"}', "temperature is 'hot'; it must be a number"),
    ('{"prompt": "x", "top_k": 1.5}', "has a sampling setting out of range: top_k is 1.5"),
    ('{"prompt": "x", "top_p": null}', "top_p is None; it must be a number"),
    ('{"prompt": "x", "min_p": 1e999}', "min_p is inf; it must be finite"),
    ('{"prompt": "x", "grammar": {"xml": "a"}}', "it must have one key, one of json_schema, regex"),
    ('{"prompt": "x", "grammar": "a+"}', "the grammar is 'a+'; it must be a dict"),
    (
        '{"prompt": "x", "forbidden": [300]}',
        "has settings that cannot be obeyed: the sampler names",
    ),
    ('{"tokens": []}', "give at least one token"),
    ('{"tokens": [1, "2"]}', "no list of whole numbers"),
    ('{"tokens": 7}', "no list of whole numbers"),
    ('{"tokens": [-1]}', "no list of whole numbers"),
    ('{"tokens": [4, 300]}', "has the token 300; tokens of this model are between 0 and"),
    (
        '{"prompt": "' + "9" * 90 + '"}',
        "the prompt has 91 tokens and 10 more may follow, but the model's context holds 100",
    ),
    ('{"prompt": "x", "id": [1]}', "has the id [1]; it must be a string or a number"),
    ('{"prompt": "x", "id": NaN}', "has the id NaN"),
    ('{"prompt": "x", "id": "good"}', 'has the id "good" of line 1'),
    ('{"prompt": "x", "id": 1e999}', "has the id Infinity"),
    ('{"prompt": "x", "n": 1000000000}', "has 1000000000 as its n; ask for at most 1048576"),
    ('{"prompt": "x", "n": 1' + "0" * 400 + "}", "ask for at most 1048576"),
    ('{"prompt": "' + "x" * 2000 + '"}', "has 2,000 characters, but the model's context of 100"),
    (
        '{"messages": [{"role": "user", "content": "' + "x" * 2000 + '"}]}',
        "has 2,004 characters, but the model's context of 100",
    ),
    ('{"messages": []}', 'has "messages" that are no list of {"role"'),
    ('{"messages": [{"role": "user"}]}', "that are no list of"),
    (
        '{"messages": [{"role": "sir", "content": "x"}]}',
        "that the chat template refuses (roles must be user)",
    ),
]


@pytest.mark.parametrize(("line", "words"), BAD, ids=range(len(BAD)))
def test_a_bad_line_is_named_and_the_rest_runs(job, line, words):
    code, out, err = job(
        [{"prompt": "a", "id": "good"}, "", line, {"prompt": "b"}],
        "--max-new-tokens",
        "10",
        "--json",
    )
    assert code == 3 and err.count("\n") == 3
    assert err.endswith("1 line of " + str(job.folder / "in.jsonl") + " could not be read (3)\n")
    assert "in.jsonl, line 3: " in err.split("\n")[0] and words in err.split("\n")[0]
    assert [(r["line"], r["id"], r["text"]) for r in results(job.output)] == [
        (1, "good", text(0, tokens("a"), 0)),
        (4, 4, text(0, tokens("b"), 0)),
    ]
    assert [bad["line"] for bad in json.loads(out)["bad_lines"]] == [3]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"text": "a", "children": [{"text": "b"}, {"text": ""}]}, 'branch 1 has an empty "text"'),
        (
            {"text": "a", "children": [{"text": "b", "children": ["c", {"n": 2}]}]},
            'branch 0.1 must have one of "text" and "tokens"',
        ),
        ({"text": "a", "n": 0}, "the root has 0 as its n"),
        ({"text": "a", "prompt": "b"}, 'the root has the unknown field "prompt"'),
        ({"text": "a", "children": {"text": "b"}}, 'the root has "children" that are no list'),
        ({"text": "a", "children": [["b"]]}, 'branch 0 is ["b"]; it must be an object'),
        ({"text": "a", "children": ["b", "c" * 90]}, "the prompt of branch 1 has 92 tokens"),
        ({"text": "a", "children": [{"text": "b", "top_p": 0}]}, "branch 0 has a sampling setting"),
        ({}, "the root must have one of"),
        # Python 3.14 reads tens of thousands of levels.
        ('{"text": "a", "children": [' * 100_000 + "]}" * 100_000, "is nested too deeply"),
    ],
)
def test_a_bad_tree_is_named(job, line, words):
    code, _, err = job([line, {"text": "good"}], "--tree", "--max-new-tokens", "10")
    assert (
        code == 3 and "in.jsonl, line 1: " in err and words in err and len(results(job.output)) == 1
    )


def test_a_job_of_too_many_completions_is_refused(job):
    with pytest.raises(ValueError, match=r"asks for 9000000 completions; a job has at most"):
        job([{"prompt": str(i), "n": 1_000_000} for i in range(9)])


def test_a_template_that_never_ends_stops_the_job_once(job, monkeypatch):
    monkeypatch.setattr(chat_rendering, "RENDER_SECONDS", 0.2)
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    bad = type("Endless", (Tokenizer,), {"chat_template": endless})
    with pytest.raises(ValueError, match=r"cannot be used for line 1: it takes more than"):
        job([{"prompt": "a"}] * 99, "--chat", load=lambda: model(bad))


JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.sampled_from([10**400, -1, 1e308, float("inf"), float("nan"), "\ud800", "\0"]),
        st.text(max_size=3),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(
                [
                    "prompt",
                    "messages",
                    "tokens",
                    "text",
                    "children",
                    "n",
                    "id",
                    "role",
                    "content",
                    "top_k",
                ]
            ),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=8,
)


@given(
    st.lists(st.one_of(JSON.map(json.dumps).map(str.encode), st.binary(max_size=12)), max_size=4),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_any_line_is_prompts_or_is_named(lines, tree, chat):
    data = b"\n".join(line.replace(b"\n", b"") for line in lines)
    options = argparse.Namespace(tree=tree, chat=chat, n=1, max_new_tokens=1)
    items, bad_lines = read_input(data, model(), options, Sampler())
    good, bad = {item.line for item in items}, {line["line"] for line in bad_lines}
    kept = {number for number, line in enumerate(data.split(b"\n"), 1) if line.strip()}
    assert not good & bad and good | bad <= kept
    assert all(item.tokens and item.n >= 1 for item in items)
    assert kept == good | bad


def test_models_without_a_tokenizer_or_a_template(job):
    code, _, err = job([{"prompt": "a"}, {"tokens": [3]}], load=lambda: model(None))
    assert (
        code == 3
        and "line 1: the model folder has no tokenizer" in err
        and results(job.output)[0]["line"] == 2
    )
    bare = type("Bare", (Tokenizer,), {"chat_template": None})
    code, _, err = job(
        [{"prompt": "a"}, {"tokens": [3]}], "--chat", load=lambda: model(bare), name="b"
    )
    assert code == 3 and "line 1: needs a chat template, and the model has none" in err


@pytest.mark.parametrize("lines", [[], ["", " "], ["nonsense", {"prompt": ""}]])
def test_nothing_to_run_leaves_nothing_behind(job, lines):
    with pytest.raises(
        ValueError, match=r"no line of the input .*in.jsonl can be run; give at least one such as"
    ):
        job(lines)
    assert [path.name for path in job.folder.iterdir()] == ["in.jsonl"]


def test_what_the_engine_refuses_leaves_nothing_behind(job):
    def refuse(self, *_, **__):
        raise ValueError("too much memory")

    with pytest.raises(ValueError, match="too much memory"):
        job(LINES, __init__=refuse)
    assert [path.name for path in job.folder.iterdir()] == ["in.jsonl"]


def no_model():
    pytest.fail("the model is not needed to find this out")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--n", "0"], "--n is 0; ask for at least 1 completion"),
        (["--max-new-tokens", "0"], "--max-new-tokens is 0; ask for at least 1 tok"),
        (["--max-rows", "-1"], "--max-rows is -1"),
        (["--max-kv-bytes", "2QB"], "--max-kv-bytes is '2QB'"),
        (["--tree", "--chat"], "--chat and --tree do not go together"),
        (["--output", "no/folder/out"], "there is no folder no/folder"),
        (["--input", "nowhere.jsonl"], "the input nowhere.jsonl cannot be read"),
    ],
)
def test_mistakes_are_found_before_the_model_is_loaded(job, arguments, words):
    with pytest.raises(ValueError, match=words):
        job(LINES, *arguments, load=no_model)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--input", "nowhere.jsonl"], 2),
        (["--n", "0"], 2),
        (["--max-kv-bytes", "2QB"], 2),
        (["--temperature", "-1"], 2),
        (["--output", "no/folder/out"], 1),
        (["--output", "in.jsonl"], 1),
        ([], 1),
    ],
    ids=lambda given: " ".join(map(str, given)) if isinstance(given, list) else str(given),
)
@pytest.mark.parametrize("form", ["prompts", "requests"])
def test_the_exit_code_says_whether_trying_again_may_help(
    tmp_path, monkeypatch, capsys, arguments, code, form
):
    """2 for the input and settings, 1 for the output and the model, in both forms of lines."""
    monkeypatch.chdir(tmp_path)
    body = {"model": "tiny", "prompt": "a"}
    request = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body}
    lines = {"prompts": {"prompt": "a"}, "requests": request}
    Path("in.jsonl").write_text(json.dumps(lines[form]))
    given = ["--input", "in.jsonl", "--output", "out.jsonl", *arguments]
    assert main(["batch", str(tmp_path / "nothing"), *given]) == code
    assert capsys.readouterr().err.startswith("jaxshare: error: ")
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".jsonl"] == ["in.jsonl"]


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ("1", 1),
        ("2e9", 2 * 10**9),
        ("1.5e+3", 1500),
        ("2GB", 2 * 10**9),
        ("512MiB", 512 * 2**20),
        ("0.5 kib", 512),
        ("3tb", 3 * 10**12),
        ("7B", 7),
    ],
)
def test_bytes(given, size):
    assert arguments.parse_bytes(given) == size


@pytest.mark.parametrize(
    "given", ["", "GB", "-1", "0", "1e", "1 2", "0.1", "nan", "inf", "1e999", "5 bits", "1MiBs"]
)
def test_no_bytes(given):
    with pytest.raises(ValueError, match="it must be a number of bytes such as 2e9, 2GB or 512MiB"):
        arguments.parse_bytes(given)


def test_an_output_that_exists_is_left_alone(job):
    job.output.write_text("mine")
    with pytest.raises(
        ValueError,
        match=r"out.jsonl exists; --resume goes on with the job that wrote it, or give another "
        r"--output",
    ):
        job(LINES, load=no_model)
    with pytest.raises(
        ValueError, match=r"there is no .*out.jsonl.job, so nothing says which job wrote"
    ):
        job(LINES, "--resume", load=no_model)
    assert job.output.read_text() == "mine" and not job.job.exists()


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "[]",
        '{"settings": 3, "finished": null, "output": 1, "format": "jaxshare batch job 2"}',
        "{}",
        '{"settings": {}, "finished": null, "output": 1, "format": "other"}',
        '{"settings": {}, "finished": {"a": 1}, "output": 1, "format": "jaxshare batch job 2"}',
    ],
)
def test_a_damaged_job_is_refused(job, damage):
    job(LINES)
    job.job.write_text(damage)
    with pytest.raises(
        ValueError, match=r"out.jsonl.job cannot be read or is damaged .*; give another --output"
    ):
        job(LINES, "--resume", load=no_model)


def test_resuming_what_has_not_begun_begins_it(job):
    assert job(LINES, "--resume")[0] == 0
    assert len(results(job.output)) == 6 and job.engines[0].skip == set()


def test_resuming_what_is_complete_says_so(job):
    job([*LINES, "nonsense"])
    before = job.output.read_bytes()
    code, out, err = job([*LINES, "nonsense"], "--resume", "--json", load=no_model)
    done = json.loads(out)
    assert (
        code == 3
        and "the job is complete: all 6 completions" in err
        and done["completions"] == done["resumed"] == 6
    )
    assert (
        [bad["line"] for bad in done["bad_lines"]] == [7]
        and done["tokens"] == 0
        and job.output.read_bytes() == before
    )
    job(LINES, name="b")
    assert job(LINES, "--resume", name="b", load=no_model)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "changed", "words"),
    [
        (["--n", "3"], {}, "began with --n 2, not 3"),
        (["--max-new-tokens", "5"], {}, "began with --max-new-tokens 64, not 5"),
        (["--seed", "1"], {}, "began with --seed 0, not 1"),
        (["--chat"], {}, "began without --chat, not with --chat"),
        (["--share", "never"], {}, "began with --share auto, not never"),
        (["--tree"], {}, "began without --tree, not with --tree"),
        ([], {"dtype": None}, "began with --dtype float32, not without it"),
        (
            [],
            {"sampling": {"temperature": 0.5, "top_k": 5}},
            "began without --top-k, not with --top-k 5",
        ),
        ([], {"sampling": {}}, "began with --temperature 0.5, not without it"),
        ([], {"lines": LINES[:-1]}, "the input file has changed since the job began"),
    ],
)
def test_another_job_is_not_mixed_into_the_output(job, arguments, changed, words):
    job(LINES, "--n", "2", sampling={"temperature": 0.5})
    written = job.output.read_bytes()
    again = {"lines": LINES, "sampling": {"temperature": 0.5}} | changed
    with pytest.raises(ValueError, match=f"{words}.*; give it as it was, or give another --output"):
        job(again.pop("lines"), "--n", "2", *arguments, "--resume", load=no_model, **again)
    assert job.output.read_bytes() == written


class OtherWords(Tokenizer):
    def get_vocab(self) -> dict[str, int]:
        return {chr(byte): 255 - byte for byte in range(256)}


class OtherTemplate(Tokenizer):
    chat_template = "another template"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"fingerprint": "two"}, "its parameters have changed"),
        (
            {"dtype": "float16", "fingerprint": "in float16"},
            r"the dtype of its parameters \(float32, now float16\) has changed",
        ),
        ({"tokenizer": OtherWords}, "its tokenizer has changed"),
        ({"tokenizer": None}, "its tokenizer and its chat template have changed"),
        ({"tokenizer": OtherTemplate}, "its chat template has changed"),
        (
            {"temperature": 0.7, "stop_tokens": (3,)},
            r"its generation settings \(stop_tokens \[\], now \[3\], temperature 0.5, now 0.7\) "
            "have changed",
        ),
        (
            {"top_p": 0.5, "fingerprint": "two"},
            r"its parameters and its generation settings \(top_p 1.0, now 0.5\) have changed",
        ),
    ],
)
def test_another_model_of_the_same_name_is_not_mixed_into_the_output(job, changed, words):
    with pytest.raises(RuntimeError, match="killed"):
        job(LINES, lives=2)
    written, kept = job.output.read_bytes(), job.job.read_bytes()
    with pytest.raises(
        ValueError,
        match=f"the job of .*out.jsonl began with another model of this name: {words}; give "
        "another --output, or put the files of the model back as they were",
    ):
        job(LINES, "--resume", load=lambda: model(**changed))
    assert job.output.read_bytes() == written and job.job.read_bytes() == kept
    assert job(LINES, "--resume")[0] == 0 and len(results(job.output)) == 6


def model_files(folder: Path, weights: bytes) -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(weights)
    return folder


@pytest.mark.parametrize("lives", [2, None])
def test_a_model_whose_folder_was_moved_goes_on_and_another_one_does_not(job, lives, monkeypatch):
    first = model_files(job.folder / "first", b"1")
    expected = contextlib.nullcontext() if lives is None else pytest.raises(RuntimeError)
    with expected:
        job(LINES, of=first, lives=lives)
    monkeypatch.chdir(job.folder)
    for other in ("unlike", "./unlike"):
        said = f"began with the model {first}, and {other} is another one: its parameters are diff"
        model_files(job.folder / "unlike", b"2") if other == "unlike" else None
        with pytest.raises(ValueError, match=said):
            job(LINES, "--resume", of=other, load=lambda: model(fingerprint="two"))
    moved = first.rename(job.folder / "moved")
    before = job.output.read_bytes()
    assert job(LINES, "--resume", of=moved)[0] == 0 and len(results(job.output)) == 6
    assert lives or job.output.read_bytes() == before
    # its parameters cannot be compared where they are on other machines
    outline = model()
    outline.params = {}
    with pytest.raises(ValueError, match="their parameters cannot be compared; give "):
        job(LINES, "--resume", of="unlike", load=lambda: outline)


def test_other_weights_under_the_same_name_are_found_after_the_end_too(job, monkeypatch):
    folder = model_files(job.folder / "first", b"1")
    job(LINES, of=folder)
    monkeypatch.chdir(job.folder)
    for name in (folder, "first", "./first"):  # nothing has changed
        assert job(LINES, "--resume", of=name, load=no_model)[0] == 0
    (folder / "model.safetensors").write_bytes(b"12")
    with pytest.raises(ValueError, match="another model of this name: its parameters have chan"):
        job(LINES, "--resume", of=folder, load=lambda: model(fingerprint="two"))
    assert job(LINES, "--resume", of=folder)[0] == 0  # written anew with the same content


def test_a_job_that_was_not_begun_is_said_to_begin(job):
    code, _, err = job(LINES, "--resume")
    assert code == 0 and err.startswith(f"no job at {job.output} yet: it begins now\n")
    assert "begins" not in job(LINES, name="other.jsonl")[2]


def test_bad_lines_are_counted_whenever_the_exit_code_tells_of_them(job):
    lines = [*LINES, *["{"] * 4]
    said = f"4 lines of {job.folder / 'in.jsonl'} could not be read (7, 8, 9, ...)\n"
    for more in ((), ("--resume",)):
        code, _, err = job(lines, *more)
        assert code == 3 and err.endswith(said) and err.count(said) == 1


def former_job(job) -> None:
    """Rewrites the file of the job as the version before wrote it: without checksums, too."""
    content = checksums.loads(job.job.read_bytes())
    del content["model"], content["settings"]["share"], content["lines"]
    job.job.write_text(json.dumps(content | {"format": "jaxshare batch job 2"}))


def test_a_job_of_an_earlier_version_goes_on_with_a_warning_and_is_checked_from_then_on(
    job, caplog
):
    for lives in (2, 1):
        with pytest.raises(RuntimeError, match="killed"):
            job(LINES, "--resume", lives=lives)
        if lives == 2:
            former_job(job)
            assert not caplog.records
    [record] = caplog.records
    assert "out.jsonl goes on without a comparison of the dtype of its parameters, its param" in (
        said := record.getMessage()
    )
    assert "its chat template, its generation settings with the model that it began with" in said
    with pytest.raises(ValueError, match="its parameters have changed"):
        job(LINES, "--resume", load=lambda: model(fingerprint="two"))
    assert job(LINES, "--resume")[0] == 0 and len(caplog.records) == 1
    former_job(job)
    assert job(LINES, "--resume", "--share", "never", load=no_model)[0] == 0  # it is complete


def test_two_starts_at_once_do_not_mix_two_jobs(job):
    """The second one starts while the first loads its model, when there is no output so far."""
    refused = []

    def load():
        files = sorted(job.folder.iterdir())
        for more in ((), ("--resume",)):
            with pytest.raises(InUseError) as error:
                job(LINES, "--seed", "6", *more, load=no_model)
            refused.append(str(error.value))
        assert sorted(job.folder.iterdir()) == files
        return model()

    assert job(LINES, "--seed", "5", load=load)[0] == 0
    assert [said.split("; ")[1] for said in refused] == [
        "wait for it, or give another --output"
    ] * 2
    assert {r["text"].split("|")[0] for r in results(job.output)} == {"5"}
    assert json.loads(job.job.read_bytes())["settings"]["seed"] == 5


def test_a_job_broken_off_at_any_byte_is_continued(job):
    """Cut at every byte in turn: what is whole is kept, what is not is sampled again, and nothing
    is there twice."""
    job(LINES, "--n", "2")
    whole, settings = job.output.read_bytes(), json.loads(job.job.read_bytes())
    lines = [batch.jsonl.line(checksums.sealed(result)) for result in results(job.output)]
    random.Random(5).shuffle(lines)
    written = b"".join(lines)
    for cut in range(0, len(written) + 1, 7):
        job.output.write_bytes(written[:cut])
        job.job.write_text(json.dumps(begun(settings)))
        kept = written[:cut].count(b"\n")
        assert job(LINES, "--n", "2", "--resume")[0] == 0
        assert job.output.read_bytes() == whole and json.loads(job.job.read_bytes()) == settings
        sampled = job.engines[0].wrote if job.engines else []
        assert len(sampled) == len(lines) - kept and all(
            pair not in job.engines[0].skip for pair in sampled
        )


def test_a_job_killed_again_and_again_comes_to_its_end(job):
    job(LINES, "--n", "2", name="unbroken")
    wrote = []
    for _ in range(4):
        with pytest.raises(RuntimeError, match="killed"):
            job(LINES, "--n", "2", "--resume", lives=2)
        wrote += job.engines[0].wrote
    code, out, err = job(LINES, "--n", "2", "--resume", "--json", lives=2)
    assert (
        code == 0
        and json.loads(out)["resumed"] == 8
        and "9 completions (8 of them from before)" in err
    )
    assert len({*wrote, *job.engines[0].wrote}) == 9
    assert job.output.read_bytes() == (job.folder / "unbroken").read_bytes()


def test_rows_that_were_taken_out_of_a_complete_job_are_sampled_again(job):
    job(LINES)
    whole = job.output.read_bytes()
    job.output.write_bytes(b"".join(whole.splitlines(keepends=True)[1:4]))
    assert (
        job(LINES, "--resume")[0] == 0
        and len(job.engines[0].wrote) == 3
        and job.output.read_bytes() == whole
    )


def test_the_output_of_an_earlier_version_is_continued(job):
    """It had "reason" for "finish_reason", "budget" for "length", and no checksums."""
    lines = [*LINES, {"prompt": 'a "reason"'}]
    asked = ("--n", "2", "--max-new-tokens", "3")
    job(lines, *asked, name="unbroken")
    with pytest.raises(RuntimeError, match="killed"):
        job(lines, *asked, lives=7)
    former = {"length": "budget"}
    job.output.write_text(
        "".join(
            json.dumps(
                {
                    {"finish_reason": "reason"}.get(name, name): former.get(value, value)
                    if name == "finish_reason"
                    else value
                    for name, value in checksums.unsealed(result).items()
                }
            )
            + "\n"
            for result in results(job.output)
        )
    )
    assert {result["reason"] for result in results(job.output)} == {"budget", "stop"}
    assert job(lines, *asked, "--resume")[0] == 0 and len(job.engines[0].wrote) == 4
    assert job.output.read_bytes() == (job.folder / "unbroken").read_bytes()


GOOD = {
    "id": 1,
    "line": 1,
    "index": 0,
    "text": "x",
    "tokens": [3],
    "finish_reason": "stop",
    "logprob": -1.0,
}


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (b"\0\0\0", "JSONDecodeError"),
        (b"", "JSONDecodeError"),
        (b'{"line": 1}', "KeyError: 'index'"),
        (b"[]", "TypeError"),
        (json.dumps(GOOD | {"text": None}).encode(), "TypeError: its text is null"),
        (json.dumps(GOOD | {"index": 7}).encode(), "of no prompt"),
        (json.dumps(GOOD | {"line": 2}).encode(), "it is of no prompt of the input"),
        (json.dumps(GOOD | {"branch": [0]}).encode(), "it is of no prompt of the input"),
        (json.dumps(GOOD | {"branch": [[]]}).encode(), "TypeError"),
        (json.dumps(GOOD | {"branch": 4}).encode(), "TypeError"),
        (json.dumps(GOOD | {"finish_reason": None}).encode(), "its finish_reason is null"),
        (b'["reason"]', "TypeError"),
        (json.dumps(GOOD).encode(), "it repeats line 1"),
    ],
)
def test_damage_in_the_middle_is_named(job, damage, words):
    job([{"prompt": "a"}, "", {"prompt": "b", "n": 3}])
    lines = job.output.read_bytes().split(b"\n")
    job.output.write_bytes(b"\n".join([*lines[:2], damage, *lines[3:]]))
    job.job.write_text(json.dumps(begun(json.loads(job.job.read_bytes()))))
    with pytest.raises(
        ValueError,
        match=rf"line 3 of the output .*out.jsonl is damaged \(.*{words}.*take that line out, and "
        r"--resume",
    ):
        job([{"prompt": "a"}, "", {"prompt": "b", "n": 3}], "--resume")


@pytest.mark.parametrize("lives", [3, None], ids=["begun", "complete"])
def test_no_flipped_bit_of_an_output_is_taken_for_a_text(job, lives):
    """Also one that leaves JSON with all its fields."""
    given = (LINES, "--n", "2", "--max-new-tokens", "3")
    job(*given, name="unbroken")
    with contextlib.nullcontext() if lives is None else pytest.raises(RuntimeError):
        job(*given, lives=lives)
    written, settings = job.output.read_bytes(), job.job.read_bytes()
    named = 0
    for at in range(0, len(written), 17):
        job.output.write_bytes(flipped(written, at))
        job.job.write_bytes(settings)
        line = written[:at].count(b"\n") + 1
        try:
            job(*given, "--resume")
        except ValueError as error:
            assert f"line {line} of the output {job.output} is damaged" in str(error)
            assert job.output.read_bytes() == flipped(written, at), "an error changes nothing"
            named += 1
        else:
            assert job.output.read_bytes() == (job.folder / "unbroken").read_bytes()
    assert named > 10
    for at in range(0, len(settings), 17):
        job.output.write_bytes(written)
        job.job.write_bytes(flipped(settings, at))
        try:
            code, _, err = job(*given, "--resume")
        except ValueError as error:
            assert str(error).startswith(f"{job.job} cannot be read or is damaged")
        else:
            assert code == 0 and "9 completions" in err
            assert job.output.read_bytes() == (job.folder / "unbroken").read_bytes()


def test_a_flipped_bit_is_found_where_the_job_ended_between_its_last_two_files(job, monkeypatch):
    write, calls = batch.jsonl.write, []

    def killed(*args):
        calls.append(args)
        if len(calls) == 3:
            raise RuntimeError("killed")
        write(*args)

    monkeypatch.setattr(batch.jsonl, "write", killed)
    with pytest.raises(RuntimeError, match="killed"):
        job(LINES)
    monkeypatch.undo()
    whole = job.output.read_bytes()
    job.output.write_bytes(whole.replace(b'"tokens": [0', b'"tokens": [1', 1))
    with pytest.raises(ValueError, match=r"line 1 of the output .* is damaged \(.*checksum"):
        job(LINES, "--resume")
    job.output.write_bytes(whole)
    assert job(LINES, "--resume")[0] == 0 and len(results(job.output)) == 6


def test_completions_in_a_complete_output_are_plain(job):
    job(LINES)
    assert {*results(job.output)[0]} == {*GOOD}
    with pytest.raises(RuntimeError):
        job(LINES, name="b", lives=2)
    assert all({*line} == {*GOOD, "checksum"} for line in results(job.folder / "b"))


def test_ctrl_c_says_how_to_go_on(job, capsys):
    with pytest.raises(KeyboardInterrupt):
        job(LINES, lives=2, error=KeyboardInterrupt())
    assert (
        "2 of 6 completions are in" in (err := capsys.readouterr().err)
        and "--resume goes on with the job" in err
    )
    assert (
        len(results(job.output)) == 2
        and job(LINES, "--resume")[0] == 0
        and len(results(job.output)) == 6
    )


def test_two_processes_do_not_write_one_output(job):
    with pytest.raises(RuntimeError):
        job(LINES, lives=2)
    with open(job.output, "rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="is being written by another process; wait for it"):
            job(LINES, "--resume", load=no_model)
    assert job(LINES, "--resume")[0] == 0


def test_the_json_object(job):
    _, out, _ = job([*LINES, "nonsense"], "--max-new-tokens", "4", "--json")
    done = json.loads(out)
    tokens = sum(len(r["tokens"]) for r in results(job.output))
    assert done.pop("bad_lines")[0]["error"].startswith("is not JSON")
    assert done == {
        "completions": 6,
        "prompts": 4,
        "tokens": tokens,
        "passes": 6,
        "seconds": 0.5,
        "compile_seconds": 2.5,
        "tokens_per_second": 2 * tokens,
        "kv_bytes": 4096,
        "unique_prompt_tokens": 77,
        "output": str(job.output),
        "resumed": 0,
        "rows": 3,
    }


def test_a_disk_that_is_full_at_the_end_costs_no_result(job, monkeypatch, capsys):
    write = batch.jsonl.write

    def failing(path, lines, do):
        if path == job.output:
            raise ValueError(
                f"{path} cannot be written (No space left on device); make room, and {do}"
            )
        write(path, lines, do)

    monkeypatch.setattr(batch.jsonl, "write", failing)
    with pytest.raises(ValueError, match="No space left on device"):
        job(LINES, "--json")
    done = json.loads(capsys.readouterr().out)
    assert done["completions"] == 6 and len(results(job.output)) == 6
    monkeypatch.undo()
    code, out, _ = job(LINES, "--json", "--resume")
    assert (
        code == 0
        and json.loads(out)["resumed"] == 6
        and [r["line"] for r in results(job.output)] == [1, 4, 4, 4, 5, 6]
    )


def test_a_terminal_gets_a_progress_bar(job, monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(progress, "DELAY", 0.0)
    monkeypatch.setattr(progress, "_REDRAW", 0.02)
    job(
        LINES,
        "--max-new-tokens",
        "4",
        stream=lambda self, on_pass: (time.sleep(0.11) or c for c in Engine.stream(self, on_pass)),
    )
    assert "completions" in screen.getvalue() and "tokens/s" in screen.getvalue()


# Real jobs, killed.

SHOWN = "1. 47 + 38\n2. 12 * 7\n3. 93 - 16\n4. 64 + 19\n5. "
MIXED = [
    {"prompt": f"{SHOWN}47 + 38"},
    {"prompt": f"{SHOWN}12 * 7"},
    {"messages": [{"role": "user", "content": "1. 90 - 17"}]},
    {"tokens": [5, 6, 7, 8, 9]},
]
"""Lines of all kinds, two of which have a long common prefix."""
ARGUMENTS = [
    "--n",
    "4",
    "--max-new-tokens",
    "24",
    "--max-rows",
    "4",
    "--temperature",
    "2",
    "--seed",
    "5",
]
"""Sixteen completions in four waves at least."""


def begin(folder: Path, name: str, *more: str) -> subprocess.Popen:
    """Starts `jaxshare batch` on the embedded model; processes share what they compile."""
    (folder / "in.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in MIXED), encoding="utf-8"
    )
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    with open(folder / f"{name}.err", "w", encoding="utf-8") as errors:
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "jaxshare.serving.cli.main",
                "batch",
                "embedded",
                "--input",
                str(folder / "in.jsonl"),
                "--output",
                str(folder / name),
                *ARGUMENTS,
                *more,
            ],
            env=environment,
            stderr=errors,
        )


def kill_after(process: subprocess.Popen, output: Path, lines: int, seconds: float) -> bool:
    """Kills the job some seconds after it has written some lines; True if it was still running."""
    deadline = time.monotonic() + 300
    while (
        process.poll() is None
        and time.monotonic() < deadline
        and not (output.exists() and output.read_bytes().count(b"\n") >= lines)
    ):
        time.sleep(0.001)
    time.sleep(seconds)
    process.kill()
    return process.wait() == -signal.SIGKILL


def killed_jobs_equal_unbroken_ones(folder: Path, kills: int) -> None:
    whole = begin(folder, "whole")
    assert whole.wait(timeout=300) == 0, (folder / "whole.err").read_text(encoding="utf-8")
    expected, rng, landed = results(folder / "whole"), random.Random(3), 0
    assert len(expected) == 16 and len({r["text"] for r in expected}) > 4
    for attempt in range(3 * kills):
        name = f"killed {attempt}"
        if not kill_after(
            begin(folder, name), folder / name, rng.randint(1, 12), rng.random() * 0.02
        ):
            continue  # it was done first
        landed += 1
        written = (folder / name).read_bytes().rpartition(b"\n")[0].splitlines()
        # The lines of a job that is complete have no checksums of their own.
        kept = [
            {key: value for key, value in json.loads(line).items() if key != "checksum"}
            for line in written
        ]
        again = begin(folder, name, "--resume")
        assert again.wait(timeout=300) == 0, (folder / f"{name}.err").read_text(encoding="utf-8")
        found = results(folder / name)
        assert [{**r, "logprob": 0} for r in found] == [{**r, "logprob": 0} for r in expected]
        assert [r["logprob"] for r in found] == pytest.approx(
            [r["logprob"] for r in expected], abs=1e-3
        )
        # not sampled again
        lines = map(json.loads, (folder / name).read_bytes().splitlines())
        final = {(line["line"], line["index"]): line for line in lines}
        assert 0 < len(kept) <= 16
        assert [final[line["line"], line["index"]] for line in kept] == kept
        if landed == kills:
            return
    pytest.fail(f"only {landed} of {3 * kills} jobs were killed before their end")


@pytest.mark.slow
def test_a_job_killed_once(tmp_path):
    killed_jobs_equal_unbroken_ones(tmp_path, kills=1)


@pytest.mark.slow
def test_a_job_killed_at_ten_moments(tmp_path):
    killed_jobs_equal_unbroken_ones(tmp_path, kills=10)
