"""The command `jaxshare agents run FILE`: runs the agent of a Python file, and says what it cost.

A file defines

    AGENT                  the agent that is run
    MODEL                  the model it is run with where --model names none: "embedded" (the default), "scripted", a folder or a hub id
    arguments(args)        the agent's arguments, of what stands behind `--` on the command line; without it, these texts are the arguments
    scripted()             what answers under --model scripted: a `ScriptedModel`, whose dictionary of answers is no language model
    shown(value)           a text that says what the agent has returned; without it, str

of which only AGENT has to be there.
"""

import argparse
import asyncio
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

from jaxshare.paths import check_file, check_folder
from jaxshare.serving.agents.agent import Agent
from jaxshare.serving.agents.backends import EngineModel
from jaxshare.serving.agents.compiler.frames import FRAME
from jaxshare.serving.agents.requests import Model
from jaxshare.serving.agents.runtime import AgentRun, Runtime
from jaxshare.serving.agents.search_log import SearchLog, timeline_picture, tree_picture

_TREES = 16
"""Trees that are drawn, at most."""


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """What is for the command, and what stands behind a `--` after `agents run` and is for the
    agent's file."""
    given = [*arguments]
    if [word for word in given if word != "--debug"][:2] == ["agents", "run"] and "--" in given:
        at = given.index("--")
        return given[:at], given[at + 1 :]
    return given, []


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `jaxshare agents`."""
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    run_parser = commands.add_parser(
        "run", help="run the agent of a Python file", usage="%(prog)s [options] FILE [-- ARGS]"
    )
    run_parser.add_argument(
        "file", metavar="FILE", help="with an AGENT in it, such as examples/pipeline.py"
    )
    run_parser.add_argument(
        "--model",
        metavar="PATH",
        help="folder or hub id, `embedded` for the model that comes with jaxshare, or `scripted` "
        "for the answers that the file brings (default: what the file says, or else embedded)",
    )
    run_parser.add_argument(
        "--dtype", help="float32, bfloat16 or float16 (default: the checkpoint's own)"
    )
    run_parser.add_argument("--seed", type=int, default=0, help="of all that is random (default 0)")
    run_parser.add_argument(
        "--trace", metavar="FILE", help="write states, scores and times as JSON"
    )
    run_parser.add_argument(
        "--plots", metavar="DIR", help="draw the search trees and a timeline into this folder"
    )
    run_parser.add_argument(
        "--json", action="store_true", help="one JSON object on stdout, everything else on stderr"
    )
    run_parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """`jaxshare agents run`; options.args is what stood behind `--`. Exit code 1 where the agent
    raises: its error is on stderr, with its place in the file, and its traceback with --debug.

    Raises:
      ValueError: a file that cannot be loaded or has no agent, no scripted model where one is asked
        for, or what cannot be written.
      FileNotFoundError: no such file, or no such model.
    """
    check_file("--trace", options.trace)
    if options.plots is not None:
        check_folder("--plots", options.plots)
        _check_matplotlib()
    module = _load(options.file)
    args = _arguments(module, options)
    model, which = _model(module, options)
    out = sys.stderr if options.json else sys.stdout
    print(f"model: {which}", file=out, flush=True)
    runtime = Runtime(model, seed=options.seed)
    error: Exception | None = None
    try:
        done: AgentRun | None = asyncio.run(runtime.run(module.AGENT, *args))
    except Exception as raised:
        done, error = None, raised
    if isinstance(model, EngineModel):
        model.engine.drain()
    written, unwritten = _write(SearchLog.of(runtime), options)
    place = None if error is None else _place(error, module, options.file, runtime.runs)
    engine = model.engine.metrics if isinstance(model, EngineModel) else None
    compiling = engine.compile_seconds if engine else 0.0
    value = done.accepted.value if done and done.accepted else None
    runs = runtime.runs
    report = {
        "file": str(options.file),
        "agent": module.AGENT.name,
        "model": which,
        "seed": options.seed,
        "value": _plain(value),
        "error": None if error is None else _told(error),
        "where": None if place is None else dataclasses.asdict(place),
        "agents": len(runs),
        "states": sum(len(one.states) for one in runs),
        "calls": sum(one.calls for one in runs),
        "new_tokens": sum(one.new_tokens for one in runs),
        "prompt_tokens": sum(one.prompt_tokens for one in runs),
        "seconds": max(runs[0].ended - runs[0].began - compiling, 0.0) if runs else 0.0,
        "compile_seconds": compiling,
        "passes": engine.passes if engine else 0,
        "reused_tokens": engine.reused if engine else 0,
        "written": written,
    }
    if options.json:
        print(json.dumps(report), flush=True)
    elif error is None:
        try:
            print(_called(module, "shown", options, value) if hasattr(module, "shown") else value)
        except ValueError:
            print(value)
            raise
    if error is not None:
        if "debug" in options:
            traceback.print_exception(error)
        print(
            f"jaxshare: error: agent {module.AGENT.name} raised {_one_line(_told(error, place))}",
            file=sys.stderr,
        )
    print(_summary(report), file=out)
    if unwritten:
        raise unwritten
    return 0 if error is None else 1


def _load(file: str) -> types.ModuleType:
    path = Path(file)
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no file {file}; give a Python file with an AGENT in it, such as "
            "examples/pipeline.py"
        )
    name = "jaxshare_agents_run_" + re.sub(r"\W", "_", path.stem)
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise ValueError(f"{file} is not a Python file; give one that ends in .py")
    module = importlib.util.module_from_spec(found)
    # Dataclasses and pickles of the file's own classes look for their module by its name.
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except Exception as error:  # whatever the file's own code raises
        raise ValueError(
            _one_line(f"{file} cannot be loaded: {_told(error, _place(error, module, file))}")
        ) from error
    if not isinstance(getattr(module, "AGENT", None), Agent):
        raise ValueError(
            f"{file} has no AGENT; name the agent that is to be run, as in `AGENT = solve` behind "
            "an agent `solve`"
        )
    return module


def _arguments(module: types.ModuleType, options: argparse.Namespace) -> Sequence[Any]:
    args = (
        _called(module, "arguments", options, options.args)
        if hasattr(module, "arguments")
        else options.args
    )
    try:
        module.AGENT.program.signature.bind(*args)
    except TypeError as error:
        raise ValueError(
            f"the agent {module.AGENT.name} of {options.file} does not take these arguments "
            f"({error}); give them behind `--`"
        ) from None
    return args


def _model(module: types.ModuleType, options: argparse.Namespace) -> tuple[Model, str]:
    """The model, and what it is called."""
    name = options.model or getattr(module, "MODEL", "embedded")
    if name == "scripted":
        if not hasattr(module, "scripted"):
            raise ValueError(
                f"{options.file} brings no scripted model; give --model embedded, a folder or a "
                "hub id"
            )
        return _called(
            module, "scripted", options
        ), "scripted, a dictionary of answers that comes with the file; no language model runs"
    from jaxshare import models  # here, so that --help and wrong arguments answer at once

    loaded = models.load(name, dtype=options.dtype)
    return EngineModel(
        loaded
    ), "embedded, the small model that comes with jaxshare" if name == "embedded" else name


def _check_matplotlib() -> None:
    """Before anything runs."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "pictures are drawn with matplotlib, which is not installed: pip install "
            "'jaxshare[plot]'"
        )


def _write(trace: SearchLog, options: argparse.Namespace) -> tuple[list[str], ValueError | None]:
    """(the files written, the error where one could not be)."""
    written: list[str] = []
    try:
        if options.trace:
            trace.save(options.trace)
            written.append(options.trace)
        if options.plots and trace.runs:
            folder = Path(options.plots)
            folder.mkdir(parents=True, exist_ok=True)
            pictures = {"timeline.png": timeline_picture(trace)}
            searched = [
                one
                for one in trace.runs
                if len({state.parent for state in one.states}) < len(one.states) - 1
            ]
            for number, one in enumerate((searched or [*trace.runs[:1]])[:_TREES]):
                pictures[f"tree-{number}-{one.agent}.png"] = tree_picture(one)
            for name, picture in pictures.items():
                picture.savefig(folder / name)
                written.append(str(folder / name))
    except OSError as error:
        return written, ValueError(
            f"what the agents did cannot be written ({error}); give another place to --trace or "
            "--plots"
        )
    return written, None


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an error was raised.

    Attributes:
      file: as it was given on the command line.
      line: of the innermost call that is in the file.
      function: what it is in, or None where that is the agent or the file itself.
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
    """The innermost place in the module's file that led to an error; or where one of the runs
    waited that it came over; or the place of what caused it. None where there is none."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, SyntaxError) and cause.filename == module.__file__ and cause.lineno:
            return Place(file, cause.lineno, None, None)
        calls = [(frame.f_code, line) for frame, line in traceback.walk_tb(cause.__traceback__)]
        if own := [(code, line) for code, line in calls if code.co_filename == module.__file__]:
            # Every piece of a compiled agent takes the agent's frame, and is called as the agent
            # is.
            agents = [code for code, _ in calls if code.co_varnames[:1] == (FRAME,)]
            code, line = own[-1]
            function = None if code in agents or code.co_name == "<module>" else code.co_name
            return Place(file, line, function, agents[-1].co_name if agents else None)
        if waited := _waiting_place(cause, runs):
            return waited
        cause = cause.__cause__
    return None


def _waiting_place(error: BaseException, runs: Sequence[AgentRun]) -> Place | None:
    """Where the agent waited that an error of the runtime's own came over, such as a variable that
    cannot be copied."""
    for run in runs:
        for state in run.states:
            if state.error is error and (
                line := state.line or (state.parent.line if state.parent else 0)
            ):
                return Place(run.agent.program.file, line, None, run.agent.name)
    return None


def _called(module: types.ModuleType, name: str, options: argparse.Namespace, *args: Any) -> Any:
    """What a function of the file returns.

    Raises:
      ValueError: it has raised something; says where.
    """
    try:
        return getattr(module, name)(*args)
    except Exception as error:  # whatever the file's own code raises
        place = _place(error, module, options.file)
        told = str(error) if isinstance(error, ValueError) else _told(error)
        raise ValueError(_one_line(f"{told}{f' ({place})' if place else ''}")) from error


def _plain(value: Any) -> Any:
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        return repr(value)


def _told(error: Exception, place: Place | None = None) -> str:
    """An error, its place, and the agents that led to it."""
    notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {error}{f' ({place})' if place else ''}{notes}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _summary(report: dict[str, Any]) -> str:
    engine, compiling = (
        "",
        f" after {report['compile_seconds']:.1f} s of compiling"
        if report["compile_seconds"]
        else "",
    )
    if report["passes"]:
        engine = (
            f" in {report['passes']} passes; prompts of {report['prompt_tokens']:,} tokens, "
            f"{report['reused_tokens']:,} of them known before"
        )
    lines = [
        f"{report['agents']} agents, {report['states']} states, {report['calls']} model "
        f"calls{engine}; {report['new_tokens']:,} tokens written, {report['seconds']:.2f} "
        f"s{compiling}"
    ]
    return "\n".join(
        [*lines, *([f"written: {', '.join(report['written'])}"] if report["written"] else [])]
    )
