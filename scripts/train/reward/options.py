"""The command line of training by reward."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from jaxshare.paths import check_folder
from scripts.train.options import add_run_arguments
from scripts.train.reward.exercises import PARAGRAPH_TOKENS
from scripts.train.reward.policy_gradient import VARIANTS

_POSITIVE = (
    "steps",
    "prompts",
    "updates",
    "learning_rate",
    "clip_low",
    "clip_high",
    "temperature",
    "max_new_tokens",
    "tokens",
    "problems",
    "minutes",
    "budget",
)


def parse(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    """The arguments, and the parser for errors that are found later."""
    parser = argparse.ArgumentParser(description="Trains a model by reward, with GRPO.")
    parser.add_argument(
        "--model", default="embedded", help="the folder of a model to go on from, or embedded"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=1,
        help="1 trains single paragraphs; more train whole sessions of so many workers",
    )
    parser.add_argument("--run-dir", type=Path, default=Path("runs/grpo"), help="checkpoints, plot")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/grpo-model"), help="the best model so far"
    )
    add_run_arguments(parser, steps=400, optimizer="adamw", learning_rate=5e-4, tokens=1280)
    parser.add_argument("--prompts", type=int, default=24, help="groups of a step")
    parser.add_argument("--samples", type=int, default=16, help="samples of a group")
    parser.add_argument(
        "--learn-from",
        type=int,
        default=8,
        help="samples of a group that are learned from: those whose rewards vary most",
    )
    parser.add_argument("--updates", type=int, default=1, help="updates by the samples of a step")
    parser.add_argument("--variant", choices=VARIANTS, default=VARIANTS[0])
    parser.add_argument("--clip-low", type=float, default=0.2)
    parser.add_argument("--clip-high", type=float, default=0.2)
    parser.add_argument("--kl", type=float, default=0.0, help="weight of the divergence")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-new-tokens", type=int, default=PARAGRAPH_TOKENS)
    parser.add_argument(
        "--budget", type=int, default=120, help="forward passes of a session of workers"
    )
    parser.add_argument(
        "--plain", type=float, default=0.5, help="share of prompts without a dependent question"
    )
    parser.add_argument(
        "--reward",
        default="right-answer",
        help="or module:function, which takes an exercise and a text (with workers: a problem and "
        "a result) and returns a number",
    )
    parser.add_argument("--rows", type=int, default=64, help="of the engine that samples")
    parser.add_argument(
        "--evaluate-every", type=int, default=20, help="steps between measurements; 0 for none"
    )
    parser.add_argument("--problems", type=int, default=64, help="held-out problems")
    args = parser.parse_args(argv)
    if error := _wrong(args):
        parser.error(error)
    return args, parser


def _wrong(args: argparse.Namespace) -> str | None:
    """The error in the numbers, and what would do; None without one."""
    for name in _POSITIVE:
        value = getattr(args, name)
        if value is not None and not value > 0:
            return f"--{name.replace('_', '-')} must be positive; got {value}"
    if args.samples < 2:
        return f"--samples is {args.samples}; a group needs at least 2 samples to compare"
    if args.learn_from < 2:
        return f"--learn-from is {args.learn_from}; a group needs at least 2 samples to compare"
    if not 1 <= args.workers <= 6:
        return f"--workers is {args.workers}; give 1 to 6"
    if args.rows < 1:
        return f"--rows is {args.rows}; the engine needs at least 1"
    if args.clip_low >= 1:
        return f"--clip-low is {args.clip_low}; a ratio cannot fall by 1 or more"
    if not args.kl >= 0 or not 0 <= args.plain <= 1:
        return f"--kl must be at least 0 and --plain from 0 to 1; got {args.kl} and {args.plain}"
    if args.evaluate_every < 0:
        return f"--evaluate-every is {args.evaluate_every}; give at least 0"
    try:
        check_folder("--out", args.out)
        check_folder("--run-dir", args.run_dir)
    except ValueError as error:
        return str(error)
    return None
