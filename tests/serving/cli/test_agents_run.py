"""`jaxshare agents run`: journals, questions at the terminal, and the engine's options."""

import asyncio
import io
import json
import re
import sys

import pytest

from jaxshare import models
from jaxshare.serving.agents import Reply
from jaxshare.serving.agents.backends import EngineModel
from jaxshare.serving.agents.journal import Journal
from jaxshare.serving.cli import main
from jaxshare.serving.engine import Engine, engine

_PROGRAM = """
import pathlib
from jaxshare.serving.agents import agent, ask, gather, llm, tool
from jaxshare.serving.agents.backends import ScriptedModel

MODEL = "scripted"

def counted(place):
    with open(place, "a") as file:
        file.write("called\\n")
    return 5

@agent
async def main(place, *words):
    text, _ = await llm("begin", n=2)
    number = await tool(counted, place)
    if not words:
        return text, number
    answers = await gather(ask("go on?", options=["yes", "no"]), ask("how many?", returns=int))
    return text, number, *answers

AGENT = main

def scripted():
    return ScriptedModel({"begin": "begun"})
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    file = tmp_path / "program.py"
    file.write_text(_PROGRAM, encoding="utf-8")
    return str(file)


def run(capsys, *arguments) -> tuple[int, str, str]:
    code = main.main(["agents", "run", *map(str, arguments)])
    return code, *capsys.readouterr()


def test_a_run_goes_on_with_its_journal(capsys, tmp_path, program):
    journal, calls = tmp_path / "j", tmp_path / "calls"
    whole = ("--journal", journal, "--resume", "--json", "--", calls)
    code, out, _ = run(capsys, program, *whole)  # begins, since there is none yet
    assert (code, json.loads(out)["value"]) == (0, ["begun", 5])
    journal.write_bytes(journal.read_bytes()[:-20])
    assert run(capsys, program, *whole)[0] == 0
    assert run(capsys, program, *whole)[0] == 0
    assert calls.read_text(encoding="utf-8") == "called\n" * 2  # once more for the line cut off
    code, _, err = run(capsys, program, "--journal", journal, "--", calls)
    assert code == 1 and "has a run already; give --resume" in err
    code, _, err = run(capsys, program, *whole[:3], "--seed", "4", "--", calls)
    assert code == 1 and "of another program or version: its seed is 0 and this one 4" in err


def test_questions_are_listed_and_answered_later(capsys, tmp_path, program):
    journal, end = tmp_path / "j", ("--", tmp_path / "calls", "ask")
    code, out, _ = run(capsys, program, "--journal", journal, *end)
    with Journal.open(journal) as opened:
        ids = {one.text: one.id for one in opened.questions}
    go, many = ids["go on?"], ids["how many?"]
    assert code == 3 and f"{go}: agent main asks: go on? (yes / no)" in out
    assert f"--journal {journal} --resume --answer " in out and f"--answer {many}=TEXT" in out
    resume = ("--journal", journal, "--resume", "--json")
    code, out, _ = run(capsys, program, *resume, "--answer", f"{go}=yes", *end)
    questions = json.loads(out)["questions"]
    assert code == 3 and [(one["id"], one["text"]) for one in questions] == [(many, "how many?")]
    assert json.loads(out)["error"] is None and json.loads(out)["value"] is None
    code, _, err = run(capsys, program, *resume, "--answer", "beef=1", *end)
    assert code == 1 and f"no question 'beef' in the journal {journal}" in err
    code, _, err = run(capsys, program, *resume, "--answer", f"{many}=few", *end)
    assert code == 1 and f"the answer to question {many} is 'few'" in err
    code, out, _ = run(capsys, program, *resume, "--answer", f"{many}=7", *end)
    assert (code, json.loads(out)["value"]) == (0, ["begun", 5, "yes", 7])
    assert json.loads(out)["questions"] == []
    assert (tmp_path / "calls").read_text(encoding="utf-8") == "called\n"


def test_questions_are_asked_at_a_terminal(capsys, tmp_path, program, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    end = ("--", tmp_path / "calls", "ask")
    monkeypatch.setattr(sys, "stdin", Terminal("perhaps\n7\nyes\n"))
    code, out, err = run(capsys, program, "--json", *end)
    assert code == 0 and json.loads(out)["value"] == ["begun", 5, "yes", 7]
    assert "the last answer: 'perhaps' is none of yes, no\nagent main asks: go on?" in err
    monkeypatch.setattr(sys, "stdin", Terminal("yes\n"))
    code, out, _ = run(capsys, program, "--json", *end)
    assert code == 3 and [one["text"] for one in json.loads(out)["questions"]] == ["how many?"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("--resume", "--resume is given without --journal"),
        ("--answer a=b", "--answer is given without --journal"),
        ("--journal {}/j --answer a=b", "--answer is given without --resume"),
        ("--journal {}/j --resume --answer b", "--answer is 'b'; it must be the id"),
        ("--journal {}/j --resume --answer a=b --answer a=c", "two answers to a"),
        ("--journal {}/j --resume --answer a=b", "there is no question 'a' in the journal"),
        ("--journal {}/none/j", "--journal is '.*none/j', but there is no folder"),
        ("--journal {}", "--journal is '.*', but that is a folder"),
        ("--journal {}/notes --resume", "is no journal that grows with its run"),
        ("--max-concurrency 0", "--max-concurrency is 0; at least one"),
        ("--resample hotspot", "--resample is hotspot, but there is no Logits Cache"),
        ("--kv-bytes many", "--kv-bytes is 'many'; it must be a number of bytes"),
        ("--host-kv-bytes 0", "--host-kv-bytes is '0'; it must be"),
        ("--logits-cache -1", "--logits-cache"),
        ("--kv-bytes 1GiB", "--kv-bytes is of an engine, and the scripted model has none"),
        ("--policy lru", "--policy is of an engine"),
        (
            "--policy lru --kv-bytes 1GiB --logits-cache 1MiB",
            "--policy, --kv-bytes and --logits-cache are of an engine, and the scripted model",
        ),
        (
            "--endpoint http://localhost:1/v1 --model m --logits-cache 1MiB --kv-bytes 1GiB",
            "--kv-bytes and --logits-cache are of an engine, and the model at --endpoint "
            "http://localhost:1/v1 has none; leave them out, or leave --endpoint out to run the "
            "model of --model here",
        ),
        ("--endpoint http://localhost:1/v1 --model m --dtype float32", "--dtype is of an engine"),
        ("--endpoint http://localhost:1/v1 --policy lru", "--policy is of an engine, and the"),
        ("--endpoint http://localhost:1/v1 --resample hotspot", "--resample is of an engine"),
    ],
)
def test_odd_options_are_refused_before_any_work(capsys, tmp_path, program, given, words):
    (tmp_path / "notes").write_text("notes", encoding="utf-8")
    options = given.format(*[tmp_path] * given.count("{}")).split()
    try:
        code, out, err = run(capsys, program, *options, "--", tmp_path / "calls")
    except SystemExit as ended:  # by the parser
        code, (out, err) = ended.code, capsys.readouterr()
    assert code in (1, 2) and not out and not (tmp_path / "calls").exists()
    assert re.search(words, err), err


def test_a_journal_that_is_open_is_refused(capsys, tmp_path, program):
    with Journal.open(tmp_path / "j"):
        code, _, err = run(capsys, program, "--journal", tmp_path / "j", "--resume", "--", "x")
    assert code == 1 and "is being written by this process already" in err


def test_options_reach_the_engine_and_the_runtime(capsys, tmp_path, program, monkeypatch):
    """The engine is made, and its scheduler gets what `Engine` gives it for the same options."""
    made, schedulers, under_way, most = [], [], [0], []
    create = engine.create_scheduler

    def recorded(model, metrics, *settings):
        *rest, (logits, hotspot, always) = settings
        schedulers.append((*rest, logits and logits.max_bytes, repr(hotspot), always))
        return create(model, metrics, *settings)

    async def answer(self, call):
        under_way[0] += 1
        most.append(under_way[0])
        await asyncio.sleep(0.001)
        under_way[0] -= 1
        made.append(self)
        return Reply("yes")

    monkeypatch.setattr(engine, "create_scheduler", recorded)
    monkeypatch.setattr(EngineModel, "answer", answer)
    sizes = {"kv_bytes": 32 * 2**20, "host_kv_bytes": 2**20, "logits_cache": 2 * 2**20}
    Engine(models.load("embedded"), policy="slru", **sizes)
    options = "--model embedded --policy slru --kv-bytes 32MiB --host-kv-bytes 1MiB"
    options += " --logits-cache 2MiB --resample hotspot --max-concurrency 1"
    code, _, err = run(capsys, program, *options.split(), "--", tmp_path / "calls")
    assert code == 0, err
    assert schedulers[0] == schedulers[1] and schedulers[0][1] == "slru"
    assert made[0]._resample == "hotspot" and most == [1, 1]
    run(capsys, program, "--model", "embedded", "--logits-cache", "2MiB", "--", tmp_path / "calls")
    run(capsys, program, "--model", "embedded", "--", tmp_path / "calls")
    assert [one._resample for one in made[::2]] == ["hotspot", "stepwise", None]
    assert most[2:] == [1, 2, 1, 2]
    assert schedulers[2] != schedulers[0] and schedulers[3][1] == "contribution"


def test_a_model_of_the_file_takes_no_options_of_an_engine(capsys, tmp_path, program):
    text = _PROGRAM.replace('MODEL = "scripted"', 'MODEL = ScriptedModel({"begin": "begun"})')
    (tmp_path / "program.py").write_text(text, encoding="utf-8")
    code, out, _ = run(capsys, program, "--", tmp_path / "calls")
    assert code == 0 and "begun" in out
    code, _, err = run(capsys, program, "--policy", "lru", "--", tmp_path / "calls")
    assert code == 1 and "--policy is of an engine, and the ScriptedModel of " in err
