"""The options that benchmarks of decoding share."""

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path

from scripts.bench.lib import Parser
from scripts.bench.parts.decode.families import FAMILIES, BenchFamily

LLAMA = FAMILIES["llama"]


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a run; rounds and steps as `--quick` has them, and batches and prompt as the
    family has them, where they were not given.

    Attributes:
      family: of the model.
      python: that runs the other side.
    """

    family: BenchFamily
    batches: tuple[int, ...]
    prompt: int
    rounds: int
    steps: int
    quick: bool
    seed: int
    python: str
    json: bool
    output: Path | None


def add_options(parser: Parser, *, quick_steps: int, quick: str) -> None:
    """Adds all of them but that of the other side's Python.

    Args:
      quick_steps: decode steps a turn with `--quick`.
      quick: what `--quick` leaves out.
    """
    parser.add_argument(
        "--batches",
        metavar="N,N",
        help=f"rows decoded at once (default {LLAMA.batches})",
    )
    parser.add_argument(
        "--prompt",
        type=int,
        help=f"tokens of each row's prompt (default {LLAMA.prompt})",
    )
    parser.add_argument("--rounds", type=int, help="turns of each side (default 5; quick 3)")
    parser.add_argument(
        "--steps", type=int, help=f"decode steps a turn (default 16; quick {quick_steps})"
    )
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--seed", type=int, default=0, help="of weights and prompts")
    parser.reporting()
    parser.set_defaults(quick_steps=quick_steps)


def checked(
    parser: Parser,
    given: argparse.Namespace,
    find_python: Callable[[], str],
    *,
    fewest_steps: int = 1,
    family: BenchFamily = LLAMA,
) -> Options:
    """The options as they were given; ends the program where they cannot be.

    Args:
      find_python: finds the Python that runs the other side, once all else is right.
      fewest_steps: a turn has.
      family: of the model.
    """
    batches = parser.numbers("--batches", given.batches or family.batches, family.batches)
    prompt = family.prompt if given.prompt is None else given.prompt
    rounds = given.rounds if given.rounds is not None else 3 if given.quick else 5
    steps = given.steps
    if steps is None:
        steps = given.quick_steps if given.quick else 16
    if rounds < 1 or steps < fewest_steps or given.seed < 0:
        parser.error(
            f"--rounds is {rounds}, --steps {steps} and --seed {given.seed}, but they must be at "
            f"least 1, {fewest_steps} and 0"
        )
    most = family.config["max_position_embeddings"] - steps * (rounds + 1)
    if not 1 <= prompt <= most:
        parser.error(
            f"--prompt is {prompt}, but with {rounds} rounds of {steps} steps it must be "
            f"from 1 to {most} tokens"
        )
    parser.check_output(given.output)
    return Options(
        family,
        batches,
        prompt,
        rounds,
        steps,
        given.quick,
        given.seed,
        find_python(),
        given.json,
        given.output,
    )
