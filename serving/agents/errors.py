"""The errors of agents and their runs."""

from typing import Any, Self


class AgentError(RuntimeError):
    """An impossible interaction between agents, or between a supervisor and its agent."""


class RoundsError(AgentError):
    """A model calls tools again after as many answers with calls as `llm` allows."""


class DivergedError(AgentError):
    """An agent that was run again, to restore a state, did not do what it had done before."""

    @classmethod
    def of(cls, agent: str, what: str) -> Self:
        """The error of an agent with this name; `what` it did instead, and what would do."""
        return cls(f"agent {agent} was run again to restore a state, and {what}")


class DeadlockError(AgentError):
    """All agents wait for each other; the message lists the waits."""


class BudgetError(AgentError):
    """The budget of an agent was used up before any of its paths had ended."""


class PausedError(AgentError):
    """All that can go on waits for persons; a later run goes on with their answers.

    Attributes:
      questions: those that are open, each a `jaxshare.serving.agents.questions.OpenQuestion`.
    """

    def __init__(self, questions: tuple[Any, ...]):
        told = "; ".join(f"{one.id}: {one.text}" for one in questions)
        super().__init__(
            f"the run waits for answers of a person to {told}; run it again with the same journal "
            "and answers={id: answer}"
        )
        self.questions = questions


class EndedError(AgentError):
    """A child that has ended was resumed, or had to yield once more; or it was ended unneeded."""


class ParseError(ValueError):
    """No attempt of a model could be parsed; `text` is the last one, `reason` its parse error."""

    def __init__(self, agent: str, attempts: int, text: str, reason: str):
        super().__init__(
            f"agent {agent}: {attempts} answer{'s' * (attempts > 1)} of the model could not be "
            f"parsed ({reason}); the last was {text!r}"
        )
        self.text, self.reason = text, reason


class AnswerError(ParseError):
    """No attempt of a model was a value of the type that `llm` returns, or each was cut short.

    Attributes:
      text: the last answer.
      reason: what is wrong with it.
    """
