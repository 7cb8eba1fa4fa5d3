"""Journals record the outcomes of firings, so that a run can be replayed without model and tools.

    journal = Journal()
    asyncio.run(Runtime(model, journal=journal).run(agent, ...))
    journal.save("run.json")
    journal = Journal.load("run.json", strict=True)
    asyncio.run(Runtime(None, journal=journal).run(agent, ...))  # same states, scores and result

A run that is to go on after a kill has a journal that grows in a file:

    with Journal.open("run.journal") as journal:  # again, if the run is to go on
        asyncio.run(Runtime(model, journal=journal).run(agent, ...))

Each outcome is on the disk before the agent gets it, so nothing that had answered is called again.
Calls under way at the kill are made again; see `jaxshare.serving.agents.call_key`.

An entry is the outcome of one firing of one state: the model's answer and the messages that it adds
to the dialogue, a tool's value, or an error. Its key is the run and the path of the firing, so
nothing depends on the order of events. An entry also has a summary of its request, so that a
changed agent does not get the outcome of another request.
"""

import base64
import copy
import dataclasses
import json
import os
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from jaxshare.models.config_fields import first_line
from jaxshare.paths import WriteError, whole_file
from jaxshare.serving import checksums
from jaxshare.serving.agents.agent import Agent
from jaxshare.serving.agents.call_keys import digest_of
from jaxshare.serving.agents.dialogue import Message
from jaxshare.serving.agents.identity import identity_of
from jaxshare.serving.agents.journal_entries import (
    CALLS,
    Entry,
    Key,
    Spending,
    entry_of,
    is_pickled,
    is_written,
    line_of,
    made_error,
    outcome_of_error,
    outcome_of_value,
    spending,
    summary,
)
from jaxshare.serving.agents.journal_file import DamageError, is_lines, read_lines
from jaxshare.serving.agents.model_calls import UsedUpError
from jaxshare.serving.agents.questions import OpenQuestion
from jaxshare.serving.agents.requests import Reply
from jaxshare.serving.agents.write_ahead import Part, WriteAhead, loaded, opened

_FORMAT = "jaxshare agents journal 1"
_DAMAGE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""The errors by which a file turns out to be no journal."""


class ReplayError(LookupError):
    """A strict journal has no entry for this firing: it is not part of the recorded run."""


class Journal:
    """Records or replays a run: `Runtime(model, journal=...)`.

    Outcomes that it has are replayed; the others are computed and recorded.

    Attributes:
      strict: a firing without an entry, or with the entry of another request, is a ReplayError.
      missed: the firings without an entry, if strict.
      fail: ends the run, since nothing more can be written to the file.
    """

    def __init__(self, *, strict: bool = False):
        self.strict = strict
        self.missed: list[Key] = []
        self._ahead = WriteAhead()
        self.fail: Callable[[Exception], None] | None = None
        self._entries: dict[Key, Entry] = {}
        self._pending: dict[Key, str] = {}  # summaries of requests without an outcome so far
        self._allow_pickles = True

    def __len__(self) -> int:
        return len(self._entries)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Journal":
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Files that grow with their runs, and persons.

    @classmethod
    def open(
        cls, file: str | os.PathLike, *, strict: bool = False, pickles: bool | None = None
    ) -> "Journal":
        """Opens a file that grows with its run, or makes it; a lock keeps others out until `close`.

        A last line that was cut off by a kill is dropped, with a warning.

        Args:
          strict: see `Journal`.
          pickles: unpickle values that JSON cannot hold, which can run any program; default only
            if no other user can have written the file.

        Raises:
          InUseError: another process, or this one, has it open.
          ValueError: it is damaged (names the line), no such journal, has pickles that may not be
            read, or cannot be written.
          OSError: it cannot be read.
        """
        journal = cls(strict=strict)
        journal._ahead, lines = opened(file)
        try:
            assert journal._ahead.file is not None
            journal._allow_pickles = journal._ahead.file.is_private if pickles is None else pickles
            journal._take(lines, file)
            if not journal._allow_pickles and (held := journal._first_pickle()):
                raise ValueError(
                    f"the journal {file} keeps the outcome of firing {list(held[1])} of {held[0]} "
                    "as a pickle, which can run any program when it is read, and others can have "
                    "written the file; if you trust it, open it with pickles=True"
                )
        except BaseException:
            journal.close()
            raise
        return journal

    def close(self) -> None:
        """Ends writing to the file of `open`, and gives its lock back."""
        if self._ahead.file is not None:
            self._ahead.file.close()

    @property
    def id(self) -> str:
        """The name of the run that it is of, the same in all its restarts; of no other run."""
        return self._ahead.id

    @property
    def questions(self) -> tuple[OpenQuestion, ...]:
        """The open questions to a person, as far as runs have come."""
        answered = {*self._ahead.answers, *(digest_of("", *key, size=4) for key in self._entries)}
        return tuple(one for id, one in self._ahead.questions.items() if id not in answered)

    def answer(self, id: str, value: Any) -> None:
        """Answers an open question; the next run goes on with it.

        Args:
          id: of the question.
          value: a text as a person types it, or a value of types that JSON has.

        Raises:
          ValueError: there is no such question, or the answer does not fit it.
          WriteError: the file cannot be written.
        """
        self._ahead.answer(id, value)

    # Methods for the runtime.

    def begin(self, agent: Agent, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int) -> None:
        """Says what the run is of: in the file's first line, or compared with that.

        Raises:
          ValueError: the journal is of another program, version, supervisor, seed or arguments.
        """
        self._ahead.begin(identity_of(agent, args, kwargs, seed))

    def given(self, id: str, default: Any) -> Any:
        """A person's answer to a question."""
        return self._ahead.answers.get(id, default)

    def record_question(self, question: OpenQuestion) -> None:
        """Records that a question is open."""
        self._append(lambda: self._ahead.record_question(question))

    def reply(self, part: Part) -> Reply | None:
        """The recorded answer to one of the calls of a firing that needs several."""
        return self._ahead.reply(part)

    def record_reply(self, part: Part, reply: Reply) -> None:
        """Records the answer to one of the calls of a firing that needs several."""
        self._append(lambda: self._ahead.record_reply(part, reply))

    def _append(self, append: Callable[[], None]) -> None:
        try:
            append()
        except (WriteError, ValueError) as error:
            if self.fail is not None:
                self.fail(error)
            raise

    def lookup(
        self, key: Key, request: Any = None
    ) -> Callable[[], tuple[Any, tuple[Message, ...]]] | None:
        """A function that replays a firing, or None if the journal has no entry for it.

        The function returns (value, messages added to the dialogue), or raises the recorded error.

        Args:
          key: key of the firing.
          request: the request that it waits for; None matches any.

        Raises:
          ReplayError: there is no entry, and the journal is strict.
        """
        if self._ahead.file is not None:
            self._ahead.file.check()
        asked, entry = summary(request), self._entries.get(key)
        if entry and (asked == entry.request or not asked or not entry.request):
            return lambda: self._replay(key, entry)
        if self.strict or (entry and self._ahead.file is not None):
            self.missed.append(key)
            problem = (
                f"asks for {asked}, and in the journal for {entry.request}"
                if entry
                else "is not in the journal"
            )
            cause = (
                "the agent, its arguments or its supervisor are not those of the run that was "
                "recorded, or that run ended first"
                if self._ahead.file is None
                else "it depends on something that is not recorded: make that a tool"
            )
            raise ReplayError(f"firing {list(key[1])} of {key[0]} {problem}; {cause}")
        self._pending[key] = asked
        return None

    def readings(self, key: Key) -> Any:
        """The recorded readings of clocks and random numbers under a key of theirs, or None."""
        entry = self._entries.get(key)
        return None if entry is None else self._replay(key, entry)[0]

    def spent(self, key: Key) -> Spending:
        """The model calls, new tokens and prompt tokens of an entry; budgets count them again."""
        return self._entries[key].spent

    def record_value(
        self, key: Key, value: Any, messages: tuple[Message, ...], spent: Sequence[float] = ()
    ) -> None:
        """Records a copy of a firing's value, which the agent may change from now on.

        Raises:
          TypeError: a tool's value cannot be written to the file of `open`.
          WriteError: the file cannot be written.
        """
        entry = outcome_of_value(self._pending.pop(key, ""), value)
        self._keep(key, entry, messages, spent)

    def record_error(self, key: Key, error: BaseException, spent: Sequence[float] = ()) -> None:
        """Records the error of a firing; raises as `record_value`."""
        self._keep(key, outcome_of_error(self._pending.pop(key, ""), error), (), spent)

    def record_used_up(self, key: Key, used_up: str, spent: Sequence[float]) -> None:
        """Records that the budget was used up in a firing, between two attempts."""
        self._keep(key, Entry(self._pending.pop(key, ""), {"used up": used_up}), (), spent)

    def _keep(
        self, key: Key, entry: Entry, messages: tuple[Message, ...], spent: Sequence[float]
    ) -> None:
        entry = dataclasses.replace(entry, messages=messages, spent=spending(spent))
        if self._ahead.file is None:
            self._entries[key] = entry
            return
        refused = None
        if not is_written(entry):
            if not entry.request.startswith(CALLS):
                return  # of a coroutine, which is awaited again when the run goes on
            told = (
                f"{entry.request} gave a {type(entry.unsaved).__name__}, which neither JSON nor "
                f"pickle can hold ({next(iter(entry.outcome.values()))}), so the journal cannot keep "
                "it; have the tool return plain data"
            )
            refused = TypeError(told)
            entry = dataclasses.replace(outcome_of_error(entry.request, refused), spent=entry.spent)
        self._append(lambda: self._ahead.append(line_of(key, entry)))
        self._entries[key] = entry
        if refused:
            raise refused

    def _replay(self, key: Key, entry: Entry) -> tuple[Any, tuple[Message, ...]]:
        match entry.outcome:
            case {"json": value}:
                return copy.deepcopy(value), entry.messages
            case {"error": named}:
                raise made_error(named)
            case {"used up": used_up}:
                raise UsedUpError(used_up)
            case {"pickle": data} | {"error pickle": data}:
                if not self._allow_pickles:
                    raise ValueError(
                        f"the outcome of firing {list(key[1])} of {key[0]} is kept as a pickle, "
                        "which can run any program when it is read; if you trust the source of "
                        "the journal, load it with pickles=True"
                    )
                value = pickle.loads(base64.b64decode(data))
            case _:
                value = entry.unsaved
        if "error" in next(iter(entry.outcome)):
            raise value
        return value, entry.messages

    # Files.

    def save(self, file: str | os.PathLike) -> None:
        """Writes JSON, the whole file or nothing.

        A value that JSON cannot hold is pickled, and marked as such.

        Raises:
          ValueError: a value that cannot be pickled either.
          WriteError: the file cannot be written; what was there before stays.
        """
        entries = []
        for key, entry in self._entries.items():
            if not is_written(entry):
                raise ValueError(
                    f"the journal cannot be saved: firing {list(key[1])} of {key[0]} was given a "
                    f"{type(entry.unsaved).__name__}, which neither JSON nor pickle can hold "
                    f"({next(iter(entry.outcome.values()))}); have the tool return plain data"
                )
            entries.append(checksums.sealed(line_of(key, entry)))
        with whole_file(Path(file)) as whole:
            json.dump({"format": _FORMAT, "entries": entries}, whole)

    @classmethod
    def load(
        cls, file: str | os.PathLike, *, strict: bool = False, pickles: bool = False
    ) -> "Journal":
        """Reads a file written by `save`.

        Args:
          strict: see `Journal`.
          pickles: unpickle values that were pickled. That can run any program: only for files from
            sources that you trust.

        Raises:
          ValueError: it is not a journal.
          OSError: it cannot be read.
        """
        journal = cls(strict=strict)
        journal._allow_pickles = pickles
        data = Path(file).read_bytes()
        if is_lines(data):
            journal._ahead, lines = loaded(read_lines(file, data)[0], file)
            journal._take(lines, file)
            return journal
        try:
            whole = checksums.parse(data.decode("utf-8"))
            if whole["format"] != _FORMAT:
                raise ValueError(f"its format is {whole['format']!r}, not {_FORMAT!r}")
            for number, sealed in enumerate(whole["entries"], 1):
                key, entry = entry_of(_unsealed(sealed, number), number)
                journal._entries[key] = entry
        except _DAMAGE as error:
            raise ValueError(
                f"{file} is no journal of agents ({first_line(error)}); give a file that "
                "Journal.save has written"
            ) from error
        return journal

    def _take(self, lines: list[tuple[int, dict[str, Any]]], file: str | os.PathLike) -> None:
        """Takes the entries in lines of a file that grows."""
        for number, line in lines:
            try:
                key, entry = entry_of(line, number)
            except _DAMAGE as error:
                raise DamageError(
                    f"line {number} of the journal {file} is damaged: {first_line(error)}"
                ) from error
            self._entries[key] = entry

    def _first_pickle(self) -> Key | None:
        return next((key for key, entry in self._entries.items() if is_pickled(entry)), None)


def _unsealed(entry: Any, number: int) -> Any:
    try:
        return checksums.unsealed(entry)
    except ValueError as error:
        raise ValueError(f"entry {number} is damaged: {error}") from error
