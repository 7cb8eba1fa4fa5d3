"""The `jaxshare` command: finds the command, runs it, and turns errors into exit codes."""

import argparse
import contextlib
import itertools
import select
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from jaxshare import __version__, compile_cache, garbage, progress
from jaxshare.compile_time import reported_compiles
from jaxshare.extras import MissingExtraError
from jaxshare.paths import DISK_ERRORS, WriteError
from jaxshare.serving.errors import RefusedInputError, SamplingError

_COMMANDS = {
    "demo": (
        lambda: import_module("jaxshare.serving.cli.demo"),
        "one model as two workers and as sixteen branches over one shared cache",
    ),
    "generate": (
        lambda: import_module("jaxshare.serving.cli.generate"),
        "sample completions of a prompt, which is stored and read once for all of them",
    ),
    "score": (
        lambda: import_module("jaxshare.serving.cli.score"),
        "log-probabilities of candidates that may continue a text, which is read once for all of them",
    ),
    "workers": (
        lambda: import_module("jaxshare.serving.cli.workers"),
        "solve a problem with several workers that read each other's words as they are written",
    ),
    "batch": (
        lambda: import_module("jaxshare.serving.cli.batch"),
        "complete the prompts of a file, each n times, and share what they have in common",
    ),
    "serve": (
        lambda: import_module("jaxshare.serving.cli.serve"),
        "serve a model over HTTP to every client of OpenAI's interface",
    ),
    "evaluate": (
        lambda: import_module("jaxshare.serving.cli.evaluation.evaluate"),
        "measure accuracy against the budget of forward passes",
    ),
    "rescore": (
        lambda: import_module("jaxshare.serving.cli.evaluation.rescore"),
        "mark the runs of an evaluation again, without running any",
    ),
    "judge": (
        lambda: import_module("jaxshare.serving.cli.evaluation.judge"),
        "have a model grade how well the workers of an evaluation worked together",
    ),
    "agents": (
        lambda: import_module("jaxshare.serving.cli.agents"),
        "run agents: coroutines that call a model, under supervisors that search over its replies",
    ),
    "convert": (
        lambda: import_module("jaxshare.serving.cli.convert"),
        "write a model in Orbax form, which is restored straight onto many devices, or back",
    ),
    "calibrate": (
        lambda: import_module("jaxshare.serving.cli.calibrate"),
        "measure what attention costs on this device, so that runs share where it pays",
    ),
    "tune": (
        lambda: import_module("jaxshare.serving.cli.tune"),
        "measure which tiles of the GPU kernels are fastest on this GPU for a model's shape",
    ),
    "inspect": (
        lambda: import_module("jaxshare.serving.cli.inspect"),
        "tables and pictures of what a session of workers had cached and attended to",
    ),
    "doctor": (
        lambda: import_module("jaxshare.serving.cli.doctor"),
        "versions, devices, attention backends and folders of this installation, and what to mend",
    ),
}
"""How each command is imported, and its help text."""
_PIPE_CLOSED = 128 + 13
"""The exit code of a program whose output is read no more, as shells have it."""
_REFUSED = 2
"""The exit code for input that is refused, as argparse has for a command line that is."""
_MENDABLE = (
    ValueError,
    FileNotFoundError,
    NotImplementedError,
    MissingExtraError,
    SamplingError,
    WriteError,
)
"""The errors that the user can mend."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    An error that the user can mend is one sentence on stderr, after the traceback with --debug, and
    exit code 1, or 2 where the input of a job is refused.
    """
    garbage.collect_seldom()
    garbage.leave_at_exit()
    given, args = split(sys.argv[1:] if arguments is None else arguments)
    # Called as a function it may share the process with engines and sessions.
    alone = arguments is None
    options = _parser().parse_args(given, argparse.Namespace(args=args, alone=alone))
    try:
        compile_cache.enable(getattr(options, "compile_cache", None))
        with progress.DISPLAY.session("quiet" in options), reported_compiles():
            code = options.run(options)
            sys.stdout.flush()  # here, where a full disk is said in a sentence
            return code
    except (*_MENDABLE, OSError) as error:
        if isinstance(error, BrokenPipeError) and _stdout_is_gone():
            _close_stdout()
            return _PIPE_CLOSED
        if not isinstance(error, _MENDABLE):
            if not isinstance(error, OSError) or error.errno not in DISK_ERRORS:
                raise
            error = WriteError.of(error.filename or "the standard output", error)
            _close_stdout()
        if "debug" in options:
            traceback.print_exc()
        print(f"jaxshare: error: {error}", file=sys.stderr)
        return _REFUSED if isinstance(error, RefusedInputError) else 1
    except KeyboardInterrupt:
        print("jaxshare: interrupted", file=sys.stderr)
        return 130


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits off the words after a `--` of `agents run`, which are for the agent's file."""
    given = [*words]
    end = given.index("--") if "--" in given else len(given)
    if ("agents", "run") in itertools.pairwise(given[:end]):
        return given[:end], given[end + 1 :]
    return given, []


def _stdout_is_gone() -> bool:
    """Returns whether what reads the output, such as `head`, has ended."""
    look = select.poll()
    try:
        look.register(sys.stdout.fileno(), select.POLLOUT)
    except (OSError, ValueError):  # it is no file
        return False
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in look.poll(0))


def _close_stdout() -> None:
    """Closes what cannot be written, so that Python does not try again at its end."""
    if sys.stdout is sys.__stdout__ and sys.stdout:
        with contextlib.suppress(OSError):
            sys.stdout.close()


class _Parser(argparse.ArgumentParser):
    """A parser whose commands take --debug, --quiet and --compile-cache at any depth."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        # Suppressed by default, so that the parser of a command does not overwrite what was given
        # before the command's name.
        self.add_argument(
            "--debug",
            action="store_true",
            default=argparse.SUPPRESS,
            help="show the traceback of an error",
        )
        self.add_argument(
            "--quiet",
            action="store_true",
            default=argparse.SUPPRESS,
            help=f"no progress on stderr (also: {progress.VARIABLE}=off)",
        )
        self.add_argument(
            "--compile-cache",
            metavar="FOLDER",
            default=argparse.SUPPRESS,
            help="where compiled programs are kept for later runs, or `off` (default: "
            f"${compile_cache.VARIABLE}, or the user's cache folder)",
        )

    def error(self, message: str) -> NoReturn:
        """Ends the program with one line in place of the usage, which may be thirty."""
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


class _CommandParser(_Parser):
    """The parser of a command, which imports the command's module when it is asked for arguments.

    All modules together take a quarter of a second to import, and one is used.
    """

    command: str | None = None  # whose arguments are yet to be added

    def fill(self) -> None:
        """Adds the arguments of the command."""
        if self.command:
            module = _COMMANDS[self.command][0]()
            module.add_arguments(self)
            self.set_defaults(run=module.run)
            self.command = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """See `argparse.ArgumentParser.parse_known_args`."""
        self.fill()
        return super().parse_known_args(args, namespace)


def command_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    return _parser(filled=True)


def _parser(filled: bool = False) -> argparse.ArgumentParser:
    """The parser of all commands; those that are not filled know their arguments when they parse."""
    parser = _Parser(
        prog="jaxshare",
        description="Inference for groups of language-model streams that share memory.",
    )
    parser.add_argument("--version", action="version", version=f"jaxshare {__version__}")
    commands = parser.add_subparsers(
        title="commands", required=True, metavar="COMMAND", parser_class=_CommandParser
    )
    for name, (_, help) in _COMMANDS.items():
        added = commands.add_parser(name, help=help)
        added.command = name
        if filled:
            added.fill()
    return parser


if __name__ == "__main__":
    sys.exit(main())
