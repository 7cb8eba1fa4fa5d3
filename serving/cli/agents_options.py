"""Options of `jaxshare agents run` for the engine and the journal, and persons at the terminal."""

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from jaxshare.argument_checks import shown
from jaxshare.paths import check_file
from jaxshare.serving.agents.backends import EngineModel
from jaxshare.serving.agents.journal import Journal
from jaxshare.serving.agents.model_calls import in_thread
from jaxshare.serving.agents.questions import OpenQuestion
from jaxshare.serving.agents.requests import Model
from jaxshare.serving.cli import arguments
from jaxshare.serving.kvcache.eviction import POLICIES

_ENGINE = ("policy", "kv_bytes", "host_kv_bytes", "logits_cache")
_OF_ENGINE = (*_ENGINE, "resample", "dtype", "adapter")
_MODES = ("stepwise", "hotspot")


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Adds --kv-bytes, --host-kv-bytes, --policy, --logits-cache, --resample, --max-concurrency."""
    arguments.add_memory(parser)
    parser.add_argument(
        "--policy",
        choices=[*POLICIES],
        help="the order in which keys and values are evicted (default contribution)",
    )
    parser.add_argument(
        "--logits-cache",
        metavar="SIZE",
        help="host memory for the Logits Cache, from which calls that come to the same state again "
        "are sampled (default: none)",
    )
    parser.add_argument(
        "--resample",
        choices=_MODES,
        help="how the Logits Cache is used: exactly, or approximately (default stepwise)",
    )
    parser.add_argument(
        "--max-concurrency",
        type=int,
        metavar="N",
        help="calls of the model under way at once (default: no limit)",
    )


def add_journal(parser: argparse.ArgumentParser) -> None:
    """Adds --journal, --resume and --answer."""
    parser.add_argument(
        "--journal",
        metavar="FILE",
        help="write all that the model, tools and persons answer into this file, each before the "
        "agent has it",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with the run of --journal, which asks for nothing again that it has; begin it "
        "if there is none yet",
    )
    parser.add_argument(
        "--answer",
        action="append",
        default=[],
        metavar="ID=TEXT",
        help="answer a question of the run that is gone on with; may be given several times",
    )


def check(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of the engine, after a check of all options of this module.

    Raises:
      ValueError: one of them is wrong, lacks another one, or has no effect.
    """
    if options.endpoint is not None:
        there = f"the model at --endpoint {options.endpoint}"
        refuse_engine(
            options, f"{there} has none", "leave --endpoint out to run the model of --model here"
        )
    made = check_engine(options)
    for option, given in (("--resume", options.resume), ("--answer", options.answer)):
        if given and options.journal is None:
            raise ValueError(f"{option} is given without --journal; give the journal of the run")
    if options.answer and not options.resume:
        raise ValueError("--answer is given without --resume; give it to go on with the run")
    _answers(options.answer)
    check_file("--journal", options.journal)
    if options.journal is not None and not options.resume and _has_content(options.journal):
        raise ValueError(
            f"--journal is {options.journal!r}, which has a run already; give --resume to go on "
            "with it, or another --journal"
        )
    return made


def check_engine(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of the engine, after a check of the options of `add_engine`.

    Raises:
      ValueError: one of them is wrong or lacks another one.
    """
    if options.max_concurrency is not None and options.max_concurrency < 1:
        raise ValueError(
            f"--max-concurrency is {options.max_concurrency}; at least one call is under way"
        )
    if options.resample is not None and options.logits_cache is None:
        raise ValueError(
            f"--resample is {options.resample}, but there is no Logits Cache; give --logits-cache "
            "SIZE, too"
        )
    made: dict[str, Any] = {
        name: arguments.parse_bytes(size, f"--{name.replace('_', '-')}")
        for name in _ENGINE[1:]
        if (size := getattr(options, name)) is not None
    }
    return made if options.policy is None else {"policy": options.policy, **made}


def resample_of(options: argparse.Namespace) -> str | None:
    """Returns the use of the Logits Cache; None without one."""
    return None if options.logits_cache is None else options.resample or _MODES[0]


def refuse_engine(
    options: argparse.Namespace, why: str, instead: str = "give another --model"
) -> None:
    """Refuses options of an engine for a model for which none is made.

    Args:
      options: of the command.
      why: there is none, in words.
      instead: what else would do, in words.

    Raises:
      ValueError: some are given; names all of them.
    """
    given = [
        f"--{name.replace('_', '-')}" for name in _OF_ENGINE if getattr(options, name) is not None
    ]
    if given:
        *rest, last = given
        named, verb, them = (
            (f"{', '.join(rest)} and {last}", "are", "them") if rest else (last, "is", "it")
        )
        raise ValueError(f"{named} {verb} of an engine, and {why}; leave {them} out, or {instead}")


def made_model(options: argparse.Namespace, model: Model) -> str:
    """The words for a model that the agent's file makes itself.

    Raises:
      ValueError: options of an engine are given, which has no part in it or is made already.
    """
    name = f"the {type(model).__name__} of {options.file}"
    has = "has its own" if isinstance(model, EngineModel) else "has none"
    refuse_engine(options, f"{name} {has}")
    return name


def _has_content(file: str) -> bool:
    return os.path.exists(file) and (not os.path.isfile(file) or os.path.getsize(file) > 0)


def _answers(given: Sequence[str]) -> dict[str, str]:
    answers = {}
    for text in given:
        id, equals, answer = text.partition("=")
        if not equals or not id.strip():
            raise ValueError(
                f"--answer is {shown(text)}; it must be the id of a question, = and the answer, such "
                "as 1f2e3d4c=yes"
            )
        if id.strip() in answers:
            raise ValueError(f"--answer has two answers to {id.strip()}; give one of them")
        answers[id.strip()] = answer
    return answers


def opened(options: argparse.Namespace) -> "contextlib.AbstractContextManager[Journal | None]":
    """Returns the journal of --journal, with the answers of --answer; or None.

    Raises:
      ValueError: it is damaged or no journal, or has no such question.
      InUseError: another process has it open.
    """
    if options.journal is None:
        return contextlib.nullcontext()
    journal = Journal.open(options.journal)
    try:
        for id, answer in _answers(options.answer).items():
            journal.answer(id, answer)
    except BaseException:
        journal.close()
        raise
    return journal


class Terminal:
    """A person at the terminal, who is asked one question at a time."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._is_gone = False

    async def __call__(self, question: OpenQuestion) -> str | None:
        """The line that is typed; None once the input has ended."""
        async with self._turn:
            if self._is_gone:
                return None
            print(in_words(question), file=sys.stderr, flush=True)
            line = await in_thread(sys.stdin.readline)
            self._is_gone = not line
            return line.rstrip("\n") if line else None


def in_words(question: OpenQuestion) -> str:
    """Returns a question with what its answer has to be."""
    wanted = ""
    if question.options:
        wanted = f" ({' / '.join(question.options)})"
    elif question.schema is not None:
        wanted = f" (JSON of the schema {shown(question.schema)})"
    problem = f"{question.problem}\n" if question.problem else ""
    return f"{problem}agent {question.agent} asks: {question.text}{wanted}"


def how_to_answer(questions: Sequence[OpenQuestion], journal: str | None) -> str:
    """Returns the open questions, and what to do about them."""
    lines = [f"{question.id}: {in_words(question)}" for question in questions]
    if journal is None:
        lines.append("the run waits for answers; with --journal it could go on with them")
    else:
        lines.append(
            f"the run waits for answers; go on with --journal {journal} --resume "
            f"{' '.join(f'--answer {question.id}=TEXT' for question in questions)}"
        )
    return "\n".join(lines)
