"""Jobs of `jaxshare batch` whose lines have OpenAI's form: answers are the server's."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from jaxshare import models
from jaxshare.serving.cli.main import main
from tests.helpers import one_layer
from tests.serving.http.served import served
from tests.serving.http.test_batches import line


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(models, "load", lambda name, **options: one_layer())


@pytest.fixture
def job(tmp_path):
    """Runs lines; returns the exit code and the answers."""

    def run(lines, *more, name="out.jsonl"):
        source, output = tmp_path / "in.jsonl", tmp_path / name
        source.write_text(
            "\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines)
        )
        code = main(
            [
                "batch",
                "tiny",
                "--input",
                str(source),
                "--output",
                str(output),
                "--max-rows",
                "4",
                *more,
            ]
        )
        written = output.read_text().splitlines() if output.exists() else []
        return code, [json.loads(each) for each in written]

    return run


def plain(answer):
    """An answer without what is new each time."""
    body = answer["response"]["body"]
    kept = {name: value for name, value in body.items() if name not in ("id", "created", "usage")}
    return answer["response"]["status_code"], kept


def test_answers_are_those_of_the_server_in_the_order_of_the_input(job, engine_server, capsys):
    messages = [{"role": "user", "content": "3 + 4"}]
    lines = [
        line("a", "1. 3 + 4", n=2, logprobs=2),
        line("b", "2. 3 + 4", max_tokens=30),
        line("c", endpoint="/v1/chat/completions", prompt=None, messages=messages),
        line("refused", temperature=-1),
        line("long", "a " * 9000),
    ]
    code, found = job(lines, "--json")
    assert code == 3
    assert [each["custom_id"] for each in found] == ["a", "b", "c", "refused", "long"]
    assert all(each.keys() == {"id", "custom_id", "response", "error"} for each in found)
    for sent, answer in zip(lines, found, strict=True):
        direct = engine_server.http.post(sent["url"], json=sent["body"])
        expected = {"response": {"status_code": direct.status_code, "body": direct.json()}}
        assert plain(answer) == plain(expected)
    told = json.loads(capsys.readouterr().out)
    assert (told["completions"], told["failed"], told["bad_lines"]) == (5, 2, [])


@pytest.fixture(scope="module")
def engine_server():
    from jaxshare.serving.engine import Engine

    with Engine(one_layer(), max_rows=4, max_queue=64, passes=4) as engine, served(engine) as made:
        yield made


def test_a_job_that_was_broken_off_goes_on_to_the_same_texts(job, tmp_path):
    lines = [line(f"a{i}", f"{i % 5}. 3 + 4", seed=None, max_tokens=12) for i in range(30)]
    code, whole = job(lines)
    assert code == 0
    texts = {each["custom_id"]: plain(each) for each in whole}
    assert len({text["choices"][0]["text"] for _, text in texts.values()}) > 5
    # As a kill leaves it: some lines, and a part of one.
    full = tmp_path / "out.jsonl"
    kept = full.read_bytes().splitlines(keepends=True)
    full.write_bytes(b"".join(kept[3:9]) + kept[20][:40])
    job_file = tmp_path / "out.jsonl.job"
    facts = json.loads(job_file.read_text())
    assert facts["settings"]["form"] == "OpenAI batch"
    code, again = job(lines, "--resume")
    assert code == 0 and [each["custom_id"] for each in again] == [f"a{i}" for i in range(30)]
    assert {each["custom_id"]: plain(each) for each in again} == texts
    assert [json.dumps(each) for each in again[3:9]] == [
        json.dumps(json.loads(k)) for k in kept[3:9]
    ]
    before = full.read_bytes()
    assert job(lines, "--resume")[0] == 0 and full.read_bytes() == before
    with pytest.raises(SystemExit):
        raise SystemExit(job(lines))  # without --resume the output is not touched
    assert full.read_bytes() == before


def test_bad_lines_are_named_and_the_others_run(job, capsys):
    lines = [line("a"), "{", line("a"), {**line("b"), "url": "/v1/embeddings"}, "", line("c")]
    code, found = job(lines)
    assert code == 3 and [each["custom_id"] for each in found] == ["a", "c"]
    errors = capsys.readouterr().err
    for words in (
        "line 2: the line is no JSON",
        "line 3: custom_id is that of line 1",
        "line 4: url",
    ):
        assert words in errors


@pytest.mark.parametrize(
    "more",
    [
        ("--n", "2"),
        ("--temperature", "1"),
        ("--chat",),
        ("--tree",),
        ("--stop", "x"),
        ("--max-new-tokens", "5"),
        ("--data", "2"),
        ("--ray", "--replicas", "2"),
        ("--max-rows", "0"),
    ],
)
def test_options_that_mean_nothing_here_are_refused_before_anything_is_written(job, more, capsys):
    code, found = job([line("a")], *more)
    assert code not in (0, 3) and found == []
    assert more[0].lstrip("-").split("-")[0] in capsys.readouterr().err


def test_lines_name_the_model_by_its_names(job):
    lines = [line("a", model="tiny"), line("b", model="gpt-5")]
    assert [plain(each)[0] for each in job(lines)[1]] == [200, 404]
    names = ("--served-model-name", "gpt-5", "--served-model-name", "tiny")
    assert [plain(each)[0] for each in job(lines, *names, name="named.jsonl")[1]] == [200, 200]


@pytest.mark.slow
def test_a_job_that_is_killed_goes_on(tmp_path):
    lines = [line(f"a{i}", f"{i % 7}. 3 + 4", seed=None, max_tokens=60) for i in range(300)]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    output = tmp_path / "out.jsonl"
    command = [
        *(sys.executable, "-m", "jaxshare.serving.cli", "batch", "embedded"),
        *("--input", str(tmp_path / "in.jsonl"), "--output", str(output), "--max-rows", "2"),
    ]
    made = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not output.exists() or output.read_bytes().count(b"\n") < 20:
        assert time.monotonic() < deadline and made.poll() is None
        time.sleep(0.01)
    os.kill(made.pid, signal.SIGKILL)
    made.wait()
    assert output.read_bytes().count(b"\n") < 300
    assert subprocess.run([*command, "--resume"], stderr=subprocess.DEVNULL).returncode == 0
    found = [json.loads(each)["custom_id"] for each in output.read_text().splitlines()]
    assert found == [f"a{i}" for i in range(300)]
