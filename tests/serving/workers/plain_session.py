"""A session of workers computed in the plainest way: the oracle of sessions that share an engine.

Every pass computes attention from scratch in float64 numpy: each row's keys are rotated anew to the
positions that they have for it (`tests.helpers.DenseModel`). Steps are found by a regular
expression, moves are of lists, and tokens are drawn by numpy. Only the random numbers, the seeds
and the texts of a format are those of jaxshare.
"""

import dataclasses
import functools
import re
from collections.abc import Sequence

import jax
import numpy as np

from jaxshare import Sampler
from jaxshare.decoding.sampling import uniforms
from jaxshare.models import LoadedModel
from jaxshare.seeds import seed_words, stream_seed
from jaxshare.serving import Format
from tests.helpers import DenseModel

Written = dict[str, list[tuple[int, list[int]]]]
WIDTH, POSITIONS = 16, 256
"""Tokens a row of a pass that feeds more than one; draws of a stream that are made at once."""
EDGE = 1e-6
"""Of a cumulative probability, several units in the last place of float32."""
# Whitespace is that of ASCII: Python's \s has U+001C to U+001F, too.
_STEP_END = re.compile(r"[.?!][\"')\]*_ \t\n\r\v\f]*\n\n")


@functools.lru_cache(4096)
def random_numbers(seed: int) -> np.ndarray:
    """The first uniform numbers of a stream."""
    words = np.repeat(seed_words([seed]), POSITIONS, axis=0)
    return np.asarray(_uniforms(words, np.arange(POSITIONS, dtype=np.int32)), np.float64)


_uniforms = jax.jit(uniforms)


def drawn(logits: np.ndarray, sampler: Sampler, seed: int, position: int) -> list[int]:
    """The token of a stream's draw, by inverting the cumulative sum of the probabilities.

    Returns:
      The token; after it others where the random number lies so near to the edge between two, or
        `top_p` to where a token is left out (`EDGE`), that float32 decides either way.
    """
    logits = np.asarray(logits, np.float64).copy()
    for token, bias in sampler.bias.items():
        logits[token] += bias
    logits[list(sampler.forbidden)] = -np.inf
    if not sampler.temperature:
        return [int(logits.argmax())]
    scaled = (logits - logits.max()) / sampler.temperature
    kept = np.ones(len(scaled), bool)
    if sampler.top_k:
        kept &= scaled >= np.sort(scaled)[-sampler.top_k]
    weights = np.where(kept, np.exp(scaled), 0.0)
    order, found = np.argsort(-weights), []
    before = np.cumsum(weights[order]) - weights[order]
    for edge in (0, -EDGE, EDGE) if sampler.top_p < 1 else (np.inf,):
        rest = weights.copy()
        rest[order[before >= (sampler.top_p + edge) * weights.sum()]] = 0.0
        cumulative, number = np.cumsum(rest), random_numbers(seed)[position]
        places = np.clip([number, number - EDGE, number + EDGE], 0, 1 - 1e-15) * cumulative[-1]
        found += [int(np.argmax(cumulative > place)) for place in places]
    return list(dict.fromkeys(found))


@dataclasses.dataclass
class Row:
    """A worker: its stream, the tokens that it is to feed, and what it has written.

    Attributes:
      queue: tokens to feed; fed: whether the first of those after a sampled one has been.
      steps: (number, sampled tokens) of each of its steps.
      state: "running", "paused", "stopped" or "answered".
      due: whether its next step opens with the question.
    """

    name: str
    number: int
    seed: int
    queue: list[int]
    steps: list[tuple[int, list[int]]] = dataclasses.field(default_factory=lambda: [(1, [])])
    state: str = "running"
    num_sampled: int = 0
    fresh: bool = False
    """Whether the first token of the queue was sampled in the last pass, and is not fed."""
    due: bool = False
    asked: set[int] = dataclasses.field(default_factory=set)


class PlainSession:
    """Workers in one of the three layouts, one pass at a time.

    Args:
      model: with random parameters of its own, and a tokenizer.
      settings: as for `Workers`: problem, names, layout, format, sampler, seed, ask_every, stop_on,
        together and max_workers.
      is_answer: whether the text of a step holds an answer.
      found: what the session under test has written, by worker as `written`; it decides where a
        draw lies on the edge between two tokens, and nothing else.
    """

    def __init__(self, model: LoadedModel, settings: dict, is_answer, found: Written | None = None):
        self.model, self.settings, self.is_answer = model, settings, is_answer
        self.found = found or {}
        self.format: Format = settings["format"]
        self.moves = settings["layout"] != "contiguous"
        self.history = "history" if self.moves else "prompt"
        names = settings["names"]
        headed = settings["layout"] != "interleaved" and max(len(names), settings["max_workers"])
        self.headers = {
            block: self.encode(text)
            for block, text in (
                ("others:", self.format.others_header),
                ("own:", self.format.own_header),
            )
            if text and headed and headed > 1
        }
        self.blocks: list[str] = [self.history, *self.headers]
        self.dense = DenseModel(model.config, model.params, 16)
        self.passes = self.asked = self.since = 0
        self.over: str | None = None
        self.rows: dict[str, Row] = {}
        self.left: list[Row] = []
        self.with_headers = len(names) > 1 and bool(self.headers)
        prompt = (
            self.format if self.moves else dataclasses.replace(self.format, history_header="")
        ).prompt(model.tokenizer, settings["problem"], names)
        self.feed_text(model.tokenizer.encode(prompt), self.history)
        for block, tokens in self.headers.items():
            self.feed_text(tokens, block)
        for i, name in enumerate(names):
            self._enter(name, i, stream_seed(settings["seed"], i), names)

    # What a session does between passes.

    def add(self, name: str) -> None:
        number = min({*range(8)} - {row.number for row in self.rows.values()})
        self.with_headers = bool(self.headers)
        seed = stream_seed(self.settings["seed"], "joined", number, self.passes)
        self._enter(name, number, seed, (*self.rows, name))

    def remove(self, name: str) -> None:
        """The worker's block moves to the history, with the last token that it has sampled."""
        rows = list(self.rows.values())
        new = [row.queue[:1] if row.fresh else [] for row in rows]
        self._forward(rows, new)
        for row, tokens in zip(rows, new, strict=True):
            if tokens and row.name != name:
                for shelf in self.dense.shelves:
                    shelf.blocks[self._block(row.name)].pop()
        self.dense.move(self._block(name), self._block(self.history))
        self.left.append(self.rows.pop(name))
        self.blocks[self._block(name)] = ""

    def say(self, text: str, count: int) -> None:
        opening = self.format.opening("User", count, names=())
        said = opening + text if opening.endswith((" ", "\n")) else f"{opening} {text}"
        self.feed_text(self.encode("\n\n") + self.encode(said), self.history)

    def pause(self, name: str) -> None:
        self._set(name, "running", "paused")

    def resume(self, name: str) -> None:
        self._set(name, "paused", "running")

    def _set(self, name: str, before: str, after: str) -> None:
        if self.rows[name].state == before:
            self.rows[name].state = after

    # Passes.

    @property
    def running(self) -> list[Row]:
        """In the order of the device's rows."""
        rows = [row for row in self.rows.values() if row.state == "running"]
        return sorted(rows, key=lambda row: row.number)

    def run(self, until: int) -> None:
        while self.over is None and self.running and self.passes < until:
            self._pass()
            states = {row.state for row in self.rows.values()}
            if self.over is None and not states & {"running", "paused"}:
                self.over = "answer" if "answered" in states else "stop"

    def _pass(self) -> None:
        self.passes += 1
        rows = self.running
        width = WIDTH if any(len(row.queue) > 1 for row in rows) else 1
        logits = self._forward(rows, [row.queue[:width] for row in rows])
        sampled, ended = [], []
        for row, last in zip(rows, logits, strict=True):
            row.queue, row.fresh = row.queue[width:], False
            if not row.queue:
                sampled.append(row)
                ended += [row] if self._sample(row, last[-1]) else []
        self._end_steps(ended, len(sampled))

    def _sample(self, row: Row, logits: np.ndarray) -> bool:
        """Returns whether the token ends a step or its row."""
        possible = drawn(logits, self.sampler, row.seed, row.num_sampled)
        found = [token for _, tokens in self.found.get(row.name, []) for token in tokens]
        found = found[row.num_sampled : row.num_sampled + 1]
        token = found[0] if found and found[0] in possible else possible[0]
        row.num_sampled += 1
        if token in self.model.generation.stop_tokens:
            row.state = "stopped"
            return True
        row.steps[-1][1].append(token)
        row.queue, row.fresh = [token], True
        return bool(_STEP_END.search(self.model.tokenizer.decode(row.steps[-1][1])))

    @functools.cached_property
    def sampler(self) -> Sampler:
        given, stops = self.settings["sampler"], self.model.generation.stop_tokens
        more = stops if self.settings["stop_on"] == "never" else ()
        return dataclasses.replace(given, forbidden=(*given.forbidden, *more))

    def _end_steps(self, ended: list[Row], num_sampled: int) -> None:
        """Ends steps: with an answer, or so that they move, in the order of the rows."""
        can_ask = self.running
        answered = [row for row in ended if self._answers(row)]
        if self.settings["stop_on"] == "eos" and any(row.state == "stopped" for row in ended):
            self.over = "stop"
        elif answered and self.settings["together"]:
            self.over = "answer"
        else:
            for row in answered:
                row.state = "answered"
        for row in ended:
            if self.over is None and row.state == "running":
                self._next_step(row)
        self._ask(num_sampled, can_ask)

    def _answers(self, row: Row) -> bool:
        number, tokens = row.steps[-1]
        text = self._opening(row, number, number in row.asked)
        text += self.model.tokenizer.decode(tokens)
        return self.settings["stop_on"] == "answer" and self.is_answer(text)

    def _next_step(self, row: Row) -> None:
        number = row.steps[-1][0] + 1
        if row.due:
            row.asked.add(number)
        if self.moves:
            self.dense.move(self._block(row.name), self._block(self.history))
        row.queue += self.encode(self._opening(row, number, row.due))
        row.due = False
        row.steps.append((number, []))

    def _ask(self, num_sampled: int, can_ask: Sequence[Row]) -> None:
        """After so many sampled tokens of all workers, one of them is due to be asked."""
        every, self.since = self.settings["ask_every"], self.since + num_sampled
        if every and num_sampled and can_ask and self.since >= every:
            number = random_numbers(stream_seed(self.settings["seed"], "asked"))[self.asked]
            can_ask[int(np.float32(number) * np.float32(len(can_ask)))].due = True
            self.since, self.asked = self.since - every, self.asked + 1

    # Blocks and texts.

    def encode(self, text: str) -> list[int]:
        return self.model.tokenizer.encode(text.rstrip(" "), add_special_tokens=False)

    def _opening(self, row: Row, number: int, ask: bool) -> str:
        if number > 1 and not self.moves:
            return self.format.question if ask else ""
        return self.format.opening(row.name, number, names=(), ask=ask)

    def _enter(self, name: str, number: int, seed: int, names: Sequence[str]) -> None:
        opening = self.encode("\n\n") + self.encode(self.format.opening(name, 1, names=names))
        self.rows[name] = Row(name, number, seed, opening)
        self.blocks.append(name)

    def _block(self, name: str) -> int:
        return self.blocks.index(name)

    def feed_text(self, tokens: list[int], block: str) -> None:
        self.dense.forward([tokens], [[self._block(block)]])

    def _forward(self, rows: Sequence[Row], tokens: list[list[int]]) -> list[np.ndarray]:
        return self.dense.forward(tokens, [self._sees(row.name) for row in rows])

    def _sees(self, name: str) -> list[int]:
        """The history, the others' steps, and the row's own (Hogwild! Inference, section 3.2)."""
        others = [n for n in self.rows if n != name]
        if self.settings["layout"] == "interleaved":
            return [self._block(self.history), self._block(name)]
        headed = [*(["others:"] if self.with_headers else []), *others]
        headed += [*(["own:"] if self.with_headers else []), name]
        return [self._block(block) for block in (self.history, *headed)]

    @property
    def written(self) -> Written:
        """By worker, those that left included."""
        rows = [*self.left, *self.rows.values()]
        return {row.name: row.steps for row in rows}
