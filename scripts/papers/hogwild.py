"""The figures and tables of Hogwild! Inference, on any model.

    python -m scripts.papers.hogwild figure3 --model Qwen/QwQ-32B --data-dir data --out results/hogwild
    python -m scripts.papers.hogwild figure3 --quick --out build/hogwild     # on the embedded model
    python -m scripts.papers.hogwild figure3 --out results/hogwild --rescore # marks again, runs nothing

A figure is composed of evaluations (`jaxshare evaluate`), gradings (`jaxshare judge`) and passes that
are timed (scripts/bench/workers.py). DIR/FIGURE gets settings.json, points.jsonl, result.json,
table.md and pictures; DIR/evaluations has the texts and their marks, which figures share. How to
read them is in docs/papers.md.

The exit code is 0; 3 where lines of a task are bad or problems were refused, which are named, and the
others have been run; 2 for mistakes, 130 after an interrupt.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence

from jaxshare import garbage
from scripts.bench.lib import own_command
from scripts.papers import hogwild_accuracy as accuracy
from scripts.papers import hogwild_judge as judge
from scripts.papers import hogwild_latency as latency
from scripts.papers import hogwild_views as views
from scripts.papers.folder import exit_code
from scripts.papers.hogwild_figures import FIGURES
from scripts.papers.hogwild_job import INCOMPLETE, Job
from scripts.papers.hogwild_options import JUDGED, TABLES, TIMED, VIEWS, check_judge, parse

PROGRAM = "scripts.papers.hogwild"


@dataclasses.dataclass(frozen=True)
class FigureMaker:
    """The functions that make a figure: by runs, of what is there, and of marks made again."""

    make: Callable[[Job], None]
    redraw: Callable[[Job], None]
    rescore: Callable[[Job], None] = accuracy.rescore


MAKERS: Mapping[str, FigureMaker] = {
    **dict.fromkeys(FIGURES, FigureMaker(accuracy.make, accuracy.redraw)),
    **dict.fromkeys(TABLES, FigureMaker(latency.make_table, latency.redraw_table)),
    **dict.fromkeys(JUDGED, FigureMaker(judge.make, judge.redraw)),
    TIMED: FigureMaker(latency.make_figure8, latency.redraw_figure8, latency.rescore_figure8),
    VIEWS: FigureMaker(views.make, views.redraw),
}


def job_of(options: argparse.Namespace, command: str) -> Job:
    """The job of a command's options."""
    settings = dataclasses.asdict(options.given)
    if options.figure in JUDGED:
        settings |= {"judge": options.judge, "gradings": options.gradings}
    return Job(
        figure=options.figure,
        models=options.models,
        settings=settings,
        out=options.output,
        resume=options.resume,
        command=command,
        words=options.given.more,
        where=options.where,
        options=options,
    )


def run(options: argparse.Namespace, command: str) -> int:
    """Makes a figure; its exit code.

    Raises:
      ValueError: what the user can mend.
    """
    garbage.collect_seldom()
    check_judge(options)
    job, maker = job_of(options, command), MAKERS[options.figure]
    if options.redraw:
        maker.redraw(job)
    elif options.rescore:
        maker.rescore(job)
    else:
        maker.make(job)
    return INCOMPLETE if job.incomplete else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; its exit code."""
    options = parse(arguments)
    command = own_command(__file__, arguments)
    return exit_code(PROGRAM, lambda: run(options, command))


if __name__ == "__main__":
    sys.exit(main())
