"""One checkout's side of scripts/bench/before.py. One JSON object a line, in on stdin, out on
stdout.

The environment variable CHECKOUT names the folder that is measured. Nothing is imported from it
but what every version since 0.1 has.

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

from scripts.bench.peers.conversation import Conversation

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
    conversation = Conversation()
    folder = Path(os.environ["CHECKOUT"])
    sys.path.insert(0, str(folder))
    # An editable installation of another checkout would find its parts before this one's.
    sys.meta_path[:] = [f for f in sys.meta_path if "__editable__" not in _module(f)]
    try:
        import jax

        import jaxshare

        if not Path(jaxshare.__file__).is_relative_to(folder):
            raise ImportError(f"jaxshare is imported from {Path(jaxshare.__file__).parent}")
        side = Checkout()
    except Exception as error:
        return conversation.say(error=f"{type(error).__name__}: {error}")
    conversation.say(versions={"python": platform.python_version(), "jax": jax.__version__})
    conversation.answer_requests(side)


if __name__ == "__main__":
    main()
