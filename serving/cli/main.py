"""The `jaxshare` command."""

import argparse
import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxshare import __version__
from jaxshare.decoding.sampling import Sampler
from jaxshare.paths import check_file, check_folder
from jaxshare.serving.checkpoints import has_checkpoints
from jaxshare.serving.cli import agents as agents_command
from jaxshare.serving.cli import batch
from jaxshare.serving.cli import evaluate as evaluate_command
from jaxshare.serving.cli import inspect as inspect_command
from jaxshare.serving.cli import judge as judge_command
from jaxshare.serving.cli import tune as tune_command
from jaxshare.serving.cluster import process_mesh
from jaxshare.serving.workers import inspection
from jaxshare.serving.workers.layouts import MOVES, worker_names
from jaxshare.serving.workers.prompts import presets, preview
from jaxshare.serving.workers.results import Result, check_finish_at
from jaxshare.serving.workers.step_automata import STOP_ON
from jaxshare.trace.trace import Trace

_ANSWER_TOKENS = {"box": 16, "code": 1024}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code. Errors of the user's making are one sentence on
    stderr, after the traceback with --debug, and exit code 1."""
    given, args = agents_command.split(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given, argparse.Namespace(args=args))
    try:
        return options.run(options)
    except (ValueError, FileNotFoundError, NotImplementedError) as error:
        if "debug" in options:
            traceback.print_exc()
        print(f"jaxshare: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("jaxshare: interrupted", file=sys.stderr)
        return 130


class _Parser(argparse.ArgumentParser):
    """A parser whose commands, at any depth, all take --debug."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        # Not set where it is not given, so that a command leaves one alone that was given before
        # its name.
        self.add_argument(
            "--debug",
            action="store_true",
            default=argparse.SUPPRESS,
            help="show the traceback of an error",
        )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="jaxshare",
        description="Inference for groups of language-model streams that share memory.",
    )
    parser.add_argument("--version", action="version", version=f"jaxshare {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    demo = commands.add_parser(
        "demo", help="one model as two workers and as sixteen branches over one shared cache"
    )
    demo.add_argument(
        "--model",
        metavar="PATH",
        help="folder or hub id of a chat model; default the one that comes with jaxshare",
    )
    demo.add_argument(
        "--seed", type=int, default=0, help="of the problem and the samples (default 0)"
    )
    demo.add_argument(
        "--json", action="store_true", help="one JSON object on stdout, everything else on stderr"
    )
    demo.set_defaults(run=_demo)

    generate = commands.add_parser(
        "generate",
        help="sample completions of a prompt, which is stored and read once for all of them",
    )
    generate.add_argument(
        "model",
        metavar="MODEL",
        help="folder or hub id, or `embedded` for the model that comes with jaxshare",
    )
    prompt = generate.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT")
    prompt.add_argument("--prompt-file", metavar="FILE", help="`-` reads stdin")
    generate.add_argument(
        "--chat",
        action="store_true",
        help="the prompt is a user's message, put into the model's chat template; without "
        "a prompt, every line of stdin is one, and answers are remembered",
    )
    generate.add_argument("--n", type=int, default=1, help="completions (default 1)")
    generate.add_argument(
        "--max-new-tokens", type=int, default=64, help="most tokens of a completion (default 64)"
    )
    _sampling_arguments(generate)
    process_mesh.add_arguments(generate)
    process_mesh.add_process_arguments(generate)
    generate.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of all completions; no two of them, nor of two seeds, share random numbers "
        "(default 0)",
    )
    generate.add_argument(
        "--json",
        action="store_true",
        help="one JSON object on stdout; with --chat and no prompt, one a line",
    )
    generate.set_defaults(run=process_mesh.together(_generate))

    workers = commands.add_parser(
        "workers",
        help="solve a problem with several workers that read each other's words as they are "
        "written",
    )
    workers.add_argument(
        "model",
        metavar="MODEL",
        help="folder or hub id, or `embedded` for the model that comes with jaxshare",
    )
    problem = workers.add_mutually_exclusive_group()
    problem.add_argument("--problem", metavar="TEXT")
    problem.add_argument("--problem-file", metavar="FILE", help="`-` reads stdin")
    who = workers.add_mutually_exclusive_group()
    who.add_argument("--workers", type=int, metavar="N", help="how many (default 2)")
    who.add_argument("--names", metavar="A,B,...", help="of the workers (default Alice,Bob,...)")
    workers.add_argument(
        "--layout", default="combined", help="contiguous, interleaved or combined (default)"
    )
    presets.add_arguments(workers)
    workers.add_argument(
        "--show-prompt",
        action="store_true",
        help="print what workers read first and what blocks start with, as text "
        "and as tokens, and run nothing; the model's parameters are not needed",
    )
    workers.add_argument("--budget", type=int, default=1024, help="forward passes (default 1024)")
    workers.add_argument(
        "--finish-at",
        metavar="P,P,...",
        help="answer after these many forward passes (default: the budget)",
    )
    workers.add_argument(
        "--answer",
        choices=("box", "code"),
        default="box",
        help="what stands in \\boxed{...}, or a program in Python",
    )
    workers.add_argument(
        "--stop-on",
        choices=STOP_ON,
        default="answer",
        help="what ends the session before the budget: a valid answer "
        "(default), the end token of one worker, or nothing",
    )
    workers.add_argument(
        "--answer-tokens",
        type=int,
        help="most tokens of an answer that is asked for early (default 16, and 1024 for a "
        "program)",
    )
    workers.add_argument(
        "--ask-every",
        type=int,
        default=1024,
        help="tokens, all workers together, after which one of them is asked "
        "whether its work is redundant; 0 asks nobody (default 1024)",
    )
    workers.add_argument(
        "--move", choices=MOVES, default="rotate", help="how finished steps get to the history"
    )
    _sampling_arguments(workers)
    process_mesh.add_arguments(workers, groups="sessions (there is one)")
    process_mesh.add_process_arguments(workers)
    workers.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of all workers; no two of them, nor of two seeds, share random numbers (default 0)",
    )
    workers.add_argument(
        "--save",
        metavar="FILE",
        help="write a snapshot for `jaxshare inspect`, attention over time included",
    )
    workers.add_argument(
        "--checkpoint",
        metavar="DIR",
        help="save the session there on the way, so that it can go on after a kill",
    )
    workers.add_argument(
        "--checkpoint-every",
        type=int,
        default=256,
        metavar="P",
        help="forward passes between two saves (default 256)",
    )
    workers.add_argument(
        "--resume",
        action="store_true",
        help="go on with the session that the same command has saved in --checkpoint",
    )
    workers.add_argument(
        "--trace",
        metavar="FILE",
        help="write what was fed and who saw what, for `jaxshare.models.reencode`",
    )
    workers.add_argument(
        "--json", action="store_true", help="one JSON object on stdout, everything else on stderr"
    )
    workers.set_defaults(run=process_mesh.together(_workers))

    jobs = commands.add_parser(
        "batch",
        help="complete the prompts of a file, each n times, and share what they have in common",
    )
    batch.add_arguments(jobs)
    _sampling_arguments(jobs)
    jobs.set_defaults(run=lambda options: batch.run(options, _sampling(options)))

    evaluate = commands.add_parser(
        "evaluate", help="measure accuracy against the budget of forward passes"
    )
    evaluate_command.add_arguments(evaluate)
    _sampling_arguments(evaluate)
    evaluate.set_defaults(run=_evaluate)

    judge = commands.add_parser(
        "judge", help="have a model grade how well the workers of an evaluation worked together"
    )
    judge_command.add_arguments(judge)
    judge.set_defaults(run=judge_command.run)

    agents = commands.add_parser(
        "agents",
        help="run agents: coroutines that ask a model, under supervisors that search what they may "
        "say",
    )
    agents_command.add_arguments(agents)

    convert = commands.add_parser(
        "convert",
        help="write a model in Orbax form, which is restored straight onto many devices, or back",
    )
    convert.add_argument(
        "source",
        metavar="SOURCE",
        help="folder in Hugging Face form or in that which this command writes; or embedded",
    )
    convert.add_argument(
        "target", metavar="TARGET", help="folder to write, which does not exist yet"
    )
    convert.add_argument(
        "--json", action="store_true", help="one JSON object on stdout, everything else on stderr"
    )
    convert.set_defaults(run=_convert)

    calibrate = commands.add_parser(
        "calibrate",
        help="measure what attention costs on this device, so that runs share where it pays",
    )
    calibrate.add_argument(
        "model",
        metavar="MODEL",
        help="folder or hub id, or `embedded`: its heads and dtype are what is measured",
    )
    calibrate.add_argument(
        "--dtype", help="float32, bfloat16 or float16 (default: the checkpoint's own)"
    )
    calibrate.add_argument(
        "--json", action="store_true", help="one JSON object on stdout, everything else on stderr"
    )
    calibrate.set_defaults(run=_calibrate)

    tune = commands.add_parser(
        "tune",
        help="measure which tiles of the GPU kernels are fastest on this GPU for a model's shape",
    )
    tune_command.add_arguments(tune)
    tune.set_defaults(
        run=lambda options: tune_command.run(options, _numbers("--rows", options.rows))
    )

    inspect = commands.add_parser(
        "inspect",
        help="tables and pictures of what a session of workers had cached and attended to",
    )
    inspect_command.add_arguments(inspect)
    inspect.set_defaults(run=inspect_command.run)
    return parser


def _sampling_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--temperature",
        type=float,
        help="0 takes the likeliest token (default: the checkpoint's own)",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        help="keep the k likeliest tokens; 0 keeps all (default: the checkpoint's own)",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        help="keep the likeliest tokens of this probability (default: the checkpoint's own)",
    )
    parser.add_argument(
        "--min-p",
        type=float,
        help="keep tokens this likely, as a part of the likeliest (default: the checkpoint's)",
    )
    parser.add_argument(
        "--dtype", help="float32, bfloat16 or float16 (default: the checkpoint's own)"
    )


def _sampling(options: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given, checked."""
    given = {
        name: value
        for name in ("temperature", "top_k", "top_p", "min_p")
        if (value := getattr(options, name)) is not None
    }
    Sampler(**given)
    return given


def _demo(options: argparse.Namespace) -> int:
    from jaxshare import models  # here, so that --help and wrong arguments answer at once
    from jaxshare.serving.cli import demo

    model = models.load(options.model) if options.model else demo.load_embedded()
    result = demo.run_demo(model, options.seed, demo.console_for(options.json))
    if options.json:
        print(json.dumps(result))
    return 0


def _generate(options: argparse.Namespace) -> int:
    # What can be wrong without the model is found before it is loaded.
    given = _sampling(options)
    if options.n < 1:
        raise ValueError(f"--n is {options.n}; ask for at least 1 completion")
    if options.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens is {options.max_new_tokens}; ask for at least 1 token")
    text = (
        None
        if options.chat and options.prompt is None and options.prompt_file is None
        else _text("prompt", options.prompt, options.prompt_file, " or --chat")
    )

    if text is None and process_mesh.is_together(options):
        raise ValueError(
            "a dialogue from stdin is one process's; give --prompt to run it on several"
        )
    mesh = process_mesh.mesh_of(options)

    from jaxshare import models

    model: Any = models.load(options.model, dtype=options.dtype, mesh=mesh)
    if options.chat and (model.tokenizer is None or not model.tokenizer.chat_template):
        raise ValueError(
            f"{options.model} has no chat template; leave out --chat and write the prompt as the "
            "model wants it"
        )
    if text is not None and not options.chat:
        _answer(options, model, given, text)
        return 0
    messages: list[dict[str, str]] = []
    for message in [text] if text is not None else map(str.strip, sys.stdin):
        if not message:
            continue
        messages.append({"role": "user", "content": message})
        # As tokens, because the template has the special tokens in it already.
        tokens = model.tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            tokenizer_kwargs={"verbose": False},
        )
        messages.append(
            {
                "role": "assistant",
                "content": _answer(options, model, given, tokens, len(messages) == 1),
            }
        )
    return 0


def _workers(options: argparse.Namespace) -> int:
    # What can be wrong without the model is found before it is loaded.
    given = _sampling(options)
    if options.workers is not None and options.workers < 1:
        raise ValueError(f"--workers is {options.workers}; ask for at least 1")
    names = (
        [name.strip() for name in options.names.split(",")]
        if options.names is not None
        else worker_names(options.workers or 2)
    )
    finish_at = _numbers("--finish-at", options.finish_at)
    check_finish_at(finish_at, options.budget)
    problem = _text("problem", options.problem, options.problem_file)
    format = presets.format_named(options.format) if options.format is not None else None
    if options.show_prompt:
        return preview.run(options, problem, names, format)
    begun = _begun(options)
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
    mesh = process_mesh.mesh_of(options)

    import dataclasses

    from tqdm import tqdm

    from jaxshare import models
    from jaxshare.serving import Workers
    from jaxshare.serving.cli.demo import console_for
    from jaxshare.serving.cli.display import Streams
    from jaxshare.serving.greedy import warn_of_greedy
    from jaxshare.serving.inputs import default_sampler

    model = models.load(options.model, dtype=options.dtype, mesh=mesh)
    settings = dict[str, Any](
        problem=problem,
        names=names,
        layout=options.layout,
        budget=options.budget,
        ask_every=options.ask_every,
        seed=options.seed,
        move=options.move,
        kind=options.answer,
        stop_on=options.stop_on,
        record=bool(options.trace),
        finisher_tokens=options.answer_tokens or _ANSWER_TOKENS[options.answer],
        sampler=dataclasses.replace(default_sampler(model), **given),
    )
    warn_of_greedy(model, settings["sampler"], discouraged=presets.advises_sampling(options.format))
    if begun:
        session = Workers.restore(model, options.checkpoint)
        if other := [name for name, value in settings.items() if session.settings[name] != value]:
            raise ValueError(
                f"the session in {options.checkpoint} has {other[0]} "
                f"{session.settings[other[0]]!r}, not {settings[other[0]]!r}; give the same "
                "command, or another --checkpoint"
            )
        if format not in (None, session.format):
            raise ValueError(
                f"the session in {options.checkpoint} has other prompts than --format "
                f"{options.format}; give the same command, or another --checkpoint"
            )
        print(f"going on after {session.passes} passes", file=sys.stderr)
    else:
        session = Workers(model, **settings, format=format)
    recorder = inspection.AttentionProbe(session) if options.save else None
    console = console_for(options.json)
    with (
        Streams(session.names, console) as streams,
        tqdm(
            total=options.budget,
            initial=session.passes,
            unit=" passes",
            leave=False,
            disable=console.is_terminal or not sys.stderr.isatty(),
        ) as bar,
    ):

        def show(event: Any) -> None:
            streams.show(event)
            bar.update(session.passes - bar.n)
            if recorder:
                recorder(event)

        result, unwritten = _run_session(session, finish_at, show, options)
    for budget, answer in result.answers.items():
        how = (
            "written by the workers"
            if not answer.extra_passes
            else f"asked for, {answer.extra_passes} more passes"
        )
        console.print(
            f"answer after {answer.passes} passes (budget {budget}): {answer.value or 'none'} "
            f"({how})",
            markup=False,
            highlight=False,
        )
    why = {
        "answer": "an answer stands",
        "stopped": "all workers have stopped",
        "budget": "the budget is used up",
        "full": "the cache is full; everything written so far is above: give a smaller budget, or "
        "a model with a longer context",
    }
    console.print(
        f"{result.passes} passes, {result.tokens} tokens, "
        f"{result.tokens / max(result.seconds, 1e-9):,.0f} tokens/s after "
        f"{result.compile_seconds:.1f} s of compiling, {result.kv_bytes / 1e6:.2f} MB of keys and "
        f"values; {why[result.ended]}.",
        markup=False,
        highlight=False,
    )
    snapshot = recorder.snapshot() if recorder else None
    if options.json:
        # before anything is written, which may fail
        print(json.dumps(result.as_json()), flush=True)
    if process_mesh.speaks():
        if snapshot:
            unwritten += _save("snapshot", snapshot, "--save", options.save)
        if options.trace:
            unwritten += _save("trace", session.trace, "--trace", options.trace)
    for error in unwritten[1:]:
        print(f"jaxshare: error: {error}", file=sys.stderr)
    if unwritten:
        raise unwritten[0]
    return 0


def _run_session(
    session: Any, finish_at: Sequence[int], show: Any, options: argparse.Namespace
) -> tuple[Result, list[ValueError]]:
    """Runs a session of workers to its end, also where its saves cannot be written; (its result,
    what went wrong with the saves)."""
    from jaxshare.serving.checkpoints import SaveError

    result: Result | None = None
    unsaved: SaveError | None = None
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
                # the others would wait for this one's part of the next save
                if process_mesh.is_together(options):
                    raise
                print(
                    f"jaxshare: --checkpoint: {error}; the session goes on without saves",
                    file=sys.stderr,
                )
                unsaved, result = error, session.run(finish_at, on_event=show)
    except SaveError as error:  # the last one, which the end of the session waits for
        if result is None:
            raise
        unsaved = unsaved or error
    assert result is not None
    return result, [unsaved] if unsaved else []


def _begun(options: argparse.Namespace) -> bool:
    """Whether a session is to go on that was saved."""
    if options.resume and not options.checkpoint:
        raise ValueError(
            "--resume goes on with a session that was saved; give its folder as --checkpoint"
        )
    if options.checkpoint_every < 1:
        raise ValueError(
            f"--checkpoint-every is {options.checkpoint_every}; save every so many forward passes, "
            "at least 1"
        )
    if not options.checkpoint or not has_checkpoints(options.checkpoint):
        return False
    if not options.resume:
        raise ValueError(
            f"there is a saved session in {options.checkpoint}; --resume goes on with it, or give "
            "another --checkpoint"
        )
    return True


def _evaluate(options: argparse.Namespace) -> int:
    workers, budgets = (
        _numbers("--workers", options.workers),
        _numbers("--budgets", options.budgets),
    )
    return evaluate_command.run(options, _sampling(options), workers, budgets)


def _convert(options: argparse.Namespace) -> int:
    from jaxshare.models import orbax_io
    from jaxshare.models.loading import local_folder

    if not Path(options.target).exists():
        check_folder("TARGET", options.target)
    written = orbax_io.convert(local_folder(options.source), Path(options.target))
    form = "Orbax" if written["form"] == "orbax" else "Hugging Face"
    print(
        f"{options.target}: {written['tensors']} tensors, {written['bytes'] / 1e6:,.1f} MB, in "
        f"{form} form",
        file=sys.stderr,
    )
    if options.json:
        print(json.dumps({**written, "folder": options.target}))
    return 0


def _calibrate(options: argparse.Namespace) -> int:
    import dataclasses

    from jaxshare import models
    from jaxshare.serving.kvcache import sharing_cost
    from jaxshare.serving.tuning import calibration

    check_file(
        "the file in the cache folder JAXSHARE_CACHE", sharing_cost.costs_file(), makes_folder=True
    )
    model = models.load(options.model, dtype=options.dtype)
    costs, points = calibration.calibrate(model)
    file, unkept = None, None
    try:
        file = sharing_cost.save_costs(model, costs)
    except OSError as error:  # what was measured is shown all the same
        unkept = error
    if options.json:
        print(
            json.dumps(
                {
                    "costs": costs.as_json(),
                    "points": [dataclasses.asdict(point) for point in points],
                    "file": str(file) if file else None,
                }
            )
        )
    else:
        print("microseconds of one attention layer\n   rows  prefix   shared   copies")
        for shared, copies in zip(points[::2], points[1::2], strict=True):
            print(f"{shared.rows:7} {shared.prefix:7} {shared.time:8.0f} {copies.time:8.0f}")
        if file:
            print(f"kept in {file}")
    if unkept:
        raise ValueError(
            f"the costs cannot be kept in {sharing_cost.costs_file()} ({unkept}); set "
            "JAXSHARE_CACHE to a folder that can be written"
        ) from unkept
    return 0


def _save(
    what: str, made: "inspection.Snapshot | Trace", option: str, file: str
) -> list[ValueError]:
    """Writes it; the error, if it cannot be."""
    try:
        made.save(file)
        return []
    except OSError as error:
        found = ValueError(
            f"the {what} cannot be written to {file} ({error}); give another place to {option}"
        )
        found.__cause__ = error
        return [found]


def _numbers(name: str, text: str | None) -> list[int]:
    try:
        return [int(part) for part in text.split(",")] if text else []
    except ValueError as error:
        raise ValueError(
            f"{name} is {text!r}; it must be whole numbers with commas between them, such as "
            "256,512,1024"
        ) from error


def _text(what: str, given: str | None, file: str | None, instead: str = "") -> str:
    """What --WHAT or --WHAT-file give."""
    if given is None and file is None:
        raise ValueError(
            f"there is no {what}; give --{what} TEXT{',' if instead else ' or'} --{what}-file "
            f"FILE{instead}"
        )
    try:
        text = (
            given
            if given is not None
            else sys.stdin.read()
            if file == "-"
            else Path(str(file)).read_text(encoding="utf-8")
        )
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"the {what} file {file} cannot be read ({error}); give a file of UTF-8 text"
        ) from error
    if not text.strip():
        raise ValueError(f"the {what} is empty; give at least one word")
    return text


def _answer(
    options: argparse.Namespace,
    model: Any,
    given: dict,
    prompt: str | list[int],
    first: bool = True,
) -> str:
    """Generates and prints; the first completion's text. What was chosen for the run is said with
    the first prompt alone."""
    import dataclasses

    from tqdm import tqdm

    from jaxshare.serving.branches.generate import generate
    from jaxshare.serving.inputs import default_sampler

    sampler, notes = dataclasses.replace(default_sampler(model), **given), [first] * first
    with tqdm(
        total=options.n * options.max_new_tokens,
        unit=" tokens",
        leave=False,
        disable=not sys.stderr.isatty(),
    ) as bar:

        def show(run: Any) -> None:
            if notes and process_mesh.speaks():
                for note in run.notes:
                    bar.write(f"jaxshare: {note}", file=sys.stderr)
            notes.clear()
            bar.n = run.sampled_tokens
            bar.refresh()

        done = generate(
            model,
            prompt,
            n=options.n,
            max_new_tokens=options.max_new_tokens,
            sampler=sampler,
            seed=options.seed,
            on_tokens=show,
        )
    if options.json:
        print(
            json.dumps(
                {
                    "completions": [dataclasses.asdict(c) for c in done.completions],
                    "prompt_tokens": done.prompt_tokens,
                    "passes": done.passes,
                    "seconds": done.seconds,
                    "compile_seconds": done.compile_seconds,
                    "tokens_per_second": done.tokens_per_second,
                    "kv_bytes": done.kv_bytes,
                    "rows": done.rows,
                    "costs": done.costs and dataclasses.asdict(done.costs),
                }
            ),
            flush=True,
        )
    else:
        for i, completion in enumerate(done.completions):
            if options.n > 1:
                print(
                    f"{'' if i == 0 else chr(10)}--- {i + 1} of {options.n} ({completion.reason}, "
                    f"logprob {completion.logprob:.2f})"
                )
            print(completion.text, flush=True)
    return done.completions[0].text


if __name__ == "__main__":
    sys.exit(main())
