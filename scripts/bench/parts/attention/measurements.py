"""The parts of scripts.bench.attention: which passes are looked at, by which sides, and the goals
that they are held against."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxshare.models import Decoder, LoadedModel, ModelConfig
from jaxshare.models.generation_config import Generation
from jaxshare.models.packed import pack
from scripts.bench.lib import Goal, alternate, ratios
from scripts.bench.parts.attention import cases
from scripts.bench.parts.attention.cases import Case, Heads
from scripts.bench.parts.attention.peers import others, others_causal, plan_sides
from scripts.bench.parts.attention.scale import FULL, Scale
from scripts.bench.parts.attention.speed import (
    BACKENDS,
    COPY,
    MOST_ELEMENTS,
    UNROTATED,
    UNSHARED,
    Bench,
    Ceilings,
    Side,
    ours,
    reason,
    with_layers,
)
from scripts.bench.parts.sharing import decode as decoding

PARTS = (
    *("correctness", "private", "shared", "workers", "contexts", "prefixes", "prefill"),
    *("plan", "step"),
)
PRIVATE_GOAL, PRODUCTS_GOAL, UNSHARED_GOAL, PLAN_GOAL, STEP_GOAL = 0.85, 0.6, 20.0, 30.0, 0.8
WORKERS_GOALS = {2: 1.05, 4: 1.15}


def measure_correctness(bench: Bench, scale: Scale) -> None:
    """Every backend over small passes of all kinds; what is found is in `bench.checks`."""
    for i, (dim, group) in enumerate(zip(scale.dims, scale.groups, strict=True)):
        width, dtype = scale.widths[i % len(scale.widths)], ("bfloat16", "float16")[i % 2]
        bench.say(f"correctness, head dim {dim}, G {group}, {width} tokens a row, {dtype}")
        for case in cases.mixed_cases(Heads(2, group, dim), width, dtype):
            bench.check(case, cases.make(case, bench.seed + i, tokens=2048, slots=4), {})
    if scale.many:
        bench.say(f"correctness, {scale.many} rows")
        many = cases.many_rows(Heads(2, 8), scale.many, "bfloat16")
        tokens = max(cases.make(case, 0).cache.keys[0].shape[1] for case in many)
        for case in many:
            bench.check(case, cases.make(case, bench.seed, tokens=tokens, slots=3), {})


def measure_private(bench: Bench, scale: Scale, group: int) -> dict[str, Any]:
    """Rows with a private block each: what is read is everything."""
    heads = dataclasses.replace(scale.private_heads, group=group)
    case = with_layers(
        cases.private(heads, scale.private_rows, scale.private_tokens), scale.most_layers
    )
    bench.say(f"private, G {group}")
    skipped: dict[str, str] = {}
    sides = _right_sides(bench, case, skipped)
    return _point(bench, case, sides | others(bench, case, skipped), skipped)


def measure_shared(bench: Bench, scale: Scale) -> dict[str, Any]:
    """One prefix that all rows see, against copies of it. A side with copies has as many rows as
    `unshared_rows` and an array of 2**31 elements allow, and its time is taken times what is
    missing: it reads each row's copy, so that time is in proportion to rows."""
    heads, rows = scale.shared_heads, scale.shared_rows
    case = with_layers(cases.shared(heads, rows, scale.prefix, scale.own), scale.most_layers)
    tokens = scale.prefix + scale.own
    fits = MOST_ELEMENTS // (tokens * heads.num_kv_heads * heads.head_dim)
    copies = min(rows, scale.unshared_rows, fits)
    apart = with_layers(cases.private(heads, copies, tokens), scale.most_layers)
    scaled = rows / copies
    bench.say("shared")
    skipped: dict[str, str] = {}
    inputs, inputs_apart = cases.make(case, bench.seed), cases.make(apart, bench.seed)
    good = bench.check(case, inputs, skipped)
    sides = {backend: ours(bench, case, inputs, backend) for backend in good}
    for backend in (b for b in bench.check(apart, inputs_apart, skipped) if b in good):
        sides[f"{backend}, {UNSHARED}"] = ours(bench, apart, inputs_apart, backend, scaled)
    point = _point(bench, case, sides | others(bench, apart, skipped, scaled), skipped)
    seconds = {name: side["round_seconds"] for name, side in point["sides"].items()}
    return point | {
        "copies": copies,
        "times_faster_than_unshared": {
            b: ratios(seconds[f"{b}, {UNSHARED}"], seconds[b])
            for b in good
            if b in seconds and f"{b}, {UNSHARED}" in seconds
        },
    }


def measure_workers(bench: Bench, scale: Scale) -> dict[str, Any]:
    """Measures workers over one history and each other's blocks, against one row over as many
    tokens in one block with a query that is not rotated."""
    heads = scale.worker_heads
    alone = cases.private(heads, 1, scale.history + scale.own)
    unrotated = dataclasses.replace(alone, heads=dataclasses.replace(heads, rotated=False))
    several = {
        rows_name(n): cases.workers(heads, n, scale.history, scale.own) for n in scale.workers
    }
    skipped: dict[str, str] = {}
    sides: dict[str, Side] = {}
    for name, case in {UNROTATED: unrotated, **several}.items():
        bench.say(f"workers, {name}")
        case = with_layers(case, scale.most_layers)
        inputs, unable = cases.make(case, bench.seed), {}
        sides |= {
            f"{backend}, {name}": ours(bench, case, inputs, backend)
            for backend in bench.check(case, inputs, unable)
        }
        skipped |= {f"{backend}, {name}": why for backend, why in unable.items()}
    alone = with_layers(alone, scale.most_layers)
    point = _point(
        bench, several[rows_name(scale.workers[-1])], sides | others(bench, alone, skipped), skipped
    )
    seconds = {name: side["round_seconds"] for name, side in point["sides"].items()}
    to_one = {
        b: {
            str(n): ratios(seconds[f"{b}, {rows_name(n)}"], seconds[f"{b}, {UNROTATED}"])
            for n in scale.workers
            if f"{b}, {rows_name(n)}" in seconds
        }
        for b in bench.backends
        if f"{b}, {UNROTATED}" in seconds
    }
    return point | {"history": scale.history, "own": scale.own, "to_one_row": to_one}


def measure_contexts(bench: Bench, scale: Scale, rows: int, tokens: int) -> dict[str, Any]:
    """A token of each row that sees so many of its own, beside others' attention."""
    case = with_layers(cases.private(scale.private_heads, rows, tokens), scale.most_layers)
    bench.say(case.name)
    skipped: dict[str, str] = {}
    sides = _right_sides(bench, case, skipped)
    return _point(bench, case, sides | others(bench, case, skipped), skipped)


def measure_prefixes(bench: Bench, scale: Scale, rows: int) -> dict[str, Any]:
    """Rows that see one prefix, which is read once."""
    made = cases.shared(scale.private_heads, rows, scale.prefix, scale.own)
    case = with_layers(made, scale.most_layers)
    bench.say(case.name)
    skipped: dict[str, str] = {}
    return _point(bench, case, _right_sides(bench, case, skipped), skipped)


def measure_prefill(bench: Bench, scale: Scale, tokens: int) -> dict[str, Any]:
    """One row's prompt in one pass, beside others' causal attention. Answers are held against the
    reference at the smallest size alone, for which that has memory."""
    smallest = min(scale.prefills)
    case = with_layers(cases.prompt(scale.private_heads, tokens), scale.most_layers)
    bench.say(case.name)
    skipped: dict[str, str] = {}
    first = cases.prompt(scale.private_heads, smallest)
    able = bench.check(first, cases.make(first, bench.seed), skipped)
    inputs = cases.make(case, bench.seed)
    sides = {backend: ours(bench, case, inputs, backend) for backend in able}
    return _point(bench, case, sides | others_causal(bench, case), skipped)


def _right_sides(bench: Bench, case: Case, skipped: dict[str, str]) -> dict[str, Side]:
    """The sides of the backends whose answers are right."""
    inputs = cases.make(case, bench.seed)
    right = bench.check(case, inputs, skipped)
    return {backend: ours(bench, case, inputs, backend) for backend in right}


def measure_plan(bench: Bench, scale: Scale) -> dict[str, Any]:
    """Microseconds of what a pass makes once, by layout, for the GPU backends and for xla."""
    layouts = {
        f"{n} workers": cases.workers(scale.worker_heads, n, scale.history, scale.own)
        for n in scale.workers
        if n > 1
    }
    layouts |= {
        f"{rows} rows over a prefix": cases.shared(
            scale.shared_heads, rows, scale.prefix, scale.own
        )
        for rows in sorted({scale.plan_rows, scale.shared_rows})
    }
    found: dict[str, Any] = {}
    for name, case in layouts.items():
        bench.say(f"plan, {name}")
        sides = plan_sides(bench, case)
        alternate(sides, 1)
        times = alternate(sides, bench.rounds)
        found[name] = {
            side: {"microseconds": statistics.median(seconds) * 1e6, "round_seconds": seconds}
            for side, seconds in times.items()
        }
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class Named(LoadedModel):
    """A model with the attention of one backend."""

    implementation: str = "xla"

    @property
    def module(self) -> Decoder:
        return Decoder(self.config, self.implementation)


def random_params(config: ModelConfig, seed: int) -> tuple[dict[str, Any], int]:
    """bfloat16 parameters, made on the device, and how many of them a pass reads: all but an
    embedding, of which it reads a row a token."""
    shapes = jax.eval_shape(
        lambda: Decoder(config).init(
            jax.random.key(0), jnp.zeros((1, 2), jnp.int32), method="causal"
        )
    )
    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)
    rng = np.random.default_rng(seed)
    made, read = [], 0
    for path, leaf in leaves:
        name = path[-1].key
        made.append(
            jnp.ones(leaf.shape, jnp.bfloat16)
            if name == "scale"
            else cases.noise(rng, leaf.shape, "bfloat16", 0.02)
        )
        read += 0 if name == "embedding" and not config.tie_embeddings else leaf.size
    return jax.tree.unflatten(tree, made), read


def measure_step(bench: Bench, scale: Scale, batch: int) -> dict[str, Any]:
    """A decode step of a whole model, as `jaxshare.decode` does it. Its memory-bound limit is the
    time in which a copy reads and writes as many bytes as the parameters and all that is cached
    have, in the mean of a turn's passes."""
    config = ModelConfig.from_json(scale.model)
    bench.say(f"step, batch {batch}: parameters")
    params, parameters = random_params(config, bench.seed)
    params = pack(params, config)  # as models are loaded for one GPU
    tokens = scale.context + (scale.steps + 1) / 2  # that a row sees in a pass, in the mean
    token_bytes = 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
    read = 2 * parameters + batch * tokens * token_bytes
    sides, runs, skipped = {}, {}, {}
    for backend in bench.backends:
        bench.say(f"step, batch {batch}, {backend}: compile")
        try:
            model = Named(config, params, None, Generation(), implementation=backend)
            runs[backend] = decoding.Decoding(
                model,
                batch,
                scale.context,
                shared=False,
                suffix=0,
                room=scale.steps,
                steps=scale.steps,
                seed=bench.seed,
            )
            runs[backend].compile()
            sides[backend] = runs[backend].turn
            sides[backend]()
        except (
            Exception
        ) as error:  # a kernel that does not compile raises whatever its compiler does
            skipped[backend] = reason(error)
            sides.pop(backend, None)
    bench.say(f"step, batch {batch}: measure in turn")
    times = alternate({**sides, COPY: bench.ceilings.copy}, bench.rounds)
    for backend in sides:
        runs[backend].check(bench.rounds + 1)
    return summarise_step(
        batch, scale.context, read, {b: times[b] for b in sides}, times[COPY], bench.ceilings
    ) | {"parameters_read": parameters, "skipped": skipped}


def summarise_step(
    batch: int,
    context: int,
    read: float,
    times: Mapping[str, Sequence[float]],
    copies: Sequence[float],
    ceilings: Ceilings,
) -> dict[str, Any]:
    """A step of one batch: the time that reading `read` bytes takes at the rate of copies, divided
    by that of the step, round by round."""
    limit = [read / ceilings.copy_rate(s) for s in copies]
    return {
        "batch": batch,
        "context": context,
        "read_bytes": read,
        "limit_milliseconds": statistics.median(limit) * 1e3,
        "sides": {
            name: {
                "milliseconds": statistics.median(seconds) * 1e3,
                "of_limit": ratios(limit, seconds)["median"],
                "tokens_per_second": batch / statistics.median(seconds),
                "round_seconds": list(seconds),
            }
            for name, seconds in times.items()
        },
    }


def rows_name(count: int) -> str:
    """The name of a number of workers in results."""
    return f"{count} row{'s' * (count > 1)}"


def _point(
    bench: Bench, case: Case, sides: Mapping[str, Side], skipped: Mapping[str, str]
) -> dict[str, Any]:
    measured = bench.measure(sides)
    heads = case.heads
    return {
        "case": case.name,
        "kv_heads": heads.num_kv_heads,
        "group": heads.group,
        "head_dim": heads.head_dim,
        "layers": heads.num_layers,
        **measured,
        "skipped": {**skipped, **measured["skipped"]},
    }


def best(found: Mapping[str, Any] | None) -> str | None:
    """The backend that `implementation=None` should have taken: the first of ours that was
    measured."""
    return next((name for name in BACKENDS if name in (found or {})), None)


def goals(results: Mapping[str, Any], *, tiny: bool) -> list[Goal]:
    """All goals; what was not measured, or at tiny sizes, is None in them."""
    results = {} if tiny else results
    return [*_attention_goals(results), *_plan_goals(results), *_step_goals(results)]


def _best_goal(
    what: str, sides: Mapping[str, Any] | None, value: str, target: float, *, at_most: bool = False
) -> Goal:
    """A goal that the best backend among these sides is held against."""
    name = best(sides)
    measured = sides[name] if sides and name else None
    return Goal(
        f"{what} ({name})" if name else what,
        measured[value] if measured else None,
        target,
        at_most=at_most,
    )


def _attention_goals(results: Mapping[str, Any]) -> list[Goal]:
    by_group = {r["group"]: r["sides"] for r in results.get("private", [])}
    shared = results.get("shared", {})
    to_one = results.get("workers", {}).get("to_one_row", {})
    return [
        *(
            _best_goal(
                f"private, 64 rows of 8192 tokens, G {group}: of the copy bandwidth",
                by_group.get(group),
                "of_copy",
                PRIVATE_GOAL,
            )
            for group in FULL.private_groups
        ),
        _best_goal(
            "shared, 1024 rows over 16384 tokens: of the rate of products",
            shared.get("sides"),
            "of_products",
            PRODUCTS_GOAL,
        ),
        _best_goal(
            "the same: times faster than unshared",
            shared.get("times_faster_than_unshared"),
            "median",
            UNSHARED_GOAL,
        ),
        *(
            _best_goal(
                f"{n} workers over 16384 tokens: times one row, not rotated",
                {b: r[str(n)] for b, r in to_one.items() if str(n) in r},
                "median",
                ratio,
                at_most=True,
            )
            for n, ratio in WORKERS_GOALS.items()
        ),
    ]


def _plan_goals(results: Mapping[str, Any]) -> list[Goal]:
    found = []
    for layout in ("4 workers", "64 rows over a prefix"):
        plan = results.get("plan", {}).get(layout, {}).get("GPU backends")
        found.append(
            Goal(
                f"plan, {layout}: microseconds",
                plan and plan["microseconds"],
                PLAN_GOAL,
                at_most=True,
            )
        )
    return found


def _step_goals(results: Mapping[str, Any]) -> list[Goal]:
    by_batch = {r["batch"]: r["sides"] for r in results.get("step", [])}
    return [
        _best_goal(
            f"decode step of 7B, batch {batch}: of the memory-bound limit",
            by_batch.get(batch),
            "of_limit",
            STEP_GOAL,
        )
        for batch in FULL.batches
    ]
