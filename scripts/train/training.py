"""The common parts of the training scripts: the optimizer, one update by gradients that were added
up, runs that are saved, and memory kept between steps."""

import argparse
import ctypes
import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from jaxshare.serving.checkpoints import CheckpointStore, SavedCheckpoint, leaves

WARMUP, DECAY_FROM, ADAM_SHARE = 50, 0.5, 0.15
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8  # malloc.h


def schedule(steps: int, peak: float, warmup: int = WARMUP) -> optax.Schedule:
    """A short rise, constant, then a fall to zero from DECAY_FROM of the steps on."""
    return lambda step: (
        peak
        * jnp.minimum(jnp.minimum(1.0, (step + 1) / warmup), (1 - step / steps) / (1 - DECAY_FROM))
    )


def make_optimizer(steps: int, peak: float, warmup: int = WARMUP) -> optax.GradientTransformation:
    """Muon for the layers' matrices, Adam for all others. The rate is constant, then falls to zero
    from DECAY_FROM on: that depends on step / steps, so that an interrupted run may be resumed with
    another number of steps."""

    kernel = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)  # [out, in]

    def dimensions(params: dict) -> dict:
        return jax.tree_util.tree_map_with_path(
            lambda path, p: (
                kernel if p.ndim == 2 and "layers" in jax.tree_util.keystr(path) else None
            ),
            params,
        )

    muon = optax.contrib.muon(
        schedule(steps, peak, warmup),
        adam_learning_rate=schedule(steps, ADAM_SHARE * peak, warmup),
        adam_b2=0.98,
        muon_weight_dimension_numbers=dimensions,
    )
    return optax.chain(optax.clip_by_global_norm(1.0), muon)


def optimizer_of(
    args: argparse.Namespace, updates: int = 1, warmup: int = WARMUP
) -> optax.GradientTransformation:
    """The optimizer of a command line with --optimizer, --steps and --learning-rate.

    Args:
      args: of the command line.
      updates: of a step.
      warmup: updates in which the rate rises.
    """
    steps = args.steps * updates
    if args.optimizer == "muon":
        return make_optimizer(steps, args.learning_rate, warmup)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule(steps, args.learning_rate, warmup), b2=0.98, weight_decay=0.01),
    )


def empty_sums(params: dict, names: Iterable[str]) -> dict:
    """Sums over batches before the first one: the gradients, the weight, and the named numbers."""
    return {
        "gradients": jax.tree.map(jnp.zeros_like, params),
        **{name: jnp.zeros(()) for name in (*names, "weight")},
    }


@functools.partial(jax.jit, static_argnames=("optimizer",), donate_argnames=("state", "total"))
def update(state: dict, total: dict, *, optimizer: Any) -> tuple[dict, dict, dict[str, Array]]:
    """One step by the mean over all that was added up.

    Args:
      state: {"params": ..., "opt": ...}.
      total: as `empty_sums` has it.
      optimizer: an optax.GradientTransformation.

    Returns:
      The state, an empty total, and the named numbers divided by the weight.
    """
    empty = jax.tree.map(jnp.zeros_like, total)
    weight = jnp.maximum(total.pop("weight"), 1.0)
    means = jax.tree.map(lambda each: each / weight, total)
    updates, opt = optimizer.update(means.pop("gradients"), state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, empty, means


@dataclasses.dataclass
class SavedRun:
    """The state of a run, as it is saved; scripts add fields that JSON has, with defaults.

    Attributes:
      state: parameters and what the optimizer keeps.
      step: how many were made.
    """

    state: dict
    step: int = 0

    def save(
        self, saves: CheckpointStore, settings: Mapping[str, Any], *, wait: bool = False
    ) -> None:
        """Writes a checkpoint; see `CheckpointStore.save`."""
        facts = {name: getattr(self, name) for name in self._facts()}
        saves.save(leaves(self.state), {"settings": dict(settings), **facts}, wait=wait)

    def take_over(self, folder: Path, settings: Mapping[str, Any]) -> None:
        """Becomes the run that was saved.

        Raises:
          ValueError: it was made with other settings.
          SaveError: it cannot be read.
        """
        with SavedCheckpoint(folder) as saved:
            facts = saved.metadata
            if other := [name for name in settings if settings[name] != facts["settings"][name]]:
                raise ValueError(
                    f"the run in {folder} was made with {other[0]}={facts['settings'][other[0]]}, "
                    f"not {settings[other[0]]}; resume it with the same, or give another --run-dir"
                )
            here = leaves(self.state)
            found = saved.arrays(
                {name: np.zeros(array.shape, array.dtype) for name, array in here.items()}
            )
            self.state = jax.tree.unflatten(
                jax.tree.structure(self.state), [jnp.asarray(found[name]) for name in here]
            )
            for name in self._facts():
                setattr(self, name, facts[name])

    def _facts(self) -> list[str]:
        return [field.name for field in dataclasses.fields(self) if field.name != "state"]


def keep_memory() -> None:
    """Makes glibc keep freed memory: XLA allocates its temporaries anew every step, and page faults
    took up to half of the time."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        for parameter, value in (
            (_M_ARENA_MAX, 1),
            (_M_MMAP_THRESHOLD, 2**31 - 1),
            (_M_TRIM_THRESHOLD, 2**31 - 1),
            (_M_TOP_PAD, 2**29),
        ):
            libc.mallopt(parameter, value)


def run_command(
    args: argparse.Namespace,
    parser: argparse.ArgumentParser,
    train: Callable[[argparse.Namespace], Mapping[str, Any]],
) -> None:
    """Trains as a command line says, and prints the result; ends the program where it cannot."""
    keep_memory()
    try:
        result = train(args)
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))
    print(
        json.dumps(result)
        if args.json
        else "\n".join(f"{name}: {value}" for name, value in result.items())
    )
