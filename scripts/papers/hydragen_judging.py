"""Marks of the programs of `scripts.papers.hydragen apps`: each is judged once, in the sandbox of
`jaxshare evaluate`."""

import argparse
import collections
import concurrent.futures
import dataclasses
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jaxshare import progress
from jaxshare.serving import jsonl, pass_at_k
from jaxshare.serving.evaluation import provenance
from jaxshare.serving.evaluation.checkers import sandbox
from jaxshare.serving.evaluation.checkers.sandbox import Limits, Verdict
from jaxshare.serving.evaluation.problems import Task
from jaxshare.serving.evaluation.scoring import judged
from scripts.bench.lib import Parser, cores
from scripts.papers.folder import OTHER, PaperFolder
from scripts.papers.hydragen_problems import program_of

Texts = Mapping[str, Mapping[int, Sequence[str]]]
"""Texts of samples, by side and number of the problem."""
Program = tuple[int, str]
"""The number of a problem, and a program."""
_KS = (1, 10, 100)
SCORES = "scores.jsonl"
"""A line for each different program: its problem, its verdict, and how many samples of each side are
it."""


def add_arguments(parser: Parser) -> None:
    """Adds the arguments of marking."""
    parser.add_argument("--k", metavar="K,K", help="of pass@k (default those of 1,10,100 that fit)")
    parser.add_argument(
        "--test-seconds",
        type=float,
        default=Limits().seconds,
        metavar="S",
        help="processor time of a program for each case (default %(default)g)",
    )
    parser.add_argument(
        "--test-memory",
        type=int,
        default=Limits().memory >> 20,
        metavar="MIB",
        help="memory of a program for each case (default %(default)d)",
    )


def check(parser: Parser, given: argparse.Namespace) -> None:
    """Completes the options; ends the program where they cannot be right."""
    if given.k is not None:
        given.k = sorted(parser.numbers("--k", given.k, "1,10,100"))
        if given.k[-1] > given.samples and not given.redraw:
            parser.error(
                f"--k has {given.k[-1]}, but there are {given.samples} samples of each problem; "
                "raise --samples"
            )
    for option in ("test_seconds", "test_memory"):
        if not getattr(given, option) > 0:
            name = option.replace("_", "-")
            parser.error(f"--{name} is {getattr(given, option)}, but it must be more than 0")


def mark(
    options: argparse.Namespace,
    kept: PaperFolder,
    task: Task,
    texts: Texts,
) -> dict[str, Any]:
    """Judges all programs, writes scores.jsonl and computes pass@k.

    Args:
      options: of `add_arguments`.
      kept: the experiment.
      task: its problems, as their files are today.
      texts: of samples, by side and number of the problem.

    Returns:
      "pass_at" by side and k, "problems" with the right samples of each by side, and "marked": the
      limits, the versions and the sandbox.

    Raises:
      ValueError: other problems, or a k larger than the number of samples.
    """
    if task.digest != kept.settings["problems"]:
        raise ValueError(
            f"the problems of {options.task} are others than those of {kept.path}, or have other "
            f"cases now; give the files and the arguments as they were, or {OTHER}"
        )
    samples = kept.settings["samples"]
    ks = options.k or [k for k in _KS if k <= samples]
    if ks[-1] > samples:
        raise ValueError(f"--k has {ks[-1]}, but each problem has {samples} samples; lower it")
    if lack := sandbox.notice():
        print(lack, file=sys.stderr)
    limits = Limits(seconds=options.test_seconds, memory=options.test_memory << 20)
    counts = _programs(texts)
    verdicts = _verdicts(task, [*counts], limits)
    _write_scores(kept, task, counts, verdicts)
    right = {side: dict.fromkeys(by_problem, 0) for side, by_problem in texts.items()}
    for (number, program), verdict in verdicts.items():
        for side, count in counts[number, program].items() if verdict.passed else ():
            right[side][number] += count
    marks = [
        {"id": problem.id, "right": {s: found[n] for s, found in right.items() if n in found}}
        for n, problem in enumerate(task.problems)
    ]
    return {
        "pass_at": {side: pass_at(found, samples, ks) for side, found in right.items() if found},
        "problems": marks,
        "marked": {
            "limits": dataclasses.asdict(limits),
            "sandbox": sandbox.ways()[0].name,
            "versions": provenance.versions(),
        },
    }


def _programs(texts: Texts) -> dict[Program, dict[str, int]]:
    """The different programs, and how many samples of each side are it."""
    counts: dict[Program, dict[str, int]] = collections.defaultdict(dict)
    for side, by_problem in texts.items():
        for number, written in by_problem.items():
            for text in written:
                of_program = counts[number, program_of(text)]
                of_program[side] = of_program.get(side, 0) + 1
    return counts


def _write_scores(
    kept: PaperFolder,
    task: Task,
    counts: Mapping[Program, dict[str, int]],
    verdicts: Mapping[Program, Verdict],
) -> None:
    lines = [
        {
            "problem": task.problems[number].id,
            "passed": verdict.passed,
            "error": verdict.error,
            "samples": counts[number, program],
            "program": program,
        }
        for (number, program), verdict in verdicts.items()
    ]
    jsonl.write(kept.path / SCORES, map(jsonl.line, lines), OTHER)


def pass_at(right: Mapping[int, int], samples: int, ks: Sequence[int]) -> dict[str, float]:
    """pass@k over problems by k, where each has as many samples (Chen et al., 2021)."""
    return {str(k): statistics.fmean(pass_at_k(n, samples, k) for n in right.values()) for k in ks}


def _verdicts(task: Task, programs: Sequence[Program], limits: Limits) -> dict[Program, Verdict]:
    """The verdict of each program, on all cores."""

    def verdict(of: Program) -> Verdict:
        number, program = of
        if not program.strip():
            return Verdict(False, "there is no program")
        return judged(task.problems[number], program, limits)

    with concurrent.futures.ThreadPoolExecutor(cores()) as pool:
        found = pool.map(verdict, programs)
        return dict(zip(programs, progress.each(found, "judging", "programs"), strict=True))
