"""The examples of agents and the command that runs them, each once with the engine."""

import asyncio
import dataclasses
import importlib.util
import json
import random
import sys
import time
from fractions import Fraction

import pytest

from jaxshare import models
from jaxshare.models import Generation, LoadedModel
from jaxshare.serving.agents import Message, Runtime, Single
from jaxshare.serving.agents.backends import EngineModel
from jaxshare.serving.agents.search_log import SearchLog
from jaxshare.serving.cli import main
from tests.helpers import TINY, init
from tests.paths import ROOT

EXAMPLES = ROOT / "examples"
CONFIG = dataclasses.replace(TINY, vocab_size=402, num_layers=1, max_positions=1024)


def example(name: str):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


game24, bug_repair, pipeline, trip = map(example, ("game24", "bug_repair", "pipeline", "trip"))
debate, research = map(example, ("debate", "research"))


def finished(model, what, *args):
    return asyncio.run(Runtime(model).run(what, *args)).accepted.value


# The debate.


def test_each_path_of_a_debate_goes_on_with_debaters_of_its_own():
    model = debate.scripted()
    run = asyncio.run(Runtime(model).run(debate.debate, *debate.arguments([])))
    assert run.accepted.value == ["The second side leads, 70%.", "The first side leads, 80%."]
    assert debate.shown(run.accepted.value).splitlines()[1] == "turn 2: The first side leads, 80%."
    heard = [call.messages[-1].content for call in model.calls if call.agent == "debater"]
    assert heard.count("Begin.") == 2  # what paths share is computed once
    assert sorted(text.partition("%")[0][-2:] for text in heard if text != "Begin.") == [
        *("55", "55", "70", "70")
    ]
    verdicts = {
        call.state: call.messages[-1].content for call in model.calls if call.agent == "debate"
    }
    assert all("For: It saves an hour" in text for text in verdicts.values() if "Turn 1" in text)
    assert all("For: The toll" in text for text in verdicts.values() if "Turn 2" in text)


def test_a_debater_keeps_the_question_and_the_last_turns():
    model = debate.scripted()
    model.script = {"": "x"}
    asyncio.run(Runtime(model).run(debate.debate.under(Single()), "Why?"))
    asked = [call.messages for call in model.calls if call.agent == "debater"]
    assert {len(messages) for messages in asked} == {2, 4}
    assert all(messages[0].content.startswith("You debate: Why?") for messages in asked)


# The research.


def test_workers_begin_with_the_planner_s_dialogue_and_a_summary_agent_shortens_it():
    model = research.scripted()
    value = finished(model, research.research, *research.arguments([]))
    assert value == ("The moon pulls at the sea.", 6)
    assert research.shown(value) == "The moon pulls at the sea.\n(6 messages)"
    calls = {}
    for call in model.calls:
        calls.setdefault(call.agent, []).append(call.messages)
    plan, *drafts, last = calls["research"]
    said = (*plan, Message("assistant", "The moon's part\nThe sun's part"))
    for messages, found in zip(calls["worker"], ("The moon pulls", "The sun pulls"), strict=True):
        assert messages[:3] == said and len(messages) == 4 and found in messages[3].content
    [[shorten]] = calls["summary"]
    assert "assistant: moon's pulls." in shorten.content and "You answer" not in shorten.content
    short = (
        plan[0],
        Message("user", "Asked how tides work; moon and sun pull the water."),
        Message("user", "Answer the question."),
    )
    assert drafts == [short, short]
    assert last[:3] == short and last[3].content == "The moon, and the sun."


# The journey.


def test_a_journey_is_found_with_tools_and_a_wrong_one_refused():
    model = trip.scripted()
    assert finished(model, trip.plan, *trip.arguments([])) == trip.Trip(
        "Bergen", "08:25", "15:10", True
    )
    timetable, rain = model.calls[1].messages[-2:]
    assert json.loads(timetable.content) == trip.TRAINS["Oslo", "Bergen"]
    assert (timetable.role, rain.role, rain.content) == ("tool", "tool", "true")
    assert len(model.calls) == 4 and "with an umbrella" in trip.shown(
        trip.Trip("Bergen", "08:25", "15:10", True)
    )
    with pytest.raises(ValueError, match="no train to Bergen leaves at 08:26"):
        trip.Trip("Bergen", "08:26", "15:10", True)
    assert tuple(trip.arguments(["Trondheim", "20:00"])) == ("Trondheim", "20:00")
    with pytest.raises(ValueError, match="give a city and a time, such as Bergen 16:00, not Oslo"):
        trip.arguments(["Oslo"])


# The game of 24.


def test_the_game_of_24_is_solved_and_every_solution_is_one():
    (puzzles,) = game24.arguments([])
    found = finished(game24.scripted(), game24.solve_all, puzzles)
    assert len(found) == 5
    for puzzle, expression in found.items():
        assert game24.is_solution(expression, [int(word) for word in puzzle.split()])
        assert abs(eval(expression) - 24) < 1e-9


def test_a_puzzle_without_a_solution_has_none():
    assert finished(game24.scripted(), game24.solve_all, [[1, 1, 1, 1], [4, 6]]) == {
        "1 1 1 1": None,
        "4 6": "4 * 6",
    }


def test_expressions_are_worked_out_as_python_does():
    rng = random.Random(0)

    def made(depth: int) -> str:
        if depth == 0:
            return str(rng.randint(1, 13))
        return f"({made(depth - 1)} {rng.choice('+-*/')} {made(rng.randrange(depth))})"

    for _ in range(200):
        text = made(rng.randint(1, 3))
        fractions = "".join(
            f"Fraction({word})" if word.isdigit() else word
            for word in text.replace("(", "( ").replace(")", " )").split()
        )
        try:
            expected = eval(fractions, {"Fraction": Fraction})
        except ZeroDivisionError:
            with pytest.raises(ValueError, match="has a value"):
                game24.value_of(text)
            continue
        value, used = game24.value_of(text)
        assert value == expected and used == [
            int(w) for w in text.replace("(", " ").replace(")", " ").split() if w.isdigit()
        ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "4 +",
        "__import__('os')",
        "4 ** 2",
        "-4 + 28",
        "24.0",
        "True + 23",
        "x",
        "[24]",
        "4 / 0",
        "(" * 500,
    ],
)
def test_what_is_no_expression_is_none(text):
    with pytest.raises(ValueError):
        game24.value_of(text)
    assert not game24.is_solution(text, [24])


@pytest.mark.parametrize(
    ("text", "puzzle", "right"),
    [
        ("4 * 6 * 1 * 1", [1, 1, 4, 6], True),
        ("4 * 6", [1, 1, 4, 6], False),
        ("4 * 6 * 1 * 1 * 1", [1, 1, 4, 6], False),
        ("(1 + 1) * 12", [1, 1, 12], True),
        ("12 + 12", [12, 6], False),
        ("8 / (3 - 8 / 3)", [3, 3, 8, 8], True),
        ("4 * 5", [4, 5], False),
    ],
)
def test_every_number_counts_once(text, puzzle, right):
    assert game24.is_solution(text, puzzle) is right


def test_steps_are_worked_out_and_not_believed():
    numbers = [(Fraction(n), str(n)) for n in (4, 9, 10)]
    assert game24.step("I think 10 - 4 = 99 is good", numbers) == [
        (Fraction(9), "9"),
        (Fraction(6), "(10 - 4)"),
    ]
    thirds = game24.step("4 / 9 =", numbers)
    assert thirds[1] == (Fraction(4, 9), "(4 / 9)") and game24.step("10 * 4/9 = 1", thirds)[0][
        0
    ] == Fraction(40, 9)
    for line, words in (
        ("hello", "no step"),
        ("4 + 5 = 9", "5 is not among"),
        ("4 + 4 = 8", "4 is not among"),
    ):
        with pytest.raises(ValueError, match=words):
            game24.step(line, numbers)
    with pytest.raises(ValueError, match="division by zero"):
        game24.step("4 / 0 = 1", [(Fraction(4), "4"), (Fraction(0), "0")])


def test_puzzles_are_read(tmp_path):
    (tmp_path / "a.csv").write_text(
        "Rank,Puzzles,AMT (s)\n1,1 1 4 6,4.4\n2,1 1 11 11,4.41\n", encoding="utf-8"
    )
    (tmp_path / "b.txt").write_text("4 9 10 13\n\n1 x\n", encoding="utf-8")
    assert game24.arguments(["--puzzles", str(tmp_path / "a.csv"), "--limit", "1"]) == (
        [[1, 1, 4, 6]],
    )
    assert game24.arguments(["3", "3", "8", "8"]) == ([[3, 3, 8, 8]],)
    with pytest.raises(ValueError, match=r"line 3 of .* is no puzzle: '1 x' is not whole numbers"):
        game24.arguments(["--puzzles", str(tmp_path / "b.txt")])
    with pytest.raises(ValueError, match="a puzzle has four numbers, and '4 9 10' has 3"):
        game24.arguments(["4", "9", "10"])
    with pytest.raises(ValueError, match="cannot be read"):
        game24.arguments(["--puzzles", str(tmp_path / "c.txt")])


# Repairing a program.


def test_the_program_is_repaired_in_two_patches():
    value = finished(bug_repair.scripted(), bug_repair.bug_repair, *bug_repair.arguments([]))
    assert [one["passed"] for one in value["tried"]] == [False, True] and value["passed"]
    made = {}
    exec(value["source"], made)
    assert (
        made["median"]("4 1 3 2") == 2.5
        and made["median"]("9 1 5") == 5
        and made["spread"]("9 1 5") == 8
    )
    assert "test passes" in bug_repair.shown(value)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return 3", ""),
        ("return 2", "assert value() == 3"),
        ("import os; os._exit(0)", "ended with code 0"),
        ("raise SystemExit(0)", "ended with code 0"),
        ("return bytearray(2**31) and 3", "MemoryError"),
        ("open('big', 'wb').write(bytes(2**22)); return 3", "File too large"),
        ("return undefined", "NameError"),
        ("return (", "SyntaxError"),
    ],
)
def test_a_test_passes_where_it_has_run_to_its_end_within_bounds(body, words):
    verdict = bug_repair.verify(
        f"def value():\n    {body}\n",
        "from program import value\ndef test_value():\n    assert value() == 3\n",
    )
    assert verdict.passed is (not words) and words in verdict.report
    assert "/tmp" not in verdict.report


def test_a_test_that_hangs_dies_with_all_that_it_has_started(tmp_path):
    later = f"import time; time.sleep(3); open({str(tmp_path / 'alive')!r}, 'w')"
    source = (
        "import subprocess, sys, time\ndef value():\n"
        f"    subprocess.Popen([sys.executable, '-c', {later!r}])\n    time.sleep(60)\n"
    )
    begun = time.perf_counter()
    verdict = bug_repair.verify(
        source, "from program import value\ndef test_value():\n    value()\n", seconds=1.0
    )
    assert (
        not verdict.passed
        and "not ended within 1.0 seconds" in verdict.report
        and time.perf_counter() - begun < 3
    )
    time.sleep(3 - (time.perf_counter() - begun) + 0.5)
    assert not (tmp_path / "alive").exists()


def test_a_test_without_tests_has_not_passed():
    assert "there is no test" in bug_repair.verify("", "x = 1\n").report


def test_patches_replace_whole_functions():
    source = "def a():\n    return 1\n\n\ndef b():\n    return a()\n"
    assert bug_repair.patched(source, "def a():\n    return 2\n") == source.replace("1", "2")
    assert bug_repair.patched(source, "def c():\n    return 3\n").endswith(
        "def c():\n    return 3\n"
    )
    for patch, words in (("def a(:", "no Python"), ("x = 1", "no function")):
        with pytest.raises(ValueError, match=words):
            bug_repair.patched(source, patch)
    assert bug_repair.code_block("a\n```python\nx\n```\nb\n```\ny\n```\n") == "y\n"


# The pipeline.


def test_the_pipeline_marks_a_worksheet_and_asks_again_where_there_are_complaints():
    value = finished(pipeline.scripted(), pipeline.mark, *pipeline.arguments([]))
    assert value["attempts"] == 3 and len(value["answers"]) == 10
    assert value["answers"]["47 + 38"] == "85" and value["answers"]["98 boxes of 2 books"] == "196"


def test_complaints_name_what_is_wrong():
    questions = ["47 + 38", "30 eggs, 12 sold"]
    assert (
        pipeline.complaints_about(
            questions, "47+38. 7+8=15, 4+3+1=8. 10-2=8, 3-1-1=1. \\boxed{85, 18}"
        )
        == []
    )
    assert pipeline.complaints_about(questions, "7+8=16 \\boxed{85, 19}") == [
        "7+8=16 does not hold",
        "19 does not answer '30 eggs, 12 sold'",
    ]
    assert pipeline.complaints_about(questions, "") == [
        "there are 0 answers in the box to 2 questions"
    ]


@pytest.mark.slow
def test_the_embedded_model_serves_the_pipeline():
    model = EngineModel(models.load(models.EMBEDDED, dtype="float32"))
    value = finished(model, pipeline.mark, *pipeline.arguments([]))
    calls = model.engine.metrics.registry.get_sample_value("jaxshare_calls_total", {"end": "stop"})
    expected = [85, 84, 77, 99, 18, 83, 55, 45, 78, 196]
    assert [*value["answers"].values()] == [str(number) for number in expected] and value[
        "attempts"
    ] == calls


@pytest.mark.slow
def test_the_engine_runs_the_examples_where_the_model_has_nothing_to_say():
    """One layer of random weights: its answers are useless, and nothing breaks."""
    tokenizer = models.load(models.EMBEDDED).tokenizer
    model = EngineModel(
        LoadedModel(
            CONFIG, init(CONFIG), tokenizer, Generation(stop_tokens=tuple(range(0, 402, 8)))
        ),
        max_rows=4,
    )
    assert finished(model, game24.solve_all, [[4, 6], [1, 1, 4, 6]]) == {
        "4 6": None,
        "1 1 4 6": None,
    }
    read = model.engine.metrics.registry.get_sample_value(
        "jaxshare_prompt_tokens_total", {"agent": "solve"}
    )
    assert read > 0 and model.engine.metrics.reused > read / 2
    test = "from program import f\ndef test_f(): assert f()\n"
    value = finished(model, bug_repair.bug_repair, "def f(): return 0\n", test)
    assert (
        not value["passed"]
        and len(value["tried"]) == 4
        and "could not be used" in value["tried"][0]["report"]
    )
    value = finished(model, pipeline.mark, "47 + 38")
    assert value == {"answers": {"47 + 38": None}, "attempts": 3}


# The command.


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main.main(["agents", "run", *arguments])
    return code, *capsys.readouterr()


def test_the_command_runs_an_example(capsys, tmp_path):
    code, out, _ = run(
        capsys,
        str(EXAMPLES / "game24.py"),
        "--trace",
        str(tmp_path / "trace.json"),
        "--plots",
        str(tmp_path / "plots"),
        "--seed",
        "3",
        "--",
        "1",
        "1",
        "4",
        "6",
    )
    assert code == 0
    first, answer, *_ = out.splitlines()
    assert first.startswith(
        "model: scripted, a dictionary of answers that comes with the file; no language model runs"
    )
    assert answer.split("   ")[-1].endswith("= 24") and "1 of 1 solved" in out
    trace = SearchLog.load(tmp_path / "trace.json")
    assert [run.agent for run in trace.runs][:2] == ["solve_all", "solve"] and {
        run.agent for run in trace.runs[2:]
    } == {"judge"}
    assert {file.name for file in (tmp_path / "plots").iterdir()} == {
        "profile.png",
        "timeline.png",
        "workflow.png",
        "tree-0-solve.png",
    }


def test_the_command_prints_one_object(capsys):
    code, out, err = run(capsys, str(EXAMPLES / "pipeline.py"), "--model", "scripted", "--json")
    report = json.loads(out)
    assert (
        code == 0
        and report["value"]["attempts"] == 3
        and report["error"] is None
        and "scripted" in report["model"]
    )
    assert (report["agents"], report["calls"], report["passes"]) == (
        3,
        3,
        0,
    ) and "model: scripted" in err


def test_the_command_ends_with_the_agents_error(capsys, tmp_path):
    file = tmp_path / "fails.py"
    file.write_text(
        "from jaxshare.serving.agents import agent, spawn\n@agent\nasync def child(x):\n    raise "
        "ValueError(x)\n\n@agent\nasync def main(x):\n    await spawn(child, x).result()\n\nAGENT, "
        "MODEL = main, 'scripted'\ndef scripted():\n    return None\n",
        encoding="utf-8",
    )
    code, out, err = run(capsys, str(file), "--json", "--", "boom")
    assert (
        code == 1
        and "agent main raised ValueError: boom" in err
        and "child" in err
        and "line 8" in err
    )
    assert json.loads(out)["error"].startswith("ValueError: boom")


AGENTS = """from jaxshare.serving.agents import agent, llm, spawn, tool
class Holder:
    def __deepcopy__(self, memo):
        raise TypeError("no copies")
def parsed(text):
    return int(text)
@agent
async def child(text):
    try:
        values = [each for each in (1, 2)]
    finally:
        values = None
    number = (
        parsed(text))
    return number
@agent(restore="copy")
async def main(what, text="x"):
    if what == "child":
        return await spawn(child, text).result()
    if what == "tool":
        return await tool(parsed, text)
    if what == "model":
        return await llm("hello", parse=parsed)
    if what == "copy":
        held = Holder()
        await tool(int, 1)
        return held
    if what == "caught":
        try:
            parsed(text)
        except ValueError as error:
            raise RuntimeError("no number\\nat all") from error
    if what == "library":
        import json
        json.loads(text)
    for i in range(3):
        assert i < 2, "too far"
    return 0
AGENT, MODEL = main, "scripted"
def scripted():
    from jaxshare.serving.agents.backends import ScriptedModel
    return ScriptedModel({"hello": "seven"})
"""
LINES = AGENTS.splitlines()


def line_of(code: str) -> int:
    (number,) = [number for number, line in enumerate(LINES, 1) if line.strip() == code]
    return number


@pytest.mark.parametrize(
    ("what", "error", "code", "function", "name"),
    [
        ("child", "ValueError: invalid literal", "return int(text)", "parsed", "child"),
        ("tool", "ValueError: invalid literal", "return int(text)", "parsed", "main"),
        (
            "model",
            "ParseError: agent main: 1 answer",
            'return await llm("hello", parse=parsed)',
            None,
            "main",
        ),
        ("copy", "UncopyableError: agent main waits", "await tool(int, 1)", None, "main"),
        (
            "caught",
            "RuntimeError: no number at all",
            'raise RuntimeError("no number\\nat all") from error',
            None,
            "main",
        ),
        ("library", "JSONDecodeError: Expecting value", "json.loads(text)", None, "main"),
        ("assert", "AssertionError: too far", 'assert i < 2, "too far"', None, "main"),
    ],
)
def test_an_error_of_an_agent_has_its_place(capsys, tmp_path, what, error, code, function, name):
    file = tmp_path / "mine.py"
    file.write_text(AGENTS, encoding="utf-8")
    exit_code, out, err = run(capsys, str(file), "--json", "--", what)
    place = (
        f"({file}, line {line_of(code)}{f', in {function}' if function else ''}, in agent {name})"
    )
    (told,) = [line for line in err.splitlines() if line.startswith("jaxshare: error: ")]
    assert (
        exit_code == 1
        and told.startswith(f"jaxshare: error: agent main raised {error}")
        and place in told
    )
    assert json.loads(out)["where"] == {
        "file": str(file),
        "line": line_of(code),
        "function": function,
        "agent": name,
    }
    assert "Traceback" not in err


def test_debug_shows_the_traceback_of_an_agents_error(capsys, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(AGENTS, encoding="utf-8")
    code, _, err = run(capsys, str(file), "--debug", "--", "child")
    assert (
        code == 1
        and f'File "{file}", line {line_of("return int(text)")}, in parsed' in err
        and "Traceback (most recent" in err
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "x = 1\n\n1 / 0\n",
            "{0} cannot be loaded: ZeroDivisionError: division by zero ({0}, line 3)",
        ),
        ("x = 1\ndef broken(:\n    pass\n", "({0}, line 2)"),
        ("import json\ndef read():\n    json.loads('{{')\nread()\n", "({0}, line 3, in read)"),
        (
            "import no_such_module\n",
            "ModuleNotFoundError: No module named 'no_such_module' ({0}, line 1)",
        ),
        (
            "{agent}def arguments(args):\n    return int(args[0]),\n",
            "invalid literal for int() with base 10: 'x' ({0}, line 8, in arguments)",
        ),
        (
            "{agent}def arguments(args):\n    raise KeyError('k')\n",
            "KeyError: 'k' ({0}, line 8, in arguments)",
        ),
        (
            "{agent}MODEL = 'scripted'\ndef scripted():\n    return 1 / 0\n",
            "division by zero ({0}, line 9, in scripted)",
        ),
        (
            "{agent}MODEL = 'scripted'\ndef scripted(): pass\ndef shown(value):\n    return "
            "value.x\n",
            "'x' ({0}, line 10, in shown)",
        ),
    ],
)
def test_errors_of_the_file_have_their_place(capsys, tmp_path, text, words):
    file = tmp_path / "mine.py"
    made = (
        "from jaxshare.serving.agents import agent\n@agent\nasync def one(x):\n"
        "    return x\n\nAGENT = one\n"
    )
    file.write_text(text.replace("{agent}", made).replace("{{", "{"), encoding="utf-8")
    code, _, err = run(capsys, str(file), "--", "x")
    assert (
        code == 1
        and words.format(file) in err
        and err.count("jaxshare: error:") == 1
        and "Traceback" not in err
    )


@pytest.mark.parametrize(
    ("text", "arguments", "words"),
    [
        (None, (), "there is no file"),
        ("x = 1", (), "has no AGENT"),
        ("1 / 0", (), "cannot be loaded: ZeroDivisionError"),
        ("AGENT = print", (), "has no AGENT"),
        ("{agent}", ("--", "1", "2"), "does not take these arguments"),
        ("{agent}", ("--model", "scripted", "--", "1"), "brings no scripted model"),
        (
            "{agent}",
            ("--model", "no/such/folder", "--", "1"),
            "there is no model folder no/such/folder",
        ),
        (
            "{agent}MODEL = 'scripted'\ndef scripted(): return None\n",
            ("--trace", "/no/such/folder/x.json", "--", "1"),
            "--trace is '/no/such/folder/x.json', but there is no folder /no/such/folder",
        ),
    ],
)
def test_mistakes_are_one_clear_sentence(capsys, tmp_path, text, arguments, words):
    file = tmp_path / "mine.py"
    if text is not None:
        made = (
            "from jaxshare.serving.agents import agent\n@agent\nasync def one(x):\n"
            "    return x\n\nAGENT = one\n"
        )
        file.write_text(text.replace("{agent}", made), encoding="utf-8")
    code, _, err = run(capsys, str(file), *arguments)
    assert code == 1 and words in err and err.count("jaxshare: error:") == 1


def test_pictures_without_matplotlib_are_refused_before_anything_runs(capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, out, err = run(capsys, str(EXAMPLES / "game24.py"), "--plots", "x")
    assert code == 1 and "pip install 'jaxshare[plot]'" in err and not out
