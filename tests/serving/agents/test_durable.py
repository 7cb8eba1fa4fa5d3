"""Journals that grow in a file: runs that are cut off anywhere go on, and call nothing again."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections import Counter

import pytest

from jaxshare.serving.agents import (
    BestOfN,
    Runtime,
    TreeOfThoughts,
    agent,
    call_key,
    first,
    gather,
    llm,
    spawn,
    tool,
)
from jaxshare.serving.agents.backends import ScriptedModel
from jaxshare.serving.agents.journal import Journal, ReplayError
from jaxshare.serving.agents.journal_file import DamageError
from jaxshare.serving.errors import InUseError
from tests.paths import ROOT

CALLS: list[str] = []
"""The calls of tools: their keys, or what they are."""


async def doubled(number: int) -> int:
    CALLS.append(call_key())
    return 2 * number


def refused(what: str) -> str:
    CALLS.append(call_key())
    raise ValueError(f"no {what}")


def model() -> ScriptedModel:
    return ScriptedModel({"": lambda call: f"{call.seed % 100}"})


@agent
async def worker(number):
    text = await llm(f"work {number}", retries=1)
    more = yield text
    yield await tool(doubled, int(text) + more)


@agent(supervisor=BestOfN(2, value=lambda state: len(str(state.value))))
async def program(start):
    answers = await llm(f"begin {start}", n=3)
    child = spawn(worker, answers[0])
    value = await child.next()
    child.resume(start)
    try:
        await tool(refused, value)
    except ValueError as error:
        told = str(error)
    both = await gather(llm("left"), tool(doubled, start), child.next())
    index, _ = await first(tool(doubled, 5), tool(doubled, 5))
    return answers, told, both, index in (0, 1)


def outcome(runtime: Runtime, what=program, *args):
    return asyncio.run(runtime.run(what, *args)).accepted.value


def run_with(file, *, seed: int = 0, agent_=program, args=(4,)):
    """(value, the model's calls, the keys of the tools' calls) of one run with this file."""
    CALLS.clear()
    script = model()
    with Journal.open(file) as journal:
        value = outcome(Runtime(script, seed=seed, journal=journal), agent_, *args)
    calls = [(call.run, call.state, call.seed) for call in script.calls]
    return value, calls, list(CALLS)


def answered_in(lines) -> tuple[set, Counter]:
    """(firings that the model has answered, numbers of answers in others and in these)."""
    ended, parts = set(), Counter()
    for line in lines:
        if "path" in line:
            key = line["run"], tuple(step for step in line["path"] if step >= 0)
            if "reply" in line:
                parts[key] += 1
            elif line["asked"].startswith("an answer"):
                ended.add(key)
    return ended, parts


def test_a_run_that_is_cut_off_anywhere_goes_on_and_calls_nothing_again(tmp_path, caplog):
    whole = tmp_path / "whole"
    value, calls, tools = run_with(whole)
    data = whole.read_bytes()
    lines = [json.loads(line) for line in data.splitlines()]
    assert outcome(Runtime(model()), program, 4) == value  # as without a journal
    assert len(calls) == len(tools) == len({*tools}) == 10
    ends = [0]
    for line in data.splitlines(keepends=True):
        ends.append(ends[-1] + len(line))
    total = Counter((run, state) for run, state, _ in calls)
    for cut in [*ends, *(end + 7 for end in ends[:-1]), len(data) - 1]:
        file = tmp_path / f"cut{cut}"
        file.write_bytes(data[:cut])
        kept = lines[: sum(end <= cut for end in ends) - 1 + (cut == len(data) - 1)]
        again, asked, called = run_with(file)
        assert again == value
        ended, parts = answered_in(kept)
        for key, count in Counter((run, state) for run, state, _ in asked).items():
            assert key not in ended and count <= total[key] - parts[key]
        assert len(asked) <= len(calls) - sum(parts.values()) - sum(
            total[key] for key in ended if not parts[key]
        )
        done = sum(line.get("asked", "").startswith("the tool") for line in kept)
        assert len(called) <= len(tools) - done
        assert cut < ends[1] or {*called} <= {*tools}  # keys are those of the first start
    assert any("was cut off" in record.message for record in caplog.records)


def test_a_finished_run_is_read_back_without_model_and_tools(tmp_path):
    value, calls, tools = run_with(tmp_path / "j")
    assert calls and tools
    assert run_with(tmp_path / "j") == (value, [], [])
    strict = Journal.load(tmp_path / "j", strict=True)
    assert outcome(Runtime(None, journal=strict), program, 4) == value
    strict.save(tmp_path / "saved")
    old = Journal.load(tmp_path / "saved", strict=True)
    assert outcome(Runtime(None, journal=old), program, 4) == value


def test_an_outcome_is_on_the_disk_before_the_agent_has_it(tmp_path):
    file, seen = tmp_path / "j", []

    def on_disk(what: str) -> bool:
        return any(
            line.get("json") == what for line in map(json.loads, file.read_text().splitlines())
        )

    @agent
    async def looks():
        text = await llm("one")
        seen.append(on_disk(text))
        value = await tool(str.upper, "two")
        seen.append(on_disk(value))

    with Journal.open(file) as journal:
        outcome(Runtime(ScriptedModel({"one": "first"}), journal=journal), looks)
    assert seen == [True, True]


@agent
async def other(start):
    return await llm(f"begin {start}")


changed = {
    "agent": (lambda: other, (4,), 0, "its agent is program and this one other"),
    "seed": (lambda: program, (4,), 1, "its seed is 0 and this one 1"),
    "arguments": (lambda: program, (5,), 0, "its arguments are others"),
    "supervisor": (
        lambda: program.under(BestOfN(3, value=len)),
        (4,),
        0,
        r"its supervisor is BestOfN\(n=2, .* and this BestOfN\(n=3, value=len, ",
    ),
}


@pytest.mark.parametrize("what", changed)
def test_the_journal_of_another_run_is_refused_before_any_call(tmp_path, what):
    make, args, seed, words = changed[what]
    run_with(tmp_path / "j")
    script = model()
    with Journal.open(tmp_path / "j") as journal:
        runtime = Runtime(script, seed=seed, journal=journal)
        with pytest.raises(ValueError, match=f"journal .*j is of another program.*{words}"):
            outcome(runtime, make(), *args)
    assert not script.calls and not runtime.runs


_PROGRAM = """
import asyncio, sys
from jaxshare.serving.agents import Runtime, agent, llm, spawn
from jaxshare.serving.agents.backends import ScriptedModel
from jaxshare.serving.agents.journal import Journal

@agent
async def helper(word):
    return await llm({first!r} + word)

@agent
async def main(words):
    return await spawn(helper, min(words)).result()

with Journal.open(sys.argv[1]) as journal:
    model = ScriptedModel({{"": "yes"}})
    try:
        asyncio.run(Runtime(model, journal=journal).run(main, {{"a", "b", "c", "d"}}))
        print(len(model.calls))
    except ValueError as error:
        print(error)
"""


@pytest.mark.slow
def test_another_version_is_refused_in_another_process_and_the_same_one_is_not(tmp_path):
    """Sets have another order in each process, and a child's source is a part of the program."""

    def said(first: str) -> str:
        file = tmp_path / "main.py"
        file.write_text(_PROGRAM.format(first=first), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, str(file), str(tmp_path / "j")],
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        assert not done.returncode, done.stderr
        return done.stdout.strip()

    assert [said("do "), said("do ")] == ["1", "0"]
    assert "the source of agent main, or of one that it names, has changed" in said("make ")


def test_a_request_that_is_not_the_recorded_one_is_an_error(tmp_path):
    count = []

    @agent
    async def drifts():
        count.append(1)
        return await llm(f"time {len(count)}")

    with Journal.open(tmp_path / "j") as journal:
        outcome(Runtime(model(), journal=journal), drifts)
    script = model()
    with (
        Journal.open(tmp_path / "j") as journal,
        pytest.raises(ReplayError, match="not recorded: make that a tool"),
    ):
        outcome(Runtime(script, journal=journal), drifts)
    assert not script.calls


def test_damaged_lines_are_named(tmp_path):
    run_with(tmp_path / "whole")
    lines = (tmp_path / "whole").read_bytes().splitlines(keepends=True)
    file = tmp_path / "j"
    flipped = [bytearray(line) for line in lines]
    flipped[4][len(flipped[4]) // 2] ^= 1
    for damaged, number in (
        (flipped, 5),
        ([*lines[:3], *lines[4:]], 4),  # lost
        ([*lines[:3], lines[2], *lines[3:]], 4),  # doubled
        ([*lines[:5], lines[5].rstrip(b"\n"), *lines[6:]], 6),  # two lines run together
        ([*lines[:2], b"\n", *lines[2:]], 3),
        ([*lines[:-1], lines[-1].replace(b'"spent"', b'"spend"')], len(lines)),
    ):
        file.write_bytes(data := b"".join(damaged))
        for read in (Journal.open, Journal.load):
            with pytest.raises(DamageError, match=f"^line {number} of the journal .*j is damaged"):
                read(file)
        assert file.read_bytes() == data


def test_files_that_are_none_are_refused_and_stay(tmp_path):
    file = tmp_path / "j"
    Journal().save(file)
    saved = file.read_bytes()
    for text in (saved, b"notes", b"{}\n", b'{"a": 1}'):
        file.write_bytes(text)
        with pytest.raises(DamageError, match="is no journal that grows"):
            Journal.open(file)
        assert file.read_bytes() == text
    header = b'{"checksum": "0", "format": "jaxshare agents journal 9", "number": 1}\n'
    file.write_bytes(header)
    with pytest.raises(DamageError, match="line 1 of"):
        Journal.open(file)


def test_a_journal_of_another_format_names_both(tmp_path):
    from jaxshare.serving.checksums import sealed

    file = tmp_path / "j"
    line = {"number": 1, "format": "jaxshare agents journal 9", "id": "a"}
    file.write_text(json.dumps(sealed(line)) + "\n", encoding="utf-8")
    with pytest.raises(DamageError, match="has the format 'jaxshare agents journal 9', and this"):
        Journal.open(file)


def test_a_journal_that_is_open_is_refused(tmp_path):
    code = (
        "import sys\nfrom jaxshare.serving.agents.journal import Journal\n"
        "try:\n    Journal.open(sys.argv[1])\nexcept Exception as error:\n"
        "    print(type(error).__name__, error)"
    )
    with Journal.open(tmp_path / "j"):
        with pytest.raises(InUseError, match="this process already"):
            Journal.open(tmp_path / "j")
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "j")],
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        assert f"InUseError the output {tmp_path / 'j'} is being written by process" in done.stdout
    Journal.open(tmp_path / "j").close()


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    for place, words in (
        (tmp_path / "none" / "j", "there is no folder"),
        (tmp_path, "that is a folder"),
        (tmp_path / "file" / "j", "there is no folder"),
    ):
        with pytest.raises(ValueError, match=words):
            Journal.open(place)


def test_a_disk_that_takes_no_more_ends_the_run(tmp_path, monkeypatch):
    """The agent cannot catch that; the file has what was told, and the run goes on afterwards."""
    place = tmp_path / "full"

    @agent
    async def stubborn():
        told = []
        while len(told) < 8:
            with contextlib.suppress(OSError, ValueError):
                told.append(await llm(f"more {len(told)}"))
        return told

    script, real, left = model(), os.fsync, [7]

    def fsync(descriptor):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        real(descriptor)

    with Journal.open(place) as journal:
        monkeypatch.setattr(os, "fsync", fsync)
        with pytest.raises(OSError, match=r"full cannot be written .*make room"):
            outcome(Runtime(script, journal=journal), stubborn)
        with pytest.raises(OSError, match=r"full cannot be written"):
            journal.record_value(("a", ()), 5, ())
    monkeypatch.undo()
    assert len(script.calls) == 7  # the header took one line, and the seventh was refused
    again = model()
    with Journal.open(place) as journal:
        assert len(outcome(Runtime(again, journal=journal), stubborn)) == 8
    assert len(again.calls) == 2


def test_pickles_are_read_only_from_files_of_ones_own(tmp_path):
    @agent
    async def pair():
        return await tool(divmod, 7, 2)

    file = tmp_path / "j"
    with Journal.open(file) as journal:
        assert outcome(Runtime(None, journal=journal), pair) == (3, 1)
    assert not file.stat().st_mode & 0o077
    with Journal.open(file) as journal:
        assert outcome(Runtime(None, journal=journal), pair) == (3, 1)
    file.chmod(0o666)
    with pytest.raises(ValueError, match=r"as a pickle.*others can have written"):
        Journal.open(file)
    with Journal.open(file, pickles=True) as journal:
        assert outcome(Runtime(None, journal=journal), pair) == (3, 1)


def test_what_a_file_cannot_hold_is_an_error_of_the_tool(tmp_path):
    """The same one when the run goes on, and the tool is not called again."""
    count = []

    def lock():
        count.append(1)
        return threading.Lock()

    @agent
    async def locks():
        try:
            return await tool(lock)
        except TypeError as error:
            return str(error)

    values = []
    for _ in range(2):
        with Journal.open(tmp_path / "j") as journal:
            values.append(outcome(Runtime(None, journal=journal), locks))
    assert values[0] == values[1] and count == [1]
    assert "the tool lock gave a lock, which neither JSON nor pickle can hold" in values[0]


def test_keys_of_calls_are_of_one_call_of_one_run(tmp_path):
    keys = []

    def fails():
        keys.append(call_key())
        raise OSError("down")

    async def works():
        keys.append(call_key())

    @agent
    async def calls():
        try:
            await tool(fails, retries=2)
        except OSError:
            await gather(tool(works), tool(works))

    for name in ("a", "b"):
        with Journal.open(tmp_path / name) as journal:
            outcome(Runtime(None, journal=journal), calls)
    assert len(keys) == 10 and len({*keys[:3]}) == 1 and len({*keys}) == 6
    assert all(len(key) == 32 for key in keys)
    with pytest.raises(RuntimeError, match="functions that agents call"):
        call_key()

    @agent
    async def asks():
        await tool(works)
        return call_key()

    with pytest.raises(RuntimeError, match="functions that agents call"):
        outcome(Runtime(None), asks)


def test_tools_of_ended_paths_are_not_called_again(tmp_path):
    count = []

    def closed():
        count.append(1)

    @agent
    async def child():
        try:
            await llm("long")
        finally:
            await tool(closed)

    @agent
    async def main():
        spawn(child)
        await tool(str.upper, "a")
        return await tool(str.upper, "b")

    for _ in range(2):
        slow = ScriptedModel({"long": "x"}, delay=lambda _: 30.0)
        with Journal.open(tmp_path / "j") as journal:
            assert outcome(Runtime(slow, journal=journal), main) == "B"
    assert count == [1]


def test_a_search_goes_on(tmp_path):
    """After every line of its journal, to the same tree, with the rest of the calls."""

    @agent(supervisor=TreeOfThoughts(2, 2, value=lambda state: state.path[-1]))
    async def thinks(start):
        return [await llm(f"{start} a"), await llm("b"), await llm("c")]

    value, calls, _ = run_with(tmp_path / "whole", agent_=thinks)
    lines = (tmp_path / "whole").read_bytes().splitlines(keepends=True)
    assert len(lines) == 1 + len(calls) == 11
    for kept in range(1, len(lines)):
        (tmp_path / "j").write_bytes(b"".join(lines[:kept]))
        again, asked, _ = run_with(tmp_path / "j", agent_=thinks)
        assert again == value and len(asked) == len(lines) - kept
