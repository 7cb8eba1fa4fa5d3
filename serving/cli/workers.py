"""The command `jaxshare workers`: one problem, several workers, one session."""

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from jaxshare import FinishReason, progress
from jaxshare.models import LoadedModel
from jaxshare.paths import check_file, check_folder, reason
from jaxshare.serving.checkpoints import SaveError, has_checkpoints
from jaxshare.serving.cli import arguments, resuming
from jaxshare.serving.cli.display import Streams, console_for
from jaxshare.serving.cluster import process_mesh
from jaxshare.serving.greedy import warn_of_greedy
from jaxshare.serving.inputs import default_sampler
from jaxshare.serving.locks import OutputLock
from jaxshare.serving.workers.inspection.probe import AttentionProbe, Snapshot
from jaxshare.serving.workers.layouts import MOVES, worker_names
from jaxshare.serving.workers.prompts import presets, preview
from jaxshare.serving.workers.prompts.format import Format
from jaxshare.serving.workers.results import Result, check_finish_at
from jaxshare.serving.workers.session import Workers
from jaxshare.serving.workers.text.step_automata import STOP_ON
from jaxshare.serving.workers.text.transcript import Event
from jaxshare.trace.trace import Trace

if TYPE_CHECKING:
    from jax.sharding import Mesh

_ANSWER_TOKENS = {"box": 16, "code": 1024}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `jaxshare workers`."""
    arguments.add_model(parser)
    _add_task_arguments(parser)
    _add_answer_arguments(parser)
    parser.add_argument(
        "--move", choices=MOVES, default="rotate", help="how finished steps get to the history"
    )
    arguments.add_sampling(parser)
    process_mesh.add_arguments(parser, groups="sessions (there is one)")
    process_mesh.add_process_arguments(parser)
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of all workers; no two of them, nor of two seeds, share random numbers "
        "(default 0)",
    )
    _add_file_arguments(parser)
    arguments.add_json(parser)


def _add_task_arguments(parser: argparse.ArgumentParser) -> None:
    problem = parser.add_mutually_exclusive_group()
    problem.add_argument("--problem", metavar="TEXT")
    problem.add_argument("--problem-file", metavar="FILE", help="`-` reads stdin")
    team = parser.add_mutually_exclusive_group()
    team.add_argument("--workers", type=int, metavar="N", help="number of workers (default 2)")
    team.add_argument(
        "--names", metavar="A,B,...", help="names of the workers (default Alice,Bob,...)"
    )
    parser.add_argument(
        "--layout", default="combined", help="contiguous, interleaved or combined (default)"
    )
    presets.add_arguments(parser)
    parser.add_argument(
        "--show-prompt",
        action="store_true",
        help="print what workers read first and what blocks start with, as text "
        "and as tokens, and run nothing; the model's parameters are not needed",
    )


def _add_answer_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--budget", type=int, default=1024, help="number of forward passes (default 1024)"
    )
    parser.add_argument(
        "--finish-at",
        metavar="P,P,...",
        help="take the answer after P forward passes (default: the budget)",
    )
    parser.add_argument(
        "--answer",
        choices=("box", "code"),
        default="box",
        help="form of the answer: the content of \\boxed{...}, or a program in Python",
    )
    parser.add_argument(
        "--stop-on",
        choices=STOP_ON,
        default="answer",
        help="what ends the session before the budget: a valid answer "
        "(default), the end token of one worker, or nothing",
    )
    parser.add_argument(
        "--answer-tokens",
        type=int,
        help="maximum tokens of an answer that is requested early (default 16, and 1024 for a "
        "program)",
    )
    parser.add_argument(
        "--ask-every",
        type=int,
        default=1024,
        help="tokens, all workers together, after which the next worker gets the question "
        "whether its work is redundant; 0 turns the question off (default 1024)",
    )


def _add_file_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--save",
        metavar="FILE",
        help="write a snapshot for `jaxshare inspect`, attention over time included",
    )
    parser.add_argument(
        "--checkpoint",
        metavar="DIR",
        help="save the session there on the way, so that it can go on after a kill",
    )
    parser.add_argument(
        "--checkpoint-every",
        type=int,
        default=256,
        metavar="P",
        help="forward passes between two saves (default 256)",
    )
    resuming.add_resume(parser, "the session that the same command has saved in --checkpoint")
    parser.add_argument(
        "--resume-from",
        type=int,
        metavar="N",
        help="go on from this checkpoint (default: the newest that is not damaged)",
    )
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help="write the fed tokens and which of them each token saw, for "
        "`jaxshare.models.reencode`",
    )


@process_mesh.together
def run(options: argparse.Namespace) -> int:
    """Runs `jaxshare workers`.

    Raises:
      ValueError: wrong settings, no problem, a checkpoint of another session, or a file that cannot
        be written; the result is printed all the same.
      FileNotFoundError: no such model.
    """
    # Errors that do not depend on the model are raised before it is loaded.
    sampling = arguments.sampling_of(options)
    names = _names(options)
    finish_at = arguments.parse_numbers("--finish-at", options.finish_at)
    check_finish_at(finish_at, options.budget)
    problem = arguments.read_text("problem", options.problem, options.problem_file)
    format = presets.format_named(options.format) if options.format is not None else None
    if options.show_prompt:
        text = preview.preview_text(options, problem, names, format)
        if process_mesh.speaks():
            print(text)
        return 0
    _check_places(options)
    mesh = process_mesh.mesh_of(options)
    with _locked(options):
        return _solve(options, sampling, names, finish_at, problem, format, mesh)


def _solve(
    options: argparse.Namespace,
    sampling: dict[str, Any],
    names: Sequence[str],
    finish_at: Sequence[int],
    problem: str,
    format: Format | None,
    mesh: "Mesh | None",
) -> int:
    """Runs the session with its outputs locked, and prints and writes its result."""
    resumed = _is_resumed(options)
    model = arguments.load_model(options, mesh)
    arguments.need_tokenizer(model, options.model)
    settings = _settings(options, model, sampling, problem, names)
    warn_of_greedy(model, settings["sampler"], discouraged=presets.advises_sampling(options.format))
    if resumed:
        session = _restore(options, model, settings, format)
        print(f"going on after {session.passes} passes", file=sys.stderr)
    else:
        session = Workers(model, **settings, format=format)
    probe = AttentionProbe(session) if options.save else None
    console = console_for(options.json)
    result, errors = _run_session(session, finish_at, options, console, probe)
    _print_summary(result, console)
    snapshot = probe.snapshot() if probe else None
    if options.json:
        # before anything is written, which may fail
        print(json.dumps(result.as_json()), flush=True)
    if process_mesh.speaks():
        if snapshot:
            errors += _write("snapshot", snapshot, "--save", options.save)
        if options.trace:
            errors += _write("trace", session.trace, "--trace", options.trace)
    for error in errors[1:]:
        print(f"jaxshare: error: {error}", file=sys.stderr)
    if errors:
        raise errors[0]
    return 0


def _names(options: argparse.Namespace) -> Sequence[str]:
    if options.workers is not None and options.workers < 1:
        raise ValueError(f"--workers is {options.workers}; ask for at least 1")
    if options.names is not None:
        return [name.strip() for name in options.names.split(",")]
    return worker_names(options.workers or 2)


def _is_resumed(options: argparse.Namespace) -> bool:
    """True where a saved session is to go on.

    Raises:
      ValueError: there is one, and it is not to.
    """
    if not options.checkpoint or not has_checkpoints(options.checkpoint):
        if options.resume_from is not None:
            raise ValueError(
                f"--resume-from is {options.resume_from}, but {options.checkpoint} has no "
                "checkpoint; give the folder of one"
            )
        if options.resume and process_mesh.speaks():
            resuming.say_new("session", options.checkpoint)
        return False
    if not options.resume and options.resume_from is None:
        raise ValueError(
            f"there is a saved session in {options.checkpoint}; --resume goes on with it, or give "
            "another --checkpoint"
        )
    return True


def _check_places(options: argparse.Namespace) -> None:
    """Checks that files can be written, and that one session is not to be run as groups."""
    option = "--resume" if options.resume_from is None else "--resume-from"
    if (options.resume or options.resume_from is not None) and not options.checkpoint:
        raise ValueError(
            f"{option} goes on with a session that was saved; give its folder as --checkpoint"
        )
    if options.checkpoint_every < 1:
        raise ValueError(
            f"--checkpoint-every is {options.checkpoint_every}; save at intervals of at least 1 "
            "forward pass"
        )
    if not process_mesh.is_together(options) or process_mesh.speaks():
        for option, file in (("--save", options.save), ("--trace", options.trace)):
            check_file(option, file)
    check_folder("--checkpoint", options.checkpoint)
    if options.data > 1:
        raise ValueError(
            f"--data is {options.data}, but a session is one group of rows; spread it with "
            "--tensor and --kv, or solve many problems side by side with `jaxshare evaluate "
            f"--data {options.data}`"
        )


def _locked(options: argparse.Namespace) -> contextlib.ExitStack:
    """Locks all outputs until the result is closed; process 0 does it for all.

    The session takes over the lock of its checkpoints.
    """
    with contextlib.ExitStack() as locks:
        if not process_mesh.is_together(options) or process_mesh.speaks():
            if options.checkpoint:
                locks.enter_context(
                    OutputLock.of_folder(
                        options.checkpoint, "give another --checkpoint", lends=True
                    )
                )
            for option, file in (("--save", options.save), ("--trace", options.trace)):
                if file:
                    locks.enter_context(OutputLock.of_file(file, f"give another {option}"))
        return locks.pop_all()


def _settings(
    options: argparse.Namespace,
    model: LoadedModel,
    sampling: dict[str, Any],
    problem: str,
    names: Sequence[str],
) -> dict[str, Any]:
    """The arguments of `Workers`; a resumed session must have been made with the same."""
    return {
        "problem": problem,
        "names": names,
        "layout": options.layout,
        "budget": options.budget,
        "ask_every": options.ask_every,
        "seed": options.seed,
        "move": options.move,
        "kind": options.answer,
        "stop_on": options.stop_on,
        "record": bool(options.trace),
        "finisher_tokens": options.answer_tokens or _ANSWER_TOKENS[options.answer],
        "sampler": dataclasses.replace(default_sampler(model), **sampling),
    }


def _restore(
    options: argparse.Namespace,
    model: LoadedModel,
    settings: dict[str, Any],
    format: Format | None,
) -> Workers:
    """Restores the session of --checkpoint.

    Raises:
      ValueError: it was made with other settings.
    """
    session = Workers.restore(model, options.checkpoint, number=options.resume_from)
    if changed := [name for name, value in settings.items() if session.settings[name] != value]:
        raise ValueError(
            f"the session in {options.checkpoint} has {changed[0]} "
            f"{session.settings[changed[0]]!r}, not {settings[changed[0]]!r}; give the same "
            "command, or another --checkpoint"
        )
    if format not in (None, session.format):
        raise ValueError(
            f"the session in {options.checkpoint} has other prompts than --format "
            f"{options.format}; give the same command, or another --checkpoint"
        )
    return session


def _run_session(
    session: Workers,
    finish_at: Sequence[int],
    options: argparse.Namespace,
    console: Console,
    probe: AttentionProbe | None,
) -> tuple[Result, list[ValueError]]:
    """Runs the session and shows what workers write; its result, and the errors of its saves."""
    with (
        Streams(session.names, console) as streams,
        progress.work("decoding", options.budget, "passes", session.passes) as work,
    ):

        def show(event: Event) -> None:
            streams.show(event)
            work.done = session.passes
            if probe:
                probe(event)

        return _run_with_saves(session, finish_at, show, options)


def _run_with_saves(
    session: Workers,
    finish_at: Sequence[int],
    show: Callable[[Event], None],
    options: argparse.Namespace,
) -> tuple[Result, list[ValueError]]:
    """Runs the session to its end even where saves fail; its result, and their errors."""
    result: Result | None = None
    failed_save: SaveError | None = None
    try:
        with session:
            try:
                result = session.run(
                    finish_at,
                    on_event=show,
                    save_to=options.checkpoint,
                    save_every=options.checkpoint_every,
                )
            except SaveError as error:
                # The other processes would wait for this one's part of the next save.
                if process_mesh.is_together(options):
                    raise
                print(
                    f"jaxshare: --checkpoint: {error}; the session goes on without saves",
                    file=sys.stderr,
                )
                failed_save, result = error, session.run(finish_at, on_event=show)
    except SaveError as error:  # the last save, which the end of the session waits for
        if result is None:
            raise
        failed_save = failed_save or error
    assert result is not None
    return result, [failed_save] if failed_save else []


def _print_summary(result: Result, console: Console) -> None:
    """Prints the answers, the cost and the reason for the end."""
    for budget, answer in result.answers.items():
        source = (
            "written by the workers"
            if not answer.extra_passes
            else f"requested early, {answer.extra_passes} more passes"
        )
        console.print(
            f"answer after {answer.passes} passes (budget {budget}): {answer.value or 'none'} "
            f"({source})",
            markup=False,
            highlight=False,
        )
    reason = {
        FinishReason.ANSWER: "answer found",
        FinishReason.STOP: "all workers have stopped",
        FinishReason.LENGTH: "the budget is used up",
        FinishReason.CACHE_FULL: "the cache is full; everything written so far is above: give a smaller budget, or "
        "a model with a longer context",
    }[result.finish_reason]
    console.print(
        f"{result.passes} passes, {result.tokens} tokens, "
        f"{result.tokens / max(result.seconds, 1e-9):,.0f} tokens/s after "
        f"{result.compile_seconds:.1f} s of compiling, {result.kv_bytes / 1e6:.2f} MB of keys and "
        f"values; {reason}.",
        markup=False,
        highlight=False,
    )


def _write(what: str, content: Snapshot | Trace, option: str, file: str) -> list[ValueError]:
    """Writes a snapshot or a trace; the error in a list, if there is one."""
    try:
        content.save(file)
        return []
    except OSError as error:
        failure = ValueError(
            f"the {what} cannot be written to {file} ({reason(error)}); give another place to {option}"
        )
        failure.__cause__ = error
        return [failure]
