"""Competition problems: two levels of sharing against one and none, with pass@k (Hydragen section 4.4,
figure 6).

    python -m scripts.papers.hydragen apps --data-dir APPS --output DIR
    python -m scripts.papers.hydragen apps --model codellama/CodeLlama-7b-hf --data-dir APPS \\
        --samples 128 --new-tokens 512 --k 1,10,100 --output DIR
    python -m scripts.papers.hydragen apps --data-dir APPS --output DIR --redraw    # mark again

All prompts begin with the same examples, and each problem has several samples. Sides: nothing is
shared; the examples are stored once (one level); the problems, too (two levels); and two levels with
as many problems at a time as the memory of one level holds. Every sample has the same length, as in
the paper; what follows a stop token does not count as its text. Programs are judged in the sandbox
of `jaxshare evaluate`.
"""

import argparse
import dataclasses
import functools
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxshare import Sampler
from jaxshare.models import LoadedModel
from jaxshare.serving import Branches, Prefixes
from jaxshare.serving.branches.prompt_tree import Prompt
from jaxshare.serving.inputs import cache_dtype, token_bytes
from jaxshare.serving.words import encode_marked, mark
from scripts.bench.lib import Parser, progress, table
from scripts.bench.parts.sharing.generate import MORE, ONE, TWO, room
from scripts.papers import folder as folders
from scripts.papers import hydragen_judging as judging
from scripts.papers import hydragen_plots as plots
from scripts.papers import hydragen_problems as problems
from scripts.papers.folder import PaperFolder
from scripts.papers.hydragen_memory import SideRoom

EXPERIMENT = "hydragen apps"
NONE = "no sharing"
SIDES = {"none": NONE, "one": ONE, "two": TWO, "more": MORE}
"""By their names on the command line."""


def add_arguments(parser: Parser) -> None:
    """Adds the arguments of the experiment."""
    folders.add_arguments(parser)
    problems.add_arguments(parser)
    judging.add_arguments(parser)
    for name, what in (
        ("samples", "of each problem (default 16; quick 2)"),
        ("new-tokens", "of each sample (default 512; quick 16)"),
        ("batch", "problems at a time (default 4; quick 2)"),
        ("rounds", "turns of each side (default 1)"),
    ):
        parser.add_argument(f"--{name}", type=int, metavar="N", help=what)
    parser.add_argument(
        "--larger-batch",
        type=int,
        metavar="N",
        help="problems at a time of the last side (default: what the memory of one level holds)",
    )
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="of the samples (default %(default)s)"
    )
    parser.add_argument(
        "--sides", metavar="S,S", default=",".join(SIDES), help="some of %(default)s (default all)"
    )
    parser.add_argument(
        "--max-kv-gib",
        type=float,
        metavar="GIB",
        help="leave out sides whose keys and values take more (default: what is free)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="few problems and short samples, to try the command"
    )


def check(parser: Parser, given: argparse.Namespace) -> None:
    """Completes the options; ends the program where they cannot be right."""
    folders.check_arguments(parser, given)
    names = ("problems", "shots", "samples", "new_tokens", "batch", "rounds")
    quick, full = (2, 1, 2, 16, 2, 1), (None, 2, 16, 512, 4, 1)
    for name, default in zip(names, quick if given.quick else full, strict=True):
        if getattr(given, name) is None:
            setattr(given, name, default)
    counted = ("problems", "new_tokens", "batch", "rounds", "larger_batch", "samples")
    parser.at_least(1, **{name: getattr(given, name) for name in counted})
    parser.at_least(0, shots=given.shots)
    parser.at_least(0.001, max_kv_gib=given.max_kv_gib)
    parser.at_least(0.0, temperature=given.temperature)
    given.sides = [SIDES[name] for name in parser.some_of("--sides", given.sides, [*SIDES])]
    judging.check(parser, given)


def run(options: argparse.Namespace, command: str) -> int:
    """Samples what is left of the experiment and marks it; with --redraw only marks it.

    Returns:
      0, or 3 where lines of the problems are bad: they are named on stderr, and the others are run.

    Raises:
      ValueError, OSError, ImportError: a model, files, a folder or settings that cannot be used.
    """
    if options.redraw:
        saved = PaperFolder.read(options.output, EXPERIMENT).settings
        options.problems = saved["number_of_problems"]
        options.task, options.difficulty = saved["task"], saved["difficulty"]
        options.starter_code = saved["starter_code"]
    task = problems.load_problems(options)
    for complaint in task.complaints:
        print(complaint, file=sys.stderr)
    if not options.redraw:
        _sample(options, command, task)

    def marked(found: PaperFolder) -> dict[str, Any]:
        marks = judging.mark(options, found, task, _texts(found))
        return {**summarise(found), **marks, "bad_lines": [*task.bad_lines]}

    folders.report_of(options, EXPERIMENT, marked, plots.apps, as_text)
    return 3 if task.bad_lines else 0


# Sampling.


@dataclasses.dataclass(frozen=True)
class Work:
    """The prompts and samples of all sides.

    Attributes:
      model: for the longest row.
      shared: tokens of the examples.
      asked: the problems after them, with their numbers.
      samples, new_tokens: of each problem, and of each sample.
      sampler, seed: how samples are drawn.
      batch, larger: problems at a time.
    """

    model: LoadedModel
    shared: tuple[int, ...]
    asked: tuple[Prompt, ...]
    samples: int
    new_tokens: int
    sampler: Sampler
    seed: int
    batch: int
    larger: int

    @property
    def longest(self) -> int:
        """The tokens of the longest problem."""
        return max(len(prompt.tokens) for prompt in self.asked)

    def store_tokens(self, side: str) -> int:
        """The tokens that a side stores at a time, at most."""
        rows = self.batch * self.samples
        if side == NONE:
            return rows * room(len(self.shared) + self.longest + self.new_tokens)
        if side == TWO:
            return room(len(self.shared)) + self._two_levels(self.batch)
        one = room(len(self.shared)) + rows * room(self.longest + self.new_tokens)
        return (
            one if side == ONE else max(one, room(len(self.shared)) + self._two_levels(self.larger))
        )

    def _two_levels(self, batch: int) -> int:
        return batch * (room(self.longest) + self.samples * room(self.new_tokens))

    def batches(self, side: str) -> Iterator[tuple[int, tuple[Prompt, ...]]]:
        """The problems that a side has at a time, and the number of the first."""
        size = self.larger if side == MORE else self.batch
        for start in range(0, len(self.asked), size):
            yield start, self.asked[start : start + size]


def prepare(options: argparse.Namespace, model: LoadedModel, task: problems.Task) -> Work:
    """Encodes all prompts.

    Raises:
      ValueError: a prompt that the model's context does not hold, or no tokenizer.
    """
    name, tokenizer = folders.model_name(options), model.tokenizer
    if tokenizer is None:
        raise ValueError(f"--model is {name}, but it has no tokenizer, and problems are text")

    def encode(text: str, first: bool) -> tuple[int, ...]:
        return (*encode_marked(tokenizer, mark(tokenizer, text), first=first),)

    shared = encode(problems.few_shot(options), True)
    asked = tuple(
        Prompt(number, encode(problem.text, False), options.samples)
        for number, problem in enumerate(task.problems)
    )
    longest = max(asked, key=lambda prompt: len(prompt.tokens))
    needed = len(shared) + len(longest.tokens) + options.new_tokens
    if needed > model.config.max_positions:
        raise ValueError(
            f"the problem {task.problems[longest.number].id} has {needed} tokens with the examples "
            f"and a sample, but the context of {name} has {model.config.max_positions}; lower "
            "--shots or --new-tokens, or choose other problems"
        )
    work = Work(
        model.for_context(needed),
        shared,
        asked,
        options.samples,
        options.new_tokens,
        Sampler(temperature=options.temperature, ignore_eos=True),
        options.seed,
        min(options.batch, len(asked)),
        1,
    )
    spare = work.store_tokens(ONE) - room(len(shared))
    fitting = spare // work._two_levels(1)
    larger = options.larger_batch or max(work.batch, fitting)
    return dataclasses.replace(work, larger=min(larger, len(asked)))


def _sample(options: argparse.Namespace, command: str, task: problems.Task) -> None:
    model = folders.load(options)
    work = prepare(options, model, task)
    settings = {
        "model": folders.model_name(options),
        "dtype": str(cache_dtype(model)),
        "tensor": options.tensor,
        "task": options.task,
        "difficulty": options.difficulty,
        "starter_code": options.starter_code,
        "problems": task.digest,
        "number_of_problems": len(work.asked),
        "shots": options.shots,
        "shared_tokens": len(work.shared),
        "prompts": folders.digest([work.shared, *(prompt.tokens for prompt in work.asked)]),
        "samples": work.samples,
        "new_tokens": work.new_tokens,
        "temperature": options.temperature,
        "batch": work.batch,
        "larger_batch": work.larger,
        "rounds": options.rounds,
        "seed": options.seed,
        "max_kv_gib": options.max_kv_gib,
        "machine": folders.this_machine(),
    }
    how = {"resume": options.resume, "command": command}
    with folders.opened(options.output, EXPERIMENT, settings, model, **how) as kept:
        left = [
            (side, turn, start, batch)
            for turn in range(options.rounds)
            for side in options.sides
            for start, batch in work.batches(side)
            if _key(side, turn, start) not in kept
        ]
        with progress(len(left)) as say:
            for side, turn, start, batch in left:
                say(f"{side}, problems from {start + 1} on")
                kept.add(*_point(work, side, turn, start, batch, options.max_kv_gib))


def _key(side: str, turn: int, start: int) -> dict[str, Any]:
    return {"of": side, "turn": turn, "start": start}


def _point(
    work: Work, side: str, turn: int, start: int, batch: Sequence[Prompt], gib: float | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Key and value of one batch of problems; the value says why where it does not fit."""
    memory = SideRoom(work.model, gib)
    taken = work.store_tokens(side) * token_bytes(work.model)
    value = memory.prepare(side, taken, functools.partial(sample, work, side, batch))
    if value is None:
        value = {"left_out": memory.left_out[side]}
    elif turn:
        del value["texts"]  # which are those of the first turn
    return _key(side, turn, start), value


def sample(work: Work, side: str, batch: Sequence[Prompt]) -> dict[str, Any]:
    """Samples a batch of problems: seconds without compilation, memory, and texts by problem.

    The examples are computed before the clock starts where they are shared.
    """
    how: dict[str, Any] = {"max_rows": len(batch) * work.samples, "share": side in (TWO, MORE)}
    prompts = [*batch]
    if side == NONE:
        prompts = [
            dataclasses.replace(prompt, tokens=(*work.shared, *prompt.tokens)) for prompt in batch
        ]
        size = token_bytes(work.model)
        how["max_kv_bytes"] = work.store_tokens(side) * size
    else:
        store = Prefixes(work.model, max_tokens=work.store_tokens(side))
        how["prefix"] = store.add(list(work.shared))
    run = Branches(
        work.model,
        prompts,
        n=work.samples,
        max_new_tokens=work.new_tokens,
        sampler=work.sampler,
        seed=work.seed,
        **how,
    )
    texts: dict[str, list[str]] = {str(p.number): [""] * work.samples for p in batch}
    for completion in run.stream(warm_up=True):
        if completion.error:
            raise completion.error
        texts[str(completion.prompt)][completion.index] = _text(work.model, completion.tokens)
    return {
        "seconds": run.seconds,
        "compile_seconds": run.compile_seconds,
        "passes": run.passes,
        "rows": run.rows,
        "kv_bytes": run.kv_bytes,
        "texts": texts,
    }


def _text(model: LoadedModel, tokens: Sequence[int]) -> str:
    """The text up to the first stop token."""
    stops, tokenizer = set(model.generation.stop_tokens), model.tokenizer
    assert tokenizer is not None
    end = next((i for i, token in enumerate(tokens) if token in stops), len(tokens))
    return tokenizer.decode([*tokens[:end]])


# The report.


def _texts(kept: PaperFolder) -> dict[str, dict[int, list[str]]]:
    """All texts by side and number of the problem."""
    found: dict[str, dict[int, list[str]]] = {}
    for key, value in kept.points():
        for number, texts in value.get("texts", {}).items():
            found.setdefault(key["of"], {})[int(number)] = texts
    return found


def summarise(kept: PaperFolder) -> dict[str, Any]:
    """Seconds of all problems by side, the median of the turns, and memory; only of sides that have
    done all; why others were left out; how many times longer than two levels the others took; and
    the part of samples that are those of the first side."""
    total = kept.settings["number_of_problems"]
    turns: dict[str, dict[int, list[dict[str, Any]]]] = {}
    left_out: dict[str, str] = {}
    for key, value in kept.points():
        if "left_out" in value:
            left_out[key["of"]] = value["left_out"]
            continue
        turns.setdefault(key["of"], {}).setdefault(key["turn"], []).append(value)
    sides: dict[str, Any] = {}
    texts = _texts(kept)
    for side in (side for side in SIDES.values() if side in turns):
        whole = turns[side]
        if side in left_out or len(texts.get(side, {})) < total:
            continue
        every = [value for values in whole.values() for value in values]
        seconds = [sum(value["seconds"] for value in values) for values in whole.values()]
        sides[side] = {
            "seconds": statistics.median(seconds),
            "turn_seconds": seconds,
            "problems_at_a_time": kept.settings["larger_batch" if side == MORE else "batch"],
            "rows": max(value["rows"] for value in every),
            "kv_bytes": max(value["kv_bytes"] for value in every),
            "passes": sum(value["passes"] for value in whole[min(whole)]),
        }
    one = sides.get(ONE)
    return {
        "sides": sides,
        "left_out": left_out,
        "to_one_level": {s: v["seconds"] / one["seconds"] for s, v in sides.items() if one},
        "same_texts": _same_texts({side: texts[side] for side in sides}),
    }


def _same_texts(texts: Mapping[str, Mapping[int, Sequence[str]]]) -> dict[str, float]:
    """By side the part of its samples whose texts are those of the first side. Streams of random
    numbers are the same; sums that are rounded in another order may tip a choice."""
    if not texts:
        return {}
    first = next(iter(texts.values()))
    return {
        side: statistics.fmean(
            a == b for number in first for a, b in zip(first[number], own[number], strict=True)
        )
        for side, own in texts.items()
    }


def as_text(report: Mapping[str, Any]) -> str:
    """Seconds, memory and pass@k by side."""
    settings, results = report["settings"], report["results"]
    first = (
        f"{settings['model']} in {settings['dtype']}, {settings['number_of_problems']} problems of "
        f"{settings['task']}, {settings['samples']} samples of {settings['new_tokens']} tokens, "
        f"{settings['shots']} examples of {settings['shared_tokens']} tokens"
    )
    ks = [*next(iter(results["pass_at"].values()), {})]
    rows = []
    for side, found in results["sides"].items():
        ratio = results["to_one_level"].get(side)
        rows.append(
            (
                side,
                f"{found['seconds']:.2f}",
                "" if ratio is None else f"{ratio:.2f}",
                str(found["problems_at_a_time"]),
                f"{found['kv_bytes'] / 2**20:.1f}",
                *(f"{100 * results['pass_at'][side][k]:.1f}" for k in ks),
            )
        )
    header = (
        "",
        "seconds",
        "to one level",
        "problems at a time",
        "MiB",
        *(f"pass@{k}, %" for k in ks),
    )
    absent = [f"{side}: left out, {why}" for side, why in results["left_out"].items()]
    return "\n\n".join([first, table(header, rows), *absent])
