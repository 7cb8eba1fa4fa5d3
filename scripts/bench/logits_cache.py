"""What the Logits Cache is worth where the same is asked again: tokens a second, hits and bytes, on
puzzles of the game of 24.

    python -m scripts.bench.logits_cache                               # the full measurement
    python -m scripts.bench.logits_cache --quick                       # the embedded model alone, within three minutes on two cores
    python -m scripts.bench.logits_cache --models random --forks 0.2   # a model that is in doubt more often
    python -m scripts.bench.logits_cache --json --output FILE          # one JSON object

The measurement is that of section 8.2 of Hive: every prompt is answered once, and then again with
other seeds, always with the same number of tokens. The baseline is the same engine without a Logits
Cache; it finds the prompt's keys and values as the others do. A group of prompts runs side by side,
one a row, on one side after the other. How to read the result is in benchmarks/README.md.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from jaxshare import KVCache, Layout, Sampler
from jaxshare.models import EMBEDDED, LoadedModel, load
from jaxshare.seeds import stream_seed
from jaxshare.serving.engine import Engine, RequestOutput
from jaxshare.serving.inputs import cache_dtype, encode, token_bytes
from scripts.bench.lib import (
    ROOT,
    Goal,
    Parser,
    alternate,
    command,
    finish,
    machine,
    progress,
    table,
    versions,
)
from scripts.bench.parts.engine_model import FORKS, MODEL, Profile, forking_model, profile

BASELINE, STEPWISE, HOTSPOT = "baseline", "stepwise", "hotspot"
SIDES = (BASELINE, STEPWISE, HOTSPOT)
MODELS = ("embedded", "random")
SPEED_GOALS = {STEPWISE: 1.3, HOTSPOT: 2.0}
STORAGE_GOAL = 0.03
CACHE_BYTES = 2**30
GROWTH = 256
"""Tokens of room that the engine gives a row beyond what it needs, at most."""
WARM_UP_TOKENS = 64
PROFILE_ROWS, PROFILE_TOKENS = 8, 64
"""How many texts of which length tell how certain the model is."""


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much is measured of a model.

    Attributes:
      puzzles: prompts.
      rows: of them side by side.
      kept: logits of a distribution that are kept.
    """

    puzzles: int
    rows: int
    kept: int


# A pass of the larger model takes 20 times as long: its puzzles are answered side by side.
FULL = {"embedded": Scale(100, 1, 64), "random": Scale(100, 20, 256)}
QUICK = {"embedded": Scale(8, 8, 64), "random": Scale(4, 4, 256)}


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt answered again, with the same seed on every side; dicts are by side.

    Attributes:
      puzzle, turn: which, and for the how manieth time.
      tokens: of the answers.
      seconds: from submission to the last token.
      replayed: tokens that came out of the cache.
    """

    puzzle: int
    turn: int
    tokens: Mapping[str, tuple[int, ...]]
    seconds: Mapping[str, float]
    replayed: Mapping[str, int]

    def hit_ratio(self, side: str) -> float:
        return self.replayed[side] / len(self.tokens[side])

    def speedup(self, side: str) -> float:
        """Tokens a second to those of the baseline."""
        return self.seconds[BASELINE] / self.seconds[side]


@dataclasses.dataclass(frozen=True)
class Group:
    """What a group of prompts gave.

    Attributes:
      requests: all turns of all prompts.
      positions, bytes: distributions that the stepwise side had kept after the first answers, and
        what they took.
      distances: for each prompt, how far hotspot sampling along its first answer is from fresh
        sampling: in the mean over positions, and of whole answers (total variation).
      seconds: of each turn, by side.
    """

    requests: list[Request]
    positions: int
    bytes: int
    distances: list[tuple[float, float]]
    seconds: Mapping[str, list[float]]


def run_group(
    model: LoadedModel,
    prompts: Sequence[Sequence[int]],
    *,
    puzzles: Sequence[int],
    sampler: Sampler,
    tokens: int,
    turns: int,
    kept: int,
    kv_bytes: int,
    rows: int,
    seed: int,
) -> Group:
    """Answers prompts once on each side, and then `turns` times more on the sides in turn; at most
    `rows` prompts, side by side."""
    shape: dict[str, Any] = {"kv_bytes": kv_bytes, "max_rows": rows}
    with contextlib.ExitStack() as stack:
        engines = {
            side: stack.enter_context(
                Engine(
                    model,
                    **shape,
                    **(
                        {}
                        if side == BASELINE
                        else {"logits_cache": CACHE_BYTES, "kept_logits": kept}
                    ),
                )
            )
            for side in SIDES
        }

        def ask(side: str, turn: int, new_tokens: int) -> list[RequestOutput]:
            streams = [
                engines[side].submit(
                    prompt,
                    sampler,
                    max_new_tokens=new_tokens,
                    seed=hash_seed(seed, puzzle, turn),
                    resample=None if side == BASELINE else side,
                )
                for puzzle, prompt in zip(puzzles, prompts, strict=True)
            ]
            done = [stream.wait() for stream in streams]
            engines[side].drain()
            return done

        ask(BASELINE, 0, 1)  # its first answer is of no use to it, but the prompt is
        first = ask(STEPWISE, 0, tokens)
        ask(HOTSPOT, 0, tokens)
        logits = engines[STEPWISE].logits_cache
        assert logits is not None
        positions, size = sum(len(done.tokens) for done in first), logits.bytes
        distances = (
            [logits.distance(prompt, sampler, tokens) for prompt in prompts]
            if sampler.temperature
            else []
        )
        found: dict[str, list[list[RequestOutput]]] = {side: [] for side in SIDES}

        def once(side: str) -> float:
            begin = time.perf_counter()
            found[side].append(ask(side, 1 + len(found[side]), tokens))
            return time.perf_counter() - begin

        seconds = alternate({side: lambda side=side: once(side) for side in SIDES}, turns)
    requests = [
        Request(
            puzzle,
            turn,
            *(
                {side: value(found[side][turn][i]) for side in SIDES}
                for value in (
                    lambda done: done.tokens,
                    lambda done: done.seconds,
                    lambda done: done.replayed_tokens,
                )
            ),
        )
        for turn in range(turns)
        for i, puzzle in enumerate(puzzles)
    ]
    return Group(
        requests, positions, size, [(each.mean, each.sequence) for each in distances], seconds
    )


def hash_seed(seed: int, puzzle: int, turn: int) -> int:
    """The stream of a request, the same on every side."""
    return stream_seed(seed, puzzle, turn)


def summarise(temperature: float, groups: Sequence[Group], vocab: int) -> dict[str, Any]:
    """All groups of one temperature. As in the paper, requests that came out of the cache whole are
    counted apart: what they gain has no bound. `speedup_with_all` has them in it. `free_replay` is
    what a replay alone cannot surpass: the speed-up if it had cost nothing, and every other token
    as much as in the baseline."""
    requests = [request for group in groups for request in group.requests]
    sides = {}
    for side in SIDES:
        some = [r for r in requests if side == BASELINE or r.replayed[side] < len(r.tokens[side])]
        rates = [len(r.tokens[side]) / r.seconds[side] for r in some]
        found: dict[str, Any] = {
            "requests": len(some),
            "whole_hits": len(requests) - len(some),
            "mean_tokens_per_second": statistics.fmean(rates) if rates else None,
            "median_tokens_per_second": statistics.median(rates) if rates else None,
            "group_seconds": sum(sum(group.seconds[side]) for group in groups),
        }
        if side != BASELINE:
            speedups = [r.speedup(side) for r in some]
            found |= {
                "speedup": statistics.fmean(speedups) if some else None,
                "median_speedup": statistics.median(speedups) if some else None,
                "free_replay": statistics.fmean(1 / (1 - r.hit_ratio(side)) for r in some)
                if some
                else None,
                "speedup_with_all": statistics.fmean(r.speedup(side) for r in requests),
                "hit_ratio": statistics.fmean(r.hit_ratio(side) for r in some) if some else None,
                "hit_ratio_with_all": statistics.fmean(r.hit_ratio(side) for r in requests),
            }
        sides[side] = found
    distances = [pair for group in groups for pair in group.distances]
    return {
        "temperature": temperature,
        "sides": sides,
        "different_from_baseline": sum(r.tokens[STEPWISE] != r.tokens[BASELINE] for r in requests),
        "storage_of_full_logits": sum(g.bytes for g in groups)
        / (sum(g.positions for g in groups) * vocab * 4),
        "hotspot_distance": {
            "position": statistics.fmean(each for each, _ in distances) if distances else 0.0,
            "sequence": statistics.fmean(each for _, each in distances) if distances else 0.0,
        },
    }


def averages(points: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Of each side, over the temperatures at which there is a number."""
    found: dict[str, dict[str, float | None]] = {}
    for side in SPEED_GOALS:
        found[side] = {}
        for name in ("speedup", "median_speedup", "free_replay", "speedup_with_all", "hit_ratio"):
            values = [p["sides"][side][name] for p in points if p["sides"][side][name] is not None]
            found[side][name] = statistics.fmean(values) if values else None
    return found


def goals(results: Sequence[Mapping[str, Any]]) -> list[Goal]:
    """The goals that these results can be held against; storage is that of the larger
    vocabulary."""
    found = []
    for result in results:
        name, means = result["model"], averages(result["points"])
        found += [
            Goal(
                f"{name}: {side}, times the baseline's tokens a second",
                means[side]["speedup"],
                goal,
            )
            for side, goal in SPEED_GOALS.items()
        ]
        if name == "random":
            worst = max(p["storage_of_full_logits"] for p in result["points"])
            found.append(
                Goal(f"{name}: storage, of full logits", worst, STORAGE_GOAL, at_most=True)
            )
        if result["dtype"] == "float32":
            found.append(
                Goal(
                    f"{name}: stepwise answers that are not the baseline's",
                    sum(p["different_from_baseline"] for p in result["points"]),
                    0,
                    at_most=True,
                )
            )
    return found


def model_profile(
    model: LoadedModel, prompts: Sequence[Sequence[int]], forbidden: tuple[int, ...], seed: int
) -> Profile:
    """How certain the model is of what it says at temperature 1."""
    some = [list(prompt) for prompt in prompts[:PROFILE_ROWS]]
    with Engine(
        model,
        max_rows=len(some),
        kv_bytes=len(some) * (len(max(some, key=len)) + 1024) * token_bytes(model),
    ) as engine:
        streams = [
            engine.submit(
                prompt,
                Sampler(temperature=1.0, forbidden=forbidden),
                max_new_tokens=PROFILE_TOKENS,
                seed=stream_seed(seed, "profile", i),
            )
            for i, prompt in enumerate(some)
        ]
        texts = [
            [*prompt, *stream.wait().tokens] for prompt, stream in zip(some, streams, strict=True)
        ]
    length, logits = max(map(len, texts)), []
    for text in texts:
        cache = KVCache.create(model.config, (length,))
        padded = np.zeros((1, length), np.int32)
        padded[0, : len(text)] = text
        found, _ = model.forward(padded, [len(text)], cache, Layout.from_blocks([[0]]), every=True)
        own = np.array(found, np.float32)[0, len(text) - PROFILE_TOKENS - 1 : len(text) - 1]
        own[:, list(forbidden)] = -np.inf
        logits.append(own)
    return profile(np.concatenate(logits))


def measure(
    name: str,
    model: LoadedModel,
    prompts: Sequence[Sequence[int]],
    scale: Scale,
    *,
    temperatures: Sequence[float],
    tokens: int,
    turns: int,
    seed: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """One model at all temperatures. A group with few tokens goes before, untimed, so that
    everything is compiled."""
    forbidden = tuple(model.generation.stop_tokens)
    # Nothing has to leave the memory: all answers of a prompt fit beside it, and the room that the
    # next one is given.
    room = scale.rows * (max(map(len, prompts)) + (turns + 2) * (tokens + GROWTH))
    more: dict[str, Any] = {
        "kept": scale.kept,
        "rows": scale.rows,
        "kv_bytes": room * token_bytes(model),
    }
    groups = [
        range(at, min(at + scale.rows, len(prompts))) for at in range(0, len(prompts), scale.rows)
    ]
    say(f"{name}: compile")
    certainty = model_profile(model, prompts, forbidden, seed)
    warm_up(model, prompts, forbidden, **more)
    for temperature in (0.3, 1.0):
        run_group(
            model,
            [prompts[i] for i in groups[0]],
            puzzles=groups[0],
            sampler=Sampler(temperature=temperature, forbidden=forbidden),
            tokens=min(tokens, WARM_UP_TOKENS),
            turns=1,
            seed=stream_seed(seed, "warm up"),
            **more,
        )
    points = []
    for temperature in temperatures:
        sampler, done = Sampler(temperature=temperature, forbidden=forbidden), []
        for number, group in enumerate(groups):
            say(f"{name}: temperature {temperature}, group {number + 1} of {len(groups)}")
            done.append(
                run_group(
                    model,
                    [prompts[i] for i in group],
                    puzzles=group,
                    sampler=sampler,
                    tokens=tokens,
                    turns=turns,
                    seed=seed,
                    **more,
                )
            )
        points.append(summarise(temperature, done, model.config.vocab_size))
    return {
        "model": name,
        "dtype": str(cache_dtype(model)),
        "vocab": model.config.vocab_size,
        **dataclasses.asdict(scale),
        "puzzles": len(prompts),
        "prompt_tokens": statistics.fmean(map(len, prompts)),
        "profile": dataclasses.asdict(certainty),
        "points": points,
        "averages": averages(points),
    }


def warm_up(
    model: LoadedModel,
    prompts: Sequence[Sequence[int]],
    forbidden: tuple[int, ...],
    *,
    kept: int,
    kv_bytes: int,
    rows: int,
) -> None:
    """Lets every number of rows begin together once."""
    with Engine(
        model, max_rows=rows, kv_bytes=kv_bytes, logits_cache=CACHE_BYTES, kept_logits=kept
    ) as engine:
        for count in range(1, rows + 2):
            streams = [
                engine.submit(
                    prompts[i % len(prompts)],
                    Sampler(temperature=1.0, forbidden=forbidden),
                    max_new_tokens=4,
                    seed=count * rows + i,
                    resample=STEPWISE,
                )
                for i in range(count)
            ]
            for stream in streams:
                stream.wait()


def read_puzzles(file: Path | None, count: int, seed: int) -> list[str]:
    """So many puzzles, drawn from a file, or those that the example has in it."""
    example = _example()
    numbers = (
        [[*map(int, puzzle.split())] for puzzle in example.PUZZLES]
        if file is None
        else [*example.read(str(file))]
    )
    if file is None or len(numbers) <= count:
        return [" ".join(map(str, each)) for each in numbers[:count]]
    drawn = np.random.default_rng([seed, 1]).choice(len(numbers), count, replace=False)
    return [" ".join(map(str, numbers[i])) for i in sorted(drawn)]


def prompts_of(
    model: LoadedModel, puzzles: Sequence[str], lengths: Sequence[int] | None, seed: int
) -> list[list[int]]:
    """The puzzles in the words of examples/game24.py; random tokens of these lengths where the
    model has no tokenizer."""
    if lengths is None:
        example = _example()
        return [
            encode(model, example.PROPOSE.format(goal=example.GOAL, numbers=puzzle))
            for puzzle in puzzles
        ]
    rng = np.random.default_rng([seed, 3])
    same = rng.integers(0, model.config.vocab_size, max(lengths))
    own = 16  # tokens of the puzzle, which begins with what all have in common
    return [
        [
            *same[: max(0, n - own)].tolist(),
            *rng.integers(0, model.config.vocab_size, min(n, own)).tolist(),
        ]
        for n in lengths
    ]


@functools.cache
def _example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("game24", ROOT / "examples" / "game24.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def as_text(report: Mapping[str, Any]) -> str:
    """The report without its goals."""
    settings, where = report["settings"], report["machine"]
    blocks = [
        f"{settings['tokens']} tokens an answer, {settings['turns']} answers of each prompt after "
        f"the first\n{where['cpu']}, {where['cores']} cores, load {where['load_average']} at the "
        f"start; jax {report['versions']['jax']}"
    ]
    return "\n\n".join([*blocks, *map(_model_text, report["results"])])


def _model_text(result: Mapping[str, Any]) -> str:
    certain, rows = result["profile"], []

    def number(value: float | None, digits: int = 2) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    for point in result["points"]:
        for name, side in point["sides"].items():
            rows.append(
                (
                    f"{point['temperature']}  {name}",
                    *(number(side[f"{kind}_tokens_per_second"], 1) for kind in ("mean", "median")),
                    *(
                        number(side.get(key))
                        for key in ("speedup", "median_speedup", "hit_ratio", "speedup_with_all")
                    ),
                    str(side["whole_hits"]),
                    f"{side['group_seconds']:.1f}",
                )
            )
    header = (
        "temperature",
        "mean tok/s",
        "median",
        "speed-up",
        "median",
        "hits",
        "all",
        "whole",
        "seconds",
    )
    means = [
        f"{side}: {number(mean['speedup'])}x in the mean over temperatures "
        f"({number(mean['median_speedup'])}x of medians, {number(mean['free_replay'])}x if replays "
        f"were free and all there is, {number(mean['speedup_with_all'])}x with whole hits), hit "
        f"ratio {number(mean['hit_ratio'])}"
        for side, mean in result["averages"].items()
    ]
    storage = max(point["storage_of_full_logits"] for point in result["points"])
    distances = ", ".join(
        f"{p['temperature']}: {p['hotspot_distance']['position']:.4f} and "
        f"{p['hotspot_distance']['sequence']:.3f}"
        for p in result["points"]
    )
    different = sum(point["different_from_baseline"] for point in result["points"])
    requests = sum(point["sides"][BASELINE]["requests"] for point in result["points"])
    return "\n".join(
        [
            f"{result['model']}, {result['dtype']}: {result['puzzles']} puzzles of "
            f"{result['prompt_tokens']:.0f} tokens, {result['rows']} side by side",
            f"at temperature 1 the likeliest token has over 0.9 at {100 * certain['certain']:.0f} "
            f"% of positions, the entropy is below 0.01 at {100 * certain['nearly_zero']:.0f} %, "
            f"in the mean {certain['entropy']:.3f}; a fifth is above {certain['upper_fifth']:.3f} "
            "nats",
            "",
            table(header, rows),
            "",
            *means,
            f"{result['kept']} of {result['vocab']} logits kept: {100 * storage:.2f} % of the "
            "bytes of full logits",
            f"stepwise answers that are not the baseline's: {different} of {requests}",
            "hotspot's total variation from fresh sampling, by temperature, of a position and of "
            f"an answer: {distances}",
        ]
    )


@dataclasses.dataclass(frozen=True)
class Options:
    """What was asked for; counts as `--quick` has them where they were not given. `data` is None
    for the example's own puzzles."""

    models: tuple[str, ...]
    scales: Mapping[str, Scale]
    temperatures: tuple[float, ...]
    tokens: int
    turns: int
    forks: float
    rejoin: float
    dtype: str
    data: Path | None
    quick: bool
    seed: int
    json: bool
    output: Path | None


def parse(arguments: Sequence[str] | None) -> Options:
    parser = Parser(prog="scripts.bench.logits_cache", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--models", metavar="M,M", help=f"of {','.join(MODELS)} (default both; quick embedded)"
    )
    parser.add_argument(
        "--puzzles", type=int, metavar="N", help="of each model (default 100; quick 8 and 4)"
    )
    parser.add_argument(
        "--rows",
        type=int,
        metavar="N",
        help="prompts side by side (default 1 and 20; quick 8 and 4)",
    )
    parser.add_argument(
        "--kept",
        type=int,
        metavar="K",
        help="logits that are kept of a distribution (default 64 and 256)",
    )
    parser.add_argument(
        "--temperatures", metavar="T,T", help="(default 0.2,0.4,0.6,0.8,1.0; quick 0.2,1.0)"
    )
    parser.add_argument("--tokens", type=int, help="of every answer (default 500; quick 100)")
    parser.add_argument(
        "--turns", type=int, help="answers of each prompt after the first (default 2)", default=2
    )
    parser.add_argument(
        "--forks",
        type=float,
        default=FORKS,
        help="share of tokens after which the random model is in doubt (default %(default)s)",
    )
    parser.add_argument(
        "--rejoin",
        type=float,
        default=0.0,
        help="share of these after which all its texts go on alike (default %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="of the random model (default %(default)s)",
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help="puzzles (default game24.csv in $JAXSHARE_DATA or ../shared/data, or else those of "
        "examples/game24.py)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="fewer puzzles and temperatures, shorter answers: within three minutes",
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights, puzzles and answers")
    parser.reporting()
    given = parser.parse_args(arguments)
    models = parser.some_of(
        "--models", given.models or ("embedded" if given.quick else ",".join(MODELS)), MODELS
    )
    try:
        temperatures = tuple(
            map(
                float,
                (given.temperatures or ("0.2,1.0" if given.quick else "0.2,0.4,0.6,0.8,1.0")).split(
                    ","
                ),
            )
        )
    except ValueError:
        temperatures = ()
    if (
        not temperatures
        or not all(0 < each < 100 for each in temperatures)
        or len(set(temperatures)) < len(temperatures)
    ):
        parser.error(
            f"--temperatures is {given.temperatures!r}, but it must be different numbers above 0 "
            "with commas between, such as 0.2,1.0"
        )
    tokens = given.tokens if given.tokens is not None else 100 if given.quick else 500
    for name, value in (
        ("--puzzles", given.puzzles),
        ("--rows", given.rows),
        ("--kept", given.kept),
        ("--tokens", tokens),
        ("--turns", given.turns),
    ):
        if value is not None and value < 1:
            parser.error(f"{name} is {value}, but it must be at least 1")
    for name, value in (("--forks", given.forks), ("--rejoin", given.rejoin)):
        if not 0 <= value <= 1:
            parser.error(f"{name} is {value}, but it must be from 0 to 1")
    if given.seed < 0:
        parser.error(f"--seed is {given.seed}, but it must be at least 0")
    data = (
        given.data
        or Path(os.environ.get("JAXSHARE_DATA") or ROOT.parent / "shared" / "data") / "game24.csv"
    )
    if given.data and not data.is_file():
        parser.error(f"--data is {given.data}, but there is no such file")
    parser.check_output(given.output)
    changed = {
        name: value
        for name in ("puzzles", "rows", "kept")
        if (value := getattr(given, name)) is not None
    }
    scales = {
        name: dataclasses.replace(scale, **changed)
        for name, scale in (QUICK if given.quick else FULL).items()
    }
    return Options(
        models,
        scales,
        temperatures,
        tokens,
        given.turns,
        given.forks,
        given.rejoin,
        given.dtype,
        data if data.is_file() else None,
        given.quick,
        given.seed,
        given.json,
        given.output,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.data is None:
        print(
            "scripts.bench.logits_cache: there is no game24.csv in $JAXSHARE_DATA or "
            "../shared/data, so the puzzles are the few of examples/game24.py; name more with "
            "--data",
            file=sys.stderr,
        )
    asked = command(
        [str(Path(__file__).resolve()), *(sys.argv[1:] if arguments is None else arguments)]
    )
    where = machine()
    try:
        results = measure_all(options)
    except ValueError as error:  # puzzles that are none, or answers longer than the model's context
        print(f"scripts.bench.logits_cache: {error}", file=sys.stderr)
        return 2
    settings = {
        "tokens": options.tokens,
        "turns": options.turns,
        "temperatures": options.temperatures,
        "forks": options.forks,
        "rejoin": options.rejoin,
        "quick": options.quick,
        "seed": options.seed,
        "puzzles": "file" if options.data else "of the example",
        "model": MODEL,
    }
    report = {
        "benchmark": "logits_cache",
        "command": asked,
        "machine": where,
        "versions": versions(("jax", "jaxlib", "flax", "numpy")),
        "settings": settings,
        "results": results,
    }
    finish(report, as_text(report), goals(results), as_json=options.json, output=options.output)
    return 0


def measure_all(options: Options) -> list[dict[str, Any]]:
    """The results, one a model."""
    results = []
    embedded = load(EMBEDDED)
    puzzles = {
        name: read_puzzles(options.data, options.scales[name].puzzles, options.seed)
        for name in options.models
    }
    groups = sum(
        -(-len(puzzles[name]) // options.scales[name].rows) * len(options.temperatures) + 1
        for name in options.models
    )
    with progress(groups) as say:
        for name in options.models:
            prompts = prompts_of(embedded, puzzles[name], None, options.seed)
            model = embedded
            if name == "random":
                model = forking_model(
                    options.seed, dtype=options.dtype, forks=options.forks, rejoin=options.rejoin
                )
                prompts = prompts_of(model, puzzles[name], [*map(len, prompts)], options.seed)
            results.append(
                measure(
                    name,
                    model,
                    prompts,
                    options.scales[name],
                    temperatures=options.temperatures,
                    tokens=options.tokens,
                    turns=options.turns,
                    seed=options.seed,
                    say=say,
                )
            )
    return results


if __name__ == "__main__":
    sys.exit(main())
