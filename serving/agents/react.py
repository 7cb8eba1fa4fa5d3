"""An agent that thinks, uses tools and looks at what they give until it knows the answer (ReAct,
Yao et al., 2023)."""

import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxshare.serving.agents.agent import agent
from jaxshare.serving.agents.requests import llm, tool
from jaxshare.serving.agents.runs import AgentError

_FORMAT = """\
Answer the task below. You can use tools, one at a time. Each time you write, write a line with your thought and then either a line with one
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
    """What the model has written: an action, which is a tool's name and arguments, or the
    answer."""

    thought: str
    action: str | None = None
    arguments: Mapping[str, Any] = {}
    answer: str | None = None


@agent
async def react(task, tools, steps=8, retries=2, timeout=None):
    """Solves a task with tools; returns the text of the answer. Under `Single` as it is;
    `react.under(supervisor)` searches it.

    The model writes `Thought:`, then `Action: NAME {JSON object of arguments}` or `Answer:`. Every
    action is answered by `Observation:` and what the tool has returned. A tool that there is not,
    or that raises or takes too long, is told in the observation as well.

    Args:
      task: what is wanted, as text.
      tools: functions by name, async ones too. The model sees their signatures and the first line
        of their documentation.
      steps: actions and answers at most.
      retries: how often the model is asked again where it has written something else.
      timeout: of one use of a tool, in seconds.

    Raises:
      ParseError: the model did not keep to the form; the error has what it wrote.
      AgentError: no answer after so many steps.
    """
    say = _FORMAT.format(tools=_described(tools), task=task)
    for _ in range(steps):
        step = await llm(say, parse=parse_step, retries=retries, stop="\nObservation:")
        if step.answer is not None:
            return step.answer
        if step.action not in tools:
            say = f"Observation: there is no tool {step.action}; there are: {', '.join(tools) or 'none'}"
            continue
        try:
            found = await tool(
                functools.partial(tools[step.action], **step.arguments), timeout=timeout
            )
            say = f"Observation: {found}"
        except Exception as error:
            say = f"Observation: {step.action} has failed: {type(error).__name__}: {error}"
    raise AgentError(
        f"react has found no answer within {steps} steps; the last it was told is {say!r}"
    )


def _described(tools: Mapping[str, Callable[..., Any]]) -> str:
    lines = []
    for name, function in tools.items():
        described = (inspect.getdoc(function) or "").partition("\n")[0]
        lines.append(f"{name}{inspect.signature(function)}" + f": {described}" * bool(described))
    return "\n".join(lines) or "none"


_WRITTEN = re.compile(
    r"\s*(?:Thought:(?P<thought>.*?))?^[ \t]*(?P<kind>Action|Answer):[ \t]*(?P<rest>.*)",
    re.DOTALL | re.MULTILINE,
)


def parse_step(text: str) -> ReactStep:
    """What a model has written in the form that `react` asks for. After an action's arguments
    nothing is looked at.

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
