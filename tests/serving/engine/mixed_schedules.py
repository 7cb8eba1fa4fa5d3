"""Random schedules of sessions of workers, calls and branches of trees on one small engine.

`make(seed)` draws a schedule, `play` runs it, and `check` compares every text with the one that it
has alone: calls with plain causal attention over the whole text, sessions with `PlainSession`.
"""

import dataclasses
import functools
import random
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxshare import FinishReason, Sampler
from jaxshare.decoding.automaton import ByteAutomaton
from jaxshare.models import LoadedModel
from jaxshare.models.layers import Decoder
from jaxshare.seeds import stream_seed
from jaxshare.serving import Workers
from jaxshare.serving.engine import Completion, Engine, EngineError, Stream, TooLongError
from jaxshare.serving.inputs import token_bytes
from jaxshare.serving.workers.text.answers import AnswerRule
from jaxshare.serving.workers.text.transcript import Step
from tests.helpers import TINY, init
from tests.serving.branches.test_branches import embedded
from tests.serving.engine.stepped import Client, Stepped
from tests.serving.engine.test_engine import check_memory
from tests.serving.workers.plain_session import PlainSession, drawn
from tests.serving.workers.test_session import CHAT

TOKENS, ROWS, PASSES, LONGEST = 1408, 6, 4, 160
CONFIG = dataclasses.replace(TINY, vocab_size=402, max_positions=1024)
POINT, BREAK, BRACE, STOP = 16, 265, 95, 2
BIAS = {POINT: 9.0, BREAK: 9.0, BRACE: 10.0, STOP: 4.0}
UNWANTED = (1, 6, 66, 96)
"""A token without text, and those after which no step ends for long."""
SAMPLERS = [
    Sampler(temperature=1.5, bias=BIAS, forbidden=UNWANTED),
    Sampler(temperature=2.5, bias=BIAS, forbidden=UNWANTED, top_k=40),
    Sampler(temperature=1.0, bias=BIAS, forbidden=UNWANTED, top_p=0.9),
    Sampler(bias={BREAK: 5.0}, forbidden=UNWANTED),
]
COLD = [SAMPLERS[-1], dataclasses.replace(SAMPLERS[0], temperature=0.5)]
"""With which an answer is often the same again."""
NAMES = ("Alice", "Bob", "Carol", "Dan", "Erin")
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


@functools.cache
def model() -> LoadedModel:
    """Two small layers of random parameters under the embedded model's tokenizer."""
    return dataclasses.replace(embedded(), config=CONFIG, params=init(CONFIG), workers=None)


def holds_answer(text: str) -> bool:
    """Returns whether a brace closes after one of some letters: an answer that is often drawn."""
    return any(found in LETTERS for found in re.findall(r"(.)\}", text, re.DOTALL))


KIND = AnswerRule(
    find=lambda text: re.findall(r"(.)\}", text, re.DOTALL),
    valid=lambda answer: answer in LETTERS,
    guess=lambda text: None,
    automaton=lambda: ByteAutomaton.build("text", lambda state, byte: (state, byte == ord("}"))),
)


@dataclasses.dataclass(frozen=True)
class Call:
    """A call, or one completion of a branch of a tree.

    Attributes:
      follows: chooses an earlier call whose text comes first, as far as it is known; -1 for none.
        The first `keep` tokens of it are taken.
      cancelled: turns after which it is cancelled, or None.
    """

    tokens: tuple[int, ...]
    follows: int
    keep: int
    options: dict[str, Any]
    cancelled: int | None = None


@dataclasses.dataclass(frozen=True)
class Visit:
    """A session of workers: its settings, and (passes, what is done then, to which worker)."""

    settings: dict[str, Any]
    acts: tuple[tuple[int, str, str], ...]
    until: int
    """The passes after which it leaves."""

    @property
    def is_large(self) -> bool:
        """Whether it needs most of the memory."""
        return self.settings["layout"] == "contiguous"


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What comes to an engine, and in which turn."""

    seed: int
    engine: dict[str, Any]
    arrivals: list[tuple[int, Call | Visit]]


# Drawing a schedule.


def make(seed: int) -> Schedule:
    """The schedule of a seed."""
    rng = random.Random(seed)
    engine = {
        "taken": rng.choice([0, 300, 620]),
        "host": rng.choice([0, 256]),
        "policy": rng.choice(["contribution", "lru", "lfu", "slru", "priority"]),
        "logits_cache": 10**6,
        "kept_logits": 250,
    }
    book = tuple(rng.randrange(3, 402) for _ in range(80))
    arrivals: list[tuple[int, Call | Visit]] = []
    for _ in range(rng.randrange(5, 9)):
        turn, kind = rng.randrange(20), rng.random()
        if kind < 0.4:
            arrivals.append((turn, _visit(rng)))
        elif kind < 0.55:
            arrivals += [(turn, call) for call in _tree(rng, book)]
        elif kind < 0.7:
            arrivals += [(turn + 6 * i, call) for i, call in enumerate(_again(rng, book))]
        else:
            arrivals.append((turn, _call(rng, book)))
    if any(isinstance(each, Visit) and each.is_large for _, each in arrivals):
        engine["taken"] = 0
    return Schedule(seed, engine, sorted(arrivals, key=lambda arrival: arrival[0]))


def _call(rng: random.Random, book: tuple[int, ...]) -> Call:
    own = tuple(rng.randrange(3, 402) for _ in range(rng.randrange(1, 16)))
    options = {
        "sampler": rng.choice(SAMPLERS),
        "seed": rng.choice([0, 1, rng.randrange(2**63)]),
        "max_new_tokens": rng.randrange(1, 40),
        "agent_id": rng.choice("abc"),
        "priority": rng.choice([0, 0, 0, 1, 2]),
    }
    options |= rng.choice([{}, {"resample": "stepwise"}, {"logprobs": True}])
    return Call(
        book[: rng.randrange(80)] + own,
        rng.choice([-1, rng.randrange(20)]),
        rng.choice([rng.randrange(90), 1000]),
        options,
        rng.randrange(1, 12) if rng.random() < 0.1 else None,
    )


def _again(rng: random.Random, book: tuple[int, ...]) -> list[Call]:
    """Calls with one prompt, whose answers the Logits Cache knows in parts."""
    first = _call(rng, book)
    options = {**first.options, "resample": "stepwise", "sampler": rng.choice(COLD)}
    options.pop("logprobs", None)
    options["max_new_tokens"] += 5
    return [Call(first.tokens, -1, 0, {**options, "seed": seed}) for seed in range(3)]


def _tree(rng: random.Random, book: tuple[int, ...]) -> list[Call]:
    """The completions of a tree's branches, as `generate` submits them."""
    start, count = book[: rng.randrange(20, 60)], rng.randrange(1, 20)
    seed, sampler, found = rng.randrange(100), rng.choice(SAMPLERS), []
    for number in range(rng.randrange(1, 4)):
        tokens = start + tuple(rng.randrange(3, 402) for _ in range(rng.randrange(1, 20)))
        for index in range(rng.randrange(1, 3)):
            options = {
                "sampler": sampler,
                "seed": stream_seed(seed, number, index),
                "max_new_tokens": count,
                "logprobs": True,
            }
            found.append(Call(tokens, -1, 0, options))
    return found


def _visit(rng: random.Random) -> Visit:
    present, budget = [*NAMES[: rng.randrange(1, 4)]], rng.randrange(12, 30)
    settings = {
        "problem": f"{rng.randrange(100)} + 1",
        "names": tuple(present),
        "layout": rng.choice(["combined", "interleaved", "contiguous"]),
        "sampler": rng.choice(SAMPLERS),
        "seed": rng.choice([0, rng.randrange(2**63)]),
        "ask_every": rng.choice([0, 7, 20]),
        "stop_on": rng.choice(["answer", "answer", "eos", "never"]),
        "together": rng.random() < 0.6,
        "passes_at_once": rng.choice([1, 3, 16]),
        "move": "rotate",
        "budget": budget,
        "max_workers": 3,
        "format": CHAT,
        "step_tokens": 16,
        "history_tokens": 450,
    }
    acts, at, new = [], 0, len(present)
    for _ in range(rng.choice([0, 0, 1, 2, 4])):
        at += rng.randrange(1, 8)
        act = rng.choice(["add", "remove", "pause", "resume", "say", "finish"])
        if act == "add" and len(present) < 3:
            present.append(NAMES[new])
            acts.append((at, act, NAMES[new]))
            new = min(new + 1, len(NAMES) - 1) if new < len(NAMES) - 1 else 0
            if not new:
                break
        elif act == "remove" and len(present) > 1:
            acts.append((at, act, present.pop(rng.randrange(len(present)))))
        elif act in ("pause", "resume", "say", "finish"):
            acts.append((at, act, rng.choice(present)))
    return Visit(settings, tuple(acts), budget if rng.random() < 0.8 else rng.randrange(budget))


# Playing it.


@dataclasses.dataclass
class Visited:
    """What a session has come to: its texts, its passes, the lengths of blocks, and its end."""

    steps: list[Step]
    written: dict[str, list[tuple[int, list[int]]]]
    passes: int
    lengths: dict[str, int]
    finish_reason: FinishReason | None


@dataclasses.dataclass
class Played:
    """What calls and sessions have come to, in the order of the schedule."""

    calls: list[tuple[Call, list[int], Completion]]
    visits: list[tuple[Visit, Visited]]
    engine: Engine


def start_engine(
    schedule: Schedule, kind: type[Engine] = Stepped, loaded: LoadedModel | None = None
) -> Any:
    """The small engine of a schedule."""
    options = {key: value for key, value in schedule.engine.items() if key != "taken"}
    host = options.pop("host") * token_bytes(model())
    return kind(
        loaded or model(),
        kv_bytes=TOKENS * token_bytes(model()),
        host_kv_bytes=host,
        max_rows=ROWS,
        passes=PASSES,
        **options,
    )


def play(
    schedule: Schedule,
    loaded: LoadedModel | None = None,
    watch: Callable[[Engine], object] = lambda engine: None,
) -> Played:
    """Runs a schedule in one thread's turns; `watch` sees the engine first."""
    engine, rng = start_engine(schedule, loaded=loaded), random.Random(schedule.seed)
    watch(engine)
    # So memory is of any size, and arrays of one.
    taken = engine.lease([schedule.engine["taken"]]) if schedule.engine["taken"] else None
    waiting, turn = [*schedule.arrivals], 0
    calls: list[tuple[Call, list[int], Stream, int]] = []
    clients: list[tuple[Visit, Client]] = []
    while waiting or any(not c.over for _, c in clients) or engine._requests:
        for arrival in [each for each in waiting if each[0] <= turn]:
            what = arrival[1]
            if isinstance(what, Visit):
                clients.append((what, Client(functools.partial(visit, engine, what))))
            elif not _submit(engine, what, calls, turn):
                continue
            waiting.remove(arrival)
        for call, _, stream, since in calls:
            if call.cancelled is not None and turn - since >= call.cancelled:
                stream.cancel()
        for _, client in clients:
            if rng.random() < 0.8:
                client.turn()
        engine.step()
        if rng.random() < 0.1:
            check_memory(engine)
        turn += 1
        assert turn < 3000, "the schedule does not come to its end"
    if taken:
        taken.close()
    check_baseline(engine)
    return Played(
        [(call, tokens, stream.wait(0)) for call, tokens, stream, _ in calls],
        [(what, client.result) for what, client in clients],
        engine,
    )


def play_in_threads(schedule: Schedule) -> Played:
    """Runs a schedule on an engine with a thread of its own, and each session in another."""
    engine, visits = start_engine(schedule, Engine), list[tuple[Visit, Future]]()
    calls: list[tuple[Call, list[int], Stream, int]] = []
    taken = engine.lease([schedule.engine["taken"]]) if schedule.engine["taken"] else None
    with ThreadPoolExecutor(len(schedule.arrivals)) as threads:
        for turn, what in schedule.arrivals:
            time.sleep(0.002 * turn)
            if isinstance(what, Visit):
                visits.append((what, threads.submit(_when_it_fits, visit, engine, what)))
                continue
            while not _submit(engine, what, calls, turn):
                time.sleep(0.01)
            if what.cancelled is not None:
                threading.Timer(0.01 * what.cancelled, calls[-1][2].cancel).start()
        found = [(what, done.result(_PATIENCE)) for what, done in visits]
        done = [(call, tokens, stream.wait(_PATIENCE)) for call, tokens, stream, _ in calls]
    if taken:
        taken.close()
    engine.drain(_PATIENCE)
    check_baseline(engine)
    engine.shutdown()
    return Played(done, found, engine)


_PATIENCE = 120  # seconds


def _when_it_fits(work: Callable[..., Any], *arguments: Any) -> Any:
    """Runs a function again where other sessions had the memory that it needs."""
    for _ in range(10 * _PATIENCE):
        try:
            return work(*arguments)
        except EngineError as error:
            assert "but other sessions have" in str(error)
            time.sleep(0.1)
    raise TimeoutError("the other sessions do not end")


def _submit(engine: Engine, call: Call, calls: list, turn: int) -> bool:
    """Submits a call; False where sessions have its memory now."""
    tokens = [*call.tokens]
    if call.follows >= 0 and calls:
        _, before, stream, _ = calls[call.follows % len(calls)]
        known = stream._state.output.tokens if stream._state.output else ()
        whole = [token for token in (*before, *known) if token != STOP]
        tokens = [*whole[: min(call.keep, 90)], *tokens[-5:]]
    try:
        stream = engine.submit(tokens, **call.options)
    except TooLongError as error:
        assert "sessions have all but" in str(error)
        return False
    calls.append((call, tokens, stream, turn))
    return True


def visit(engine: Any, what: Visit) -> Visited:
    """Runs a session on an engine as planned."""
    with Workers(engine.model, engine=engine, kind=KIND, **what.settings) as session:
        said = 0
        for at, act, name in (*what.acts, (what.until, "", "")):
            for _ in session.stream(at):
                pass
            if session.finish_reason or not act:
                break
            if act == "say":
                session.say("Hurry up.")
                said += 1
            elif act == "finish":
                session.finish()
            else:
                getattr(session, act)(name)
        lengths = np.asarray(session._session.state.cache.lengths).tolist()
        return Visited(
            session.steps,
            written(session),
            session.passes,
            dict(zip(session.blocks, lengths, strict=True)),
            session.finish_reason,
        )


def written(session: Workers) -> dict[str, list[tuple[int, list[int]]]]:
    """Each worker's steps, those of workers that have left included."""
    found: dict[str, list[tuple[int, list[int]]]] = {}
    for step in sorted(session.steps, key=lambda step: step.number):
        if step.worker != "User":
            found.setdefault(step.worker, []).append((step.number, [*step.tokens]))
    return found


def check_baseline(engine: Engine) -> None:
    """All memory is free again, but for what is kept for reuse, and that can be dropped."""
    check_memory(engine)
    scheduler = engine._scheduler
    assert not (scheduler.live or len(scheduler.queue) or len(scheduler.sessions))
    assert engine._leases.available == scheduler.kv.pool.tokens == TOKENS
    with engine._leases.exclusive():
        assert scheduler.kv.leased_tokens == 0 and not scheduler.kv.leased
        scheduler.kv.drop_unused()
        assert scheduler.kv.pool.free == TOKENS
        kept = [node for node in scheduler.kv.tree.root.subtree() if node.parent]
        assert all(node.copy and not node.ref_count for node in kept)  # in host memory


# What it must come to.


def check(played: Played) -> None:
    """Compares all with what each is alone."""
    check_calls(played.calls)
    for number, (what, found) in enumerate(played.visits):
        check_visit(number, what, found)


@functools.cache
def _causal():
    return jax.jit(
        lambda params, tokens: Decoder(model().config).apply(params, tokens, method="causal")
    )


def check_calls(calls: list[tuple[Call, list[int], Completion]]) -> None:
    """Every token is drawn from the logits that causal attention gives after those before it."""
    for first in range(0, len(calls), 8):
        batch = calls[first : first + 8]
        padded = np.zeros((8, LONGEST), np.int32)
        for row, (_, prompt, done) in enumerate(batch):
            text = [*prompt, *done.tokens]
            padded[row, : len(text)] = text
        logits = np.asarray(_causal()(model().params, padded), np.float64)
        for row, (call, prompt, done) in enumerate(batch):
            check_call(first + row, call, logits[row, len(prompt) - 1 :], done)


def check_call(number: int, call: Call, logits: np.ndarray, done: Completion) -> None:
    """Checks a completion against logits [tokens, V] after its prompt and after each token."""
    sampler, seed = call.options["sampler"], stream_seed(call.options["seed"])
    most, stops = call.options["max_new_tokens"], model().generation.stop_tokens
    for i, token in enumerate(done.tokens):
        expected = drawn(logits[i], sampler, seed, i)
        assert token in expected, f"call {number}: token {i} is {token}, and {expected} alone"
        assert token not in stops or i == len(done.tokens) - 1
    if done.finish_reason is FinishReason.CANCELLED:
        assert call.cancelled is not None and len(done.tokens) <= most
    elif done.tokens[-1] in stops:
        assert done.finish_reason is FinishReason.STOP
    else:
        assert (done.finish_reason, len(done.tokens)) == (FinishReason.LENGTH, most)
    if call.options.get("logprobs"):
        chances = logits - logits.max(axis=-1, keepdims=True)
        chances -= np.log(np.exp(chances).sum(axis=-1, keepdims=True))
        expected = [chances[i, token] for i, token in enumerate(done.tokens)]
        np.testing.assert_allclose(done.logprobs, expected, atol=2e-4)


_ENDS = {"answer": FinishReason.ANSWER, "stop": FinishReason.STOP, None: None}


def check_visit(number: int, what: Visit, found: Visited) -> None:
    """Compares a session with the plain one."""
    plain, said = PlainSession(model(), what.settings, holds_answer, found.written), 0
    for at, act, name in (*what.acts, (what.until, "", "")):
        plain.run(min(at, what.settings["budget"]))
        if plain.over or not act:
            break
        if act == "say":
            said += 1
            plain.say("Hurry up.", said)
        elif act != "finish":
            getattr(plain, act)(name)
    assert found.written == plain.written, f"session {number}: {what}"
    assert found.passes == plain.passes, f"session {number}: {what}"
    assert found.finish_reason is _ENDS[plain.over], f"session {number}: {what}"
    for block in (plain.history, *plain.rows):
        assert found.lengths[block] == plain.dense.length(plain.blocks.index(block)), block
