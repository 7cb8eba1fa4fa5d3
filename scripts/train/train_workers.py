"""Teaches a model to be one of several workers: fine-tunes it on traces that a teacher has played
(Hogwild! Inference, appendices B, E.2).

    python -m scripts.train.train_workers --run-dir runs/workers --out runs/taught                  # from the embedded model
    python -m scripts.train.train_workers --resume --run-dir runs/workers --out runs/taught         # goes on after an interruption
    python -m scripts.train.train_workers --layers 6 --hidden 288 --run-dir runs/new --out runs/new-model      # from scratch
    python -m scripts.train.train_workers --model FOLDER --dtype bf16 --optimizer adamw \\
        --learning-rate 1e-5 --out FOLDER-taught --run-dir runs/hf

One parallel pass re-encodes several sessions at once, and what was sampled in them is learned.
Lessons come from the seed and their numbers alone, so that a run that was interrupted goes on as
though it had not been.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from tqdm import tqdm

from jaxshare import Sampler
from jaxshare.models import EMBEDDED, LoadedModel, load
from jaxshare.models.layers import Decoder
from jaxshare.models.sources import local_folder
from jaxshare.serving import Format
from jaxshare.serving.checkpoints import CheckpointStore, has_checkpoints
from jaxshare.serving.evaluation import (
    Point,
    Scorer,
    load_task,
    passes_to,
    points,
    run_specs,
    solve,
)
from jaxshare.serving.evaluation.arithmetic import MAX_QUESTIONS, QUESTIONS, SEPARATOR
from jaxshare.serving.evaluation.checkers.mathematics import Mathematician
from jaxshare.serving.workers.layouts import worker_names
from scripts.train.embedded_data import train_tokenizer
from scripts.train.embedded_files import architecture, export, export_like
from scripts.train.lessons import MOST_WORKERS, Batch, Shape, stream
from scripts.train.options import DTYPES, POSITIONS, VOCAB_SIZE, parse
from scripts.train.pair_attention import logits
from scripts.train.training import SavedRun, empty_sums, optimizer_of, run_command, update

QUESTION = " Am I redundant?"
"""What a worker is asked where the model's own texts do not ask."""
GOAL = 0.9
BUDGETS = tuple(range(40, 321, 40))
"""Forward passes after which held-out answers are taken."""
_KEPT = (
    "model",
    "layers",
    "hidden",
    "seed",
    "learning_rate",
    "optimizer",
    "dtype",
    "accumulate",
    "tokens",
)
"""Settings that a run cannot change on its way."""


# The model.


def start_folder(args: argparse.Namespace) -> Path:
    """The folder of the model to train: the given one, or a new one with random parameters."""
    if args.layers is None:
        return local_folder(args.model)
    folder = args.run_dir / "start"
    if not (args.resume and folder.is_dir()):
        tokenizer = train_tokenizer(VOCAB_SIZE, args.seed, workers_texts())
        config = architecture(tokenizer.get_vocab_size(), args.layers, args.hidden, POSITIONS)
        params = Decoder(config).init(
            jax.random.key(args.seed), jnp.zeros((1, 8), jnp.int32), method="causal"
        )
        export(params, config, tokenizer, folder)
    return folder


def workers_texts() -> list[str]:
    """The texts of workers beside problems and solutions, for a tokenizer to learn."""
    names = worker_names(MOST_WORKERS)
    texts = [
        f"system\n{', '.join(names[: n - 1])} and {names[n - 1]} work together."
        for n in range(2, len(names) + 1)
    ]
    for name, number in itertools.product(names, range(1, MAX_QUESTIONS + 1)):
        texts += [
            f"{SEPARATOR}{name} {number}:{QUESTION} no. I wait for {name}.",
            f" Question {number}: {name} has it.",
            f"{QUESTION} yes. \\boxed{{?, {number}, ?}}",
            f"twice the answer of {number}, plus {number}",
        ]
    return 40 * texts


def teaching_format(model: LoadedModel) -> Format:
    """The model's own texts, or those of the embedded model, with a question whether work is
    redundant."""
    format = Format.from_json(model.workers or json.loads((EMBEDDED / "workers.json").read_text()))
    return format if format.question else dataclasses.replace(format, question=QUESTION)


# Learning.


def loss_of(params: dict, module: Decoder, dtype: str, batch: Batch) -> tuple[Array, Array]:
    """The weighted losses of sampled tokens, in nats, and the weight of those that are likeliest.

    Args:
      params: float32.
      module: of the model; dtype: that it computes in.
      batch: as in `lessons.Batch`.
    """
    traces, pairs, at, targets, weights = batch
    found = logits(
        module, jax.tree.map(lambda p: p.astype(dtype), params), traces, pairs, jnp.asarray(at)
    )
    losses = optax.softmax_cross_entropy_with_integer_labels(found, targets)
    return jnp.sum(losses * weights), jnp.sum(
        jnp.where(jnp.argmax(found, -1) == targets, weights, 0.0)
    )


@functools.partial(jax.jit, static_argnames=("module", "dtype"), donate_argnames=("total",))
def add_gradients(total: dict, params: dict, batch: Any, *, module: Decoder, dtype: str) -> dict:
    """The gradients, losses and weights of one more batch, added to a total."""
    (loss, right), gradients = jax.value_and_grad(loss_of, has_aux=True)(
        params, module, dtype, batch
    )
    new = {"gradients": gradients, "loss": loss, "accuracy": right, "weight": jnp.sum(batch[-1])}
    return jax.tree.map(jnp.add, total, new)


def empty_total(params: dict) -> dict:
    """The total of `add_gradients` before the first batch."""
    return empty_sums(params, ("loss", "accuracy"))


# Held-out problems.


def measure(
    model: LoadedModel,
    format: Format,
    problems: int,
    workers: Sequence[int],
    seed: int = 0,
    budgets: Sequence[int] = BUDGETS,
) -> list[Point]:
    """Greedy accuracy by number of workers and budget, on problems that no lesson draws, in the
    combined layout."""
    task = load_task("sums", samples=problems)
    runs = run_specs(
        task.problems,
        method="workers",
        workers=workers,
        budgets=budgets,
        seeds=1,
        seed=seed,
        answer_tokens=8 * QUESTIONS,
        sampler=Sampler(temperature=0.0),
        more={"format": format, "step_tokens": 128},
    )
    scores = []
    # answers are compared to the letter, so it never starts
    scorer = Scorer(task.problems, Mathematician())
    for piece in tqdm(runs, "held out", file=sys.stderr, leave=False, disable=None):
        scores += scorer.score(solve(model, piece))
    return points(scores)


def summary(found: Sequence[Point]) -> dict[str, Any]:
    """The reported facts of a measurement."""
    last = max(BUDGETS)
    return {
        "passes_to_90": {str(count): passes for count, passes in passes_to(found, GOAL).items()},
        "accuracy": {str(point.workers): point.accuracy for point in found if point.budget == last},
    }


def plot(history: Mapping[str, Sequence[Any]], path: Path) -> None:
    """The loss of every step, and passes until 90% of held-out answers are right."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    left.plot(np.arange(1, len(history["loss"]) + 1), history["loss"], linewidth=0.8)
    left.set(xlabel="step", ylabel="loss of sampled tokens, nats", yscale="log")
    measured: dict[str, list[tuple[int, float]]] = {}
    for at, found in history["held_out"]:
        for count, passes in found["passes_to_90"].items():
            measured.setdefault(count, []).append((at, np.nan if passes is None else passes))
    for count, line in measured.items():
        right.plot(
            *zip(*line, strict=True),
            marker="o",
            markersize=4,
            label=f"{count} worker{'s' * (count != '1')}",
        )
    right.set(xlabel="step", ylabel=f"passes until {GOAL:.0%} right", ylim=(0, None))
    if measured:
        right.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


# The run.


@dataclasses.dataclass
class Run(SavedRun):
    """The state of a run, as it is saved.

    Attributes:
      group, used: the group of batches that comes next, and how many of it were used.
      history: the loss of each step, and (step, summary) of each measurement.
    """

    group: int = 0
    used: int = 0
    history: dict[str, list] = dataclasses.field(
        default_factory=lambda: {"loss": [], "held_out": []}
    )


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Trains, saves, measures and exports; returns the facts that are reported at the end."""
    settings = {name: getattr(args, name) for name in _KEPT}
    if has_checkpoints(args.run_dir / "saves") and not args.resume:
        raise ValueError(
            f"{args.run_dir} has a run already; add --resume to go on with it, or give another "
            "--run-dir"
        )
    folder = start_folder(args)
    model = load(folder, dtype="float32")
    format, optimizer = teaching_format(model), optimizer_of(args)
    params = jax.tree.map(jnp.copy, model.named_params)  # a step donates them
    run = Run({"params": params, "opt": optimizer.init(params)})
    if args.resume and has_checkpoints(args.run_dir / "saves"):
        run.take_over(args.run_dir / "saves", settings)
    size = sum(p.size for p in jax.tree.leaves(model.params))
    tqdm.write(f"{size / 1e6:.2f} M parameters, steps {run.step} to {args.steps}", file=sys.stderr)

    saves = CheckpointStore(args.run_dir / "saves")
    learned, seconds = learn(run, model, format, optimizer, folder, saves, settings, args)
    if args.evaluate_every:
        _measure(run, model, format, args)
    run.save(saves, settings, wait=True)
    saves.close()
    export_like(
        run.state["params"],
        folder,
        DTYPES[args.dtype],
        dataclasses.asdict(format),
        args.context,
        args.out,
    )
    plot(run.history, args.run_dir / "training.png")
    held_out = run.history["held_out"][-1][1] if run.history["held_out"] else {}
    return {
        "steps": run.step,
        "loss": run.history["loss"][-1] if run.history["loss"] else None,
        "parameters": size,
        "tokens_per_second": learned / seconds,
        "seconds": seconds,
        **held_out,
        "out": str(args.out),
    }


def learn(
    run: Run,
    model: LoadedModel,
    format: Format,
    optimizer: optax.GradientTransformation,
    folder: Path,
    saves: CheckpointStore,
    settings: Mapping[str, Any],
    args: argparse.Namespace,
) -> tuple[int, float]:
    """Makes the steps that are left, as far as the minutes allow; saves and measures meanwhile.

    Returns:
      The number of tokens fed, and seconds.
    """
    start = saved = time.monotonic()
    total, learned = empty_total(run.state["params"]), 0
    dtype, shape = DTYPES[args.dtype], Shape(tokens=args.tokens)
    lessons = stream(folder, format, args.seed, shape, first=run.group, processes=args.processes)
    progress = tqdm(
        total=args.steps,
        initial=run.step,
        unit="step",
        file=sys.stderr,
        mininterval=args.log_seconds,
    )
    with lessons as groups, progress as bar:
        batches = _batches(run, groups)
        while run.step < args.steps and (
            args.minutes is None or time.monotonic() - start < 60 * args.minutes
        ):
            for batch in itertools.islice(batches, args.accumulate):
                total = add_gradients(
                    total, run.state["params"], batch, module=model.module, dtype=dtype
                )
                learned += int(np.count_nonzero(batch[0].seen.any(-1)))
            run.state, total, found = update(run.state, total, optimizer=optimizer)
            run.step += 1
            run.history["loss"].append(round(float(found["loss"]), 6))
            rate = learned / (time.monotonic() - start)
            bar.set_postfix_str(
                f"loss {np.mean(run.history['loss'][-50:]):.4f}, {float(found['accuracy']):.1%} "
                f"right, {rate:.0f} tokens/s" + _said(run),
                refresh=False,
            )
            bar.update()
            if run.step < args.steps and args.evaluate_every and not run.step % args.evaluate_every:
                _measure(run, model, format, args)
            if time.monotonic() - saved > args.save_seconds:
                run.save(saves, settings)
                saved = time.monotonic()
    return learned, time.monotonic() - start


def _batches(run: Run, groups: Iterator[tuple[int, list[Batch]]]) -> Iterator[Batch]:
    """The batches that a run has not used yet; notes which it has."""
    for number, group in groups:
        for place in range(run.used, len(group)):
            run.group, run.used = (number, place + 1) if place + 1 < len(group) else (number + 1, 0)
            yield group[place]


def _measure(run: Run, model: LoadedModel, format: Format, args: argparse.Namespace) -> None:
    params = jax.tree.map(lambda p: p.astype(DTYPES[args.dtype]), run.state["params"])
    found = measure(dataclasses.replace(model, params=params), format, args.problems, args.workers)
    run.history["held_out"].append([run.step, summary(found)])
    tqdm.write(f"step {run.step}{_said(run)}", file=sys.stderr)
    plot(run.history, args.run_dir / "training.png")


def _said(run: Run) -> str:
    if not run.history["held_out"]:
        return ""
    passes = run.history["held_out"][-1][1]["passes_to_90"]
    return ", passes to 90%: " + ", ".join(
        f"{count}: {'-' if value is None else f'{value:.0f}'}" for count, value in passes.items()
    )


def main(argv: Sequence[str] | None = None) -> None:
    run_command(*parse(argv), train)


if __name__ == "__main__":
    main()
