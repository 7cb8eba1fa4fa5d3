"""Rows of one decode loop for the calls of many agents: each with a prompt, sampler, seed, budget and stop texts of its own.

`Branches` samples a tree of prompts in one way; calls of agents each want theirs. What their prompts begin with in common is stored once
and read once a pass, as there. Numbers of rows and sizes of memory are rounded up, so that batches of all sizes share few programs.
"""

import collections
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxshare import DecodeState, Layout, Reason, Sampler, decode
from jaxshare.cache import arena_size
from jaxshare.models import LoadedModel
from jaxshare.sampling import Samplers
from jaxshare.serving import calibration
from jaxshare.serving.arena import Arena, whole_tiles
from jaxshare.serving.folding import Arrangement, Stream, arrange, fold, unique_tokens
from jaxshare.serving.inputs import check_context, token_bytes
from jaxshare.serving.prefixes import at_work
from jaxshare.serving.trees import Prompt
from jaxshare.serving.waves import Residents, Wave, power_of_two, widest_wave

_PASSES_AT_ONCE = 16
_FEW_ROWS = 4
_LEAST_TOKENS, _LEAST_ROOM, _LEAST_WIDTH = 2048, 1024, 4
"""Of an arena, of what a row may sample, and blocks that a row lists: rounded up from there."""


@dataclasses.dataclass(eq=False)
class Request:
    """One thing to complete.

    Attributes:
      tokens: the prompt.
      sampler, seed: of the answer, whatever else is in the batch.
      budget: the most tokens of the answer.
      stops: it ends before the first of these texts.
      wanted: whether somebody still waits for it; looked at between dispatches.
    """

    tokens: tuple[int, ...]
    sampler: Sampler
    seed: int
    budget: int
    stops: tuple[str, ...]
    wanted: Callable[[], bool]


@dataclasses.dataclass
class Spent:
    """What rows have cost: tokens of all prompts, and of these what is left when every common prefix counts once; tokens sampled; forward
    passes; seconds of wall time."""

    prompt_tokens: int = 0
    unique_tokens: int = 0
    new_tokens: int = 0
    passes: int = 0
    seconds: float = 0.0


class Rows:
    """Runs batches of requests.

    Args:
      model: as loaded; keys are rotated as for its whole context, so that no batch changes what another one's rows see.
      max_rows: requests that run at a time.
      max_kv_bytes: bound on the memory for keys and values, which is taken as it is needed.

    Raises:
      ValueError: no tokenizer, or a bound below 1.
    """

    def __init__(self, model: LoadedModel, max_rows: int, max_kv_bytes: int):
        if model.tokenizer is None:
            raise ValueError("agents speak in text, but the model folder has no tokenizer; add the tokenizer's files to the folder")
        for name, value in (("max_rows", max_rows), ("max_kv_bytes", max_kv_bytes)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        self.model, self.max_rows = model.for_context(model.config.max_positions), max_rows
        self._bound = whole_tiles(max_kv_bytes // token_bytes(model))
        self._arena: Arena | None = None
        self._tokenizer: Any = model.tokenizer

    def check(self, request: Request) -> None:
        """Raises ValueError for a request that does not fit the model's context or the memory."""
        check_context(self.model, len(request.tokens), request.budget)
        if (needed := arena_size(len(request.tokens) + request.budget)) > self._bound:
            raise ValueError(f"a prompt of {len(request.tokens)} tokens and an answer of {request.budget} need room for {needed} tokens of "
                             f"keys and values, but there is room for {self._bound}; raise max_kv_bytes or shorten them")

    def run(self, requests: Sequence[Request], done: Callable[[Request, str, int], None]) -> Spent:
        """Completes all requests that are still wanted.

        Args:
          requests: at least one; each has passed `check`.
          done: called with a request, its text and its number of tokens, as soon as it has ended.
        """
        spent = Spent()
        tree = fold([Prompt(number, request.tokens, 1) for number, request in enumerate(requests)])
        most = max(request.budget for request in requests)
        for share in (None, True):  # where memory is short, what saves it comes first
            arrangement = arrange(tree, calibration.load(self.model) if share is None else None, share, grow=most // 2)
            wave = widest_wave(arrangement, arrangement.streams, most, self.max_rows, self._bound)
            if wave.most <= self._bound:
                break
        else:  # the longest prompt and the longest answer are of different requests
            ordered = sorted(requests, key=lambda request: request.budget)
            halves = ordered[:len(ordered) // 2], ordered[len(ordered) // 2:]
            parts = [dataclasses.astuple(self.run(half, done)) for half in halves]
            return Spent(*map(sum, zip(*parts, strict=True)))
        spent.prompt_tokens, spent.unique_tokens = sum(len(request.tokens) for request in requests), unique_tokens(tree)
        began = time.perf_counter()
        try:
            self._run(requests, arrangement, wave, most, done, spent)
        except BaseException:
            self._arena = None  # its cache may have been given to a pass that failed
            raise
        spent.seconds = time.perf_counter() - began
        return spent

    def _room(self, wave: Wave) -> Arena:
        """An arena that holds the wave: the one there is, or a larger one."""
        slots = 4 * self.max_rows + power_of_two(wave.blocks + 1)
        if self._arena is None or self._arena.tokens < wave.tokens or self._arena.slots < wave.rows + wave.blocks:
            tokens = min(self._bound, arena_size(power_of_two(max(wave.tokens, _LEAST_TOKENS))))
            self._arena = None  # frees it before the next one is made
            self._arena = Arena(self.model, tokens, slots)
        return self._arena

    def _run(self, requests: Sequence[Request], arrangement: Arrangement, wave: Wave, most: int,
             done: Callable[[Request, str, int], None], spent: Spent) -> None:
        model, arena = self.model, self._room(wave)
        rows = _FEW_ROWS if wave.rows <= _FEW_ROWS < self.max_rows else self.max_rows
        width = max(_LEAST_WIDTH, power_of_two(arrangement.depth + 1))
        waiting, live = collections.deque(arrangement.streams), dict[int, tuple[Stream, int]]()
        samplers = [Sampler()] * rows
        edits = max(len(request.sampler.bias) + len(request.sampler.forbidden) for request in requests)
        residents = Residents(arena, model=model, arrangement=arrangement, streams=arrangement.streams, prefix=None, width=width,
                              max_new_tokens=most)
        with at_work(arena):
            state = DecodeState.create(
                arena.settle(), Layout.from_blocks([], num_rows=rows, width=width), [], vocab_size=model.config.vocab_size,
                stops=model.generation.stop_tokens, room=max(_LEAST_ROOM, power_of_two(most)), bias_slots=edits, max_width=1)
            try:
                while True:
                    waiting = collections.deque(stream for stream in waiting if requests[stream.prompt].wanted())
                    if not waiting and not live:
                        return
                    admitted = residents.admit(waiting, [row for row in range(rows) if row not in live], idle=not live)
                    cache, logits, passes = residents.feed()
                    state = dataclasses.replace(state, cache=cache)
                    spent.passes += passes
                    if admitted:
                        taken, streams, blocks = zip(*admitted, strict=True)
                        asked = [requests[stream.prompt] for stream in streams]
                        for row, request in zip(taken, asked, strict=True):
                            samplers[row] = request.sampler
                        state = dataclasses.replace(state, samplers=Samplers.stack(samplers, bias_slots=edits)).admit(
                            taken, [residents.path(stream, block) for stream, block in zip(streams, blocks, strict=True)],
                            residents.logits(streams, blocks, logits), seeds=[request.seed % 2**32 for request in asked],
                            budgets=[request.budget for request in asked])
                        live |= {row: (stream, block) for row, stream, block in admitted}
                    begun = int(state.passes)
                    state = decode(model.module, model.params, state, passes=_PASSES_AT_ONCE, until_any=bool(waiting))
                    arena.cache = state.cache
                    state.cache.check()
                    spent.passes += int(state.passes) - begun
                    ended = self._ended(state, {row: requests[stream.prompt] for row, (stream, _) in live.items()})
                    if ended:  # an empty row may not go on listing a block that another one writes next
                        state = state.retire([*ended])
                    for row, (text, count) in ended.items():
                        stream, block = live.pop(row)
                        residents.end(stream, block, count)
                        spent.new_tokens += count
                        done(requests[stream.prompt], text, count)
            finally:
                residents.clear()

    def _ended(self, state: DecodeState, live: dict[int, Request]) -> dict[int, tuple[str, int]]:
        """The rows that have come to their end, with text and tokens: by themselves, at a stop text, or because nobody waits any more."""
        reasons, drawn, written = jax.device_get((state.reasons, state.drawn, state.tokens))
        found: dict[int, tuple[str, int]] = {}
        for row, request in live.items():
            reason, tokens = Reason(int(reasons[row])), written[row, :drawn[row]].tolist()
            if reason is Reason.FULL:
                raise RuntimeError(f"row {row} ran out of room that was made for it; this is a mistake in jaxshare")
            if reason is Reason.RUNNING and request.wanted() and not request.stops:
                continue
            shown = tokens[:-1] if reason is Reason.STOP else tokens
            text = self._tokenizer.decode(shown)
            if (end := _first(text, request.stops)) is not None:
                found[row] = text[:end], self._needed(shown, request.stops)
            elif reason is not Reason.RUNNING or not request.wanted():
                found[row] = text, len(tokens)
        return found

    def _needed(self, tokens: list[int], stops: tuple[str, ...]) -> int:
        """The tokens up to a stop text: the same whenever the host looks in."""
        low, high = 1, len(tokens)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if _first(self._tokenizer.decode(tokens[:middle]), stops) is not None else (middle + 1, high)
        return low


def _first(text: str, stops: tuple[str, ...]) -> int | None:
    """Where the first of the stop texts begins."""
    return min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)
