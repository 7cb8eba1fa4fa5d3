"""`jaxshare agents run` with a model at an endpoint, tools of an MCP server, and pieces shown."""

import json
import sys

import pytest

from jaxshare.serving.agents.endpoint import OpenAIModel
from jaxshare.serving.cli import main
from tests.paths import ROOT
from tests.serving.agents.scripted_endpoint import completion, scripted_endpoint
from tests.serving.agents.test_endpoint import sse

PROGRAM = """
from jaxshare.serving.agents import agent, llm
from jaxshare.serving.agents.backends import ScriptedModel

@agent
async def ask(question="Hello?"):
    return await llm(question)

def scripted():
    return ScriptedModel({"Hello?": "<think>Who?</think>Good day."})

AGENT = ask
"""


@pytest.fixture
def program(tmp_path):
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    return str(file)


def run(capsys, *words: str) -> tuple[int, str, str]:
    code = main.main(["agents", "run", *words])
    return code, *capsys.readouterr()


def test_pieces_are_shown_on_stderr(capsys, program):
    code, out, err = run(capsys, program, "--model", "scripted", "--stream")
    assert code == 0 and "Good day." in out.splitlines()
    assert err == "[ask 0.0 thinks] Who?\n[ask 0.0] Good day.\n"


def test_pieces_are_lines_of_json_and_the_report_is_the_last(capsys, program):
    code, out, _ = run(capsys, program, "--model", "scripted", "--stream", "--json")
    *pieces, report = map(json.loads, out.splitlines())
    assert code == 0 and report["value"] == "Good day."
    told = [(one["text"], one["is_reasoning"], one["is_last"]) for one in pieces]
    assert told == [("Who?", True, False), ("Good day.", False, False), ("", False, True)]
    assert all((one["run"], one["state"], one["agent"]) == ("ask", [0, 0], "ask") for one in pieces)


def test_an_endpoint_answers(capsys, program, monkeypatch):
    monkeypatch.setenv("SOME_KEY", "sk-7")
    stream = sse({"content": "By "}, {"content": "wire."})
    with scripted_endpoint(completion("Far away."), stream) as endpoint:
        where = ("--endpoint", endpoint.url, "--model", "m", "--key-variable", "SOME_KEY")
        code, out, _ = run(capsys, program, "--json", *where)
        report = json.loads(out)
        streamed, shown, err = run(capsys, program, "--stream", *where)
    assert (code, report["value"], report["new_tokens"]) == (0, "Far away.", 2)
    assert report["model"] == f"m at {endpoint.url}"
    assert (streamed, err) == (0, "[ask 0.0] By wire.\n") and "By wire." in shown.splitlines()
    assert endpoint.keys == ["Bearer sk-7"] * 2


def test_an_endpoint_that_is_refused_is_told_of(capsys, program, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with scripted_endpoint((401, {}, "no key")) as endpoint:
        code, _, err = run(capsys, program, "--endpoint", endpoint.url, "--model", "m")
    assert code == 1 and f"EndpointError: the endpoint {endpoint.url} refuses (HTTP 401" in err
    for words, told in (
        (("--endpoint", "http://host/v1"), "--endpoint is given without --model"),
        (("--endpoint", "host", "--model", "m"), "--endpoint host cannot be used: base_url is"),
    ):
        code, _, err = run(capsys, program, *words)
        assert code == 1 and told in err and len(err.splitlines()) == 1


def test_a_file_may_have_its_model_and_the_tools_of_a_server(capsys, tmp_path):
    server = ROOT / "tests" / "serving" / "agents" / "mcp_server.py"
    calls = [
        {
            "id": "x",
            "type": "function",
            "function": {"name": "add", "arguments": '{"a": 3, "b": 4}'},
        }
    ]
    with scripted_endpoint(
        completion(None, finish="tool_calls", tool_calls=calls), completion("It is 7.")
    ) as endpoint:
        file = tmp_path / "program.py"
        file.write_text(
            f"""
from jaxshare.serving.agents import agent, llm
from jaxshare.serving.agents.endpoint import OpenAIModel
from jaxshare.serving.agents.mcp_tools import MCPServer

MODEL = OpenAIModel("m", base_url={endpoint.url!r})
SERVER = MCPServer([{sys.executable!r}, {str(server)!r}])

@agent
async def AGENT(question):
    return await llm(question, tools=SERVER.tools())
"""
        )
        code, out, _ = run(capsys, str(file), "--json", "--", "What is 3 + 4?")
        module = sys.modules["jaxshare_agents_run_program"]
        module.SERVER.close()  # pyright: ignore[reportAttributeAccessIssue]
    report = json.loads(out)
    assert (code, report["value"]) == (0, "It is 7.")
    assert report["model"] == f"the {OpenAIModel.__name__} of {file}"
    assert endpoint.asked[1]["messages"][-1]["content"] == "7"
