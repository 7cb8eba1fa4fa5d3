"""One forward pass of workers over a random cache, and its parts."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxshare import DecodeState, KVCache, Layout, decode
from jaxshare.attention.api import block_attention
from jaxshare.attention.plan import Plan, make_plan
from jaxshare.models import LoadedModel
from scripts.bench.lib import cores
from scripts.bench.parts.decode import sides as decode_sides
from scripts.bench.peer import Worker

MODEL = decode_sides.MODEL | {"max_position_embeddings": 32768}


CURRENT, STEP_ROOM = 64, 512
"""Tokens of each worker's current step when a turn begins, and room for them as `Workers` gives
it."""


# Of each side in a turn: a plan is short and is repeated many times; one pass of theirs can take
# longer than a turn of the others.
PLANS, ATTENTIONS, THEIR_PASSES = 256, 16, 2


def combined(workers: int) -> Layout:
    """Block 0 is the history, which all see first; then the others' current steps, then the
    worker's own."""
    steps = range(1, workers + 1)
    return Layout.from_blocks([[0, *(b for b in steps if b != own), own] for own in steps])


def random_cache(model: LoadedModel, workers: int, history: int, seed: int) -> KVCache:
    """A history that fills its block, and for each worker a current step of CURRENT tokens."""
    cache = KVCache.create(model.config, (history, *[STEP_ROOM] * workers))
    key = jax.random.key(seed)

    def random(arenas: tuple[Array, ...], side: int) -> tuple[Array, ...]:
        return tuple(
            jax.random.normal(jax.random.fold_in(key, 2 * i + side), a.shape, a.dtype)
            for i, a in enumerate(arenas)
        )

    lengths = jnp.asarray([history, *[CURRENT] * workers], jnp.int32)
    return dataclasses.replace(
        cache, keys=random(cache.keys, 0), values=random(cache.values, 1), lengths=lengths
    )


class Run:
    """jaxshare's side for one number of workers and one length of history: the decode loop, and two
    of its parts alone.

    The parts are timed in loops of their own inside jit, as the decode loop runs them.

    Args:
      cache: as `random_cache` makes it, which is the default.
      attends: time the attention alone, which is that of a model whose layers all see all keys.
    """

    def __init__(
        self,
        model: LoadedModel,
        workers: int,
        history: int,
        steps: int,
        seed: int,
        *,
        cache: KVCache | None = None,
        attends: bool = True,
    ):
        self.model, self.workers, self.steps, self.seed = model, workers, steps, seed
        self.attends = attends
        cache = random_cache(model, workers, history, seed) if cache is None else cache
        self.lengths = np.asarray(cache.lengths)
        self.state = DecodeState.create(
            cache,
            model.adapted(combined(workers)),
            [[1]] * workers,
            vocab_size=model.config.vocab_size,
            max_new_tokens=steps + 2,
            max_width=1,
        )

    def compile(self) -> None:
        loop = jax.jit(
            lambda params, state: decode(self.model.module, params, state, passes=self.steps),
            donate_argnums=1,
        )
        self.loop = loop.lower(self.model.variables, self.state).compile()
        self.plans = jax.jit(plan_many_times).lower(self.state.cache, self.state.layout).compile()
        if not self.attends:
            return
        config = self.model.config
        self.q = jax.random.normal(
            jax.random.key(self.seed),
            (self.workers, 1, config.num_heads, config.head_dim),
            self.model.dtype,
        )
        plan = self.plans(self.state.cache, self.state.layout)
        self.attentions = jax.jit(attend_many_times).lower(self.q, self.state.cache, plan).compile()

    def step(self) -> float:
        """Seconds of `steps` passes of all workers. Every turn begins with current steps of the
        same length."""
        cache = dataclasses.replace(self.state.cache, lengths=jnp.asarray(self.lengths))
        state = jax.block_until_ready(
            dataclasses.replace(
                self.state, cache=cache, num_sampled=jnp.zeros(self.workers, jnp.int32)
            )
        )
        begin = time.perf_counter()
        self.state = jax.block_until_ready(self.loop(self.model.variables, state))
        return time.perf_counter() - begin

    def plan(self) -> float:
        """Seconds of PLANS plans."""
        begin = time.perf_counter()
        jax.block_until_ready(self.plans(self.state.cache, self.state.layout))
        return time.perf_counter() - begin

    def attend(self) -> float:
        """Seconds of the attention of all layers, ATTENTIONS times."""
        plan = jax.block_until_ready(self.plans(self.state.cache, self.state.layout))
        begin = time.perf_counter()
        jax.block_until_ready(self.attentions(self.q, self.state.cache, plan))
        return time.perf_counter() - begin

    def sides(self) -> dict[str, Callable[[], float]]:
        """The measured sides, each to give its seconds for one pass."""
        return {
            PASS: lambda: self.step() / self.steps,
            PLAN: lambda: self.plan() / PLANS,
            **({ATTENTION: lambda: self.attend() / ATTENTIONS} if self.attends else {}),
        }

    def check(self, turns: int) -> None:
        """Raises RuntimeError where less was done than was to be measured."""
        self.state.cache.check()
        if int(self.state.passes) != turns * self.steps or not bool(jnp.all(self.state.running)):
            raise RuntimeError(
                f"workers ended before their {turns * self.steps} passes were done: "
                f"{np.asarray(self.state.reasons).tolist()}"
            )


def plan_many_times(cache: KVCache, layout: Layout) -> Plan:
    """Plans PLANS passes, each of them for other lengths, and gives the last plan. All of a plan is
    carried on, so all of it is made."""
    lengths, count = cache.lengths, jnp.ones(layout.num_rows, jnp.int32)

    def plan(i: Array | int) -> Plan:
        return make_plan(
            dataclasses.replace(cache, lengths=lengths.at[1:].add(-(i % 8))), layout, count, 1
        )

    return jax.lax.fori_loop(1, PLANS, lambda i, _: plan(i), plan(0))


def attend_many_times(q: Array, cache: KVCache, plan: Plan) -> Array:
    """The attention of all layers, one after the other and ATTENTIONS times: each answer is the
    next query."""

    def layers(_: Array, q: Array) -> Array:
        return functools.reduce(
            lambda q, arenas: block_attention(q, *arenas, plan),
            zip(cache.keys, cache.values, strict=True),
            q,
        )

    return jax.lax.fori_loop(0, ATTENTIONS, layers, q)


def fastest(
    others: dict[str, Worker], hogwild: str, folder: str, history: int
) -> tuple[Worker, dict[str, Any]]:
    """The authors' implementation with threads that wait in the way, and in the dtype, in which two
    workers are fastest here; how it was set up."""
    passes: dict[str, dict[str, float]] = {}
    for name, other in others.items():
        passes[name] = {}
        for dtype in ("bfloat16", "float32"):
            other.ask("load", hogwild=hogwild, folder=folder, dtype=dtype, threads=cores())
            other.ask("prepare", workers=2, history=history, current=CURRENT)
            other.ask("step", workers=2, passes=1)
            passes[name][dtype] = (
                min(other.ask("step", workers=2, passes=1)["seconds"] for _ in range(3)) * 1e3
            )
    waiting = min(passes, key=lambda name: min(passes[name].values()))
    dtype = min(passes[waiting], key=passes[waiting].__getitem__)
    for name in others.keys() - {waiting}:
        others[name].close()
    threads = others[waiting].ask(
        "load", hogwild=hogwild, folder=folder, dtype=dtype, threads=cores()
    )["threads"]
    return others[waiting], {
        "threads": threads,
        "waiting": waiting,
        "dtype": dtype,
        "pass_milliseconds": passes,
    }


# Sides of one number of workers, as they are called in results.
PASS, PLAN, ATTENTION, THEIRS = "pass", "plan", "attention", "hogwild_llm"


HOGWILD = "the authors' implementation"
