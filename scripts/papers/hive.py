"""The experiments of Hive, on any model that loads: data as it is found, then a report and pictures.

    python -m scripts.papers.hive game24 --model Qwen/Qwen3-8B --chat '{"enable_thinking": false}' --output DIR
    python -m scripts.papers.hive section8_2 --model Qwen/Qwen3-8B --output DIR    # the Logits Cache
    python -m scripts.papers.hive section8_3 --model Qwen/Qwen3-8B --output DIR    # residency by contribution
    python -m scripts.papers.hive figure9 --model Qwen/Qwen3-8B --output DIR       # contributions over time
    python -m scripts.papers.hive game24 --model scripted --quick --output DIR     # seconds, without a model

A command that was interrupted goes on with --resume; --redraw makes the report and the pictures of
what is in the folder. The folder is described in scripts/papers/folder.py; docs/papers.md says how
to read the results.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence

from jaxshare.serving import jsonl
from scripts.bench.lib import Parser, own_command
from scripts.papers import folder as paper_folder
from scripts.papers import hive_game24, hive_logits, hive_residency
from scripts.papers.folder import OTHER, PaperFolder
from scripts.papers.hive_experiment import (
    SCRIPTED,
    HiveExperiment,
    HivePlan,
    add_common,
    scripted_identity,
)

PROGRAM = "scripts.papers.hive"
EXPERIMENTS: Mapping[str, HiveExperiment] = {
    "game24": hive_game24.EXPERIMENT,
    "section8_2": hive_logits.EXPERIMENT,
    "section8_3": hive_residency.SECTION,
    "figure9": hive_residency.FIGURE,
}


def parse(arguments: Sequence[str] | None) -> tuple[Parser, argparse.Namespace]:
    """The parser of the experiment that is named, and its options."""
    parser = Parser(prog=PROGRAM, description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="experiment", required=True, metavar="EXPERIMENT")
    parsers = {}
    for name, experiment in EXPERIMENTS.items():
        parsers[name] = commands.add_parser(
            name, help=experiment.summary, description=experiment.summary
        )
        add_common(parsers[name])
        experiment.add_arguments(parsers[name])
    given = parser.parse_args(arguments)
    return parsers[given.experiment], given


def run(parser: Parser, options: argparse.Namespace, command: str) -> int:
    """Runs an experiment, or what is left of it; 0."""
    experiment, name = EXPERIMENTS[options.experiment], f"hive {options.experiment}"
    if options.redraw:
        return report(experiment, PaperFolder.read(options.output, name), options)
    plan = experiment.plan(parser, options)
    is_whole = known(plan, name, options)
    model = None
    if not is_whole:
        is_scripted = options.model == SCRIPTED
        model = scripted_identity() if is_scripted else paper_folder.load(options)
    with paper_folder.opened(
        options.output, name, plan.settings, model, resume=options.resume, command=command
    ) as folder:
        if model is not None:
            plan.run(model, folder)
        return report(experiment, folder, options)


def known(plan: HivePlan, name: str, options: argparse.Namespace) -> bool:
    """True if the folder has all points, so that nothing is left to run.

    Raises:
      ValueError: it cannot be gone on with, which is known before a model is loaded.
    """
    if not (options.output / paper_folder.SETTINGS).exists():
        return False
    if not options.resume:
        raise ValueError(
            f"{options.output} has an experiment already; --resume goes on with it, or {OTHER}"
        )
    before = PaperFolder.read(options.output, name)
    jsonl.check_settings(
        f"the experiment in {options.output} began", before.settings, plan.settings, OTHER
    )
    return all(key in before for key in plan.keys)


def report(experiment: HiveExperiment, folder: PaperFolder, options: argparse.Namespace) -> int:
    """Writes the report and the pictures of what a folder has; 0."""
    results = experiment.results(folder)
    written = paper_folder.draw(folder.path, experiment.pictures(results))
    made = folder.report(results, pictures=written)
    paper_folder.finish(made, experiment.as_text(results), folder.path, as_json=options.json)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser, options = parse(arguments)
    paper_folder.check_arguments(parser, options)
    command = own_command(__file__, arguments)
    return paper_folder.exit_code(PROGRAM, lambda: run(parser, options, command))


if __name__ == "__main__":
    sys.exit(main())
