"""The command line of the training of workers, and what others have in common with it."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from jaxshare.paths import check_folder

DTYPES = {"f32": "float32", "bf16": "bfloat16"}


VOCAB_SIZE = 512
"""Of a tokenizer that is made for a model from scratch."""


POSITIONS = 8192
"""The context of such a model: six workers have room in it for steps of the length that sessions
provide for."""


def add_run_arguments(
    parser: argparse.ArgumentParser,
    *,
    steps: int,
    optimizer: str,
    learning_rate: float,
    tokens: int,
) -> None:
    """Adds what all trainings have whose runs are saved, with these defaults."""
    parser.add_argument(
        "--resume", action="store_true", help="go on with the run in --run-dir, if there is one"
    )
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument(
        "--minutes", type=float, help="stop after so long, before the last step; --resume goes on"
    )
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default=optimizer)
    parser.add_argument("--learning-rate", type=float, default=learning_rate)
    parser.add_argument(
        "--dtype",
        choices=[*DTYPES],
        default="f32",
        help="of computation and export; parameters are trained in float32",
    )
    parser.add_argument("--tokens", type=int, default=tokens, help="of a batch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-seconds", type=float, default=120.0)
    parser.add_argument(
        "--log-seconds", type=float, default=0.5, help="seconds between updates of the progress bar"
    )
    parser.add_argument(
        "--json", action="store_true", help="print what came of it as one JSON object"
    )


def parse(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    parser = argparse.ArgumentParser(description="Teaches a model to be one of several workers.")
    parser.add_argument(
        "--model", default="embedded", help="the folder of a model to go on from, or embedded"
    )
    parser.add_argument("--layers", type=int, help="start from scratch, with this many layers")
    parser.add_argument(
        "--hidden", type=int, help="and of this width, a multiple of 72; default 144"
    )
    parser.add_argument(
        "--run-dir", type=Path, default=Path("runs/workers"), help="checkpoints and the plot"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/workers-model"),
        help="where the model is exported to",
    )
    parser.add_argument(
        "--context",
        type=int,
        help="positions that the exported model is to take; default those of the one before",
    )
    add_run_arguments(parser, steps=3000, optimizer="muon", learning_rate=0.01, tokens=2048)
    parser.add_argument("--accumulate", type=int, default=2, help="batches of a step")
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        help="that make lessons ahead; 0 makes them between steps",
    )
    parser.add_argument(
        "--evaluate-every",
        type=int,
        default=250,
        help="steps between two measurements; 0 never measures",
    )
    parser.add_argument("--problems", type=int, default=16, help="held-out problems")
    parser.add_argument(
        "--workers",
        type=lambda text: [*map(int, text.split(","))],
        default=[1, 2, 4],
        help="numbers of them to measure",
    )
    args = parser.parse_args(argv)
    for name in (
        "steps",
        "accumulate",
        "tokens",
        "problems",
        "learning_rate",
        "minutes",
        "layers",
        "context",
    ):
        if (value := getattr(args, name)) is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} must be positive; got {value}")
    if args.processes < 0 or args.evaluate_every < 0:
        parser.error("--processes and --evaluate-every must be at least 0")
    if args.hidden is not None and (args.layers is None or args.hidden < 72 or args.hidden % 72):
        parser.error(f"--hidden is {args.hidden}; give a multiple of 72, and --layers with it")
    if args.layers is not None:
        args.hidden = args.hidden or 144
        if args.model != "embedded":
            parser.error(
                "--layers starts from scratch, and --model goes on from a folder; give one of them"
            )
    try:
        check_folder("--out", args.out)
        check_folder("--run-dir", args.run_dir)
    except ValueError as error:
        parser.error(str(error))
    return args, parser
