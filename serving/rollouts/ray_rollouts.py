"""Rollouts on replicas of a model on a Ray cluster, each with an engine of its own.

    with RayRollouts("Qwen/Qwen3-8B", address="auto") as replicas:
        for step in range(steps):
            batch = replicas.rollout(prompts, n=16, seed=step)
            params = train(params, batch)
            replicas.update_params(params)

Weights go to the cluster's object store once; each replica takes them before its next samples. One
that is lost is replaced, and the one in its place takes the present weights, too: its samples are
those that the other would have made.
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Hashable, Iterator
from typing import Any, Self, Unpack

import jax
import numpy as np

from jaxshare.argument_checks import INT32_MAX, as_integer
from jaxshare.models import LoadedModel
from jaxshare.models.tensor_names import expected_tensors
from jaxshare.serving.branches.prompt_tree import Prompts
from jaxshare.serving.cluster.model_spec import ModelSpec
from jaxshare.serving.cluster.ray_cluster import STORE_BYTES, import_ray
from jaxshare.serving.cluster.ray_pool import RayPool
from jaxshare.serving.cluster.ray_replica import Work
from jaxshare.serving.engine import Engine
from jaxshare.serving.rollouts.batch import RolloutBatch
from jaxshare.serving.rollouts.call import RolloutCall, SampleOptions


@dataclasses.dataclass(frozen=True)
class _RolloutTask:
    """A part of a rollout, or the check of new weights.

    Attributes:
      name: for messages.
      call: what to sample; None only takes the weights.
      weights: a reference to them in the object store; None for those of the checkpoint.
      version: of the weights.
    """

    name: str
    call: RolloutCall | None
    weights: Any
    version: int

    def __str__(self) -> str:
        return self.name


class RayRollouts:
    """Samples prompts on replicas of a model; a context manager.

    Attributes:
      model: without parameters: its config and tokenizer.
      replicas: the number of replicas; known once entered.
      params_version: of the weights, 0 for the checkpoint's.
    """

    def __init__(
        self,
        model: str,
        *,
        address: str = "local",
        replicas: int | None = None,
        dtype: str | None = None,
        tensor: int = 1,
        **engine: Any,
    ):
        """Reads the model's config.

        Args:
          model: a folder that all nodes have, a hub id, or "embedded".
          address, replicas: of the cluster, and how many; see `RayPool`.
          dtype, tensor: see `load`; the devices of a replica.
          engine: options of each `Engine`, such as max_rows and kv_bytes.

        Raises:
          ValueError: see `RayPool`; FileNotFoundError, ConfigError: see `load`.
        """
        spec = ModelSpec(model, dtype, as_integer("tensor", tensor, 1), 1).here()
        self.model, self.params_version = spec.outline(), 0
        # The weights that replicas read still, and those that come.
        room = STORE_BYTES + 2 * _weight_bytes(self.model)
        self._pool = RayPool(address, replicas=replicas, devices=tensor, store_bytes=room)
        self._make = functools.partial(_make, spec, engine)
        self._weights: Any = None

    @property
    def replicas(self) -> int:
        return self._pool.replicas

    def __enter__(self) -> Self:
        """Connects, and waits for the first replica.

        Raises:
          ValueError: see `RayPool`; or a node cannot load the model, or make the engine.
        """
        self._pool.__enter__()
        try:
            self._pool.start(self._make)
        except BaseException:
            self._pool.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.__exit__()

    def rollout(
        self,
        prompts: Prompts,
        *,
        length: int | None = None,
        multiple_of: int = 64,
        pad_token: int = 0,
        **options: Unpack[SampleOptions],
    ) -> RolloutBatch:
        """Samples n completions of each prompt, and packs them; see `rollout`.

        Each replica has neighbouring prompts, with all of their samples. In float32 these are the
        same on any number of replicas.

        Raises:
          ValueError: see `rollout`; or prompts that have ended several replicas.
        """
        call = RolloutCall.of(self.model, prompts, **options)
        parts = np.array_split(np.arange(len(call.prompts)), self.replicas)
        tasks = [
            _RolloutTask(
                f"the rollout of prompts {part[0]} to {part[-1]}",
                call.part([call.prompts[i] for i in part]),
                self._weights,
                self.params_version,
            )
            for part in parts
            if len(part)
        ]
        found = itertools.chain.from_iterable(result.value for result in self._pool.run(tasks))
        sizes = {"length": length, "multiple_of": multiple_of, "pad_token": pad_token}
        return call.packed(self.model, found, **sizes)

    def update_params(self, params: Any, *, version: int | None = None) -> int:
        """Exchanges the weights of all replicas, before the next samples.

        One replica takes them now, and so checks them.

        Args:
          params: see `Engine.update_params`; they are copied to the object store.
          version: of the weights, larger than the last one; by default the next one.

        Returns:
          The version.

        Raises:
          ParamsError: see `Engine.update_params`; the weights stay as they were.
          ValueError: a version that is not larger.
        """
        least = self.params_version + 1
        number = least if version is None else as_integer("version", version, least, INT32_MAX)
        weights = import_ray().put(jax.device_get(params))
        for _ in self._pool.run(
            [_RolloutTask(f"version {number} of the weights", None, weights, number)]
        ):
            pass
        self._weights, self.params_version = weights, number
        return number


def _weight_bytes(model: LoadedModel) -> int:
    """The bytes of the parameters in float32, the largest dtype that they can have."""
    return 4 * sum(math.prod(each.shape) for each in expected_tensors(model.config).values())


def _make(spec: ModelSpec, options: dict[str, Any]) -> Work:
    """The work of a replica, which has an engine."""
    return functools.partial(_work, Engine(spec.load(), **options))


def _work(
    engine: Engine, task: _RolloutTask, arrived: Collection[Hashable]
) -> Iterator[tuple[Hashable, Any]]:
    """Samples the prompts of a task, and yields the samples of each by its number."""
    if task.version > engine.params_version:
        engine.update_params(import_ray().get(task.weights), version=task.version)
    if task.call is None:
        return
    left = [prompt for prompt in task.call.prompts if prompt.number not in arrived]
    counts = {prompt.number: prompt.n for prompt in left}
    samples = collections.defaultdict(list)
    for each in task.call.part(left).complete(engine):
        samples[each.prompt].append(each)
        if len(samples[each.prompt]) == counts[each.prompt]:
            yield each.prompt, samples.pop(each.prompt)
