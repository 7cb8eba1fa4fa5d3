"""Samples of prompts for training, and the exchange of the weights between two steps of it.

    python -m scripts.bench.rollouts                            # the full measurement
    python -m scripts.bench.rollouts --quick                    # few prompts, within four minutes on two cores
    python -m scripts.bench.rollouts --json --output FILE       # one JSON object
    .venv-tunix/bin/python -m scripts.bench.rollouts            # against Tunix's sampler, too (make test-others makes it)

 - Samples: several of each prompt from an engine, which stores each prompt once, against `generate`
   with `share=False`, which stores and reads it for each sample. Both give the log-probabilities
   that training needs, of the same tokens. Where Tunix is installed, its own sampler on the same
   weights takes some of the prompts, a group at a time; its tokens a second are compared.
 - Data groups (`--groups 2`): samples a second of several, with an engine and a core each, against
   those of one with one core; nothing is measured where there are fewer cores. `--ray` measures
   replicas on a Ray cluster of this machine, too.
 - Weights: `Engine.update_params`, with its check of all numbers, against copying them once.

How to read the result is in benchmarks/README.md.
"""

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxshare import Sampler
from jaxshare.models import LoadedModel
from jaxshare.serving import generate
from jaxshare.serving.engine import Engine
from jaxshare.serving.rollouts import rollout
from scripts.bench.lib import (
    Goal,
    Parser,
    alternate,
    finish,
    machine,
    own_command,
    progress,
    ratios,
    table,
    versions,
)
from scripts.bench.parts.engine.random_model import MODEL, forking_model
from scripts.bench.parts.rollouts import groups as data_groups
from scripts.bench.parts.rollouts.tunix_side import TunixSide, is_installed

SHARED, UNSHARED, TUNIX = "engine", "share=False", "Tunix"
UPDATE, COPY = "update_params", "one copy"
SAMPLES_GOAL, UPDATE_GOAL, TUNIX_GOAL, GROUPS_GOAL = 1.3, 1.2, 4.0, 0.9
SCALED = {"groups": "data groups", "ray": "replicas on Ray"}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
WIDER = MODEL | {"intermediate_size": 2816} | _ROPE
"""With 125 M parameters. The base of rotations is the only one that Tunix's Llama has."""
SMALL = WIDER | {"num_hidden_layers": 1, "vocab_size": 1000, "intermediate_size": 256}
"""To see that the program runs."""


@dataclasses.dataclass(frozen=True)
class Scale:
    """The sizes of a measurement.

    Attributes:
      prompts, samples: the number of prompts, and of samples of each.
      prompt_tokens, new_tokens: of each.
      rounds: turns of each side; updates: of the weights.
      tunix_prompts: those that Tunix samples.
    """

    prompts: int = 16
    samples: int = 32
    prompt_tokens: int = 512
    new_tokens: int = 64
    rounds: int = 3
    updates: int = 8
    tunix_prompts: int = 4


QUICK = Scale(prompts=4, samples=16, rounds=1, updates=6, tunix_prompts=1)
TINY = Scale(2, 2, 16, 4, rounds=1, updates=2, tunix_prompts=1)


class Sides:
    """Both sides of both measurements."""

    def __init__(self, model: LoadedModel, scale: Scale, seed: int, with_tunix: bool):
        self.model, self.scale, self.seed = model, scale, seed
        rng, size = np.random.default_rng(seed), (scale.prompts, scale.prompt_tokens)
        self.prompts = rng.integers(3, model.config.vocab_size, size).tolist()
        stops = tuple(model.generation.stop_tokens)
        self.sampler = Sampler(temperature=1.0, forbidden=stops)
        self.engine = Engine(model, max_rows=64, passes=63)
        self.weights = [jax.tree.map(jnp.copy, model.params) for _ in range(2)]
        self.texts: dict[str, list[tuple[int, ...]]] = {}
        self.tunix = None
        if with_tunix:
            self.tunix = TunixSide(model, scale.prompt_tokens, scale.new_tokens)
        self._number = 0

    @property
    def samplers(self) -> dict[str, Callable[[], float]]:
        """The functions that sample once, by the names of the sides."""
        found = {SHARED: self.shared, UNSHARED: self.unshared}
        return found | ({TUNIX: self.with_tunix} if self.tunix else {})

    def num_tokens(self, side: str) -> int:
        """The tokens that a side samples at once."""
        scale = self.scale
        prompts = scale.tunix_prompts if side == TUNIX else scale.prompts
        return prompts * scale.samples * scale.new_tokens

    def with_tunix(self) -> float:
        assert self.tunix is not None
        return self.tunix.seconds(self.prompts[: self.scale.tunix_prompts], self.scale.samples)

    def shared(self) -> float:
        # What an earlier turn has cached must not help.
        self.engine.update_params(self.weights[0])
        begin = time.perf_counter()
        batch = rollout(
            self.engine,
            self.prompts,
            n=self.scale.samples,
            sampler=self.sampler,
            max_new_tokens=self.scale.new_tokens,
            seed=self.seed,
        )
        seconds = time.perf_counter() - begin
        self.texts[SHARED] = [each.tokens for each in batch.completions]
        return seconds

    def unshared(self) -> float:
        found = generate(
            self.model,
            self.prompts,
            n=self.scale.samples,
            sampler=self.sampler,
            max_new_tokens=self.scale.new_tokens,
            seed=self.seed,
            share=False,
            logprobs="both",
            max_rows=64,
            warm_up=True,
        )
        self.texts[UNSHARED] = [each.tokens for each in found.completions]
        return found.seconds  # without those of compilation

    def update(self) -> float:
        self._number += 1
        begin = time.perf_counter()
        self.engine.update_params(self.weights[self._number % 2])
        return time.perf_counter() - begin

    def copy(self) -> float:
        begin = time.perf_counter()
        found = jax.block_until_ready(jax.tree.map(jnp.copy, self.weights[0]))
        seconds = time.perf_counter() - begin
        del found
        return seconds

    def same_texts(self) -> float:
        """The share of samples that are the same on both sides: float32 rounds differently."""
        pairs = zip(self.texts[SHARED], self.texts[UNSHARED], strict=True)
        return statistics.mean(a == b for a, b in pairs)


def measure(
    name: str,
    model: LoadedModel,
    scale: Scale,
    seed: int,
    with_tunix: bool,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measures a model; compiles before."""
    sides, differ = Sides(model, scale, seed, with_tunix), None
    try:
        say(f"{name}: compile")
        sides.shared(), sides.update(), sides.copy()
        if sides.tunix:
            differ = sides.tunix.logprobs_differ(sides.prompts, model)
            sides.tunix.seconds(sides.prompts[:1], scale.samples)
        say(f"{name}: weights")
        updates = alternate({UPDATE: sides.update, COPY: sides.copy}, scale.updates)
        say(f"{name}: samples")
        seconds = alternate(sides.samplers, scale.rounds)
        same = sides.same_texts()
    finally:
        sides.engine.shutdown()
    size = sum(array.nbytes for array in jax.tree.leaves(model.params))
    of_each = {
        side: [taken / sides.num_tokens(side) for taken in times] for side, times in seconds.items()
    }
    return {
        "model": name,
        **dataclasses.asdict(scale),
        "weights_bytes": size,
        "seconds": seconds,
        "update_seconds": updates,
        "tokens_per_second": {s: 1 / statistics.median(t) for s, t in of_each.items()},
        "same_texts": same,
        "faster": ratios(of_each[UNSHARED], of_each[SHARED]),
        "faster_than_tunix": ratios(of_each[TUNIX], of_each[SHARED]) if sides.tunix else None,
        "tunix_logprobs_differ": differ,
        "update_by_copy": min(updates[UPDATE]) / min(updates[COPY]),
    }


def goals(results: Sequence[Mapping[str, Any]]) -> list[Goal]:
    """The goals; those of samples are for prompts of the full length."""
    return [
        goal
        for r in results
        for goal in (
            Goal(
                f"{r['model']}: samples, times faster than share=False",
                r["faster"]["median"],
                SAMPLES_GOAL,
            ),
            Goal(
                f"{r['model']}: samples, times faster than Tunix's sampler",
                r["faster_than_tunix"] and r["faster_than_tunix"]["median"],
                TUNIX_GOAL,
            ),
            Goal(
                f"{r['model']}: update_params, least seconds by those of one copy",
                r["update_by_copy"],
                UPDATE_GOAL,
                at_most=True,
            ),
        )
    ]


def goal_of_groups(found: Mapping[str, Any], what: str) -> Goal:
    """The goal of data groups, which is not measured where there are too few cores."""
    name = f"{found['groups']} {what}: samples a second, by those of one and their number"
    return Goal(name, found["efficiency"], GROUPS_GOAL)


def as_text(report: Mapping[str, Any]) -> str:
    """The report without its goals."""
    where = report["machine"]
    parts = [
        f"{where['cpu']}, {where['cores']} cores, load {where['load_average']} at the start; jax "
        f"{report['versions']['jax']}"
    ]
    for r in report["results"]:
        what = f"{r['prompts']} prompts of {r['prompt_tokens']}, {r['samples']} samples each"
        rows = [
            (f"{side}, tokens/s", f"{r['tokens_per_second'][side]:.0f}")
            for side in r["tokens_per_second"]
        ]
        rows += [
            (f"{side}, least ms", f"{1e3 * min(r['update_seconds'][side]):.1f}")
            for side in (UPDATE, COPY)
        ]
        rows.append(("the same texts", f"{r['same_texts']:.0%}"))
        if (differ := r["tunix_logprobs_differ"]) is not None:
            rows.append(("log-probabilities of Tunix differ by at most", f"{differ:.1e}"))
        parts.append(table((f"{r['model']}: {what}", ""), rows))
    for key, what in SCALED.items():
        if (found := report.get(key)) is None:
            continue
        if found["why"] is not None:
            parts.append(f"{what.capitalize()} were not measured: {found['why']}.")
        else:
            rows = [
                (f"{what}: {number}, samples/s", f"{rate:.2f}")
                for number, rate in zip(
                    (1, found["groups"]), found["samples_per_second"], strict=True
                )
            ]
            parts.append(table(("a core each", ""), rows))
    return "\n\n".join(parts)


def parse(arguments: Sequence[str] | None) -> Any:
    parser = Parser(prog="scripts.bench.rollouts", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few prompts, one round")
    parser.add_argument(
        "--tiny", action="store_true", help="a small model and a few tokens, to see that it runs"
    )
    parser.add_argument(
        "--without-tunix", action="store_true", help="leave its sampler out where it is installed"
    )
    parser.add_argument("--groups", type=int, help="measure so many data groups, too")
    parser.add_argument("--ray", action="store_true", help="and as many replicas on Ray")
    parser.add_argument("--rounds", type=int, help="turns of each side in the sampling")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and texts")
    parser.reporting()
    given = parser.parse_args(arguments)
    parser.at_least(0, seed=given.seed)
    parser.at_least(1, rounds=given.rounds)
    parser.at_least(2, groups=given.groups)
    if given.ray and not given.groups:
        parser.error("--ray is given without --groups; add --groups 2")
    parser.check_output(given.output)
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    asked = own_command(__file__, arguments)
    where, scale = machine(), TINY if options.tiny else QUICK if options.quick else Scale()
    with_tunix = is_installed() and not options.without_tunix
    if options.rounds:
        scale = dataclasses.replace(scale, rounds=options.rounds)
    scaled: dict[str, Any] = dict.fromkeys(SCALED)
    wanted = [key for key in SCALED if options.groups and (key != "ray" or options.ray)]
    with progress(4 + len(wanted)) as say:
        for key in wanted:
            say(SCALED[key])  # before this process has anything that takes cores or memory
            scaled[key] = data_groups.scaling(options.groups, options.tiny, key == "ray")
        say("make the model")
        shape = SMALL if options.tiny else WIDER
        model = forking_model(options.seed, dtype="float32", model=shape)
        results = [measure("random", model, scale, options.seed, with_tunix, say)]
    report = {
        "benchmark": "rollouts",
        "command": asked,
        "machine": where,
        "versions": versions(
            ("jax", "jaxlib", "flax", "numpy", *(["google-tunix"] if with_tunix else []))
        ),
        "settings": {
            "quick": options.quick,
            "tiny": options.tiny,
            "seed": options.seed,
            "temperature": 1.0,
        },
        "results": results,
        **scaled,
    }
    all_goals = [
        *goals(results),
        *(goal_of_groups(scaled[key], SCALED[key]) for key in wanted),
    ]
    finish(report, as_text(report), all_goals, as_json=options.json, output=options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
