"""Questions to a person: `ask` in an agent, the desk at which they wait, and their answers."""

import asyncio
import contextlib
import dataclasses
import inspect
import json
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jaxshare.argument_checks import as_texts, shown
from jaxshare.serving.agents.call_keys import digest_of
from jaxshare.serving.agents.errors import PausedError
from jaxshare.serving.agents.model_calls import in_thread
from jaxshare.serving.agents.requests import Ask
from jaxshare.serving.chat import as_returns

_ATTEMPTS = 10
"""Answers of a person that are read, until one fits."""


def ask(question: str, /, *, options: Iterable[str] | None = None, returns: Any = None) -> Ask:
    """Requests a person's answer; awaited in an agent, it gives the answer.

    The person is `Runtime(ask=...)`. Without one, or where it gives None, the question stays open:
    the agent's other paths and the other agents go on until all wait for persons, and then the run
    ends with a `PausedError`. A run with the same journal, and the answer, goes on from there.

    Args:
      question: as the person reads it.
      options: the texts of which the answer is one.
      returns: the type of the value that is made of the answer, as of `llm`: of JSON, or of a text
        where the type takes texts. Without it and `options` the answer is a text.

    Raises:
      ValueError, TypeError: a question without words, invalid options or an invalid type.
    """
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"the question is {shown(question)}; give a text for a person to read")
    if options is not None and returns is not None:
        raise ValueError("options and returns both say what an answer is; give one of them")
    given = () if options is None else as_texts("options", options)
    if options is not None and (not given or len({*given}) < len(given)):
        raise ValueError(f"options is {shown(given)}; give at least one, and none twice")
    return Ask(question, given, None if returns is None else as_returns(returns))


@dataclasses.dataclass(frozen=True)
class OpenQuestion:
    """A question to a person.

    Attributes:
      id: its name for the answer, the same in every restart of the run.
      text: as the agent has asked it.
      options: the texts of which the answer is one; none if it is free.
      schema: the JSON schema of the answer; None for a text.
      agent, run, line: the agent that asks, the id of its run, and the line in which it waits.
      problem: what was wrong with the last answer; the empty text if there was none.
    """

    id: str
    text: str
    options: tuple[str, ...]
    schema: Any
    agent: str
    run: str
    line: int
    problem: str = ""

    def read(self, answer: Any) -> Any:
        """Returns the answer as a journal keeps it: a text, or what the schema takes.

        Args:
          answer: a text as a person types it, or a value of types that JSON has.

        Raises:
          ValueError: it does not fit the question; with the reason.
        """
        if self.schema is None:
            text = answer.strip() if isinstance(answer, str) and self.options else answer
            if not isinstance(text, str):
                raise ValueError(f"{shown(answer)} is no text")
            if self.options and text not in self.options:
                raise ValueError(f"{shown(answer)} is none of {', '.join(self.options)}")
            return text
        if not isinstance(answer, str):
            return as_returns(self.schema).read(json.dumps(answer))
        try:
            return as_returns(self.schema).read(answer)
        except ValueError as error:
            with contextlib.suppress(ValueError):  # a text that is typed without quotes
                return as_returns(self.schema).read(json.dumps(answer))
            raise error


Person = Callable[[OpenQuestion], Any]
"""Answers a question, or gives None to leave it open; may be an async def."""


class Desk:
    """The place where the questions of a run wait for answers.

    Attributes:
      open: the questions without an answer, by id.
      session: tells the run from others, in all its restarts; of its journal.
      is_paused: whether the run has ended because all of it waits for persons.
    """

    def __init__(
        self,
        person: Person | None,
        answers: Mapping[str, Any] | None,
        journal: Any,
        look: Callable[[], None],
        fail: Callable[[BaseException], None],
    ):
        """Makes a desk.

        Args:
          person: see `Runtime`.
          answers: to questions, by their ids.
          journal: of the run, or None.
          look: looks whether anything can go on.
          fail: ends the run by an error of its journal.

        Raises:
          TypeError, ValueError: they are none, or the journal does not know their questions.
        """
        if person is not None and not callable(person):
            raise TypeError(f"ask is {shown(person)}; give a function that answers an OpenQuestion")
        if answers is not None and not isinstance(answers, Mapping):
            raise TypeError(f"answers is {shown(answers)}; give a dict of answers by question id")
        self.session = secrets.token_hex(8) if journal is None else journal.id
        self.open: dict[str, OpenQuestion] = {}
        self.is_paused = False
        self._person, self._answers = person, dict(answers or {})
        self._journal, self._look, self._fail = journal, look, fail
        # Of tasks that wait: the futures of their parts, or None for a person's answer.
        self._waits: dict[Any, Mapping[Any, asyncio.Future[Any]] | None] = {}
        if journal is not None:
            for id, value in self._answers.items():
                journal.answer(id, value)

    def begin(self, agent: Any, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int) -> None:
        """Tells the journal what is run; see `Journal.begin`."""
        if self._journal is not None:
            self._journal.begin(agent, args, kwargs, seed)
            self._journal.fail = self._fail

    async def answer(self, run: Any, state: Any, request: Ask, path: tuple[int, ...]) -> Any:
        """The answer to a question, as a journal keeps it; never without one."""
        question = OpenQuestion(
            digest_of("", run.id, path, size=4),
            request.question,
            request.options,
            request.returns and dict(request.returns.schema),
            run.agent.name,
            run.id,
            state.line,
        )
        given = self._answers.get(question.id)
        if self._journal is not None:
            given = self._journal.given(question.id, given)
        for _ in range(_ATTEMPTS):
            if given is None and self._person is not None:
                given = await self._asked(question)
            if given is None:
                break
            try:
                read = question.read(given)
                request.made(read)
                return read
            except ValueError as error:
                question = dataclasses.replace(question, problem=f"the last answer: {error}")
                given = None
        return await self._forever(question)

    async def _asked(self, question: OpenQuestion) -> Any:
        person: Any = self._person
        if inspect.iscoroutinefunction(person) or inspect.iscoroutinefunction(
            type(person).__call__
        ):
            return await person(question)
        return await in_thread(lambda: person(question))

    async def _forever(self, question: OpenQuestion) -> Any:
        if self._journal is not None:
            self._journal.record_question(question)
        self.open[question.id] = question
        with self.waiting(None):
            try:
                return await asyncio.get_running_loop().create_future()
            finally:
                del self.open[question.id]

    @contextlib.contextmanager
    def waiting(self, parts: Mapping[Any, asyncio.Future[Any]] | None) -> Iterator[None]:
        """Notes that the current task waits for these alone, or for a person; see `all_idle`."""
        task = asyncio.current_task()
        self._waits[task] = parts
        self.look()
        try:
            yield
        finally:
            del self._waits[task]

    def look(self) -> None:
        """Looks soon whether anything can go on."""
        asyncio.get_running_loop().call_soon(self._look)

    def all_idle(self, tasks: Iterable[asyncio.Task[Any]]) -> bool:
        """True if all these tasks wait for persons and other agents alone."""
        return all(map(self._is_idle, tasks))

    def _is_idle(self, task: asyncio.Future[Any]) -> bool:
        if task not in self._waits:
            return False
        return not any(
            part.done() or (isinstance(part, asyncio.Task) and not self._is_idle(part))
            for part in (self._waits[task] or {}).values()
        )

    def pause(self) -> PausedError:
        """The error by which a run ends that waits for persons alone."""
        self.is_paused = True
        return PausedError(tuple(self.open.values()))
