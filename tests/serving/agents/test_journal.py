"""Runs that are recorded and replayed without their model and tools; search logs and pictures."""

import asyncio
import errno
import importlib.util
import json
import os
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxshare.serving.agents import (
    BestOfN,
    Budget,
    Message,
    ParseError,
    Runtime,
    agent,
    llm,
    spawn,
    tool,
)
from jaxshare.serving.agents.backends import ScriptedModel
from jaxshare.serving.agents.journal import Journal, ReplayError
from jaxshare.serving.agents.model_calls import UsedUpError
from jaxshare.serving.agents.search import SelfRefine, TreeOfThoughts
from jaxshare.serving.agents.search_log import SearchLog, timeline_picture, tree_picture
from tests.paths import ROOT

EXAMPLES = ROOT / "examples"


def example(name: str):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def finished(runtime: Runtime, what, *args):
    return asyncio.run(runtime.run(what, *args)).accepted.value


def shape(runtime: Runtime) -> list:
    """The whole outcome of a run, without its times."""

    def told(state):
        return (
            state.path,
            state.line,
            state.score,
            state.fired,
            state.finished,
            repr(state.value),
            repr(state.error),
            state.dialogue,
        )

    return sorted(
        (run.id, run.calls, sorted(map(told, run.states), key=lambda state: state[0]))
        for run in runtime.runs
    )


def test_a_search_is_repeated_without_its_model(tmp_path):
    game = example("game24")
    journal = Journal()
    first = Runtime(game.scripted(), journal=journal)
    value = finished(first, game.solve, [4, 9, 10, 13])
    journal.save(tmp_path / "journal.json")
    again = Runtime(None, journal=Journal.load(tmp_path / "journal.json", strict=True))
    assert finished(again, game.solve, [4, 9, 10, 13]) == value
    assert shape(again) == shape(first)
    assert [spent(one) for one in again.runs] == [spent(one) for one in first.runs]
    assert 24 < len(journal) == len(Journal.load(tmp_path / "journal.json"))


def spent(one):
    return one.calls, one.new_tokens, one.prompt_tokens


def test_budgets_are_used_up_where_they_were():
    """Counts each retry as a call, a failed one too, and tokens as they were generated."""

    @agent(
        supervisor=BestOfN(9, value=lambda state: state.path[0], budget=Budget(calls=12, tokens=40))
    )
    async def guesses():
        return await llm("a number", parse=int, retries=2)

    journal, model = (
        Journal(),
        ScriptedModel(
            {"a number": lambda call: "many words and none" if call.seed % 3 else str(call.seed)}
        ),
    )
    first, again = Runtime(model, journal=journal, seed=5), Runtime(None, journal=journal, seed=5)
    assert finished(first, guesses) == finished(again, guesses)
    assert spent(first.runs[0]) == spent(again.runs[0]) and first.runs[0].new_tokens > 0
    assert first.runs[0].calls > len(journal)


class OwnError(Exception):
    """A class of this test, so that it has to be pickled."""


def test_values_and_errors_come_back_as_they_were(tmp_path):
    given = {
        "plain": [1, {"a": None, "b": [True, 2.5, "ü"]}],
        "tuple": (1, 2),
        "keys": {1: "a"},
        "inf": [float("inf")],
        "set": {1, 2},
    }
    errors = [ValueError("bad", 3), KeyError("k"), OwnError(3, "own")]

    def gives(name):
        return given[name]

    def fails(number):
        raise errors[number]

    @agent
    async def uses():
        got = {}
        for name in ("plain", "tuple", "keys", "inf", "set"):
            got[name] = await tool(gives, name)
            if name == "plain":
                got[name][1]["b"].append("changed")  # the journal keeps its own copy
        for number in range(3):
            try:
                await tool(fails, number)
            except Exception as error:
                got[number] = type(error).__name__, error.args
        try:
            await llm("count", parse=int)
        except ParseError as error:
            got["parse"] = str(error), error.text, error.reason
        return got, await llm("go on")

    journal = Journal()
    value = finished(
        Runtime(ScriptedModel({"count": "many", "go on": "yes"}), journal=journal), uses
    )
    assert (
        value[0]["tuple"] == (1, 2)
        and value[0][2] == ("OwnError", (3, "own"))
        and value[0]["parse"][1] == "many"
    )
    given.clear()
    errors.clear()
    assert finished(Runtime(None, journal=journal), uses) == value
    journal.save(tmp_path / "journal.json")
    assert (
        finished(
            Runtime(
                None, journal=Journal.load(tmp_path / "journal.json", strict=True, pickles=True)
            ),
            uses,
        )
        == value
    )
    with pytest.raises(
        ValueError, match=r"firing \[0, 0, 0\] of uses is kept as a pickle.*pickles=True"
    ):
        finished(Runtime(None, journal=Journal.load(tmp_path / "journal.json")), uses)


def test_what_cannot_be_saved_is_named_and_still_repeated(tmp_path):
    @agent
    async def uses():
        made = await tool(lambda: (x for x in "abc"))
        return type(made).__name__

    journal = Journal()
    assert (
        finished(Runtime(None, journal=journal), uses)
        == finished(Runtime(None, journal=journal), uses)
        == "generator"
    )
    with pytest.raises(
        ValueError,
        match=r"firing \[0, 0\] of uses was given a generator, which neither JSON nor pickle can "
        r"hold",
    ):
        journal.save(tmp_path / "journal.json")


def test_a_strict_journal_says_what_it_does_not_know_and_another_asks():
    @agent
    async def asks(questions):
        return [await llm(question) for question in questions]

    journal, model = Journal(), ScriptedModel({"a": "1", "b": "2"})
    assert finished(Runtime(model, journal=journal), asks, ["a"]) == ["1"]
    assert finished(Runtime(model, journal=journal), asks, ["a", "b"]) == ["1", "2"]
    assert [call.messages[-1].content for call in model.calls] == ["a", "b"]
    journal.strict = True
    with pytest.raises(ReplayError, match=r"firing \[0, 0, 0, 0\] of asks is not in the journal"):
        finished(Runtime(model, journal=journal), asks, ["a", "b", "a"])
    assert journal.missed == [("asks", (0, 0, 0, 0))]


def test_what_is_asked_has_to_be_what_was_asked(tmp_path):
    one, other, used = llm("one"), llm("other"), tool(len, "one")
    key, journal = ("asks", (0, 0)), Journal()
    assert journal.lookup(key, one) is None
    journal.record_value(key, "1", (Message("assistant", "1"),))
    journal.save(tmp_path / "journal.json")
    loaded = Journal.load(tmp_path / "journal.json")
    assert (
        loaded.lookup(key, llm("one"))()
        == loaded.lookup(key)()
        == ("1", (Message("assistant", "1"),))
    )
    assert loaded.lookup(key, other) is None and loaded.lookup(key, used) is None
    loaded.strict = True
    for request, words in ((other, "an answer of the model"), (used, "the tool len")):
        with pytest.raises(
            ReplayError, match=f"asks for {words}.*, and in the journal for an answer of the model"
        ):
            loaded.lookup(key, request)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"format": "other"}',
        '{"format": "jaxshare agents journal 1"}',
        '{"format": "jaxshare agents journal 1", "entries": [{"run": "a", "path": [0], "said": [], '
        '"eval": "1"}]}',
    ],
)
def test_files_that_are_no_journal_are_refused(tmp_path, text):
    file = tmp_path / "journal.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="is no journal of agents"):
        Journal.load(file)
    with pytest.raises(ValueError, match="is no search log of agents"):
        SearchLog.load(file)


def recorded(answer: str = "1") -> Journal:
    """A journal with a model's answer and a tool's value, as a pickle."""

    @agent
    async def mixed():
        await llm("one")
        return await tool(complex, 1, 2)

    journal = Journal()
    finished(Runtime(ScriptedModel({"one": [answer]}), journal=journal), mixed)
    return journal


def test_a_flipped_bit_in_a_journal_is_found_and_its_entry_named(tmp_path):
    file = tmp_path / "journal.json"
    recorded().save(file)
    content = file.read_text(encoding="utf-8")
    file.write_text(content.replace('"1"', '"3"'), encoding="utf-8")
    with pytest.raises(
        ValueError, match=rf"{file} is no journal .*\(entry 1 is damaged: its check"
    ):
        Journal.load(file)
    former = json.loads(content)
    for entry in former["entries"]:
        del entry["checksum"]
    file.write_text(json.dumps(former), encoding="utf-8")
    assert len(Journal.load(file)) == len(recorded()), "a journal of a former version"


def test_a_full_disk_leaves_the_journal_that_was_there(tmp_path, monkeypatch):
    file = tmp_path / "journal.json"
    recorded().save(file)
    before = file.read_bytes()

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"journal.json cannot be written \(No space .*; make room"):
        recorded().save(file)
    assert [*tmp_path.iterdir()] == [file] and file.read_bytes() == before


# Search logs.


@pytest.fixture(scope="module")
def searched() -> SearchLog:
    """Two levels of three firings, of which two and then one go on; an unused helper; an error."""

    @agent
    async def helper():
        yield 1
        yield 2

    @agent(
        supervisor=TreeOfThoughts(
            3, 2, value=lambda state: float(state.dialogue[-1].content), depth=2
        )
    )
    async def walk():
        child = spawn(helper)
        await child.next()
        first = await llm("first")
        second = await llm("second", parse=int)
        return first, second

    runtime = Runtime(ScriptedModel({"first": ["3", "1", "2"], "second": ["5", "x", "7"]}))
    assert finished(runtime, walk) == ("3", 7)
    return SearchLog.of(runtime)


def test_a_trace_says_what_became_of_every_state(searched):
    walk, helper = searched.runs
    fates = {
        state.path[2:]: (state.fate, state.score) for state in walk.states if len(state.path) > 1
    }
    # Scripted answers go around: below firing 0 the second question gets 5, x, 7, below firing 2 it
    # gets 7, 5, x. Of equals the first wins.
    assert fates == {
        (): ("accepted", None),
        (0,): ("accepted", 3.0),
        (1,): ("pruned", 1.0),
        (2,): ("kept", 2.0),
        (0, 0): ("pruned", 5.0),
        (0, 1): ("failed", None),
        (0, 2): ("accepted", 7.0),
        (2, 0): ("pruned", 7.0),
        (2, 1): ("pruned", 5.0),
        (2, 2): ("failed", None),
    }
    assert (walk.supervisor, walk.calls, walk.parent, helper.parent) == (
        "TreeOfThoughts",
        9,
        None,
        "walk",
    )
    assert helper.states[-1].waits_for == "yield" and helper.value is None
    ends = {state.path[2:]: state for state in walk.states}
    assert (
        "could not be parsed" in ends[(0, 1)].value
        and ends[(0, 0)].waits_for == "end"
        and ends[(0,)].waits_for == "llm"
    )
    for run in searched.runs:
        assert run.began <= run.ended
        assert all(
            run.began <= state.began <= state.ended <= run.ended
            for state in run.states
            if state.parent is not None
        )


def test_traces_are_saved_and_read(searched, tmp_path):
    searched.save(tmp_path / "trace.json")
    assert SearchLog.load(tmp_path / "trace.json") == searched
    assert json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["runs"][0]["states"][
        1
    ]["path"] == [0]


def test_runs_that_end_badly_and_states_of_a_supervisors_making_are_traced():
    @agent(
        supervisor=SelfRefine(
            lambda state: "again", value=lambda state: float(state.value), rounds=3, enough=9.0
        )
    )
    async def refined():
        return await llm("a number")

    @agent
    async def fails():
        await tool(int, "x")

    runtime = Runtime(ScriptedModel({"a number": ["1", "3", "2"]}))
    finished(runtime, refined)
    (run,) = SearchLog.of(runtime).runs
    paths = {state.path for state in run.states}
    assert all(state.parent in paths for state in run.states if state.parent is not None)
    tree_picture(run)
    broken = Runtime(None)
    with pytest.raises(ValueError, match="invalid literal"):
        finished(broken, fails)
    (run,) = SearchLog.of(broken).runs
    assert "invalid literal" in run.error and run.states[-1].fate == "failed" and run.value is None


def test_pictures_are_drawn(searched, tmp_path):
    for name, figure in (
        ("tree.png", tree_picture(searched.runs[0])),
        ("timeline.png", timeline_picture(searched)),
    ):
        figure.savefig(tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    tree = tree_picture(searched.runs[0])
    shown = {text.get_text() for text in tree.legends[0].get_texts()}
    assert {"on the way to the answer", "pruned", "raised an error"} <= shown
    edges, *points = tree.axes[0].collections
    states = len(searched.runs[0].states)
    assert (
        sum(len(some.get_offsets()) for some in points) == states
        and len(edges.get_segments()) == states - 1
    )
    assert [
        label.get_text().strip() for label in timeline_picture(searched).axes[0].get_yticklabels()
    ] == ["walk", "helper"]


def test_pictures_need_matplotlib(searched, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'jaxshare\[plot\]'"):
        tree_picture(searched.runs[0])


def entry(**outcome) -> dict:
    return {"run": "a", "path": [0], "asked": "", "said": [], "spent": [0, 0, 0], **outcome}


def written(file, *entries):
    file.write_text(json.dumps({"format": "jaxshare agents journal 1", "entries": entries}))
    return file


@pytest.mark.parametrize(
    "name",
    ["SystemExit", "KeyboardInterrupt", "GeneratorExit", "BaseException", "exec", "Llm", "x"],
)
def test_a_journal_raises_only_errors_that_it_records(tmp_path, name):
    """Not whatever class its file names: SystemExit would end the program that reads it."""
    file = tmp_path / "journal.json"
    with pytest.raises(
        ValueError, match=r"is no journal of agents .*an error that no journal names"
    ):
        Journal.load(written(file, entry(error={"kind": name, "args": [], "more": {}})))
    named = {"kind": "KeyError", "args": ["a"], "more": {}}
    journal = Journal.load(written(file, entry(error=named)))
    with pytest.raises(KeyError, match="a"):
        journal.lookup(("a", (0,)))()


def test_what_ends_a_program_is_not_recorded_by_name():
    journal = Journal()
    journal.record_error(("a", (0,)), SystemExit(3))
    journal.record_error(("a", (1,)), OSError(2, "gone"))
    forms = [[*entry.outcome] for entry in journal._entries.values()]
    assert forms == [["error pickle"], ["error"]]


ODD = st.sampled_from(
    [None, 5, "x", [], [1], [["a", "b"]], {}, {"a": 1}, 1e999, "KeyError", "eA=="]
)
ERROR = st.fixed_dictionaries({"kind": ODD, "args": ODD, "more": ODD})
OUTCOMES = ["json", "pickle", "error", "error pickle", "used up", "here"]
FIELDS = st.sampled_from(["run", "path", "asked", "said", "spent", *OUTCOMES])


@given(st.dictionaries(FIELDS, st.one_of(ODD, ERROR), max_size=3), st.sampled_from(OUTCOMES), ODD)
@settings(max_examples=200, deadline=None)
def test_odd_entries_are_refused_or_replayed(tmp_path_factory, fields, form, value):
    file = tmp_path_factory.getbasetemp() / "odd journal.json"
    made = entry(**{form: value}) | fields
    try:
        journal = Journal.load(written(file, made))
    except ValueError as error:
        assert "is no journal of agents" in str(error)
        return
    replay = journal.lookup((made["run"], tuple(made["path"])))
    assert replay is not None
    try:
        replay()
    except UsedUpError:
        assert "used up" in made
    except Exception as error:
        assert "pickle" in str(error) or "error" in made
