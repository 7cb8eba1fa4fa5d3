"""Feedback on states: from a function, from an agent, or from the model in the dialogue itself."""

from collections.abc import Callable
from typing import Any, Literal

from jaxshare.argument_checks import shown
from jaxshare.serving.agents.agent import Agent, agent
from jaxshare.serving.agents.dialogue import Message
from jaxshare.serving.agents.errors import AgentError
from jaxshare.serving.agents.judging import Judged
from jaxshare.serving.agents.requests import llm
from jaxshare.serving.agents.states import Inquiry, State

Source = str | Agent | Callable[[State], str | None]


@agent
async def gives_feedback(dialogue, prompt):
    """Asks the model for feedback on what a dialogue has come to."""
    return await llm([*dialogue, Message("user", prompt)])


def check_source(name: str, source: Any) -> None:
    """Raises a TypeError for what cannot give feedback."""
    if not (isinstance(source, str | Agent) or callable(source)):
        raise TypeError(
            f"{name} is {shown(source)}; give a function of a state, an agent, or a text that asks "
            "the model for it"
        )


def feedback_inquiry(
    source: Source, state: State, role: Literal["feedback", "correction"]
) -> Inquiry:
    """The inquiry for feedback on a state; its answer is a text, or None for nothing to say."""
    if isinstance(source, str):
        to, args = gives_feedback, (state.dialogue, source)
    else:
        to, args = source, (Judged.of(state) if isinstance(source, Agent) else state,)
    return Inquiry(state, 0, to, args, role, as_feedback)


def as_feedback(given: Any) -> str | None:
    """Returns feedback as it was given; raises an AgentError if it is neither a text nor None."""
    if given is not None and not isinstance(given, str):
        raise AgentError(f"the feedback is {shown(given)}; give a text, or None to stop")
    return given


def with_feedback(source: Source, state: State, text: str) -> tuple[Message, ...]:
    """The dialogue of a state, continued by feedback on it."""
    if isinstance(source, str):
        return (*state.dialogue, Message("user", source), Message("assistant", text))
    return (*state.dialogue, Message("user", text))
