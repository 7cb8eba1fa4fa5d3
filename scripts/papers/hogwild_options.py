"""The command line of the figures of Hogwild! Inference."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxshare.serving.cli import arguments
from jaxshare.serving.cli.evaluation import report
from jaxshare.serving.cluster import process_mesh, ray_pool
from jaxshare.serving.evaluation import judge
from jaxshare.serving.workers.prompts import presets
from scripts.bench.lib import Parser
from scripts.bench.parts.workers.sides import CURRENT, STEP_ROOM
from scripts.papers import hogwild_latency as latency
from scripts.papers import hogwild_views as views
from scripts.papers.folder import check_arguments
from scripts.papers.hogwild_cases import Words
from scripts.papers.hogwild_figures import FIGURES, FigureSettings

TABLES, VIEWS, TIMED, JUDGED = ("table1", "table2"), "figure1", "figure8", ("judge", "levels")
NAMES = (*TABLES, VIEWS, *FIGURES)
_ROUNDS, _STEPS = (7, 3), (16, 8)
"""Turns and passes of a turn, as the benchmark of workers has them, and with --quick."""
_OF_TEXTS = (
    *("questions", "answer_tokens", "format", "temperature", "top_k", "top_p", "min_p"),
    *("typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("no_repeat_ngram_size", "min_tokens", "processors_from", "processor"),
    *("dtype", "approximate_kv", "adapter"),
)
_OF_MARKS = ("data_dir", "test_seconds", "test_memory")
_OF_DEVICES = ("tensor", "expert", "kv", "data", "ray", "replicas", "concurrency")
_OF_JUDGE = ("endpoint", "judge", "key_variable", "gradings", "prefix_tokens", "attempts")
_OF_LATENCY = ("histories", "rounds", "steps")
_OF_RUNS = ("task", "budgets", "samples", "seeds", "dates", "ask_every", "data_dir", "concurrency")


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    """The options of a command, with those of the paper, or of --quick, in place of what was not
    given; ends the program with code 2 where they cannot be right."""
    parser = Parser(
        prog="scripts.papers.hogwild",
        description="The figures and tables of Hogwild! Inference, on any model.",
    )
    parser.add_argument(
        "figure", choices=NAMES, metavar="FIGURE", help=f"one of {', '.join(NAMES)}"
    )
    parser.add_argument(
        "--model",
        action="append",
        metavar="MODEL",
        help="folder, GGUF file or hub id, or `embedded`; again for several in figures 4 to 6, e2, judge and "
        "levels",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a few small problems that the embedded model knows, which is the default model then",
    )
    _add_folder(parser)
    _add_runs(parser)
    _add_latency(parser)
    _add_judge(parser)
    report.add_marking_arguments(parser)
    presets.add_arguments(parser)
    arguments.add_sampling(parser)
    process_mesh.add_arguments(parser, groups="runs")
    ray_pool.add_arguments(parser)
    options = parser.parse_args(given)
    check_arguments(parser, options)
    _check(parser, options)
    _complete(parser, options)
    return options


def _add_folder(parser: Parser) -> None:
    parser.add_argument(
        "--out",
        "--output",
        dest="output",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder of all figures, which share evaluations; each has a folder of its own in it",
    )
    parser.add_argument("--resume", action="store_true", help="go on with a figure that has begun")
    parser.add_argument(
        "--redraw", action="store_true", help="make a figure of what is there; nothing is run"
    )
    parser.add_argument(
        "--rescore",
        action="store_true",
        help="mark all answers again and make the figure of these marks; nothing is run",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_runs(parser: Parser) -> None:
    group = parser.add_argument_group("runs", "as in `jaxshare evaluate`; default the paper's")
    group.add_argument("--task", metavar="TASK", help="a task in place of the paper's")
    group.add_argument("--workers", metavar="N,N", help="numbers of workers")
    group.add_argument("--budgets", metavar="P,P", help="forward passes after which to answer")
    group.add_argument(
        "--samples", "--problems", type=int, metavar="N", help="the first N problems"
    )
    group.add_argument("--seeds", type=int, metavar="S", help="runs of each problem")
    group.add_argument("--seed", type=int, default=0, help="that all seeds follow from (default 0)")
    group.add_argument("--ask-every", type=int, metavar="TOKENS", help="0 never asks")
    group.add_argument("--questions", metavar="N", help="of a generated problem")
    group.add_argument("--dates", metavar="DATE,DATE", help="of LiveCodeBench's contests")
    group.add_argument("--answer-tokens", type=int, metavar="N", help="of an early answer")
    group.add_argument("--concurrency", type=int, metavar="N", help="runs at the same time")


def _add_latency(parser: Parser) -> None:
    group = parser.add_argument_group("latency", "tables 1 and 2 and figure 8")
    group.add_argument("--histories", metavar="S,S", help="tokens of history")
    group.add_argument("--rounds", type=int, help="turns of each number of workers")
    group.add_argument("--steps", type=int, help="passes of a turn")


def _add_judge(parser: Parser) -> None:
    group = parser.add_argument_group("judge", "as in `jaxshare judge`; of judge and levels")
    group.add_argument("--endpoint", metavar="URL", help="of the judge, with OpenAI's protocol")
    group.add_argument("--judge", metavar="NAME", help="of the judge's model at the endpoint")
    group.add_argument("--key-variable", metavar="NAME", help="environment variable with the key")
    group.add_argument("--gradings", type=int, metavar="N", help="of each run")
    group.add_argument("--prefix-tokens", type=int, metavar="N", help="of each worker")
    group.add_argument("--attempts", type=int, metavar="N", help="for each grading")
    group.add_argument(
        "--human", metavar="FILE", help="levels that people gave, as JSON lines (of judge)"
    )


def _check(parser: Parser, options: argparse.Namespace) -> None:
    """Refuses options that contradict each other or are of other figures."""
    figure = options.figure
    ways = [name for name in ("resume", "redraw", "rescore") if getattr(options, name)]
    if len(ways) > 1:
        parser.error(f"--{ways[0]} and --{ways[1]} are both given; give one of them")
    has_none = figure in (*TABLES, VIEWS, *JUDGED)
    if options.rescore and has_none:
        parser.error(f"--rescore is given, but {figure} has no marks; --redraw makes it again")
    for names, figures in (
        ((*_OF_JUDGE, "human"), JUDGED),
        (_OF_LATENCY, (*TABLES, TIMED)),
        ((*_OF_RUNS, "ray", "replicas"), (VIEWS, *FIGURES)),
    ):
        for name in names:
            if getattr(options, name) is not None and figure not in figures:
                parser.error(
                    f"--{name.replace('_', '-')} is given, but it is of {', '.join(figures)}, and "
                    f"the figure is {figure}; leave it out"
                )
    counted = ("samples", "seeds", "rounds", "steps", "gradings", "prefix_tokens")
    parser.at_least(1, **{name: getattr(options, name) for name in counted})
    parser.at_least(0, ask_every=options.ask_every)
    if options.steps is not None and options.steps > STEP_ROOM - CURRENT:
        parser.error(f"--steps is {options.steps}, but it must be at most {STEP_ROOM - CURRENT}")


def _complete(parser: Parser, options: argparse.Namespace) -> None:
    """Puts the paper's settings, or those of --quick, where none were given; adds `given`,
    `marking` and `judging` for evaluations and the judge."""
    figure, quick = options.figure, options.quick
    options.models = _models(parser, options)
    for name in ("workers", "budgets", "histories"):
        if (text := getattr(options, name)) is not None:
            setattr(options, name, parser.numbers(f"--{name}", text, "1,2,4"))
    if figure in (*TABLES, TIMED):
        default = latency.QUICK_HISTORIES if quick else latency.HISTORIES[figure]
        options.histories = tuple(sorted(options.histories or default))
        options.rounds = options.rounds or _ROUNDS[quick]
        options.steps = options.steps or _STEPS[quick]
        options.workers_timed = tuple(sorted({1, *(options.workers or latency.WORKERS)}))
    if figure == VIEWS:
        options.task = options.task or (views.QUICK_TASK if quick else views.TASK)
        options.budgets = options.budgets or (views.QUICK_BUDGETS if quick else views.BUDGETS)
        options.workers = options.workers or (2,)
        if len(options.workers) > 1:
            parser.error(f"--workers has {len(options.workers)} numbers, but figure1 has a session")
    if figure in JUDGED and not (options.redraw or (options.endpoint and options.judge)):
        parser.error(
            f"{figure} needs a judge: name a model at an endpoint with OpenAI's protocol, such as "
            "--endpoint http://localhost:8000/v1 --judge NAME"
        )
    if figure in JUDGED and options.workers and min(options.workers) < 2:
        parser.error(f"--workers has 1, but {figure} needs workers that have others to work with")
    options.given = FigureSettings(
        options.models,
        quick,
        *(options.task, options.workers, options.budgets, options.samples, options.seeds),
        *(options.dates, options.ask_every, options.seed),
        more=words_of(parser, options, _OF_TEXTS),
    )
    options.marking = words_of(parser, options, _OF_MARKS)
    options.where = (*options.marking, *words_of(parser, options, _OF_DEVICES))
    options.judging = words_of(parser, options, _OF_JUDGE, {"judge": "model"})


def _models(parser: Parser, options: argparse.Namespace) -> tuple[str, ...]:
    models = tuple(options.model or ())
    if not models and not options.quick and not (options.redraw or options.rescore):
        parser.error(
            "--model is missing: give a folder or a hub id, or try --quick, which has the embedded "
            "model solve small problems that it knows"
        )
    if len(models) > 1 and options.figure in (*TABLES, VIEWS, TIMED, "figure3", "e1"):
        parser.error(f"--model is given {len(models)} times, but {options.figure} is of one model")
    if twice := [name for i, name in enumerate(models) if name in models[:i]]:
        parser.error(f"--model {twice[0]} is given twice; give each model once")
    return models or ("embedded",)


def words_of(
    parser: Parser,
    options: argparse.Namespace,
    names: Sequence[str],
    renamed: dict[str, str] | None = None,
) -> Words:
    """The words that give a command these options, where they differ from the default.

    Args:
      names: of the options; renamed: their names there, where those differ.
    """
    words: list[str] = []
    for name in names:
        value: Any = getattr(options, name)
        option = f"--{(renamed or {}).get(name, name).replace('_', '-')}"
        if value is None or value == parser.get_default(name):
            continue
        for each in value if isinstance(value, list) else [value]:
            words += [option, str(each)]
    return tuple(words)


def check_judge(options: argparse.Namespace) -> None:
    """Raises ValueError for an address that cannot be a judge's."""
    if options.endpoint:
        judge.Endpoint(options.endpoint, options.judge)
