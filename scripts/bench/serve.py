"""Measures what `jaxshare serve` costs beside the engine that it serves, and a mix of requests.

    python -m scripts.bench.serve                            # the full measurement
    python -m scripts.bench.serve --quick                    # the embedded model alone, within three minutes on two cores
    python -m scripts.bench.serve --json --output FILE       # one JSON object

 - Overhead: 16 and 64 requests at once, streamed over HTTP to clients in a process of their own,
   against the same requests submitted in the same order to an engine in a process that does nothing
   else. Nothing stops before its length; prompts are new in every round, and the same on both sides.
 - A mix: requests with log-normal lengths, as ShareGPT's are, arrive by Poisson at 0.7 of the rate at
   which the server has answered 64 of them at once. Throughput, and the times of first tokens and
   between pieces.

With --llama-server PROGRAM, llama.cpp's server gets the same mix at the same times, of the model of
108 M parameters in float32 (the package gguf has to be where --llama-python is). How to read the result is in benchmarks/README.md.
"""

import contextlib
import dataclasses
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

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
from scripts.bench.parts.serve.llama_server import llama_server, write_gguf
from scripts.bench.parts.serve.loads import (
    MODELS,
    MOST_OUTPUT,
    MOST_PROMPT,
    TEMPERATURE,
    Request,
    at_once,
    load_model,
    mixed,
)
from scripts.bench.peer import Worker, WorkerError

HTTP, ENGINE = "HTTP", "engine"
RATE_GOAL, FIRST_GOAL = 0.95, 1.15
STREAMS = (16, 64)
PROMPT = 64
MIX_ROWS = 16
_PART = 0.7
"""The part of the reached rate at which the mix arrives."""


@dataclasses.dataclass(frozen=True)
class Scale:
    """The sizes of a measurement.

    Attributes:
      tokens: of each output of the overhead; rounds: turns of each side.
      requests: of the mix; lengths: what its lengths are multiplied with.
    """

    tokens: int = 256
    rounds: int = 7
    requests: int = 400
    lengths: float = 1.0


SCALES = {"embedded": Scale(), "random": Scale(tokens=96, rounds=5, requests=120)}
QUICK = Scale(rounds=5, requests=200)


class Bench:
    """The processes of all sides.

    Args:
      server, engine, clients: the processes.
      seed: of prompts, lengths and arrivals.
      say: is called with what is done next.
    """

    def __init__(
        self,
        server: Worker,
        engine: Worker,
        clients: Worker,
        seed: int,
        say: Callable[[str], None],
    ):
        self._server, self._engine, self._clients = server, engine, clients
        self._seed, self._say = seed, say

    def measure(
        self, name: str, scale: Scale, llama: tuple[str, str] | None = None
    ) -> dict[str, Any]:
        """Measures one model; `llama`: the program of llama.cpp's server, and a Python with gguf."""
        self._say(f"{name}: load")
        for each in (self._server, self._engine):
            each.ask("load", model=name)
        overhead = [self._overhead(name, scale, streams) for streams in STREAMS]
        return {
            "model": name,
            **dataclasses.asdict(scale),
            "overhead": overhead,
            "mix": self._mix(name, scale, llama),
        }

    def _open(self, rows: int, tokens: int) -> int:
        """Opens both engines; returns the server's port."""
        self._engine.ask("open", rows=rows, tokens=tokens, listen=False)
        return self._server.ask("open", rows=rows, tokens=tokens, listen=True)["port"]

    def _overhead(self, name: str, scale: Scale, streams: int) -> dict[str, Any]:
        self._say(f"{name}: {streams} streams, compile")
        port = self._open(streams, PROMPT + scale.tokens)
        rngs = {
            side: np.random.default_rng([self._seed, streams]) for side in (HTTP, ENGINE)
        }  # so that both sides have the same requests in each round
        found: dict[str, list[dict[str, Any]]] = {HTTP: [], ENGINE: []}

        def run(side: str) -> float:
            requests = at_once(rngs[side], streams, PROMPT, scale.tokens)
            if side == HTTP:
                given = {"port": port, "temperature": TEMPERATURE}
                done = self._clients.ask("run", requests=requests, **given)
            else:
                done = self._engine.ask("run", requests=requests)
            if done["tokens"] != [scale.tokens] * streams:
                raise RuntimeError(f"{side}: a text has ended before its length")
            found[side].append(done)
            return done["seconds"]

        sides = {side: lambda side=side: run(side) for side in (HTTP, ENGINE)}
        for side in sides.values():
            side()
        self._say(f"{name}: {streams} streams")
        seconds = alternate(sides, scale.rounds)
        firsts = {
            side: [statistics.median(each["first"]) for each in found[side][1:]] for side in found
        }
        pairs = [
            (ours, theirs)
            for each, other in zip(found[HTTP], found[ENGINE], strict=True)
            for ours, theirs in zip(each["texts"], other["texts"], strict=True)
        ]
        return {
            "streams": streams,
            "seconds": seconds,
            "tokens_per_second": {
                side: streams * scale.tokens / statistics.median(times)
                for side, times in seconds.items()
            },
            "rate": ratios(seconds[ENGINE], seconds[HTTP]),
            "first_seconds": firsts,
            "first": ratios(firsts[HTTP], firsts[ENGINE]),
            "texts": {"compared": len(pairs), "equal": sum(a == b for a, b in pairs)},
        }

    def _mix(self, name: str, scale: Scale, llama: tuple[str, str] | None) -> dict[str, Any]:
        self._say(f"{name}: a mix, compile")
        port = self._open(MIX_ROWS, MOST_PROMPT + MOST_OUTPUT)
        rng = np.random.default_rng([self._seed, 1])

        def run(requests: list[Request], port: int) -> dict[str, Any]:
            given = {"port": port, "temperature": TEMPERATURE}
            return self._clients.ask("run", requests=requests, **given)

        for _ in range(2):  # the first time compiles
            done = run(mixed(rng, 4 * MIX_ROWS, 1e6, scale.lengths), port)
        rate = _PART * 4 * MIX_ROWS / done["seconds"]
        self._say(f"{name}: a mix")
        requests = mixed(rng, scale.requests, rate, scale.lengths)
        found = {
            "requests_per_second": rate,
            "prompt_tokens": sum(len(each["prompt"]) for each in requests),
            **_times(run(requests, port)),
        }
        if llama is not None:
            self._say(f"{name}: the mix, llama-server")
            program, python = llama
            with tempfile.TemporaryDirectory() as folder:
                file = write_gguf(python, load_model(name), Path(folder))
                with llama_server(program, file, MIX_ROWS, MOST_PROMPT + MOST_OUTPUT) as theirs:
                    run(mixed(rng, MIX_ROWS, 1e6, scale.lengths), theirs)
                    found["llama_server"] = _times(run(requests, theirs))
        return found


def _times(done: Mapping[str, Any]) -> dict[str, Any]:
    """The times of a mix."""
    sampled = sum(done["tokens"])
    per_token = [
        (last - first) / max(tokens - 1, 1)
        for first, last, tokens in zip(done["first"], done["last"], done["tokens"], strict=True)
    ]
    return {
        "seconds": done["seconds"],
        "tokens": sampled,
        "tokens_per_second": sampled / done["seconds"],
        "first_seconds": percentiles(done["first"]),
        "piece_seconds": percentiles([gap for gaps in done["gaps"] for gap in gaps]),
        "token_seconds": percentiles(per_token),
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """The 50th and the 99th percentile."""
    return {name: float(np.percentile(values, q)) for name, q in (("p50", 50), ("p99", 99))}


def goals(results: Sequence[Mapping[str, Any]]) -> list[Goal]:
    """The goals that these results can be held against."""
    return [
        goal
        for result in results
        for one in result["overhead"]
        for goal in (
            Goal(
                f"{result['model']}, {one['streams']} streams: tokens a second over HTTP to the "
                "engine's own",
                one["rate"]["median"],
                RATE_GOAL,
            ),
            Goal(
                f"{result['model']}, {one['streams']} streams: time to the first token to the "
                "engine's own",
                one["first"]["median"],
                FIRST_GOAL,
                at_most=True,
            ),
        )
    ]


def as_text(report: Mapping[str, Any]) -> str:
    """The report without its goals."""
    where = report["machine"]
    parts = [
        f"{where['cpu']}, {where['cores']} cores, load {where['load_average']} at the start; jax "
        f"{report['versions']['jax']}, uvicorn {report['versions']['uvicorn']}"
    ]
    rows = [
        (
            f"{result['model']}, {one['streams']} streams",
            *(f"{one['tokens_per_second'][side]:.0f}" for side in (HTTP, ENGINE)),
            f"{one['rate']['median']:.3f}",
            f"{one['rate']['lowest']:.3f} to {one['rate']['highest']:.3f}",
            *(
                f"{1e3 * statistics.median(one['first_seconds'][side]):.1f}"
                for side in (HTTP, ENGINE)
            ),
            f"{one['first']['median']:.2f}",
            f"{one['texts']['equal']} of {one['texts']['compared']}",
        )
        for result in report["results"]
        for one in result["overhead"]
    ]
    header = ("overhead", "tokens/s, HTTP", "engine", "ratio", "of rounds")
    header += ("first, ms, HTTP", "engine", "ratio", "texts equal")
    parts.append(table(header, rows))
    sides = [
        (name, result["mix"]["requests_per_second"], times)
        for result in report["results"]
        for name, times in (
            (result["model"], result["mix"]),
            (f"{result['model']}, llama-server", result["mix"].get("llama_server")),
        )
        if times is not None
    ]
    rows = [
        (
            name,
            f"{rate:.2f}",
            f"{times['tokens_per_second']:.0f}",
            *(
                f"{1e3 * times[what][p]:.1f}"
                for what in ("first_seconds", "piece_seconds", "token_seconds")
                for p in ("p50", "p99")
            ),
        )
        for name, rate, times in sides
    ]
    header = ("mix, ms", "requests/s", "tokens/s", "first, p50", "p99")
    header += ("between pieces, p50", "p99", "a token, p50", "p99")
    parts.append(table(header, rows))
    return "\n\n".join(parts)


def parse(arguments: Sequence[str] | None) -> Any:
    parser = Parser(prog="scripts.bench.serve", description=(__doc__ or "").split("\n")[0])
    parser.add_models(MODELS)
    parser.add_argument("--quick", action="store_true", help="within three minutes on two cores")
    parser.add_argument("--llama-server", metavar="PROGRAM", help="llama.cpp's server, for the mix")
    parser.add_argument("--llama-python", metavar="PYTHON", default=".venv-llama/bin/python")
    parser.add_argument("--seed", type=int, default=0, help="of prompts, lengths and arrivals")
    parser.reporting()
    given = parser.parse_args(arguments)
    given.models = parser.chosen_models(given, MODELS)
    parser.at_least(0, seed=given.seed)
    parser.check_output(given.output)
    return given


def measure_all(options: Any) -> list[dict[str, Any]]:
    """The results, one a model."""
    with contextlib.ExitStack() as stack:
        say = stack.enter_context(progress(7 * len(options.models)))
        server, engine, clients = (
            stack.enter_context(Worker(sys.executable, f"scripts.bench.peers.{module}", {}))
            for module in ("engine_server", "engine_server", "http_client")
        )
        for each in (server, engine, clients):
            each.begin()
        bench = Bench(server, engine, clients, options.seed, say)
        return [
            bench.measure(
                name,
                QUICK if options.quick else SCALES[name],
                (options.llama_server, options.llama_python)
                if options.llama_server and name == "random"
                else None,
            )
            for name in options.models
        ]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    asked = own_command(__file__, arguments)
    where = machine()
    try:
        results = measure_all(options)
    except WorkerError as error:
        print(f"scripts.bench.serve: a side could not go on: {error}", file=sys.stderr)
        return 1
    report = {
        "benchmark": "serve",
        "command": asked,
        "machine": where,
        "versions": versions(("jax", "jaxlib", "starlette", "uvicorn", "uvloop", "h11")),
        "settings": {
            "quick": options.quick,
            "seed": options.seed,
            "temperature": TEMPERATURE,
            "prompt": PROMPT,
        },
        "results": results,
    }
    finish(report, as_text(report), goals(results), as_json=options.json, output=options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
