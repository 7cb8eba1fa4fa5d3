"""The command `jaxshare score`: log-probabilities of candidates that may continue a prefix."""

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

from jaxshare import progress
from jaxshare.decoding.logprobs import PROCESSED, RAW
from jaxshare.serving.cli import arguments
from jaxshare.serving.cluster import process_mesh
from jaxshare.serving.inputs import MOST_LOGPROBS, default_sampler
from jaxshare.serving.scoring import TextScore, score


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `jaxshare score`."""
    arguments.add_model(parser)
    prefix = parser.add_mutually_exclusive_group()
    prefix.add_argument(
        "--prefix",
        metavar="TEXT",
        help="special tokens such as <|im_end|> in it are special (default: none; the candidates "
        "are whole texts)",
    )
    prefix.add_argument("--prefix-file", metavar="FILE", help="`-` reads stdin")
    parser.add_argument(
        "--candidates",
        metavar="FILE",
        required=True,
        help="a candidate on each line, as it stands, with the space before a word; `-` reads stdin",
    )
    parser.add_argument(
        "--top-logprobs",
        type=int,
        default=0,
        metavar="N",
        help=f"with --json: the N likeliest tokens in the place of each token, at most {MOST_LOGPROBS}",
    )
    parser.add_argument(
        "--logprobs",
        choices=(RAW, PROCESSED),
        default=RAW,
        help="of the model itself, or of the chances that tokens would be drawn with after the "
        "sampling settings (default: %(default)s)",
    )
    arguments.add_sampling(parser)
    arguments.add_json(parser)
    process_mesh.add_arguments(parser, groups="groups of candidates")


def run(options: argparse.Namespace) -> int:
    """Runs `jaxshare score`.

    Raises:
      ValueError: wrong settings, an empty candidate, or one that does not fit the model's context.
      FileNotFoundError: no such model.
    """
    if not 0 <= options.top_logprobs <= MOST_LOGPROBS:
        raise ValueError(
            f"--top-logprobs is {options.top_logprobs}; it must be 0 to {MOST_LOGPROBS}"
        )
    if options.top_logprobs and not options.json:
        raise ValueError("--top-logprobs needs --json, whose object has them; the table has none")
    sampling = arguments.sampling_of(options)
    if sampling and options.logprobs == RAW:
        raise ValueError(
            f"{next(iter(sampling))} is given, but log-probabilities are those of the model itself; "
            "ask for --logprobs processed"
        )
    prefix = ""
    if options.prefix_file is not None:
        prefix = arguments.read_text("prefix", None, options.prefix_file)
    elif options.prefix:
        prefix = options.prefix
    candidates = _candidates(options.candidates)
    model = arguments.load_model(options, process_mesh.mesh_of(options))
    arguments.need_tokenizer(model, options.model)
    sampler = None
    if options.logprobs == PROCESSED:
        sampler = dataclasses.replace(default_sampler(model), **sampling)
    with progress.work(f"scoring {len(candidates):,} candidates"):
        scores = score(
            model, prefix, candidates, top_logprobs=options.top_logprobs, sampler=sampler
        )
    if options.json:
        found = [
            {"text": text, **_as_json(one)} for text, one in zip(candidates, scores, strict=True)
        ]
        print(json.dumps({"scores": found}))
    else:
        _print_table(candidates, scores)
    return 0


def _candidates(file: str) -> list[str]:
    """The lines of a file.

    Raises:
      ValueError: it cannot be read, or has an empty line.
    """
    lines = arguments.read_text("list of candidates", None, file).split("\n")
    lines = lines[:-1] if not lines[-1] else lines
    if "" in lines:
        place = "stdin" if file == "-" else file
        raise ValueError(
            f"line {lines.index('') + 1} of {place} is empty; take it out: each line is a candidate"
        )
    return lines


def _as_json(score: TextScore) -> dict[str, Any]:
    """A score as JSON has it: None for minus infinity."""
    given = dataclasses.asdict(score)
    given["logprobs"] = [None if n == -math.inf else n for n in score.logprobs]
    given["logprob"] = None if score.logprob == -math.inf else score.logprob
    return given


def _print_table(candidates: Sequence[str], scores: Sequence[TextScore]) -> None:
    """Prints a line for each candidate; `*` marks those that are the likeliest token by token."""
    print("     logprob  tokens     candidate")
    for text, one in zip(candidates, scores, strict=True):
        mark = "*" if one.greedy else " "
        print(f"{one.logprob:12.4f} {len(one.tokens):7}  {mark}  {text}")
