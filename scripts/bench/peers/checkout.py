"""One checkout's side of scripts/bench/before.py. One JSON object a line, in on stdin, out on
stdout.

It is run as a file, in the folder of the checkout that is measured, and imports nothing but what
every version since 0.1 has.

    (at the start)                                   -> versions
    {"do": "workers", "count": N, "budget": PASSES}  -> seconds, passes, digest: of N workers over one problem
    {"do": "branches", "prompts": [...], "n": N, "tokens": T} -> seconds, digest: N completions of T tokens of each prompt

Seconds are those of the whole call; the first call of a kind compiles. Answers also have the times
of waiting that `scripts.bench.peer.Worker` expects, or are {"error": SENTENCE}.
"""

import hashlib
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

NAMES = ("Alice", "Bob", "Carol", "Dan")
PROBLEM = "1. 47 + 38\n2. 12 * 3\n3. 81 - 27\n4. 96 / 4"


class Checkout:
    """The embedded model, as the checkout runs it."""

    def __init__(self) -> None:
        from jaxshare import Sampler
        from jaxshare.models import EMBEDDED, load

        self.model = load(EMBEDDED)
        stops = tuple(self.model.generation.stop_tokens)
        self.sampler = Sampler(temperature=0.7, forbidden=stops)

    def workers(self, count: int, budget: int) -> dict[str, Any]:
        from jaxshare.serving import Workers

        session = Workers(
            self.model,
            PROBLEM,
            names=NAMES[:count],
            budget=budget,
            sampler=self.sampler,
            stop_on="never",
            seed=0,
            step_tokens=128,
            history_tokens=1536,
        )
        begin = time.perf_counter()
        for _ in session.stream():
            pass
        seconds = time.perf_counter() - begin
        texts = [list(map(int, step.tokens)) for step in session.steps]
        return {"seconds": seconds, "passes": session.passes, "digest": _digest(texts)}

    def branches(self, prompts: list[list[int]], n: int, tokens: int) -> dict[str, Any]:
        from jaxshare.serving import generate

        begin = time.perf_counter()
        done = generate(
            self.model, prompts, n=n, max_new_tokens=tokens, sampler=self.sampler, seed=0
        )
        seconds = time.perf_counter() - begin
        texts = [list(map(int, completion.tokens)) for completion in done.completions]
        return {"seconds": seconds, "digest": _digest(texts)}


def _digest(texts: Any) -> str:
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]


def _module(finder: Any) -> str:
    return getattr(finder, "__module__", "")


def main() -> None:
    # A library that prints must not print into the conversation.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.path.insert(0, str(Path.cwd()))
    # An editable installation of another checkout would find its parts before this one's.
    sys.meta_path[:] = [f for f in sys.meta_path if "__editable__" not in _module(f)]
    try:
        import jax

        import jaxshare

        if not Path(jaxshare.__file__).is_relative_to(Path.cwd()):
            raise ImportError(f"jaxshare is imported from {Path(jaxshare.__file__).parent}")
        side = Checkout()
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=out, flush=True)
        return
    found = {"python": platform.python_version(), "jax": jax.__version__}
    print(json.dumps({"versions": found}), file=out, flush=True)
    idle, idle_cpu = time.perf_counter(), time.process_time()
    for line in sys.stdin:
        request = json.loads(line)
        idle, idle_cpu = time.perf_counter() - idle, time.process_time() - idle_cpu
        try:
            answer = getattr(side, request.pop("do"))(**request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        idle_times = {"idle_seconds": idle, "idle_cpu_seconds": idle_cpu}
        idle, idle_cpu = time.perf_counter(), time.process_time()
        print(json.dumps({**answer, **idle_times}), file=out, flush=True)


if __name__ == "__main__":
    main()
