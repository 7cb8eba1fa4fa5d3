"""The value of agent-aware residency: five agents in a workflow under memory pressure, by policy.

    python -m scripts.bench.residency                           # the full measurement
    python -m scripts.bench.residency --quick                   # within three minutes on two cores
    python -m scripts.bench.residency --rounds 7,21 --capacities 9000 --seeds 5
    python -m scripts.bench.residency --no-engine --no-agents   # the tree alone: seconds
    python -m scripts.bench.residency --plots FOLDER            # a run of the agents in pictures
    python -m scripts.bench.residency --json --output FILE      # one JSON object

The workload is that of section 8.3 of Hive (scripts/bench/parts/residency/workflow.py), on two
caches. One is a radix tree of tokens without a model (scripts/bench/parts/residency/tree.py): what
it counts is exact and the same on every machine. The other is the engine itself, with a model that
does next to nothing and has the whole workflow in its context: it answers the calls one after the
other. `plain` is the paper's own order, by contribution and recency alone; `optimum` is given
all calls to come.

The third part runs the workflow as agents, several side by side, on an engine with the embedded
model (scripts/bench/parts/residency/concurrent.py): by policy, with times. How to read the result
is in benchmarks/README.md.
"""

import functools
import itertools
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxshare import Sampler
from jaxshare.models import LoadedModel, load
from jaxshare.serving.engine import Engine
from jaxshare.serving.inputs import token_bytes
from jaxshare.serving.kvcache.contribution import Contribution
from jaxshare.serving.kvcache.eviction import POLICIES, Belady, make_policy
from jaxshare.serving.kvcache.policy import Policy
from jaxshare.serving.kvcache.pool import whole_tiles
from scripts.bench.lib import (
    Goal,
    alternate,
    finish,
    machine,
    own_command,
    table,
    versions,
    write_checkpoint,
)
from scripts.bench.parts.residency import concurrent
from scripts.bench.parts.residency.options import ANSWER, Options, parse
from scripts.bench.parts.residency.tree import Counts, compulsory, simulate
from scripts.bench.parts.residency.workflow import HOT, VOCABULARY, Call, workflow

MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCABULARY + 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": None,
    "eos_token_id": None,
}

FEWER_HOT_MISSES, FEWER_EVICTED, COLD_POINTS, OF_OPTIMUM = 0.51, 1.43, 5.0, 0.75


def small_model() -> LoadedModel:
    """The engine's model, with random weights. What leaves the memory depends on the calls alone,
    so the smallest shows it best."""
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), MODEL, seed=0)
        return load(folder, dtype="float32")


def serve(model: LoadedModel, trace: Sequence[Call], capacity: int, policy: Policy) -> Counts:
    """Has an engine answer the calls, one after the other; `simulate` for the real one.

    Args:
      model: whose context holds every prompt and `ANSWER`.
      capacity: tokens; the engine rounds them down to whole tiles.
    """
    prompt, found = Counter(), Counter()
    sampler = Sampler(temperature=0.0, bias={ANSWER[0]: 1e6})
    with Engine(model, kv_bytes=capacity * token_bytes(model), policy=policy, max_rows=1) as engine:
        for call in trace:
            done = engine.submit(
                call.tokens,
                sampler,
                max_new_tokens=len(ANSWER),
                agent_id=call.agent,
                priority=call.priority,
            ).wait()
            if done.tokens != ANSWER:
                raise RuntimeError(
                    f"a call of {call.agent} ended with {done.finish_reason}, {done.tokens}, but "
                    f"its answer is {ANSWER}"
                )
            prompt[call.agent] += done.prompt_tokens
            found[call.agent] += done.reused_tokens
        evicted = engine.metrics.registry.get_sample_value(
            "jaxshare_evicted_tokens_total", {"to": "nowhere"}
        )
    return Counts(dict(prompt), dict(found), int(evicted or 0))


def policies(trace: Sequence[Call], answer: Sequence[int] = ()) -> dict[str, Callable[[], Policy]]:
    """The constructor of each policy, by its name in the report; `answer` is the number of tokens
    kept of every call beside its prompt."""
    made = {name: lambda name=name: make_policy(name) for name in POLICIES}
    return made | {
        "plain": lambda: Contribution(expect=False),
        "optimum": lambda: Belady([(*call.tokens, *answer) for call in trace]),
    }


def measure(
    run: Callable[[Sequence[Call], int, Policy], Counts],
    rounds: int,
    capacity: int,
    seeds: Sequence[int],
    answer: Sequence[int] = (),
) -> dict[str, Any]:
    """Every policy on the workflow of every seed.

    Args:
      run: what takes calls, the tokens that its memory holds, and a policy: `simulate`, or `serve`
        with a model.
      rounds: of the workflow.
      capacity: tokens.
      seeds: of the workflow.
      answer: what `run` keeps of every call beside its prompt.
    """
    traces = [workflow(rounds, seed) for seed in seeds]
    counts: dict[str, list[Counts]] = {}

    def side(name: str) -> float:
        found = counts.setdefault(name, [])
        trace = traces[len(found)]
        policy = policies(trace, answer)[name]()
        begin = time.perf_counter()
        found.append(run(trace, capacity, policy))
        return time.perf_counter() - begin

    seconds = alternate(
        {name: lambda name=name: side(name) for name in policies(traces[0])}, len(traces)
    )
    return {
        "rounds": rounds,
        "capacity": capacity,
        "seeds": len(seeds),
        "calls": len(traces[0]),
        "longest_prompt": max(len(call.tokens) for call in itertools.chain(*traces)),
        "policies": summarise(counts, [compulsory(trace) for trace in traces], seconds),
    }


def summarise(
    counts: dict[str, list[Counts]], first: Sequence[int], seconds: dict[str, list[float]]
) -> list[dict[str, Any]]:
    """For each policy what all seeds together gave, and each seed's comparison with lru.

    Args:
      counts: for each policy the counts of every seed; "lru" and "optimum" are among them.
      first: for every seed the tokens that must be computed once by any policy.
      seconds: for each policy the time of every seed.
    """

    def compared(name: str, which: slice) -> dict[str, float | None]:
        own, lru, best = (
            sum(counts[n][which][1:], counts[n][which][0]) for n in (name, "lru", "optimum")
        )
        cold = frozenset(own.prompt) - HOT
        gain = lru.computed - best.computed
        return {
            "fewer_hot_misses": 1 - own.missed(HOT) / lru.missed(HOT),
            "evicted_ratio": lru.evicted / own.evicted if own.evicted else None,
            "cold_points_lower": 100 * (lru.hit_rate(cold) - own.hit_rate(cold)),
            "of_optimum": (lru.computed - own.computed) / gain if gain > 0 else None,
        }

    found = []
    for name, of_seeds in counts.items():
        total = sum(of_seeds[1:], of_seeds[0])
        found.append(
            {
                "policy": name,
                "hot_hit_rate": total.hit_rate(HOT),
                "cold_hit_rate": total.hit_rate(frozenset(total.prompt) - HOT),
                "evicted_tokens": total.evicted,
                "recomputed_tokens": total.computed - sum(first),
                "prompt_tokens": sum(total.prompt.values()),
                "hit_rates": {agent: total.hit_rate(frozenset([agent])) for agent in total.prompt},
                "seconds": sum(seconds[name]),
                "against_lru": compared(name, slice(None)),
                "against_lru_by_seed": [
                    compared(name, slice(i, i + 1)) for i in range(len(of_seeds))
                ],
            }
        )
    return found


def goals(results: Sequence[dict[str, Any]], capacity: int) -> list[Goal]:
    """The goals for `contribution` at this capacity, for all seeds together, on either cache.

    On the engine `optimum` is not given the places where segments will be cut, so that it is no
    bound: no part of its gain is a goal there.
    """
    found = []
    for result in results:
        if result["capacity"] == capacity:
            held = next(
                p["against_lru"] for p in result["policies"] if p["policy"] == "contribution"
            )
            where = f"{result['cache']}, {result['rounds']} rounds"
            found += [
                Goal(
                    f"{where}: misses of hot agents, fewer than lru by",
                    held["fewer_hot_misses"],
                    FEWER_HOT_MISSES,
                ),
                Goal(
                    f"{where}: tokens that lru evicts for one", held["evicted_ratio"], FEWER_EVICTED
                ),
                Goal(
                    f"{where}: points of cold hit rate below lru",
                    held["cold_points_lower"],
                    COLD_POINTS,
                    at_most=True,
                ),
            ]
            if result["cache"] == "tree":
                found.append(
                    Goal(f"{where}: of the optimum's gain over lru", held["of_optimum"], OF_OPTIMUM)
                )
    return found


def as_text(report: dict[str, Any]) -> str:
    """The report without its goals."""
    lines = [f"Hot agents: {', '.join(sorted(HOT))}; sums over all seeds of the workflow"]
    for r in report["results"]:

        def of(ratio: float | None, form: str) -> str:
            return "" if ratio is None else form.format(ratio)

        rows = [
            (
                p["policy"],
                f"{p['hot_hit_rate']:.3f}",
                f"{p['cold_hit_rate']:.3f}",
                str(p["evicted_tokens"]),
                str(p["recomputed_tokens"]),
                of(p["against_lru"]["fewer_hot_misses"], "{:+.0%}"),
                of(p["against_lru"]["evicted_ratio"], "{:.2f}"),
                of(p["against_lru"]["of_optimum"], "{:.0%}"),
                f"{p['seconds']:.1f}",
            )
            for p in r["policies"]
        ]
        header = (
            "policy",
            "hot",
            "cold",
            "evicted",
            "recomputed",
            "fewer hot misses",
            "lru evicts",
            "of optimum",
            "seconds",
        )
        lines += [
            "",
            f"{r['cache']}: {r['rounds']} rounds, {r['calls']} calls, seeds {r['seeds']}, room for "
            f"{r['room']} tokens, longest prompt {r['longest_prompt']}",
            "",
            table(header, rows),
        ]
    return "\n".join(lines)


def served(options: Options) -> list[dict[str, Any]]:
    """The same on the engine."""
    run, capacity, found = functools.partial(serve, small_model()), options.capacities[0], []
    for rounds in options.rounds[:1] if options.quick else options.rounds:
        print(f"engine: {rounds} rounds, room for {capacity} tokens ...", file=sys.stderr)
        # Programs are compiled for as many segments as a call goes through: once before, so that no
        # policy's time has it.
        run(workflow(rounds, options.seeds[0]), capacity, make_policy("contribution"))
        seeds = options.seeds[:1] if options.quick else options.seeds
        found.append(
            {
                "cache": "engine",
                "room": whole_tiles(capacity),
                **measure(run, rounds, capacity, seeds, ANSWER),
            }
        )
    return found


def measured_agents(options: Options) -> list[dict[str, Any]]:
    """The workflow by concurrent agents, for each number of rounds."""
    if options.plots is not None:
        options.plots.mkdir(parents=True, exist_ok=True)
    if options.quick:
        return concurrent.measure(
            tasks=concurrent.QUICK_TASKS,
            rounds=options.rounds[0],
            repeats=options.repeats,
            policies=("contribution", "lru"),
            with_host=False,
            plots=options.plots,
        )
    return [
        result
        for rounds in options.rounds
        for result in concurrent.measure(
            tasks=concurrent.TASKS, rounds=rounds, repeats=options.repeats, plots=options.plots
        )
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments, __doc__.splitlines()[0])
    asked = own_command(__file__, arguments)
    where = machine()
    results = []
    for capacity, rounds in itertools.product(options.capacities, options.rounds):
        print(f"tree: {rounds} rounds, room for {capacity} tokens ...", file=sys.stderr)
        results.append(
            {
                "cache": "tree",
                "room": capacity,
                **measure(simulate, rounds, capacity, options.seeds),
            }
        )
    if options.engine:
        results += served(options)
    agents = measured_agents(options) if options.agents else []
    settings = {
        "rounds": options.rounds,
        "capacities": options.capacities,
        "seeds": options.seeds,
        "hot": sorted(HOT),
        "engine": options.engine,
        "repeats": options.repeats,
        "quick": options.quick,
    }
    report = {
        "benchmark": "residency",
        "command": asked,
        "machine": where,
        "versions": versions(("jax", "numpy")),
        "settings": settings,
        "results": results,
        "agents": agents,
    }
    finish(
        report,
        "\n".join([as_text(report), *concurrent.lines(agents)]),
        [*goals(results, options.capacities[0]), *concurrent.goals(agents)],
        as_json=options.json,
        output=options.output,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
