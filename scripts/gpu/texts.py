"""Texts of the model that comes with jaxshare on the CPU and on the GPU of this machine, in float32
and bfloat16.

    python -m scripts.gpu.texts --output FILE          # one JSON object
    python -m scripts.gpu.texts --devices cpu,cpu      # the same program without a GPU

Texts are those of `generate`, of an engine's requests and of a session of workers on the engine,
beside each other. In float32 greedy texts must be equal, and log-probabilities within rounding; in
bfloat16 a near-tie may go either way, so that log-probabilities of the texts that are equal are held
against it. Texts that are drawn have equal seeds on both, and are counted. Ends with code 1 where
something is wrong.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from scripts.bench.lib import ROOT, Goal, Parser, finish, machine, own_command, table, versions

DTYPES = ("float32", "bfloat16")
TEMPERATURES = {"greedy": 0.0, "drawn": 0.8}
"""Of the texts of `generate`; those of the engine and of workers are greedy."""
ENGINE, WORKERS = "engine", "workers"
KINDS = (*TEMPERATURES, ENGINE, WORKERS)
GREEDY = tuple(kind for kind in KINDS if kind != "drawn")
PROMPTS = ("Compute 17 + 25 and 6 * 7.", "Compute 3 + 4.", "Compute 12 * 3 and 90 - 13 and 8 + 8.")
PROBLEM = "1. 47 + 38\n2. 12 * 7\n3. 93 - 16"
TOKENS, DRAWS = 64, 4
TOLERANCE = {"float32": 2e-4, "bfloat16": 0.05}
"""Of a token's log-probability, in the mean of its text."""


def side(dtype: str) -> dict[str, Any]:
    """The texts of this process's device: of each kind, tokens and log-probability of each."""
    from jaxshare import Sampler
    from jaxshare.models import load
    from jaxshare.serving import Workers, generate
    from jaxshare.serving.engine import Engine

    def as_found(completions: Iterable[Any]) -> list[dict[str, Any]]:
        return [{"tokens": list(each.tokens), "logprob": each.logprob} for each in completions]

    model, found = load("embedded", dtype), {}
    for kind, temperature in TEMPERATURES.items():
        made = generate(
            model,
            list(PROMPTS),
            n=DRAWS if temperature else 1,
            max_new_tokens=TOKENS,
            sampler=Sampler(temperature, top_p=0.95 if temperature else 1.0),
            seed=7,
        )
        found[kind] = as_found(made.completions)
    how = {"sampler": Sampler(0.0)}
    with Engine(model, max_rows=8) as engine:
        streams = [
            engine.submit(prompt, **how, max_new_tokens=TOKENS, logprobs=True) for prompt in PROMPTS
        ]
        session = Workers(engine.model, PROBLEM, budget=TOKENS, **how, engine=engine)
        texts = session.run().texts
        found[ENGINE] = as_found(stream.wait() for stream in streams)
    # Of bytes, and what a worker has written has no log-probability.
    found[WORKERS] = [{"tokens": [*text.encode()], "logprob": 0.0} for text in texts.values()]
    return found


def asked(device: str, dtype: str) -> dict[str, Any]:
    """Asks a process with this platform of JAX for its side.

    Raises:
      RuntimeError: it has failed, with what it said last.
    """
    environment = {
        **os.environ,
        "JAX_PLATFORMS": device,
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        # Two processes share a GPU.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    command = [sys.executable, "-W", "ignore", "-m", "scripts.gpu.texts", "--side", dtype]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        said = [line for line in lines if "Error" in line] or lines or ["it said nothing"]
        raise RuntimeError(f"the side of {device} in {dtype} has failed: {said[-1][:300]}")
    return json.loads(done.stdout.splitlines()[-1])


def compared(one: Sequence[Any], other: Sequence[Any]) -> dict[str, Any]:
    """Texts that are equal, the first place where others differ, and the largest difference of a
    token's log-probability among the equal ones, in the mean of a text."""
    equal = [(a, b) for a, b in zip(one, other, strict=True) if a["tokens"] == b["tokens"]]
    places = [
        next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        for a, b in ((x["tokens"], y["tokens"]) for x, y in zip(one, other, strict=True))
        if a != b
    ]
    errors = [abs(a["logprob"] - b["logprob"]) / max(len(a["tokens"]), 1) for a, b in equal]
    return {
        "texts": len(one),
        "equal": len(equal),
        "first_difference": min(places, default=None),
        "logprob_error": max(errors, default=None),
    }


def goals(results: Mapping[str, Mapping[str, Any]]) -> list[Goal]:
    """All greedy texts in float32 are equal, and log-probabilities of equal ones within rounding."""
    greedy = [results["float32"][kind] for kind in GREEDY]
    what = "texts: greedy ones in float32 that are equal, of all"
    equal = sum(each["equal"] for each in greedy) / sum(each["texts"] for each in greedy)
    found = [Goal(what, equal, 1.0)]
    for dtype, kinds in results.items():
        for kind, result in kinds.items():
            name = f"texts: log-probability of a token, {kind}, {dtype}: difference"
            found.append(Goal(name, result["logprob_error"], TOLERANCE[dtype], at_most=True))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="scripts.gpu.texts", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--devices",
        default="cpu,cuda",
        metavar="D,D",
        help="as JAX_PLATFORMS (default %(default)s)",
    )
    parser.add_argument("--side", choices=DTYPES, help="print the side of this process alone")
    parser.reporting()
    given = parser.parse_args(arguments)
    if given.side:
        print(json.dumps(side(given.side)))
        return 0
    devices = given.devices.split(",")
    if len(devices) != 2 or not all(devices):
        parser.error(f"--devices is {given.devices!r}, but it must be two, such as cpu,cuda")
    parser.check_output(given.output)
    results = {}
    try:
        with ThreadPoolExecutor() as threads:  # each waits for a process
            found = {
                dtype: [threads.submit(asked, device, dtype) for device in devices]
                for dtype in DTYPES
            }
        for dtype, sides in found.items():
            one, other = (each.result() for each in sides)
            results[dtype] = {kind: compared(one[kind], other[kind]) for kind in KINDS}
    except RuntimeError as error:
        print(f"scripts.gpu.texts: {error}", file=sys.stderr)
        return 1
    report = {
        "benchmark": "texts",
        "command": own_command(__file__, arguments),
        "machine": machine(),
        "versions": versions(("jax", "jaxlib")),
        "settings": {"devices": devices, "tokens": TOKENS},
        "results": results,
    }
    rows = [
        (f"{kind}, {dtype}", str(r["texts"]), str(r["equal"]), f"{r['logprob_error'] or 0:.2g}")
        for dtype, kinds in results.items()
        for kind, r in kinds.items()
    ]
    header = (f"{devices[0]} and {devices[1]}", "texts", "equal", "log-probability, difference")
    found = goals(results)
    finish(report, table(header, rows), found, as_json=given.json, output=given.output)
    return 1 if any(goal.met is False for goal in found) else 0


if __name__ == "__main__":
    sys.exit(main())
