"""Decoding, for scripts.bench.sharing: end to end over a shared prefix and over copies of it
(Hydragen section 4.1), and the cost rule."""

import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxshare import DecodeState, KVCache, Layout, Plan, cpu, decode, make_plan
from jaxshare.arena import append_tokens
from jaxshare.models import Decoder, LoadedModel, ModelConfig
from jaxshare.models.adapters.low_rank import of_rows
from jaxshare.models.decoder_layer import Layer
from jaxshare.models.tensor_parallel import ShardedDecoder
from jaxshare.serving import Branches, Costs
from jaxshare.serving.inputs import cache_dtype
from scripts.bench.lib import alternate, cores, ratios
from scripts.bench.parts.sharing.attention import (
    NO_ATTENTION,
    PRODUCT,
    SHARED,
    THEIRS,
    UNSHARED,
    Product,
    Say,
    attention_flops,
    copies_bytes,
    fill,
    rates,
)
from scripts.bench.peer import Worker

SUFFIX = 64
"""Tokens that each row has written when a turn begins: half of the 128 of figure 3, so that a pass
is one from the middle."""
RULE_NEW_TOKENS = 64


class AttentionFree(Decoder):
    """All of a decoder's pass but attention: projections, rotation and the cache's appends are
    done, and the answer is the query.

    It answers with nonsense; it is the ceiling of what attention that costs nothing would reach
    (Hydragen section 4.1).
    """

    def _pass(
        self, tokens: Array, count: Array, cache: KVCache, layout: Layout
    ) -> tuple[Array, KVCache, Plan]:
        plan, mla = make_plan(cache, layout, count, tokens.shape[1]), self.config.mla
        real = jnp.arange(tokens.shape[1]) < plan.count[:, None]
        x, keys, values = self._embed(tokens), [*cache.keys], [*cache.values]

        def attend(layer: int, q: Array, k: Array, v: Array, sinks: Array | None) -> Array:
            new = keys[layer], values[layer], k, v, plan
            appended = cpu.append_tokens(*new, self.implementation) or append_tokens(*new)
            keys[layer], values[layer] = appended
            return q if mla is None else q[..., mla.rope_dim :]  # of a latent's size

        for i, form in enumerate(self.config.layer_forms):
            layer = Layer(self.config, self.axis, self.implementation, form, parent=None)
            params, adapters = self._variables_of(i, layout)
            variables = {"params": params} | of_rows(adapters)
            x: Any = layer.apply(variables, x, functools.partial(attend, i), real)
        cache = dataclasses.replace(cache, keys=tuple(keys), values=tuple(values))
        return self.norm(x), cache.advance(plan), plan


class AttentionFreeSharded(ShardedDecoder):
    """`AttentionFree` over a mesh."""

    def _local(self) -> Decoder:
        local = super()._local()
        return AttentionFree(local.config, local.implementation, local.axis, local.vocab_axis)


class AttentionFreeModel(LoadedModel):
    """A loaded model without its attention, for everything that runs a `LoadedModel`."""

    @classmethod
    def of(cls, model: LoadedModel) -> "AttentionFreeModel":
        return cls(
            **{field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
        )

    @property
    def module(self) -> Decoder | ShardedDecoder:
        if self.mesh is None:
            return AttentionFree(self.config)
        return AttentionFreeSharded(self.config, self.mesh)


def first_layers(model: LoadedModel, layers: int) -> LoadedModel:
    """The same model with fewer layers."""
    return dataclasses.replace(model, config=dataclasses.replace(model.config, num_layers=layers))


class Decoding:
    """The decode loop of one side: rows over a random prefix, kept once or in copies, after which
    each has written `suffix` of at most `room` tokens.

    Every turn begins with these lengths again. What is cached is random, because the time does not
    depend on it; so nothing is prefilled.
    """

    def __init__(
        self,
        model: LoadedModel,
        rows: int,
        prefix: int,
        *,
        shared: bool,
        suffix: int,
        room: int,
        steps: int,
        seed: int,
    ):
        self.model, self.steps, self.rows = model, steps, rows
        capacities, lengths = (
            ((prefix, *[room] * rows), (prefix, *[suffix] * rows))
            if shared
            else ((prefix + room,) * rows, (prefix + suffix,) * rows)
        )
        layout = Layout.from_blocks(
            [[0, 1 + r] for r in range(rows)] if shared else [[r] for r in range(rows)]
        )
        dtype = cache_dtype(model)
        cache = KVCache.create(model.config, capacities, dtype, mesh=model.mesh)
        cache = fill(cache, lengths, seed)
        self._lengths = np.asarray(lengths, np.int32)
        self.state = DecodeState.create(
            cache,
            layout,
            [[1]] * rows,
            vocab_size=model.config.vocab_size,
            max_new_tokens=steps + 2,
            max_width=1,
        )

    def compile(self) -> None:
        loop = jax.jit(
            lambda params, state: decode(self.model.module, params, state, passes=self.steps),
            donate_argnums=1,
        )
        self._loop = loop.lower(self.model.params, self.state).compile()

    def turn(self) -> float:
        """Seconds of one pass, the mean of a turn's."""
        cache = dataclasses.replace(self.state.cache, lengths=jnp.asarray(self._lengths))
        state = jax.block_until_ready(
            dataclasses.replace(
                self.state, cache=cache, num_sampled=jnp.zeros(self.rows, jnp.int32)
            )
        )
        begin = time.perf_counter()
        self.state = jax.block_until_ready(self._loop(self.model.params, state))
        return (time.perf_counter() - begin) / self.steps

    def check(self, turns: int) -> None:
        """Raises RuntimeError where less was done than was to be measured."""
        self.state.cache.check()
        if int(self.state.passes) != turns * self.steps or not bool(jnp.all(self.state.running)):
            raise RuntimeError(
                f"rows ended before their {turns * self.steps} passes were done: "
                f"{np.asarray(self.state.reasons).tolist()}"
            )


def measure(
    model: LoadedModel,
    batches: Sequence[int],
    prefixes: Sequence[int],
    steps: int,
    their_steps: int,
    rounds: int,
    most_bytes: int,
    worker: Worker | None,
    product: Product,
    seed: int,
    say: Say,
) -> list[dict[str, Any]]:
    """All batches over all prefixes, as `summarise` gives them. The first turn of each side warms
    it up and is not timed.

    Args:
      steps, their_steps: of a turn, of ours and of transformers' side.
      most_bytes: sides whose copies of the prefix would take more are left out.
      worker: transformers with the same weights, or None to leave it out.
    """
    found, capacity = [], SUFFIX + steps
    decoding = functools.partial(Decoding, suffix=SUFFIX, room=capacity, steps=steps, seed=seed)
    for batch in batches:
        # Without attention the prefix costs nothing, so one is as good as another.
        ceiling = decoding(AttentionFreeModel.of(model), batch, 128, shared=True)
        turns = 0
        for prefix in prefixes:
            what = f"end to end: {batch} rows, prefix {prefix}"
            say(f"{what}, compile")
            fits = copies_bytes(model.config, batch, prefix + capacity) <= most_bytes
            runs = {SHARED: True, **({UNSHARED: False} if fits else {})}
            ours = {
                name: decoding(model, batch, prefix, shared=shared) for name, shared in runs.items()
            }
            compile_all([*ours.values(), *([] if turns else [ceiling])])
            sides: dict[str, Callable[[], float]] = {
                name: run.turn for name, run in ours.items()
            } | {NO_ATTENTION: ceiling.turn}
            if worker and fits:
                worker.ask("fill", rows=batch, tokens=prefix + SUFFIX)
                sides[THEIRS] = lambda: (
                    worker.ask("turn", steps=their_steps)["seconds"] / their_steps
                )
            say(f"{what}, measure")
            alternate(sides, 1)
            times = alternate({**sides, PRODUCT: product.turn}, rounds)
            turns += rounds + 1
            for run in ours.values():
                run.check(rounds + 1)
            ceiling.check(turns)
            found.append(summarise(model.config, batch, prefix, SUFFIX + (steps + 1) // 2, times))
        if worker:
            worker.ask("release")
    return found


def compile_all(runs: Sequence[Decoding]) -> None:
    with ThreadPoolExecutor(cores()) as pool:
        for done in [pool.submit(run.compile) for run in runs]:
            done.result()


def summarise(
    config: ModelConfig, batch: int, prefix: int, suffix: int, times: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    """One batch over one prefix: each side's step and rate; how many times slower than shared the
    others are; shared to its prediction.

    Args:
      suffix: tokens of each row's own that a pass sees, in the mean.
      times: seconds of one step in every round, by side; SHARED, NO_ATTENTION and PRODUCT among
        them.
    """
    sides = {
        name: {
            "step_milliseconds": statistics.median(seconds) * 1e3,
            "tokens_per_second": batch / statistics.median(seconds),
            "round_seconds": list(seconds),
        }
        for name, seconds in times.items()
        if name != PRODUCT
    }
    predicted = predict(config, batch, prefix + suffix, times[NO_ATTENTION], times[PRODUCT])
    return {
        "batch": batch,
        "prefix": prefix,
        "sides": sides,
        "slower_than_shared": {
            name: ratios(times[name], times[SHARED]) for name in sides if name != SHARED
        },
        "predicted_milliseconds": statistics.median(predicted) * 1e3,
        "shared_to_predicted": ratios(times[SHARED], predicted),
        "product_gflops": statistics.median(rates(times[PRODUCT])) / 1e9,
    }


def predict(
    config: ModelConfig, rows: int, tokens: int, without: Sequence[float], product: Sequence[float]
) -> list[float]:
    """Seconds that a step would take in each round if attention ran as fast as large products:
    those of a step without it, and its arithmetic at their rate."""
    flops = config.num_layers * attention_flops(rows, config.num_heads, config.head_dim, tokens)
    return [step + flops / rate for step, rate in zip(without, rates(product), strict=True)]


def chooses_sharing(model: LoadedModel, rows: int, prefix: int, costs: Costs) -> bool:
    """True if `generate` keeps one prompt of `prefix` tokens once for `rows` completions of it, by
    these costs."""
    prompt = [1] * prefix
    return bool(
        Branches(
            model, [prompt], n=rows, max_new_tokens=RULE_NEW_TOKENS, costs=costs
        ).sharing_plan.blocks
    )


def measure_rule(
    model: LoadedModel,
    rows: Sequence[int],
    prefixes: Sequence[int],
    steps: int,
    rounds: int,
    most_bytes: int,
    rules: Mapping[str, Costs],
    seed: int,
    say: Say,
) -> list[dict[str, Any]]:
    """Decoding with what `generate` keeps with share=True and share=False, for every number of rows
    and length of prefix, as `summarise_rule` gives it.

    Either side has two turns in a round, so that what chance does is seen.

    Args:
      rules: costs that `generate` may choose by.
    """
    found = []
    for count, prefix in itertools.product(rows, prefixes):
        if copies_bytes(model.config, count, prefix + RULE_NEW_TOKENS) > most_bytes:
            continue
        say(f"cost rule: {count} rows, prefix {prefix}")
        runs = {
            name: Decoding(
                model,
                count,
                prefix,
                shared=shared,
                suffix=RULE_NEW_TOKENS // 2,
                room=RULE_NEW_TOKENS,
                steps=steps,
                seed=seed,
            )
            for name, shared in ((SHARED, True), (UNSHARED, False))
        }
        compile_all([*runs.values()])
        sides = {(name, turn): run.turn for turn in (1, 2) for name, run in runs.items()}
        alternate(sides, 1)
        times = alternate(sides, rounds)
        for run in runs.values():
            run.check(2 * (rounds + 1))
        chosen = {
            name: SHARED if chooses_sharing(model, count, prefix, costs) else UNSHARED
            for name, costs in rules.items()
        }
        found.append(summarise_rule(count, prefix, chosen, times))
    return found


def summarise_rule(
    rows: int,
    prefix: int,
    chosen: Mapping[str, str],
    times: Mapping[tuple[str, int], Sequence[float]],
) -> dict[str, Any]:
    """One point of the cost rule.

    What the rule costs is the time of the side that it chose to that of the better one: exactly 1
    where it chose that, because then both are one program. The better side's second turns to its
    first show how far apart equal things are measured.

    Args:
      chosen: side by the name of the rule.
      times: seconds of one pass in every round, by side and turn of the round.
    """
    both = {name: [*times[name, 1], *times[name, 2]] for name in (SHARED, UNSHARED)}
    better, worse = sorted(both, key=lambda name: statistics.median(both[name]))
    slower = ratios(both[worse], both[better])["median"]
    return {
        "rows": rows,
        "prefix": prefix,
        "milliseconds": {name: statistics.median(t) * 1e3 for name, t in both.items()},
        "better": better,
        "worse_to_better": slower,
        "chosen": dict(chosen),
        "chosen_to_better": {
            rule: 1.0 if name == better else max(1.0, slower) for rule, name in chosen.items()
        },
        "better_to_itself": ratios(times[better, 2], times[better, 1])["median"],
    }
