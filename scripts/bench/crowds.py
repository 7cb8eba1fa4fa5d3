"""Measures what an engine loses where thousands of prompts are cached, or thousands of calls wait, and
`generate` where it is given thousands of prompts.

    python -m scripts.bench.crowds                              # the full measurement
    python -m scripts.bench.crowds --quick                      # smaller crowds, within three minutes on two cores
    python -m scripts.bench.crowds --json --output FILE         # one JSON object

All prompts begin with the same few tokens, as those of a chat template do, and go on differently:
none has a prefix that is worth sharing. Every side answers short calls of the embedded model with
full memory, so that each call evicts others: an engine whose memory holds few prompts, with few
calls waiting; one whose memory holds thousands; and the first, with thousands of calls waiting. Then
`generate` has few prompts and many, each of which it answers in a row of its own. How to read the
result is in benchmarks/README.md.
"""

import collections
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxshare import Sampler
from jaxshare.models import EMBEDDED, LoadedModel, load
from jaxshare.serving import generate
from jaxshare.serving.engine import Engine, Stream
from jaxshare.serving.inputs import token_bytes
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

FEW, CACHED, WAITING = "few of both", "many cached", "many waiting"
FEW_AT_ONCE, AT_ONCE = "generate, few prompts", "generate, many prompts"
ROWS, CALLS = 32, 256
BEGINNING, PROMPT_TOKENS, NEW_TOKENS = 5, 16, 8
"""Tokens with which all prompts begin, of a prompt, and of an answer."""
FEW_PROMPTS = 256
"""Prompts, with their answers, that the memory of the first engine holds."""
CROWDS = {False: (4096, 6000, 2048), True: (2048, 2000, 1024)}
"""Prompts that are cached, calls that wait, and prompts of `generate`; with `--quick`."""
ROUNDS, QUICK_ROUNDS = 5, 3
GOALS = {CACHED: (0.8, FEW), WAITING: (0.9, FEW), AT_ONCE: (0.8, FEW_AT_ONCE)}
"""The calls a second that a side has at least, of those of another."""


class Prompts:
    """Prompts that begin with the same tokens and go on at random.

    Args:
      model: as loaded.
      seed: of what follows.
    """

    def __init__(self, model: LoadedModel, seed: int):
        self._rng, self._vocab = np.random.default_rng(seed), model.config.vocab_size
        self.sampler = Sampler(1.0, forbidden=tuple(model.generation.stop_tokens))

    def next(self) -> list[int]:
        """The next prompt."""
        rest = self._rng.integers(0, self._vocab, PROMPT_TOKENS - BEGINNING).tolist()
        return [*range(BEGINNING), *rest]


class Crowd:
    """An engine with full memory, and new calls for it.

    Args:
      model: as loaded.
      prompts: that its memory holds, with their answers.
      seed: of the prompts.
    """

    def __init__(self, model: LoadedModel, prompts: int, seed: int):
        tokens = prompts * (PROMPT_TOKENS + NEW_TOKENS)
        self.engine = Engine(
            model, max_rows=ROWS, kv_bytes=tokens * token_bytes(model), max_queue=10**6
        )
        self._prompts = Prompts(model, seed)
        self.run(prompts + CALLS)

    def _submit(self) -> Stream:
        given = self._prompts.next(), self._prompts.sampler
        return self.engine.submit(*given, max_new_tokens=NEW_TOKENS, seed=0)

    def run(self, calls: int, waiting: int = ROWS) -> float:
        """The seconds of so many calls, where at most `waiting` wait beside those that run."""
        begin, streams = time.perf_counter(), collections.deque[Stream]()
        for _ in range(calls):
            if len(streams) == ROWS + waiting:
                streams.popleft().wait()
            streams.append(self._submit())
        for stream in streams:
            stream.wait()
        return time.perf_counter() - begin


def at_once(model: LoadedModel, prompts: Prompts, count: int) -> float:
    """The seconds in which `generate` answers so many prompts, without what it compiles."""
    given = [prompts.next() for _ in range(count)]
    return generate(
        model, given, max_new_tokens=NEW_TOKENS, sampler=prompts.sampler, seed=0, warm_up=True
    ).seconds


def measure(
    model: LoadedModel,
    crowds: tuple[int, int, int],
    rounds: int,
    seed: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Calls a second of each side, and the ratios of `GOALS`."""
    cached, waiting, together = crowds
    say("few")
    few = Crowd(model, FEW_PROMPTS, seed)
    say("many")
    many = Crowd(model, cached, seed + 1)
    sides = {
        FEW: lambda: few.run(CALLS),
        CACHED: lambda: many.run(CALLS),
        WAITING: lambda: few.run(waiting, waiting) * CALLS / waiting,
    }
    say("in turn")
    with few.engine, many.engine:
        seconds = alternate(sides, rounds)
    say("generate")
    prompts = Prompts(model, seed + 2)
    sides = {
        FEW_AT_ONCE: lambda: at_once(model, prompts, CALLS),
        AT_ONCE: lambda: at_once(model, prompts, together) * CALLS / together,
    }
    for side in sides.values():
        side()
    seconds |= alternate(sides, rounds)
    return {
        "calls_per_second": {side: CALLS / statistics.median(s) for side, s in seconds.items()},
        "of_few": {side: ratios(seconds[few], seconds[side]) for side, (_, few) in GOALS.items()},
        "round_seconds": seconds,
    }


def goals(result: Mapping[str, Any]) -> list[Goal]:
    """The goals that the result can be held against."""
    return [
        Goal(f"{side}: calls a second, of those with few", result["of_few"][side]["median"], goal)
        for side, (goal, _) in GOALS.items()
    ]


def as_text(report: Mapping[str, Any]) -> str:
    """The report without its goals."""
    where, settings, result = report["machine"], report["settings"], report["result"]
    rows = []
    for side, rate in result["calls_per_second"].items():
        found = result["of_few"].get(side)
        ratio = "{median:.2f}, {lowest:.2f} to {highest:.2f}".format_map(found) if found else ""
        rows.append((side, f"{rate:.1f}", ratio))
    return "\n".join(
        [
            f"{settings['cached']} prompts cached, {settings['waiting']} calls waiting, or "
            f"{settings['together']} prompts at once, medians of {settings['rounds']} rounds; {where['cpu']}, {where['cores']} cores, load "
            f"{where['load_average']} at the start; jax {report['versions']['jax']}",
            "",
            table(("prompts and calls", "calls/s", "of few"), rows),
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="scripts.bench.crowds", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller crowds, fewer rounds")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (default %(default)s)")
    parser.reporting()
    given = parser.parse_args(arguments)
    if given.seed < 0:
        parser.error(f"--seed is {given.seed}, but it must be at least 0")
    parser.check_output(given.output)
    asked, where = own_command(__file__, arguments), machine()
    crowds, rounds = CROWDS[given.quick], QUICK_ROUNDS if given.quick else ROUNDS
    with progress(4) as say:
        result = measure(load(EMBEDDED), crowds, rounds, given.seed, say)
    settings = {"cached": crowds[0], "waiting": crowds[1], "together": crowds[2]}
    settings |= {"rounds": rounds, "rows": ROWS}
    settings |= {"calls": CALLS, "prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS}
    report = {
        "benchmark": "crowds",
        "command": asked,
        "machine": where,
        "versions": versions(("jax", "jaxlib", "flax", "numpy")),
        "settings": {**settings, "quick": given.quick, "seed": given.seed},
        "result": result,
    }
    finish(report, as_text(report), goals(result), as_json=given.json, output=given.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
