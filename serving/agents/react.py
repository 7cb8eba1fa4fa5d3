"""An agent that alternates thoughts and tool calls up to an answer (ReAct, Yao et al., 2023)."""

import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxshare.serving.agents.agent import agent
from jaxshare.serving.agents.errors import AgentError
from jaxshare.serving.agents.requests import llm, tool
from jaxshare.serving.chat.tools import FunctionTool, failure

_FORMAT = """\
Answer the task below. You can use tools, one at a time. Each time you write, write a line with \
your thought and then either a line with one
tool and its arguments as a JSON object, or a line with the answer to the task:

Thought: what you know and what to do next
Action: NAME {{"ARGUMENT": VALUE}}

Thought: why you are done
Answer: the answer

After an action you are told its observation.

Tools:
{tools}

Task: {task}"""


class ReactStep(NamedTuple):
    """One step of the model: an action (a tool's name and its arguments), or the answer."""

    thought: str
    action: str | None = None
    arguments: Mapping[str, Any] = {}
    answer: str | None = None


@agent
async def react(task, tools, steps=8, retries=2, timeout=None):
    """Solves a task with tools; returns the text of the answer.

    It runs under `Single`; `react.under(supervisor)` searches its states.

    The model writes `Thought:`, then `Action: NAME {JSON object of arguments}` or `Answer:`. Every
    action is answered by `Observation:` and the tool's result. An unknown tool, an error or a
    timeout is reported in the observation too.

    Args:
      task: the task, as text.
      tools: functions by name, async ones too. The model sees their signatures and the first line
        of their documentation; of a `FunctionTool`, such as that of an MCP server, the schemas of
        its arguments.
      steps: limit of actions and answers.
      retries: number of further attempts after a text of another form.
      timeout: seconds for one tool call.

    Raises:
      ParseError: the model's text did not have the form; the error has the text.
      AgentError: there was no answer within the steps.
    """
    say = _FORMAT.format(tools=_described(tools), task=task)
    for _ in range(steps):
        step = await llm(say, parse=parse_step, retries=retries, stop="\nObservation:")
        if step.answer is not None:
            return step.answer
        if step.action not in tools:
            say = (
                f"Observation: there is no tool {step.action}; there are: "
                f"{', '.join(tools) or 'none'}"
            )
            continue
        try:
            found = await tool(
                functools.partial(tools[step.action], **step.arguments), timeout=timeout
            )
            say = f"Observation: {found}"
        except Exception as error:
            say = f"Observation: {failure(step.action, error)}"
    raise AgentError(
        f"react has found no answer within {steps} steps; the last it was told is {say!r}"
    )


def _described(tools: Mapping[str, Callable[..., Any]]) -> str:
    lines = []
    for name, function in tools.items():
        if isinstance(function, FunctionTool):
            described = function.description.partition("\n")[0]
            schema = json.dumps(dict(function.parameters), ensure_ascii=False)
            lines.append(f"{name} {schema}" + f": {described}" * bool(described))
            continue
        described = (inspect.getdoc(function) or "").partition("\n")[0]
        lines.append(f"{name}{inspect.signature(function)}" + f": {described}" * bool(described))
    return "\n".join(lines) or "none"


_WRITTEN = re.compile(
    r"\s*(?:Thought:(?P<thought>.*?))?^[ \t]*(?P<kind>Action|Answer):[ \t]*(?P<rest>.*)",
    re.DOTALL | re.MULTILINE,
)


def parse_step(text: str) -> ReactStep:
    """Parses a step of the form that `react` uses; text after an action's arguments is ignored.

    Raises:
      ValueError: neither an action nor an answer, or arguments that are no JSON object.
    """
    written = _WRITTEN.match(text)
    if not written:
        raise ValueError(
            "there is neither a line that begins with 'Action:' nor one with 'Answer:'"
        )
    thought, rest = (written["thought"] or "").strip(), written["rest"].strip()
    if written["kind"] == "Answer":
        return ReactStep(thought, answer=rest)
    name, _, given = rest.partition("{")
    name = name.strip()
    if not name or len(name.split()) > 1:
        raise ValueError(f"an action is a tool's name and a JSON object, not {rest!r}")
    if not given:
        return ReactStep(thought, name)
    arguments, _ = json.JSONDecoder().raw_decode("{" + given)
    return ReactStep(thought, name, arguments)
