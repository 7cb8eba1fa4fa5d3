"""A journal beside the outcomes of firings, and the file that it grows in, if any.

That is the identity of the run, the answers of the model that a firing has so far if it needs
several, the open questions to a person, and the answers given to them.
"""

import dataclasses
import json
import os
import secrets
from typing import Any

from jaxshare.argument_checks import shown
from jaxshare.serving.agents import identity
from jaxshare.serving.agents.journal_file import FORMAT, DamageError, JournalFile
from jaxshare.serving.agents.questions import OpenQuestion
from jaxshare.serving.agents.requests import Reply
from jaxshare.serving.chat import BrokenCall, ToolCall

Part = tuple[str, tuple[int, ...], int, int]
"""(id of a run, path of a firing, number of the answer, attempt)."""


class WriteAhead:
    """The part of a journal beside its entries; with a file, all is on the disk before it counts.

    Attributes:
      file: None for a journal in memory.
      id: of the run, in all its restarts.
      header: the identity of the run; None before it has begun, and in memory.
      questions: those that were open, by id; answers: those that a person has given, by question.
    """

    def __init__(self, file: JournalFile | None = None):
        self.file, self.id = file, secrets.token_hex(8)
        self.header: dict[str, Any] | None = None
        self.questions: dict[str, OpenQuestion] = {}
        self.answers: dict[str, Any] = {}
        self._replies: dict[Part, Reply] = {}

    def append(self, value: dict[str, Any]) -> None:
        """Writes a line to the file, if there is one; raises a WriteError where that fails."""
        if self.file is not None:
            self.file.append(value)

    def read(self, value: dict[str, Any]) -> bool:
        """Takes in a line of a file; False if it is the entry of a firing.

        Raises:
          DamageError, ValueError, LookupError, TypeError: it is no line of a journal.
        """
        match value:
            case {"format": _, "id": str(id), **header}:
                self.id, self.header = id, header
            case {
                "reply": [int(number), int(attempt)],
                "run": str(run),
                "path": path,
                "said": said,
            }:
                self._replies[run, tuple(path), number, attempt] = _reply(said)
            case {"question": {"id": str(id), "options": options, **rest}}:
                self.questions[id] = OpenQuestion(id=id, options=tuple(options), **rest)
            case {"answer": str(id), "value": given}:
                self.answers[id] = given
            case _:
                return False
        if self.header is None:
            raise DamageError("the journal does not say what run it is of")
        return True

    def begin(self, now: identity.Identity) -> None:
        """Writes what the run is of, or compares it with what the journal says.

        Raises:
          ValueError: the journal is of another run.
        """
        if self.header is None:
            if self.file is not None:
                self.append({"format": FORMAT, "id": self.id, **now})
                self.header = now
        elif told := identity.difference(self.header, now):
            raise ValueError(
                f"the journal{self._name} is of another program or version: {told}; run what it was "
                "begun with to go on, or give another journal to begin anew"
            )

    @property
    def _name(self) -> str:
        return "" if self.file is None else f" {self.file.path}"

    # Answers of the model in firings that need several.

    def reply(self, part: Part) -> Reply | None:
        """The recorded answer to one of the calls of a firing."""
        return self._replies.get(part)

    def record_reply(self, part: Part, reply: Reply) -> None:
        """Records the answer to one of the calls of a firing, whose entry comes after the last."""
        if self.file is not None:
            run, path, *reply_of = part
            said = dataclasses.asdict(reply)
            self.append({"run": run, "path": path, "reply": reply_of, "said": said})

    # Questions and answers of persons.

    def record_question(self, question: OpenQuestion) -> None:
        """Records that a question is open."""
        if question != self.questions.get(question.id):
            self.append({"question": dataclasses.asdict(question)})
            self.questions[question.id] = question

    def answer(self, id: str, value: Any) -> None:
        """Records a person's answer; see `Journal.answer`."""
        if (question := self.questions.get(id)) is None:
            asked = ", ".join(self.questions) or "none"
            raise ValueError(
                f"there is no question {shown(id)} in the journal{self._name}; open questions: "
                f"{asked}"
            )
        try:
            value = json.loads(json.dumps(question.read(value)))
        except (ValueError, TypeError) as error:
            raise ValueError(f"the answer to question {id} is {shown(value)}: {error}") from error
        if id not in self.answers or self.answers[id] != value:
            self.append({"answer": id, "value": value})
            self.answers[id] = value


def opened(file: str | os.PathLike) -> tuple[WriteAhead, list[tuple[int, dict[str, Any]]]]:
    """(what a file has beside entries of firings, the numbers and values of the lines with those).

    Raises:
      InUseError, ValueError, OSError: see `JournalFile`.
    """
    lines = JournalFile(file)
    try:
        return _read(WriteAhead(lines), lines.values, file)
    except BaseException:
        lines.close()
        raise


def _read(
    ahead: WriteAhead, values: list[dict[str, Any]], file: str | os.PathLike
) -> tuple[WriteAhead, list[tuple[int, dict[str, Any]]]]:
    entries = []
    for number, value in enumerate(values, 1):
        try:
            if not ahead.read(value):
                entries.append((number, value))
        except (ValueError, LookupError, TypeError) as error:
            raise DamageError(f"line {number} of the journal {file} is damaged: {error}") from error
    values.clear()
    return ahead, entries


def loaded(
    values: list[dict[str, Any]], file: str | os.PathLike
) -> tuple[WriteAhead, list[tuple[int, dict[str, Any]]]]:
    """The same as `opened`, of lines that are held in memory from now on."""
    return _read(WriteAhead(), values, file)


def _reply(said: dict[str, Any]) -> Reply:
    calls = tuple(ToolCall(**call) for call in said.pop("tool_calls"))
    broken = tuple(BrokenCall(**call) for call in said.pop("broken"))
    return Reply(**said, tool_calls=calls, broken=broken)
