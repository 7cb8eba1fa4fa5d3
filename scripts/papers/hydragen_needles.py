"""Questions about one long document: the time of all of them, and the right answers (Hydragen section
4.3, figure 5).

    python -m scripts.papers.hydragen needles --text war_and_peace.txt --output DIR
    python -m scripts.papers.hydragen needles --model 01-ai/Yi-6B-200K --text war_and_peace.txt \\
        --document 16384,32768,65536,131072 --output DIR

The document is a text with facts about dogs spread over it, and five answered examples (appendix
D.3). It is computed once, before the clock starts; then all questions are fed and answered at once,
over one document (shared), over a copy of it for each question, and without attention. All three are
the same loop.
"""

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxshare import DecodeState, KVCache, Layout, decode
from jaxshare.models import LoadedModel
from jaxshare.serving import jsonl
from jaxshare.serving.inputs import cache_dtype, encode, token_bytes
from scripts.bench.lib import Parser, alternate, data_file, progress, table
from scripts.bench.parts.sharing.attention import NO_ATTENTION, SHARED, UNSHARED, Say
from scripts.bench.parts.sharing.decode import AttentionFreeModel
from scripts.bench.parts.sharing.generate import count_tokens
from scripts.bench.parts.sharing.needles import MOST_FACTS, Fact, Needles, hide
from scripts.bench.parts.sharing.options import DEFAULT_TEXT
from scripts.papers import folder as folders
from scripts.papers import hydragen_plots as plots
from scripts.papers.folder import PaperFolder, plural
from scripts.papers.hydragen_memory import SideRoom
from scripts.papers.hydragen_peers import NOT_MEASURED

EXPERIMENT = "hydragen needles"
SIDES = (SHARED, UNSHARED, NO_ATTENTION)
ANSWER_TOKENS = 8
_ROOM = 128
"""Tokens that a question and its answer have at most."""
_DOCUMENT, _PIECE = 16384, 512
"""The default length of the document, and the tokens of it that a pass computes."""


def add_arguments(parser: Parser) -> None:
    """Adds the arguments of the sweep."""
    folders.add_arguments(parser)
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help=f"what the facts are hidden in (default {DEFAULT_TEXT} in $JAXSHARE_DATA)",
    )
    parser.add_argument(
        "--document",
        metavar="N,N",
        help=f"tokens of the document (default {_DOCUMENT}, or what the model's context holds)",
    )
    parser.add_argument(
        "--questions", metavar="Q,Q", help="answered at once (default 16,32,64,128,256)"
    )
    parser.add_argument("--rounds", type=int, help="turns of each side (default 3)")
    parser.add_argument(
        "--quick", action="store_true", help="small sizes and one round, to try the command"
    )
    parser.add_argument(
        "--max-kv-gib",
        type=float,
        metavar="GIB",
        help="leave out sides whose keys and values take more (default: what is free)",
    )


def check(parser: Parser, given: argparse.Namespace) -> None:
    """Completes the options; ends the program where they cannot be right."""
    folders.check_arguments(parser, given)
    if given.document is not None or given.quick:
        given.document = sorted(
            parser.numbers("--document", given.document or "1024", "16384,32768")
        )
    questions = given.questions or ("2,4" if given.quick else "16,32,64,128,256")
    given.questions = sorted(parser.numbers("--questions", questions, "64,256"))
    given.rounds = given.rounds if given.rounds is not None else 1 if given.quick else 3
    parser.at_least(1, rounds=given.rounds)
    parser.at_least(0.001, max_kv_gib=given.max_kv_gib)
    if given.redraw:
        return
    text = given.text or data_file(DEFAULT_TEXT)
    if not text.is_file():
        what = f"--text is {given.text}, but there is no such file"
        parser.error(
            what
            if given.text
            else f"there is no {DEFAULT_TEXT} in $JAXSHARE_DATA: name any long text with --text"
        )
    given.text = text


def run(options: argparse.Namespace, command: str) -> int:
    """Measures what is left of a sweep, or redraws it.

    Raises:
      ValueError, OSError, ImportError: a model, a text, a folder or settings that cannot be used.
    """
    if not options.redraw:
        _measure(options, command)
    folders.report_of(options, EXPERIMENT, summarise, plots.needles, as_text)
    return 0


def _measure(options: argparse.Namespace, command: str) -> None:
    model = folders.load(options)
    name, longest = folders.model_name(options), model.config.max_positions - _ROOM
    if model.tokenizer is None:
        raise ValueError(f"--model is {name}, but it has no tokenizer, and questions are text")
    if options.document is None:
        options.document = [_DOCUMENT if longest >= _DOCUMENT else 1 << longest.bit_length() - 1]
    if (asked := options.document[-1]) > longest:
        raise ValueError(
            f"--document has {asked}, but the context of {name}, {model.config.max_positions} "
            f"tokens, does not hold it with a question of {_ROOM}; give at most {longest}"
        )
    text = options.text.read_text(encoding="utf-8", errors="replace")
    settings = {
        "model": name,
        "dtype": str(cache_dtype(model)),
        "tensor": options.tensor,
        "text": options.text.name,
        "text_hash": jsonl.sha256(text.encode(errors="replace")),
        "facts": min(options.questions[-1], MOST_FACTS),
        "answer_tokens": ANSWER_TOKENS,
        "rounds": options.rounds,
        "seed": options.seed,
        "max_kv_gib": options.max_kv_gib,
        "machine": folders.this_machine(),
    }
    needles = {
        tokens: hide(
            text, tokens, settings["facts"], lambda t: count_tokens(model, t), options.seed
        )
        for tokens in options.document
    }  # first, because the text may be too short
    how = {"resume": options.resume, "command": command}
    with folders.opened(options.output, EXPERIMENT, settings, model, **how) as kept:
        points = [(d, q) for d in options.document for q in options.questions]
        left = [point for point in points if _key(*point) not in kept]
        with progress(len(left) + len({tokens for tokens, _ in left})) as say:
            for tokens in dict.fromkeys(tokens for tokens, _ in left):
                say(f"a document of {tokens} tokens")
                document = Document.of(model, needles[tokens])
                for count in (count for each, count in left if each == tokens):
                    kept.add(_key(tokens, count), measure(document, count, options, say))


def _key(document: int, questions: int) -> dict[str, int]:
    return {"document": document, "questions": questions}


@dataclasses.dataclass(frozen=True)
class Document:
    """A document that has been computed.

    Attributes:
      model: for its length.
      needles: its facts.
      tokens: their number.
      keys, values: of each layer, [K, tokens, D].
      seconds: of the passes over it, those that compile included.
    """

    model: LoadedModel
    needles: Needles
    tokens: int
    keys: tuple[Any, ...]
    values: tuple[Any, ...]
    seconds: float

    @classmethod
    def of(cls, model: LoadedModel, needles: Needles) -> "Document":
        """Computes the common prefix of all questions."""
        given = encode(model, needles.prefix)
        model = model.for_context(len(given) + _ROOM)
        dtype, layout = cache_dtype(model), Layout.from_blocks([[0]])
        cache = KVCache.create(model.config, [len(given)], dtype, mesh=model.mesh)
        begin = time.perf_counter()
        for at in range(0, len(given), _PIECE):
            piece = given[at : at + _PIECE]
            padded = [[*piece, *[0] * (_PIECE - len(piece))]]
            _, cache = model.forward(padded, [len(piece)], cache, layout)
        jax.block_until_ready(cache)
        seconds, (start,) = time.perf_counter() - begin, cache.offsets.tolist()
        keys, values = (
            tuple(arena[:, start : start + len(given)] for arena in arenas)
            for arenas in (cache.keys, cache.values)
        )
        return cls(model, needles, len(given), keys, values, seconds)


class Questions:
    """Questions that are answered at once, as rows over one document or over copies of it."""

    def __init__(self, document: Document, facts: Sequence[Fact], side: str):
        model, rows = document.model, len(facts)
        asked = [encode(model, fact.question, first=False) for fact in facts]
        longest = max(map(len, asked))
        room = longest + ANSWER_TOKENS
        length = 1 if side == NO_ATTENTION else document.tokens  # which costs nothing without it
        if side == UNSHARED:
            capacities, blocks = [length + room] * rows, [[row] for row in range(rows)]
        else:
            capacities, blocks = [length, *[room] * rows], [[0, 1 + row] for row in range(rows)]
        self._model = AttentionFreeModel.of(model) if side == NO_ATTENTION else model
        self._copies, self._length = rows if side == UNSHARED else 1, length
        self._asked, self._layout, self._width = asked, Layout.from_blocks(blocks), longest
        cache = KVCache.create(model.config, capacities, cache_dtype(model), mesh=model.mesh)
        starts = cache.offsets[: self._copies]
        keys, values = (
            tuple(
                _written(arena, new[:, :length], starts)
                for arena, new in zip(arenas, made, strict=True)
            )
            for arenas, made in ((cache.keys, document.keys), (cache.values, document.values))
        )
        self._cache = dataclasses.replace(cache, keys=keys, values=values)

    @classmethod
    def warm(cls, document: Document, facts: Sequence[Fact], side: str) -> "Questions":
        """Questions that have been answered, which compiles: on a mesh twice, since what comes out of
        the first turn is laid out otherwise than what went in."""
        made = cls(document, facts, side)
        made.turn()
        made.turn()
        return made

    def turn(self) -> float:
        """Feeds and answers all questions; the seconds."""
        lengths = jnp.zeros_like(self._cache.lengths).at[: self._copies].set(self._length)
        state = DecodeState.create(
            dataclasses.replace(self._cache, lengths=lengths),
            self._layout,
            self._asked,
            vocab_size=self._model.config.vocab_size,
            max_new_tokens=ANSWER_TOKENS,
            max_width=self._width,
        )
        jax.block_until_ready(state)
        how: Any = {"passes": 2 * ANSWER_TOKENS, "width": self._width}
        begin = time.perf_counter()
        state = decode(self._model.module, self._model.variables, state, **how)
        jax.block_until_ready(state)
        seconds = time.perf_counter() - begin
        state.cache.check()
        self._cache, self.outputs = state.cache, state.outputs()
        if any(len(tokens) != ANSWER_TOKENS for tokens in self.outputs):
            raise RuntimeError("an answer ended before all its tokens were sampled")
        return seconds

    def texts(self) -> list[str]:
        """The answers of the last turn."""
        tokenizer: Any = self._model.tokenizer
        return [tokenizer.decode(tokens) for tokens in self.outputs]


@functools.partial(jax.jit, donate_argnums=0)
def _written(arena: Array, new: Array, starts: Array) -> Array:
    """The arena [K, tokens, D] with `new` [K, N, D] at each of the starts."""

    def write(i: Array, arena: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(arena, new, starts[i], axis=1)

    return jax.lax.fori_loop(0, starts.size, write, arena)


def measure(
    document: Document, count: int, options: argparse.Namespace, say: Say
) -> dict[str, Any]:
    """The seconds of `count` questions in every round by side, and the right answers.

    Sides whose keys and values do not fit are left out, with the reason.
    """
    facts, size = document.needles.questions(count), token_bytes(document.model)
    taken = {
        SHARED: size * (document.tokens + count * _ROOM),
        NO_ATTENTION: size * count * _ROOM,
        UNSHARED: size * count * (document.tokens + _ROOM),
    }
    say(f"a document of {document.tokens} tokens, {plural(count, 'question')}")
    room, runs = SideRoom(document.model, options.max_kv_gib), {}
    for side, bytes in taken.items():
        make = functools.partial(Questions.warm, document, facts, side)
        if (run := room.prepare(side, bytes, make)) is not None:
            runs[side] = run
    sides: dict[str, Callable[[], float]] = {side: run.turn for side, run in runs.items()}
    times = alternate(sides, options.rounds) if sides else {}
    answers = {side: run.texts() for side, run in runs.items() if side != NO_ATTENTION}
    right = {
        side: sum(fact.is_answered(t) for fact, t in zip(facts, texts, strict=True))
        for side, texts in answers.items()
    }
    return {
        "document_tokens": document.tokens,
        "document_seconds": document.seconds,
        "seconds": times,
        "left_out": room.left_out,
        "right": right,
        "answers": answers.get(SHARED, []),
        "same_answers": len({tuple(texts) for texts in answers.values()}) <= 1,
    }


def summarise(kept: PaperFolder) -> dict[str, Any]:
    """Medians, the part of right answers, and how many times longer than shared the others took."""
    found = []
    for key, value in sorted(kept.points(), key=lambda point: [*point[0].values()]):
        times = {side: statistics.median(t) for side, t in value["seconds"].items()}
        ours = times.get(SHARED)
        found.append(
            {
                **key,
                **{name: value[name] for name in value if name != "seconds"},
                "seconds": times,
                "round_seconds": value["seconds"],
                "to_shared": {s: t / ours for s, t in times.items() if ours and s != SHARED},
                "accuracy": {s: n / key["questions"] for s, n in value["right"].items()},
            }
        )
    return {"points": found}


def as_text(report: Mapping[str, Any]) -> str:
    """Seconds and accuracy, a line for each document and number of questions."""
    settings, rows = report["settings"], []
    for p in report["results"]["points"]:
        times = [f"{p['seconds'][s]:.4f}" if s in p["seconds"] else "x" for s in SIDES]
        ratio = f"{p['to_shared'][UNSHARED]:.2f}" if UNSHARED in p["to_shared"] else "x"
        right = f"{100 * p['accuracy'][SHARED]:.1f}" if SHARED in p["accuracy"] else "x"
        at = f"{p['document_tokens']} tokens, {plural(p['questions'], 'question')}"
        rows.append((at, *times, ratio, right))
    first = (
        f"{settings['model']} in {settings['dtype']}, {settings['text']}, answers of "
        f"{settings['answer_tokens']} tokens, medians of {plural(settings['rounds'], 'round')}"
    )
    header = ("seconds", *SIDES, f"{UNSHARED} to shared", "right, %")
    notes = [NOT_MEASURED] if any("x" in row for row in rows) else []
    return "\n\n".join([first, table(header, rows), *notes])
