"""Trains a model by reward: GRPO (DeepSeekMath, arXiv:2402.03300) with groups of samples from the
engine, whose weights follow those that are trained.

    python -m scripts.train.grpo --run-dir runs/grpo --out runs/grpo-model             # one worker, dependent questions
    python -m scripts.train.grpo --resume --run-dir runs/grpo --out runs/grpo-model    # goes on after an interruption
    python -m scripts.train.grpo --workers 4 --samples 8 --run-dir runs/team --out runs/team-model

The model goes on from the one that ships. A step draws prompts, samples a group of each, rewards the
samples by a checker (or by --reward), and makes an update by `policy_gradient`. Groups whose rewards
are all equal teach nothing and are dropped; both are counted, as are samples whose reward could not
be computed. The best model by held-out problems is kept in --out. Prompts and the seeds of samples
follow from the seed and the number of the step alone, so that a run that was interrupted goes on as
it would have; to rounding, since the rows of an engine's passes are those that have arrived.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jaxshare.models import LoadedModel, load
from jaxshare.models.sources import local_folder
from jaxshare.serving import Format
from jaxshare.serving.checkpoints import CheckpointStore, has_checkpoints
from jaxshare.serving.engine import Engine
from scripts.train.embedded_files import export_like
from scripts.train.lessons import Shape
from scripts.train.options import DTYPES
from scripts.train.reward import policy_gradient
from scripts.train.reward.options import parse
from scripts.train.reward.policy_gradient import (
    LearningBatch,
    Objective,
    add_gradients,
    batches,
    score,
)
from scripts.train.reward.practice import AloneTask, Practice, RewardTask, TeamTask
from scripts.train.training import SavedRun, empty_sums, optimizer_of, run_command, update

_KEPT = (
    "model",
    "workers",
    "prompts",
    "samples",
    "learn_from",
    "updates",
    "optimizer",
    "learning_rate",
    "variant",
    "clip_low",
    "clip_high",
    "kl",
    "temperature",
    "max_new_tokens",
    "budget",
    "plain",
    "reward",
    "dtype",
    "seed",
)
"""Settings that a run cannot change on its way."""
_WARMUP = 5
"""Updates in which the learning rate rises: the model is trained already."""


@dataclasses.dataclass
class RewardRun(SavedRun):
    """The state of a run, as it is saved.

    Attributes:
      best: the score of the model that was kept.
      seconds: CPU time of the process so far, without starting and compiling.
      failures: samples that could not be rewarded.
      history: of each step the mean reward, the groups dropped, the shares of tokens that were
        clipped, the divergences, and CPU seconds; and [step, CPU seconds, numbers] of each measurement.
    """

    best: float = -1.0
    seconds: float = 0.0
    failures: int = 0
    history: dict[str, list] = dataclasses.field(
        default_factory=lambda: {
            name: []
            for name in (
                "reward",
                "dropped",
                "clipped",
                "drift",
                "divergence",
                "seconds",
                "held_out",
            )
        }
    )


def plot(history: Mapping[str, Sequence[Any]], path: Path) -> None:
    """The mean reward of every step, and the held-out numbers by CPU time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    left.plot(np.arange(1, len(history["reward"]) + 1), history["reward"], linewidth=0.8)
    left.set(xlabel="step", ylabel="mean reward of samples")
    measured: dict[str, list[tuple[float, float]]] = {}
    for _, seconds, found in history["held_out"]:
        for name, value in found.items():
            if name != "score":
                measured.setdefault(name, []).append((seconds / 60, value))
    for name, line in measured.items():
        right.plot(*zip(*line, strict=True), marker="o", markersize=3, label=name)
    right.set(xlabel="CPU minutes", ylabel="held-out problems, greedy")
    if measured:
        right.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Trains, saves, measures and exports; returns the facts that are reported at the end."""
    settings = {name: getattr(args, name) for name in _KEPT}
    if has_checkpoints(args.run_dir / "saves") and not args.resume:
        raise ValueError(
            f"{args.run_dir} has a run already; add --resume to go on with it, or give another "
            "--run-dir"
        )
    folder = local_folder(args.model)
    model = load(folder, dtype=DTYPES[args.dtype])
    optimizer = optimizer_of(args, args.updates, _WARMUP)
    params = jax.tree.map(lambda p: jnp.array(p, jnp.float32), model.named_params)
    run = RewardRun({"params": params, "opt": optimizer.init(params)})
    if args.resume and has_checkpoints(args.run_dir / "saves"):
        run.take_over(args.run_dir / "saves", settings)
    with Engine(model, max_rows=args.rows) as engine:
        trainer = _Trainer(run, model, engine, optimizer, folder, settings, args)
        trainer.update_engine()
        return trainer.run_steps()


class _Trainer:
    """A run with all that its steps need."""

    def __init__(
        self,
        run: RewardRun,
        model: LoadedModel,
        engine: Engine,
        optimizer: Any,
        folder: Path,
        settings: Mapping[str, Any],
        args: argparse.Namespace,
    ):
        self._run, self._engine, self._optimizer = run, engine, optimizer
        self._module, self._folder, self._settings, self._args = (
            model.module,
            folder,
            settings,
            args,
        )
        self._reference = model.named_params if args.kl else None
        self._objective = Objective(
            args.clip_low, args.clip_high, args.kl, args.temperature, DTYPES[args.dtype]
        )
        self._shape = Shape(args.tokens, args.tokens // 32, args.tokens // 32, args.tokens // 8)
        self._format = Format.of(model)
        kind = AloneTask if args.workers == 1 else TeamTask
        self._task: RewardTask = kind(engine, self._format, self._shape, args)
        self._total = empty_sums(run.state["params"], policy_gradient.NAMES)
        self._version = run.step
        self._failed: set[str] = set()

    def run_steps(self) -> dict[str, Any]:
        """Makes the steps that are left, as far as the minutes allow; returns the facts."""
        run, args = self._run, self._args
        saves = CheckpointStore(args.run_dir / "saves")
        start = saved = time.monotonic()
        if args.evaluate_every and not run.history["held_out"]:
            self._measure()
        before, cpu = run.seconds, time.process_time()
        bar = tqdm(
            total=args.steps,
            initial=run.step,
            unit="step",
            file=sys.stderr,
            mininterval=args.log_seconds,
        )
        with bar:
            while run.step < args.steps and (
                args.minutes is None or time.monotonic() - start < 60 * args.minutes
            ):
                self._step()
                run.seconds = before + time.process_time() - cpu
                run.history["seconds"].append(round(run.seconds, 2))
                bar.set_postfix_str(self._said(), refresh=False)
                bar.update()
                last = run.step == args.steps
                if args.evaluate_every and (last or not run.step % args.evaluate_every):
                    self._measure()
                if time.monotonic() - saved > args.save_seconds:
                    run.save(saves, self._settings)
                    saved = time.monotonic()
        run.save(saves, self._settings, wait=True)
        saves.close()
        if not args.evaluate_every:
            self._export()
        plot(run.history, args.run_dir / "training.png")
        return self._facts()

    def update_engine(self) -> None:
        """Gives the engine the parameters as they are."""
        params = jax.tree.map(
            lambda p: p.astype(DTYPES[self._args.dtype]), self._run.state["params"]
        )
        self._version += 1
        self._engine.update_params(params, version=self._version)

    def _step(self) -> None:
        run, history = self._run, self._run.history
        practice = self._task.practise(run.step)
        if practice.failures.count:
            self._tell_failures(practice)
        learned = batches(practice.episodes, self._shape)
        if not practice.scored:
            learned = [(self._scored(each), samples) for each, samples in learned]
        found: dict[str, Any] = dict.fromkeys(policy_gradient.NAMES, 0.0)
        for _ in range(self._args.updates if learned else 0):
            for each, samples in learned:
                self._total = add_gradients(
                    self._total,
                    run.state["params"],
                    self._reference,
                    each,
                    jnp.float32(samples),
                    module=self._module,
                    objective=self._objective,
                )
            run.state, self._total, found = update(
                run.state, self._total, optimizer=self._optimizer
            )
        if learned:
            self.update_engine()
        tokens = max(float(found["tokens"]), 1e-9)
        for name in ("clipped", "drift", "divergence"):
            history[name].append(round(abs(float(found[name])) / tokens, 6))
        rewards = practice.rewards[np.isfinite(practice.rewards)]
        history["reward"].append(round(float(rewards.mean()), 4) if rewards.size else None)
        history["dropped"].append(practice.dropped)
        run.failures += practice.failures.count
        run.step += 1

    def _scored(self, learned: LearningBatch) -> LearningBatch:
        """A batch with the log-probabilities under the present policy, which has sampled it."""
        found = score(self._run.state["params"], learned, self._module, self._objective)
        return (*learned[:5], np.asarray(found), learned[6])

    def _tell_failures(self, practice: Practice) -> None:
        """Names each error once in a run, and stops where nothing could be rewarded."""
        failures = practice.failures
        if failures.count == practice.rewards.size:
            raise ValueError(f"no sample could be rewarded: {failures}; mend the reward function")
        if new := failures.named.keys() - self._failed:
            self._failed |= new
            tqdm.write(f"warning: {failures.count} samples are left out: {failures}", sys.stderr)

    def _measure(self) -> None:
        run = self._run
        found = {name: round(value, 4) for name, value in self._task.measure().items()}
        run.history["held_out"].append([run.step, round(run.seconds, 2), found])
        if found["score"] > run.best:
            run.best = found["score"]
            self._export()
        tqdm.write(f"step {run.step}: {self._said()}", sys.stderr)
        plot(run.history, self._args.run_dir / "training.png")

    def _export(self) -> None:
        export_like(
            self._run.state["params"],
            self._folder,
            DTYPES[self._args.dtype],
            dataclasses.asdict(self._format),
            None,
            self._args.out,
        )

    def _said(self) -> str:
        history = self._run.history
        rewards = [each for each in history["reward"][-10:] if each is not None]
        parts = [f"reward {np.mean(rewards):.3f}"] if rewards else []
        if history["dropped"]:
            parts.append(f"{history['dropped'][-1]} of {self._args.prompts} groups dropped")
        if history["held_out"]:
            numbers = history["held_out"][-1][2].items()
            parts += [f"{name} {value:.3g}" for name, value in numbers if name != "score"]
        return ", ".join(parts)

    def _facts(self) -> dict[str, Any]:
        run, held = self._run, self._run.history["held_out"]
        best = max(held, key=lambda each: each[2]["score"]) if held else None
        return {
            "steps": run.step,
            "cpu_seconds": round(run.seconds, 1),
            "samples": run.step * self._args.prompts * self._args.samples,
            "dropped_groups": sum(run.history["dropped"]),
            "samples_left_out": run.failures,
            "held_out_first": held[0][2] if held else None,
            "held_out_best": best[2] if best else None,
            "best_step": best[0] if best else None,
            "out": str(self._args.out),
        }


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    run_command(*parse(argv), train)


if __name__ == "__main__":
    main()
