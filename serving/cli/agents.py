"""The command `jaxshare agents run FILE`: runs the agent of a Python file and prints its cost.

A file defines

    AGENT                  the agent that is run
    MODEL                  the model if --model names none: "embedded" (the default), "scripted",
                           a folder, a hub id, or a model itself, such as an `OpenAIModel`
    arguments(args)        makes the agent's arguments from the texts after `--` on the command
                           line; without it, these texts are the arguments
    scripted()             makes the model of --model scripted: a `ScriptedModel`, a dictionary of
                           answers and no language model
    shown(value)           turns the agent's value into the text to print; without it, str

of which only AGENT is required.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import importlib.util
import json
import re
import sys
import traceback
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxshare import progress
from jaxshare.paths import check_file, check_folder, reason, whole_file
from jaxshare.serving.agents import profile_pictures
from jaxshare.serving.agents.agent import Agent
from jaxshare.serving.agents.backends import EngineModel
from jaxshare.serving.agents.compiler.frames import FRAME
from jaxshare.serving.agents.endpoint import OpenAIModel
from jaxshare.serving.agents.errors import PausedError
from jaxshare.serving.agents.journal import Journal
from jaxshare.serving.agents.questions import OpenQuestion
from jaxshare.serving.agents.requests import Model
from jaxshare.serving.agents.runtime import AgentRun, Runtime
from jaxshare.serving.agents.search_log import SearchLog, timeline_picture, tree_picture
from jaxshare.serving.cli import agent_models, agents_options, arguments
from jaxshare.serving.locks import OutputLock

_MAX_TREES = 16
"""Search trees that are drawn, at most."""
_WAITS = 3
"""The exit code of a run that waits for persons."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `jaxshare agents`."""
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    run_parser = commands.add_parser(
        "run", help="run the agent of a Python file", usage="%(prog)s [options] FILE [-- ARGS]"
    )
    run_parser.add_argument(
        "file", metavar="FILE", help="Python file with an AGENT, such as examples/pipeline.py"
    )
    run_parser.add_argument(
        "--model",
        metavar="PATH",
        help="folder, GGUF file or hub id, `embedded` for the model that comes with jaxshare, or `scripted` "
        "for the file's own answers (default: the file's MODEL, or else embedded)",
    )
    agent_models.add_arguments(run_parser)
    arguments.add_dtype(run_parser)
    arguments.add_adapter(run_parser, several=True)
    arguments.add_chat_template(run_parser)
    run_parser.add_argument(
        "--seed", type=int, default=0, help="seed of all that is random (default 0)"
    )
    run_parser.add_argument(
        "--trace", metavar="FILE", help="write states, scores and times as JSON"
    )
    run_parser.add_argument(
        "--plots",
        metavar="DIR",
        help="draw search trees, a timeline and how agents work together into this folder",
    )
    agents_options.add_journal(run_parser)
    agents_options.add_engine(run_parser)
    arguments.add_json(run_parser)


def run(options: argparse.Namespace) -> int:
    """Runs `jaxshare agents run`; options.args are the words after `--`.

    Returns:
      0; 1 where the agent raises: its error is on stderr, with its place in the file, and its
      traceback with --debug; 3 where the run waits for answers of a person.

    Raises:
      ValueError: a file that cannot be loaded or has no agent, no scripted model for --model
        scripted, or output that cannot be written.
      FileNotFoundError: no such file, or no such model.
    """
    engine = agents_options.check(options)
    check_file("--trace", options.trace)
    if options.plots is not None:
        check_folder("--plots", options.plots)
        _check_matplotlib()
    with contextlib.ExitStack() as locks:
        if options.trace is not None:
            locks.enter_context(OutputLock.of_file(options.trace, "give another --trace"))
        if options.plots is not None:
            locks.enter_context(OutputLock.of_folder(options.plots, "give another --plots"))
        journal = locks.enter_context(agents_options.opened(options))
        return _run(options, engine, journal)


def _run(options: argparse.Namespace, engine: dict[str, Any], journal: Journal | None) -> int:
    """Runs the agent with its outputs locked."""
    module = _load(options.file)
    args = _arguments(module, options)
    if journal is not None:
        journal.begin(module.AGENT, tuple(args), {}, options.seed)
    model, name = _model(module, options, engine)
    out = sys.stderr if options.json else sys.stdout
    print(f"model: {name}", file=out, flush=True)
    person = agents_options.Terminal() if sys.stdin is not None and sys.stdin.isatty() else None
    writer = agent_models.PieceWriter(options.json)
    runtime = Runtime(
        model,
        seed=options.seed,
        most_calls=options.max_concurrency,
        journal=journal,
        ask=person,
        on_token=writer.write if options.stream else None,
    )
    agent_run: AgentRun | None = None
    error: Exception | None = None
    questions: tuple[OpenQuestion, ...] = ()
    talks = options.stream or person is not None  # on the same terminal
    try:
        with progress.DISPLAY.lines(talks), progress.work(f"running agent {module.AGENT.name}"):
            agent_run = asyncio.run(runtime.run(module.AGENT, *args))
    except PausedError as paused:
        questions = paused.questions
    except Exception as raised:
        error = raised
    writer.end()
    if isinstance(model, EngineModel):
        model.engine.drain()
    elif isinstance(model, OpenAIModel):
        model.close()
    written, write_error = _write(SearchLog.of(runtime), model, options)
    place = None if error is None else _place(error, module, options.file, runtime.runs)
    value = agent_run.accepted.value if agent_run and agent_run.accepted else None
    report = {
        "file": str(options.file),
        "agent": module.AGENT.name,
        "model": name,
        "seed": options.seed,
        "value": _plain(value),
        "error": None if error is None else _describe(error),
        "where": None if place is None else dataclasses.asdict(place),
        "questions": [dataclasses.asdict(question) for question in questions],
        **_costs(runtime, model),
        "written": written,
    }
    if questions and not options.json:
        print(agents_options.how_to_answer(questions, options.journal))
    else:
        _print_outcome(report, value, error, place, module, options)
    print(_summary(report), file=out)
    if write_error:
        raise write_error
    return _WAITS if questions else int(error is not None)


def _costs(runtime: Runtime, model: Model) -> dict[str, Any]:
    """The counts and times of all agents that have run."""
    runs = runtime.runs
    metrics = model.engine.metrics if isinstance(model, EngineModel) else None
    compile_seconds = metrics.compile_seconds if metrics else 0.0
    return {
        "agents": len(runs),
        "states": sum(len(run.states) for run in runs),
        "calls": sum(run.calls for run in runs),
        "new_tokens": sum(run.new_tokens for run in runs),
        "prompt_tokens": sum(run.prompt_tokens for run in runs),
        "seconds": max(runs[0].ended - runs[0].began - compile_seconds, 0.0) if runs else 0.0,
        "compile_seconds": compile_seconds,
        "passes": metrics.passes if metrics else 0,
        "reused_tokens": metrics.reused if metrics else 0,
    }


def _print_outcome(
    report: dict[str, Any],
    value: Any,
    error: Exception | None,
    place: "Place | None",
    module: types.ModuleType,
    options: argparse.Namespace,
) -> None:
    """Prints the report or the agent's value, and the error on stderr."""
    if options.json:
        print(json.dumps(report), flush=True)
    elif error is None:
        try:
            print(_call(module, "shown", options, value) if hasattr(module, "shown") else value)
        except ValueError:
            print(value)
            raise
    if error is not None:
        if "debug" in options:
            traceback.print_exception(error)
        reason = _one_line(_describe(error, place))
        print(f"jaxshare: error: agent {module.AGENT.name} raised {reason}", file=sys.stderr)


def _load(file: str) -> types.ModuleType:
    path = Path(file)
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no file {file}; give a Python file with an AGENT in it, such as "
            "examples/pipeline.py"
        )
    name = "jaxshare_agents_run_" + re.sub(r"\W", "_", path.stem)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file} is not a Python file; give one that ends in .py")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickles of the file's own classes look for their module by its name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the file's own code raises
        raise ValueError(
            _one_line(f"{file} cannot be loaded: {_describe(error, _place(error, module, file))}")
        ) from error
    if not isinstance(getattr(module, "AGENT", None), Agent):
        raise ValueError(
            f"{file} has no AGENT; name the agent to run, as in `AGENT = solve` after an agent "
            "`solve`"
        )
    return module


def _arguments(module: types.ModuleType, options: argparse.Namespace) -> Sequence[Any]:
    args = (
        _call(module, "arguments", options, options.args)
        if hasattr(module, "arguments")
        else options.args
    )
    try:
        module.AGENT.signature.bind(*args)
    except TypeError as error:
        raise ValueError(
            f"the agent {module.AGENT.name} of {options.file} does not take these arguments "
            f"({error}); give them after `--`"
        ) from None
    return args


def _model(
    module: types.ModuleType, options: argparse.Namespace, engine: dict[str, Any]
) -> tuple[Model, str]:
    """The model to run with, and its name for the report."""
    if options.endpoint is not None:
        return agent_models.endpoint_model(options)
    name = options.model or getattr(module, "MODEL", "embedded")
    if not isinstance(name, str):
        return name, agents_options.made_model(options, name)
    if name == "scripted":
        if not hasattr(module, "scripted"):
            raise ValueError(
                f"{options.file} brings no scripted model; give --model embedded, a folder or a "
                "hub id"
            )
        agents_options.refuse_engine(options, "the scripted model has none")
        model = _call(module, "scripted", options)
        return (
            model,
            "scripted, a dictionary of answers that comes with the file; no language model runs",
        )
    chosen = argparse.Namespace(**{**vars(options), "model": name})
    loaded = arguments.load_model(chosen, several=True)
    model = EngineModel(loaded, resample=agents_options.resample_of(options), **engine)
    if name == "embedded":
        name = "embedded, the small model that comes with jaxshare"
    return model, name


def _check_matplotlib() -> None:
    """Raises ValueError where matplotlib is not installed, before anything runs."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "pictures are drawn with matplotlib, which is not installed: pip install "
            "'jaxshare[plot]'"
        )


def _write(
    trace: SearchLog, model: Model, options: argparse.Namespace
) -> tuple[list[str], ValueError | None]:
    """Writes the trace and the pictures; the files written, and the error of one that failed."""
    written: list[str] = []
    output = options.trace
    try:
        if options.trace:
            trace.save(options.trace)
            written.append(options.trace)
        if options.plots and trace.runs:
            folder, output = Path(options.plots), options.plots
            pictures = {
                "timeline.png": timeline_picture(trace),
                "profile.png": profile_pictures.profile_picture(trace),
                "workflow.png": profile_pictures.workflow_picture(trace),
            }
            if shares := getattr(model, "contributions", None):
                pictures["contributions.png"] = profile_pictures.contribution_picture([*shares])
            searched = [
                run
                for run in trace.runs
                if len({state.parent for state in run.states}) < len(run.states) - 1
            ]
            for number, run in enumerate((searched or [*trace.runs[:1]])[:_MAX_TREES]):
                pictures[f"tree-{number}-{run.agent}.png"] = tree_picture(run)
            for name, picture in pictures.items():
                with whole_file(folder / name, "wb") as file:
                    picture.savefig(file)
                written.append(str(folder / name))
    except OSError as error:
        return written, ValueError(
            f"what the agents did cannot be written to {output} ({reason(error)}); give another "
            "place to --trace or --plots"
        )
    return written, None


@dataclasses.dataclass(frozen=True)
class Place:
    """The place in an agent's file where an error was raised.

    Attributes:
      file: as it was given on the command line.
      line: of the innermost call that is in the file.
      function: the function of that line; None in the agent or the file itself.
      agent: the innermost agent, or None outside of any.
    """

    file: str
    line: int
    function: str | None
    agent: str | None

    def __str__(self) -> str:
        within = [self.function, self.agent and f"agent {self.agent}"]
        return ", in ".join([f"{self.file}, line {self.line}", *filter(None, within)])


def _place(
    error: BaseException, module: types.ModuleType, file: str, runs: Sequence[AgentRun] = ()
) -> Place | None:
    """The innermost place in the module's file that led to an error.

    Else the place where one of the runs waited when the error reached it, or the place of the
    error's cause, or None.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, SyntaxError) and cause.filename == module.__file__ and cause.lineno:
            return Place(file, cause.lineno, None, None)
        calls = [(frame.f_code, line) for frame, line in traceback.walk_tb(cause.__traceback__)]
        if own := [(code, line) for code, line in calls if code.co_filename == module.__file__]:
            # Every segment of a compiled agent takes the agent's frame and has the agent's name.
            agents = [code for code, _ in calls if code.co_varnames[:1] == (FRAME,)]
            code, line = own[-1]
            function = None if code in agents or code.co_name == "<module>" else code.co_name
            return Place(file, line, function, agents[-1].co_name if agents else None)
        if waited := _waiting_place(cause, runs):
            return waited
        cause = cause.__cause__
    return None


def _waiting_place(error: BaseException, runs: Sequence[AgentRun]) -> Place | None:
    """The place where an agent waited when an error of the runtime itself reached it.

    Such as a variable that cannot be copied.
    """
    for run in runs:
        for state in run.states:
            if state.error is error and (
                line := state.line or (state.parent.line if state.parent else 0)
            ):
                return Place(run.agent.file, line, None, run.agent.name)
    return None


def _call(module: types.ModuleType, name: str, options: argparse.Namespace, *args: Any) -> Any:
    """Calls a function of the file.

    Raises:
      ValueError: the function has raised something; with its place.
    """
    try:
        return getattr(module, name)(*args)
    except Exception as error:  # whatever the file's own code raises
        place = _place(error, module, options.file)
        reason = str(error) if isinstance(error, ValueError) else _describe(error)
        raise ValueError(_one_line(f"{reason}{f' ({place})' if place else ''}")) from error


def _plain(value: Any) -> Any:
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        return repr(value)


def _describe(error: Exception, place: Place | None = None) -> str:
    """The text of an error, its place, and the agents that led to it."""
    notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {error}{f' ({place})' if place else ''}{notes}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _summary(report: dict[str, Any]) -> str:
    engine = ""
    if report["passes"]:
        engine = (
            f" in {report['passes']} passes; prompts of {report['prompt_tokens']:,} tokens, "
            f"{report['reused_tokens']:,} of them from the cache"
        )
    compiling = report["compile_seconds"]
    after = f" after {compiling:.1f} s of compiling" if compiling else ""
    lines = [
        f"{report['agents']} agents, {report['states']} states, {report['calls']} model "
        f"calls{engine}; {report['new_tokens']:,} tokens written, {report['seconds']:.2f} s{after}"
    ]
    if report["written"]:
        lines.append(f"written: {', '.join(report['written'])}")
    return "\n".join(lines)
