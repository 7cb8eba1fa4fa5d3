"""Workers: a few streams that write at once over one shared cache and read each other's tokens as they appear.

The combined layout of Hogwild! Inference (section 3.2): a history of the prompt and all finished steps, which every worker
sees first, then the other workers' unfinished steps, then its own. A finished step moves to the end of the history.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxshare import DecodeState, KVCache, Layout, Reason, Sampler, decode
from jaxshare.models import LoadedModel
from jaxshare.serving.branches import cache_dtype, check_context, encode

HISTORY = 0
_WIDTH = 64
_PASSES_AT_ONCE = 8
_ROUND = 256


@dataclasses.dataclass(frozen=True)
class Written:
    """What the workers wrote, and what it cost.

    Attributes:
      texts: each worker's own words, its steps one after the other.
      history: everything in the order in which it was finished, unfinished steps last.
      passes: forward passes.
      tokens: tokens sampled, all workers together.
      seconds: of wall time, compilation not counted.
      kv_bytes: keys and values cached at the end, over all layers.
      seen_bytes: what they would take if every worker kept its own copy of what it sees.
    """

    texts: list[str]
    history: str
    passes: int
    tokens: int
    seconds: float
    kv_bytes: int
    seen_bytes: int


@dataclasses.dataclass
class _Voice:
    """One worker as the host sees it.

    Attributes:
      name: of the worker.
      step: number of the step that it writes.
      words: tokens of all its steps, headers included.
      current: tokens of its unfinished step, the separator that opens it included.
      sampled: tokens that it has sampled.
    """

    name: str
    step: int = 0
    words: list[int] = dataclasses.field(default_factory=list)
    current: list[int] = dataclasses.field(default_factory=list)
    sampled: int = 0


def combined_layout(workers: int, *, rows: int | None = None) -> Layout:
    """Block 0 is the history, block 1 + w the current step of worker w; row w lists the others in ascending order, itself last."""
    steps = range(1, workers + 1)
    lists = [[HISTORY, *(b for b in steps if b != own), own] for own in steps]
    rows = rows or workers
    return Layout.from_blocks(lists, num_rows=rows, width=rows + 1)


def write_together(model: LoadedModel, prompt: str, names: Sequence[str], header: Callable[[str, int], str], *, separator: str = "\n\n",
                   budget: int = 512, rows: int | None = None, step_tokens: int = 128, sampler: Sampler = Sampler(), seed: int = 0,
                   implementation: str | None = None, on_text: Callable[[list[str]], None] | None = None) -> Written:
    """Lets workers write until one of them brings a stop token, the budget of tokens a worker is used up, or the history is full.

    A step ends with a token that ends in the separator. The token itself opens the worker's next step, before the header.

    Args:
      model: with a tokenizer.
      prompt: what every worker reads first, templates already applied.
      names: of the workers.
      header: (name, number of its step from 1) -> text that opens the step.
      separator: what ends a step.
      budget: tokens that each worker may sample.
      rows: rows of the program, at least one for each worker; more let runs of different sizes share one program.
      step_tokens: room for a single step; a worker whose step does not fit writes no more.
      sampler, seed: as in decoding; worker w draws from seed + w.
      implementation: attention backend.
      on_text: called with each worker's text so far between dispatches.

    Raises:
      ValueError: no workers, empty or repeated names, a budget below 1, a prompt that does not fit the context, or a tokenizer
        that has no token for the separator.
    """
    if not names or len(set(names)) < len(names) or not all(names):
        raise ValueError(f"workers need names, each its own; got {list(names)}")
    if budget < 1:
        raise ValueError(f"the budget is {budget} tokens a worker; it must be at least 1")
    prompt_tokens = encode(model, prompt)
    check_context(model, len(prompt_tokens), budget * len(names))
    tokenizer: Any = model.tokenizer
    stops = set(model.generation.stop_tokens)
    separators = _tokens_ending_in(tokenizer, separator, model.config.vocab_size)
    voices = [_Voice(name) for name in names]
    finished_steps: list[int] = []

    def opening(voice: _Voice, separated_by: list[int]) -> list[int]:
        """Turns a voice to its next step; the tokens that open it."""
        voice.step += 1
        voice.current = [*separated_by, *tokenizer.encode(header(voice.name, voice.step), add_special_tokens=False)]
        voice.words += voice.current[len(separated_by) if voice.step == 1 else 0:]
        return voice.current

    rows = rows or len(names)
    room = len(prompt_tokens) + 2 * rows * (budget + step_tokens)  # headers are not in the budget
    room += -room % _ROUND  # so that prompts of nearly the same length share one program
    room = max(len(prompt_tokens), min(room, model.config.max_positions - rows * step_tokens))
    cache = KVCache.create(model.config, (room, *[step_tokens] * rows), cache_dtype(model))
    settings: dict[str, Any] = dict(vocab_size=model.config.vocab_size, samplers=sampler, seeds=seed, budgets=budget, queue=room,
                                    stops=[*stops, *separators], max_width=_WIDTH)
    module = dataclasses.replace(model.module, implementation=implementation)

    # The first row writes the prompt into the history; then the workers' layout takes over.
    state = DecodeState.create(cache, Layout.from_blocks([[HISTORY]], num_rows=rows, width=rows + 1), [prompt_tokens], **settings)
    state = decode(module, model.params, state, passes=0, width=_WIDTH)  # compiles, runs nothing; so does moving an empty block
    state = dataclasses.replace(state, cache=_move(state.cache, 1, HISTORY))
    clock = time.perf_counter()
    state = decode(module, model.params, state, passes=-(-len(prompt_tokens) // _WIDTH), width=_WIDTH)
    passes, separated = state.passes, tokenizer.encode(separator, add_special_tokens=False)
    state = DecodeState.create(state.cache, combined_layout(len(names), rows=rows), [opening(v, separated) for v in voices], **settings)
    state = dataclasses.replace(state, passes=passes)

    done = False
    while not done and bool(jnp.any(state.running)):
        state = decode(module, model.params, state, passes=_PASSES_AT_ONCE, width=_WIDTH, until_any=True)
        outputs, reasons = state.outputs(), np.asarray(state.reasons)
        for w, voice in enumerate(voices):
            new = outputs[w][voice.sampled:]
            voice.sampled += len(new)
            ended = bool(new) and reasons[w] == Reason.STOP
            kept = new[:-1] if ended else new
            voice.words += kept
            voice.current += kept
            if ended and (new[-1] in stops or int(state.cache.lengths[HISTORY] + state.cache.lengths[1 + w]) > room):
                done = True
            elif ended:
                finished_steps += voice.current
                state = dataclasses.replace(state, cache=_move(state.cache, 1 + w, HISTORY))
                state = state.feed(w, opening(voice, new[-1:]))
        if on_text:
            on_text([tokenizer.decode(v.words) for v in voices])
    jax.block_until_ready(state.cache.lengths)
    seconds = time.perf_counter() - clock
    state.cache.check()
    cached = int(np.asarray(state.cache.lengths).sum()) * state.cache.token_bytes
    unfinished = [token for v in voices for token in v.current]
    return Written([tokenizer.decode(v.words) for v in voices], tokenizer.decode(finished_steps + unfinished), int(state.passes),
                   sum(v.sampled for v in voices), seconds, cached, cached * len(names))


def _tokens_ending_in(tokenizer: Any, separator: str, vocab_size: int) -> list[int]:
    texts = tokenizer.batch_decode([[token] for token in range(vocab_size)])
    if found := [token for token, text in enumerate(texts) if text.endswith(separator)]:
        return found
    raise ValueError(f"no token of the model's vocabulary ends in the separator {separator!r}; choose another separator")


_move = jax.jit(KVCache.move, donate_argnums=0)
