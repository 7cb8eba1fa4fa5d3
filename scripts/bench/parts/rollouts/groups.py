"""Samples of one or several data groups, each with an engine and one core, in a process of its own.

    python -m scripts.bench.parts.rollouts.groups --groups 2 [--ray] [--tiny]      # one JSON object

One group has one core, and two have two: on the same cores, several groups of one machine divide
what one of them has alone. With `--ray` each group is a replica on a Ray cluster of this machine.
`scripts.bench.rollouts --groups 2` runs this for one group and for two.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scripts.bench.lib import ROOT, cores

_PROMPTS, _SAMPLES, _ROUNDS = 4, 8, 2
"""Of each group; turns, of which the fastest counts."""


def seconds_of(groups: int, tiny: bool, ray: bool = False) -> dict[str, Any]:
    """Runs this program, and returns what it printed.

    Raises:
      RuntimeError: it failed; the message is its last line.
    """
    module = "scripts.bench.parts.rollouts.groups"
    command = [sys.executable, "-m", module, "--groups", str(groups)]
    command += ["--tiny"] * tiny + ["--ray"] * ray
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"it ended with code {done.returncode}")
    return json.loads(done.stdout)


def scaling(groups: int, tiny: bool, ray: bool = False) -> dict[str, Any]:
    """The samples a second of one group and of several, where each can have a core.

    Returns:
      `groups`, `cores`, and `efficiency`: the samples a second of all groups by those of one, and by
      their number; None where there are too few cores, and `why` says so.
    """
    found: dict[str, Any] = {"groups": groups, "cores": cores(), "efficiency": None, "why": None}
    if cores() < groups:
        why = f"{groups} groups take a core each, and there are {cores()}"
        return found | {"why": why}
    one, several = (seconds_of(number, tiny, ray) for number in (1, groups))
    rates = [each["samples"] / min(each["seconds"]) for each in (one, several)]
    return found | {
        "samples_per_second": rates,
        "update_seconds": [min(each["update_seconds"]) for each in (one, several)],
        "efficiency": rates[1] / rates[0] / groups,
    }


def measure(groups: int, tiny: bool) -> dict[str, Any]:
    """Samples with engines of `groups` data groups, in a process that has as many cores."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:groups])  # before XLA counts them
    import jax

    jax.config.update("jax_num_cpu_devices", groups)
    import jax.numpy as jnp

    from jaxshare.serving.engine import Engine
    from jaxshare.serving.rollouts import rollout, update_engines
    from jaxshare.sharding import make_mesh
    from scripts.bench.parts.engine.random_model import forking_model
    from scripts.bench.rollouts import SMALL, WIDER

    model = forking_model(0, dtype="float32", model=SMALL if tiny else WIDER)
    parts = [model] if groups == 1 else model.on(make_mesh(data=groups)).replicas()
    engines = [Engine(part, max_rows=_SAMPLES * _PROMPTS) for part in parts]
    weights = jax.tree.map(jnp.copy, model.params)
    found = _turns(
        groups,
        tiny,
        lambda: update_engines(engines, weights),
        lambda prompts, **how: rollout(engines, prompts, **how),
    )
    for engine in engines:
        engine.shutdown()
    return found


def measure_on_ray(groups: int, tiny: bool) -> dict[str, Any]:
    """Samples with as many replicas on a Ray cluster that is started here, each on one core."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    from jaxshare.serving.rollouts import RayRollouts
    from scripts.bench.lib import write_checkpoint
    from scripts.bench.parts.engine.random_model import forking_model
    from scripts.bench.rollouts import SMALL, WIDER

    shape = SMALL if tiny else WIDER
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), shape, 0)
        weights = jax.device_get(forking_model(0, dtype="float32", model=shape).params)
        with RayRollouts(
            folder, replicas=groups, dtype="float32", max_rows=_SAMPLES * _PROMPTS
        ) as replicas:
            return _turns(groups, tiny, lambda: replicas.update_params(weights), replicas.rollout)


def _turns(
    groups: int, tiny: bool, update: Callable[[], Any], sample: Callable[..., Any]
) -> dict[str, Any]:
    import numpy as np

    from jaxshare import Sampler

    length, new = (16, 4) if tiny else (512, 64)
    prompts = np.random.default_rng(0).integers(3, 1000, (_PROMPTS * groups, length)).tolist()
    taken, updates = [], []
    for turn in range(_ROUNDS + 1):
        begin = time.perf_counter()
        update()  # what an earlier turn has cached must not help
        updates.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        batch = sample(prompts, n=_SAMPLES, sampler=Sampler(1.0), max_new_tokens=new, seed=turn)
        taken.append(time.perf_counter() - begin)
    # The first turn compiles.
    return {"samples": len(batch.texts), "seconds": taken[1:], "update_seconds": updates[1:]}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--groups", type=int, required=True, help="data groups, and cores")
    parser.add_argument("--ray", action="store_true", help="replicas on a Ray cluster")
    parser.add_argument("--tiny", action="store_true", help="a small model and a few tokens")
    given = parser.parse_args(arguments)
    run = measure_on_ray if given.ray else measure
    print(json.dumps(run(given.groups, given.tiny)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
