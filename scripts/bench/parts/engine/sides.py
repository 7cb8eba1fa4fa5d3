"""The sides of the benchmark of the engine, and the calls that each of them answers."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxshare import DecodeState, KVCache, Layout, Sampler, decode
from jaxshare.models import LoadedModel
from jaxshare.serving import generate
from jaxshare.serving.engine import Completion, Engine, Stream
from jaxshare.serving.inputs import token_bytes
from jaxshare.serving.kvcache.prefix_tree import Match

ENGINE, RAW, BATCHES, FORGETFUL = "engine", "raw loop", "one batch at a time", "no prefix reuse"


SYSTEMS, SYSTEM_TOKENS = 3, 384


QUESTIONS = (8, 40)
"""Tokens of a question, the fewest and the most."""


BUDGETS = (16, 128)


ROOM = 256
"""Tokens of a row's own block in the raw loop, which is what the engine gives a row at a time."""


TEMPERATURE = 0.8


POLL_SECONDS = 0.004
Seen = list[tuple[float, float, bool]]
"""Seconds, tokens so far, and whether calls wait, looked at often."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A prompt, whose first tokens belong to the system prompt of that number, and the length of
    its answer."""

    system: int
    prompt: tuple[int, ...]
    budget: int
    seed: int


class Calls:
    """Makes calls. System prompts are the same in all of them; questions and budgets are new each
    time."""

    def __init__(self, vocab: int, seed: int, system_tokens: int = SYSTEM_TOKENS):
        self._rng, self._vocab, self._number = (
            np.random.default_rng([seed, 4]),
            vocab,
            itertools.count(),
        )
        self.systems = [
            tuple(self._rng.integers(0, vocab, system_tokens).tolist()) for _ in range(SYSTEMS)
        ]

    def make(
        self, count: int, questions: tuple[int, int], budgets: tuple[int, int] = BUDGETS
    ) -> list[Call]:
        """Makes `count` calls, each with the fewest and the most tokens of a question and an answer."""
        found = []
        for _ in range(count):
            system = int(self._rng.integers(SYSTEMS))
            length, budget = (
                int(self._rng.integers(low, high + 1)) for low, high in (questions, budgets)
            )
            question = self._rng.integers(0, self._vocab, length).tolist()
            found.append(
                Call(system, (*self.systems[system], *question), budget, next(self._number))
            )
        return found


class Served:
    """An engine with its system prompts in memory, and what is asked of it."""

    def __init__(
        self,
        model: LoadedModel,
        calls: Calls,
        rows: int,
        sampler: Sampler,
        passes: int,
        *,
        reuse: bool = True,
    ):
        longest = len(calls.systems[0]) + QUESTIONS[1] + BUDGETS[1] + ROOM
        tokens = (2 * rows if reuse else 4 * rows) * longest + SYSTEMS * len(calls.systems[0])
        self.engine = Engine(
            model,
            max_rows=rows,
            kv_bytes=tokens * token_bytes(model),
            passes=passes,
            max_queue=10**6,
            sampler=sampler,
        )
        self.engine.warm_up()  # as a server does
        if not reuse:
            tree = self.engine._scheduler.kv.tree
            tree.match = lambda tokens, most, adapter=b"": Match(tree.root, 0, 0, 0)
        for system in calls.systems:
            self.engine.submit(system, max_new_tokens=1).wait()

    def submit(self, call: Call) -> Stream:
        return self.engine.submit(call.prompt, max_new_tokens=call.budget, seed=call.seed)

    def at_once(self, calls: Sequence[Call]) -> tuple[float, Seen]:
        """(seconds until all have ended, what was seen meanwhile, for `steady_rate`)."""
        seen: Seen = []
        begin = time.perf_counter()
        streams = [self.submit(call) for call in calls]
        for stream in streams:
            while not _ended(stream):
                seen.append(
                    (
                        time.perf_counter(),
                        self._value("jaxshare_tokens_total", how="sampled"),
                        self._value("jaxshare_queue") > 0,
                    )
                )
        return time.perf_counter() - begin, seen

    def arriving(self, calls: Sequence[Call], at: Sequence[float]) -> list[Completion]:
        """Submits every call at its time, in seconds from now."""
        begin, streams = time.perf_counter(), []
        for call, due in zip(calls, at, strict=True):
            time.sleep(max(0.0, begin + due - time.perf_counter()))
            streams.append(self.submit(call))
        return [stream.wait() for stream in streams]

    def _value(self, name: str, **labels: str) -> float:
        return self.engine.metrics.registry.get_sample_value(name, labels) or 0.0


def _ended(stream: Stream) -> bool:
    """Waits for a moment; raises what went wrong with the call."""
    try:
        stream.wait(POLL_SECONDS)
    except TimeoutError:
        return False
    return True


def steady_rate(seen: Seen) -> float:
    """Tokens a second while calls waited: then all rows are at work.

    Raises:
      ValueError: calls did not wait for long enough.
    """
    waiting = [each for each in seen if each[2]]
    changes = [later for earlier, later in itertools.pairwise(waiting) if later[1] != earlier[1]]
    if len(changes) < 2:
        raise ValueError("too few calls waited for a rate to be seen; give each row more of them")
    (begin, first, _), (end, last, _) = changes[0], changes[-1]
    return (last - first) / (end - begin)


class Raw:
    """The decode loop by itself: rows below the system prompts, with own blocks of the length that
    the engine's have on average."""

    def __init__(
        self,
        model: LoadedModel,
        calls: Sequence[Call],
        system_tokens: int,
        rows: int,
        sampler: Sampler,
        passes: int,
    ):
        self.model, self.rows, self.passes = model, rows, passes
        systems = [call.system for call in calls[:rows]]
        self.length = mean_length(calls)
        used = sorted(set(systems))
        cache = KVCache.create(
            model.for_context(model.config.max_positions).config,
            (*[system_tokens] * len(used), *[ROOM] * rows),
        )
        layout = Layout.from_blocks(
            [[used.index(system), len(used) + r] for r, system in enumerate(systems)]
        )
        self._lengths = jnp.asarray(
            [*[system_tokens] * len(used), *[self.length] * rows], jnp.int32
        )
        self.state = DecodeState.create(
            dataclasses.replace(cache, lengths=self._lengths),
            layout,
            [[1]] * rows,
            samplers=sampler,
            vocab_size=model.config.vocab_size,
            max_new_tokens=2**20,
            capacity=1024,
            max_width=1,
        )

    def turn(self, dispatches: int) -> float:
        """Tokens a second."""
        begin = time.perf_counter()
        for _ in range(dispatches):
            # Every dispatch begins with the same lengths, so that its passes are those from the
            # middle of an answer.
            state = dataclasses.replace(
                self.state,
                cache=dataclasses.replace(self.state.cache, lengths=self._lengths + 0),
                num_sampled=jnp.zeros(self.rows, jnp.int32),
            )
            self.state = jax.block_until_ready(
                decode(self.model.module, self.model.params, state, passes=self.passes)
            )
        seconds = time.perf_counter() - begin
        self.state.cache.check()
        if not bool(jnp.all(self.state.running)):
            raise RuntimeError(
                "rows ended before their passes were done: "
                f"{np.asarray(self.state.reasons).tolist()}"
            )
        return self.rows * self.passes * dispatches / seconds


def mean_length(calls: Sequence[Call]) -> int:
    """The mean tokens that a row has written of its answer, over all passes of all calls."""
    return round(sum(call.budget**2 for call in calls) / (2 * sum(call.budget for call in calls)))


class Batches:
    """Serves calls in groups by `generate`, which shares what their prompts have in common, and
    keeps nothing from one to the next."""

    def __init__(self, model: LoadedModel, rows: int, sampler: Sampler):
        self.model, self.rows, self.sampler = model, rows, sampler
        # by size: seconds to the first tokens, and of a token of the longest answer
        self.costs: dict[int, tuple[float, float]] = {}

    def one(self, calls: Sequence[Call]) -> tuple[float, float]:
        """(seconds to the first tokens, seconds) of one batch; compiling is left out."""
        first: list[float] = []
        done = generate(
            self.model,
            [[*call.prompt] for call in calls],
            max_new_tokens=max(call.budget for call in calls),
            sampler=self.sampler,
            seed=calls[0].seed,
            max_rows=self.rows,
            warm_up=True,
            on_tokens=lambda run: first.append(run.seconds),
        )
        return first[0], done.seconds

    def at_once(self, calls: Sequence[Call]) -> float:
        return sum(
            self.one(calls[at : at + self.rows])[1] for at in range(0, len(calls), self.rows)
        )

    def calibrate(self, calls: Sequence[Call]) -> None:
        """Measures a batch of one call, of two, four, and so on: to compile each batch that arrives
        would take minutes."""
        sizes = [
            *itertools.takewhile(lambda size: size < self.rows, (2**i for i in itertools.count())),
            self.rows,
        ]
        for size in sizes:
            first, seconds = self.one(calls[:size])
            self.costs[size] = first, seconds / max(call.budget for call in calls[:size])

    def arriving(self, calls: Sequence[Call], at: Sequence[float]) -> list[float]:
        """The seconds of each call to its first token: all calls that wait when a batch has ended
        make the next one. A batch takes the measured time of the next larger one, in proportion to
        its longest answer.
        """

        def run(begin: int, end: int) -> tuple[float, float]:
            first, a_token = next(
                cost for size, cost in sorted(self.costs.items()) if size >= end - begin
            )
            return first, a_token * max(call.budget for call in calls[begin:end])

        return batch_waits(at, self.rows, run)


def batch_waits(
    at: Sequence[float], rows: int, run: Callable[[int, int], tuple[float, float]]
) -> list[float]:
    """Seconds from each arrival to the first token where batches follow one another.

    Args:
      at: arrivals, ascending.
      rows: calls of a batch at most.
      run: what runs calls [begin, end) and says (seconds to the first token, seconds).
    """
    waits, now, begin = [], 0.0, 0
    while begin < len(at):
        now = max(now, at[begin])
        end = begin + sum(arrival <= now for arrival in at[begin : begin + rows])
        first, seconds = run(begin, end)
        waits += [now + first - arrival for arrival in at[begin:end]]
        now, begin = now + seconds, end
    return waits


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50 and p99, in milliseconds."""
    return {name: float(np.quantile(seconds, q)) * 1e3 for name, q in (("p50", 0.5), ("p99", 0.99))}


LOADS = (0.5, 0.8)
"""Arrivals, as shares of the rate that the engine serves when calls always wait."""


def arrivals(
    served: Served, batches: Batches, calls: Calls, count: int, share: float, rate: float, seed: int
) -> dict[str, Any]:
    """Time to first token at a share of the engine's own rate, in calls a second."""
    asked = calls.make(count, QUESTIONS)
    at = np.cumsum(np.random.default_rng([seed, 5]).exponential(1 / (share * rate), count)).tolist()
    first = [done.first_token_seconds for done in served.arriving(asked, at)]
    return {
        "load": share,
        "calls_per_second": share * rate,
        "calls": count,
        "first_token_milliseconds": {
            ENGINE: quantiles(first),
            BATCHES: quantiles(batches.arriving(asked, at)),
        },
    }
