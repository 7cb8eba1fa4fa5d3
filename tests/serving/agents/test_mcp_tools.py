"""Tools of a real MCP server: in agents under every kind of run, and when the server fails."""

import asyncio
import os
import socket
import subprocess
import sys
import time

import pytest

from jaxshare.serving import chat
from jaxshare.serving.agents import (
    BestOfN,
    Runtime,
    agent,
    first,
    gather,
    llm,
    react,
    run,
    tool,
)
from jaxshare.serving.agents.backends import ScriptedModel
from jaxshare.serving.agents.mcp_tools import MCPServer, MCPServerError, MCPToolError
from tests.paths import ROOT

FILE = ROOT / "tests" / "serving" / "agents" / "mcp_server.py"
COMMAND = [sys.executable, str(FILE)]


def by_name(server: MCPServer) -> dict:
    return {one.name: one for one in server.tools()}


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.fixture(scope="module")
def server():
    with MCPServer(COMMAND, env={"MARK": "here"}, timeout=20) as made:
        yield made


@agent
async def use(function, arguments):
    return await tool(function, **arguments)


@agent
async def ask(question, tools):
    return await llm(question, tools=tools)


def test_tools_have_the_server_s_names_texts_and_schemas(server):
    tools = by_name(server)
    assert [*tools] == ["add", "count", "say_it", "fail", "die", "sleep", "where"]
    add = tools["add"].schema()["function"]
    assert add["description"] == "Adds two numbers."
    kinds = {name: one["type"] for name, one in add["parameters"]["properties"].items()}
    assert (kinds, add["parameters"]["required"]) == ({"a": "integer", "b": "integer"}, ["a"])


def test_a_model_calls_them(server):
    model = ScriptedModel(
        {
            "What is 3 + 4?": call("add", '{"a": 3, "b": 4}'),
            "7": call("say_it", '{"word": "maybe"}'),  # which the schema does not admit
            "cannot be run": call("say_it", '{"word": "yes", "times": 2}'),
            "yesyes": call("fail", '{"reason": "no"}'),
            "fail has failed: MCPToolError: Error executing tool fail": "It is 7.",
        }
    )
    assert run(ask, "What is 3 + 4?", server.tools(), model=model) == "It is 7."
    # Another run has another event loop; the server is the same.
    script = {"How many?": call("count", "{}"), "1": call("count", "{}"), "2": "Two."}
    assert run(ask, "How many?", server.tools(), model=ScriptedModel(script)) == "Two."


def test_agents_call_them_side_by_side_and_under_a_search(server):
    tools = by_name(server)

    @agent
    async def many():
        sums = await gather(*(tool(tools["add"], a=number) for number in range(5)))
        one = await first(tool(tools["sleep"], seconds=5), tool(tools["add"], a=1, b=1))
        return sums, one.value, await llm("x")

    model = ScriptedModel({"x": ["a", "b"]})
    searched = many.under(BestOfN(2, lambda state: state.value[2] == "b"))
    value = asyncio.run(Runtime(model).run(searched)).accepted.value
    assert value == (["1", "2", "3", "4", "5"], "2", "b")


def test_react_takes_them(server):
    tools = {name: by_name(server)[name] for name in ("add", "fail")}
    model = ScriptedModel(
        {
            "Task: 3 + 4": 'Thought: add\nAction: add {"a": 3, "b": 4}',
            "Observation: 7": 'Thought: odd\nAction: fail {"reason": "x"}',
            "Observation: fail has failed: MCPToolError": "Thought: done\nAnswer: 7",
        }
    )
    assert run(react, "3 + 4", tools, model=model) == "7"
    said = model.calls[0].messages[-1].content
    assert 'add {"type": "object"' in said and ": Adds two numbers." in said


def test_chats_call_them(server):
    assert chat.call(by_name(server)["add"], {"a": 3}).text == "4"
    failed = chat.call(by_name(server)["fail"], {"reason": "x"})
    assert failed.is_error and "MCPToolError" in failed.text


def test_the_server_has_its_variables_and_folder(tmp_path):
    with MCPServer(COMMAND, env={"MARK": "there"}, cwd=tmp_path, timeout=20) as made:
        found = run(use, by_name(made)["where"], {}, model=ScriptedModel({})).split()
    assert found[1:] == ["there", str(tmp_path)]
    assert_ended(int(found[0]))


def assert_ended(process: int) -> None:
    end = time.monotonic() + 10
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < end:
            os.kill(process, 0)
            time.sleep(0.05)


def test_a_server_that_dies_is_told_of_at_the_call():
    async def whole():
        async with MCPServer(COMMAND, timeout=20) as made:
            tools = by_name(made)
            with pytest.raises(MCPServerError, match="ended when its tool die was") as raised:
                await Runtime(ScriptedModel({})).run(use, tools["die"], {})
            with pytest.raises(MCPServerError, match="has ended; start another, or give restarts"):
                await Runtime(ScriptedModel({})).run(use, tools["add"], {"a": 1})
            return str(raised.value)

    told = asyncio.run(whole())
    assert str(FILE) in told and told.endswith("first words | out of luck")


def test_a_model_is_told_that_a_server_has_died_and_the_next_call_starts_it():
    plan = [*(call(name, "{}") for name in ("count", "die", "count", "die")), "Done."]
    told: list[str] = []

    def next_words(asked):
        told[:] = [one.content for one in asked.messages if one.role == "tool"]
        return plan[len(told)]

    model = ScriptedModel({lambda asked: True: next_words})
    with MCPServer(COMMAND, restarts=1, timeout=20) as made:
        tools = made.tools()
        assert run(ask, "Go", tools, model=model) == "Done."
        with pytest.raises(MCPServerError, match="has ended; start another"):
            run(use, tools[0], {"a": 1}, model=model)
    assert told[0] == told[2] == "1"  # it counts anew
    assert told[1].startswith("die has failed: MCPServerError: the MCP server")
    assert "it is started again with the next call" in told[1]
    assert "start another, or give restarts=4" in told[3]


def test_a_call_that_hangs_is_left_and_the_server_lives():
    with MCPServer(COMMAND, timeout=20) as made:
        tools = by_name(made)
        made._timeout = 0.3
        with pytest.raises(TimeoutError, match=r"the tool sleep of .* within 0.3 seconds; see to"):
            run(use, tools["sleep"], {"seconds": 30}, model=ScriptedModel({}))


def test_calls_after_the_end_are_refused():
    with MCPServer(COMMAND, timeout=20) as made:
        tools = by_name(made)
    with pytest.raises(MCPServerError, match="is closed; call its tools before the end of its"):
        run(use, tools["add"], {"a": 1}, model=ScriptedModel({}))
    with made:
        assert run(use, tools["add"], {"a": 1}, model=ScriptedModel({})) == "2"


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["/nowhere/server"], r"/nowhere/server does not start \(FileNotFoundError: .*\); give"),
        (
            [sys.executable, "-c", "import sys; sys.exit('no licence')"],
            r"does not start \(.*\); give the command of one; the last on its stderr: no licence$",
        ),
        (
            [sys.executable, "-c", "import sys; sys.stdin.read()"],
            "has not answered within 0.5 seconds of its start; give the command of a server",
        ),
    ],
)
def test_what_is_no_server_is_told_of_at_the_start(command, told):
    with pytest.raises(MCPServerError, match=told):
        MCPServer(command, timeout=0.5 if "stdin" in command[-1] else 20).start()


def test_a_server_by_http():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}/mcp"
    with pytest.raises(MCPServerError, match=rf"{url} cannot be reached .*; give the address of"):
        MCPServer(url=url, timeout=20).start()
    environment = {**os.environ, "PORT": str(port)}
    with subprocess.Popen(
        [*COMMAND, "--http"], env=environment, stderr=subprocess.DEVNULL
    ) as process:
        try:
            end = time.monotonic() + 20
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                except OSError:
                    assert time.monotonic() < end
                    time.sleep(0.05)
            with MCPServer(url=url, timeout=20) as made:
                tools = by_name(made)
                assert run(use, tools["add"], {"a": 1}, model=ScriptedModel({})) == "2"
                with pytest.raises(MCPToolError, match="Error executing tool fail"):
                    run(use, tools["fail"], {"reason": "x"}, model=ScriptedModel({}))
                process.kill()
                process.wait(20)
                with pytest.raises((MCPServerError, MCPToolError), match=url):
                    run(use, tools["add"], {"a": 1}, model=ScriptedModel({}))
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "give either a command or a url"),
        ({"command": ["x"], "url": "http://host/mcp"}, "give either a command or a url"),
        ({"command": "uvx server"}, "command is 'uvx server'; give a list of the program"),
        ({"command": []}, r"command is \[\]; give a list"),
        ({"url": "host:8000"}, "url is 'host:8000'; it must be an address"),
        ({"command": ["x"], "timeout": 0}, "timeout is 0; it must be above 0"),
        ({"command": ["x"], "restarts": -1}, "restarts is -1; it must be at least 0"),
    ],
    ids=str,
)
def test_arguments_that_make_no_server_are_refused_at_once(given, told):
    with pytest.raises(ValueError, match=told):
        MCPServer(**given)
